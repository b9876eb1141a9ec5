// What is timed: for each row of the kernel table, the plans that use it, at the shapes that matter. On a CPU in f32
// (rows that only move data: in any 16- or 32-bit float; rows that take only bf16: in that), beside another program; on
// a GPU in f16, alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check/gpu.h"
#include "cli/support/shape.h"
#include "octile/grouped_linear.h"
#include "octile/linear.h"
#include "octile/quantize.h"

namespace octile::cli {

using check::Gpu;
using check::GpuBytes;

enum class Arithmetic : std::uint8_t { none, s8, floats, bf16 };  // floats: f32, on a GPU f16

// A plan with its operands, ready to run, and the program it is compared with.
struct Prepared {
  std::string sku;
  std::function<void()> run;  // on a GPU: enqueues
  std::string baseline;       // none on a GPU
  std::function<void()> run_baseline;
  Arithmetic arithmetic = Arithmetic::none;
  double operations = 0;  // 2 M N K; 0 for what only moves data
  double bytes = 0;       // read and written, each operand once
};

// What a plan may use.
struct Place {
  int threads = 1;           // on a CPU
  const Gpu* gpu = nullptr;  // null: on a CPU
};

struct Benchmark {
  std::string name;    // <format>_<operation>_<shape>
  std::string kernel;  // the row of the table that it is about; empty: what the plan chooses
  Shape shape;         // what does not matter to the operation is 0
  DType dtype;         // on a CPU, of the floats of what moves data
  std::function<Prepared(const Benchmark&, const Place&)> prepare;  // throws Error if the row cannot do it
};

// Of one row, at `shapes`, or at its usual ones if there are none given. On a CPU products are in f32, or in bf16 where
// the row takes nothing else.
std::vector<Benchmark> benchmarks_of(const KernelInfo& row, const std::vector<Shape>& shapes, DType dtype);

// For cases.cpp: the plans, one file per family.
namespace bench {
Prepared forward_s8(const Benchmark&, int threads, bool packed);
Prepared forward_s4(const Benchmark&, int threads, Activation activation, bool packed);
// W4A16 and W8A16 of bf16.
Prepared forward_bf16(const Benchmark&, int threads, DType weight, bool packed);
// `block`: of an int8 product.
Prepared backward(const Benchmark&, int threads, bool dx, Product arithmetic, std::int64_t block);
Prepared backward_db(const Benchmark&, int threads);
Prepared gradient_quantize(const Benchmark&, int threads);
Prepared blocked_gradient_quantize(const Benchmark&, int threads);
// What a quantizer does other than quantize rows of X to s8.
struct Quantizing {
  Granularity granularity = Granularity::row;
  Orientation orientation = Orientation::row_major;
  DType q = DType::s8;
  Mapping mapping = Mapping::symmetric;
  ScaleSource scale = ScaleSource::dynamic;
  bool smoothed = false;  // X times a factor for each column
  Prologue prologue = Prologue::none;
  bool gated = false;
};
Prepared quantize(const Benchmark&, int threads, Quantizing q);
// What comes after the quantizer, by what it is run with.
template <class Args>
Prepared elementwise(const Benchmark&, int threads, Quantizing q);

Prepared gpu_forward(const Benchmark&, const Gpu&, DType x);
Prepared gpu_forward_s4(const Benchmark&, const Gpu&, Activation activation, bool packed);
struct Gradients {
  Product dx = Product::none;
  Product dw = Product::none;
  bool db = false;
  std::int64_t block = 0;  // of the int8 products
};
Prepared gpu_backward(const Benchmark&, const Gpu&, const Gradients& gradients);
Prepared gpu_quantize(const Benchmark&, const Gpu&, Quantizing q);
// Eight experts, each with an eighth of the rows. `group`: of a row of the weight; 0: a scale per channel.
Prepared gpu_experts(const Benchmark&, const Gpu&, Activation activation, DType weight, std::int64_t group);
// Of the same experts.
Prepared gpu_experts_backward(const Benchmark&, const Gpu&, const Gradients& gradients);
template <class Args>
Prepared gpu_elementwise(const Benchmark&, const Gpu&);
}  // namespace bench

}  // namespace octile::cli
