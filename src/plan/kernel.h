// A row of the kernel table: what a kernel is asked, its arguments, and what it reports about itself. Every kernel file
// ends with its own row; src/{reference,cpu,cuda}/kernels.cpp list them.
//
// A plan is a short list of steps, and each step is one row. Two families of rows exist: quantizers (one matrix, a
// scale per segment) and products (two matrices, or one to be summed).
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "octile/plan.h"
#include "octile/quantize.h"
#include "octile/tensor.h"
#include "plan/bound.h"

namespace octile {

// clang-format off
enum class Operation : std::uint8_t {
  quantize,
  dequantize,
  quantize_backward,
  dequantize_backward,
  fake_quantize,
  fake_quantize_backward,
  gradient_quantize,  // both quantizers of dY and its column sums at once: QuantizeOperands
  blocked_gradient_quantize,  // the same, a scale for each `group` terms of either contraction; any subset
  gemm,               // the product of a and b, each in its format:
    // a s8, b s8 with a scale per row (w8a8)
    //   y[i, j] = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j])
    // a s8, b s8 or s4 in groups g along c (w8a8, w4a8)
    //   acc_g = sum_{c in g} a[i, c] * (b[j, c] - z[j, g]);  t = fma(f32(acc_g), b_scale[j, g], t), g ascending, from t = 0
    //   y[i, j] = fma(t, a_scale[i], bias[j])
    // a float, b s8 or s4 in groups (w8a16, w4a16)
    //   y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, g]) * b_scale[j, g]) + bias[j]
    // a float, b s8 with a scale per column (w8a16 of the backward)
    //   y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale[c])
  blocked_gemm,       // a s8 in blocks g of a_block terms along c, the last one short; b s8; the backward's
    //   acc_g = sum_{c in g} a[i, c] * b[j, c];  t = fma(f32(acc_g), a_scale[i, g], t), g ascending, from t = 0
    //   y[i, j] = t
  column_sum,         // y[0, j] = sum_i a[i, j]
  grouped_gemm,       // gemm of each expert's rows of a: ExpertOperands. On the CPU the plan launches gemms instead
  prologue_quantize,  // quantize of prologue(x), or of prologue(x) * up; norms have rows of their own
  grouped_gradient_quantize,  // blocked_gradient_quantize of each expert's rows: QuantizeOperands
  grouped_gradient,   // dX or dW of each expert, on a GPU: the product of a and b as blocked_gemm has it (w8a8), or as
                      // gemm has it with a scale per column (w8a16): ExpertOperands
};
// clang-format on

// What a quantizer kernel is selected for: the public description with q_min and q_max resolved.
using QuantizeProblem = QuantizeDescription;

// The smallest min_scale, and the backward's for dY: below it, products with 1 / s are not exact enough to stand for
// quotients.
inline constexpr double kMinScale = 0x1p-79;

// The lengths of a gradient's blocks: powers of two. A block's sum is below 2^24, so that f32(acc) is exact.
inline constexpr std::int64_t kMinGradientBlock = 128;
inline constexpr std::int64_t kMaxGradientBlock = 1024;

// One scale per segment, as strides over the matrix: element (r, c) uses
// data[r / row_group * row_stride + c / group * col_stride]. Absent: data is null. A scale that a plan keeps itself
// is in host memory whatever the device is: on_host, one value.
struct Scales {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;
  std::int64_t group = 1;
  bool on_host = false;
  std::int64_t row_group = 1;

  std::int64_t index(std::int64_t r, std::int64_t c) const {
    return r / row_group * row_stride + c / group * col_stride;
  }
};

// Scales or zero points of a matrix with `cols` columns, from a tensor of the shape that its granularity asks for.
// Kernels write through them only where a plan passed an output.
Scales scales_over(const QuantizeProblem& problem, const ConstTensor& t, std::int64_t cols);

// The integers that a quantized type holds, and those that a description without a range means.
std::pair<int, int> range_of(DType q);
std::pair<int, int> default_range(DType q, Mapping mapping);

// What a quantizer kernel is given. A kernel takes its sizes from x (dequantize: from q), not from the problem, whose
// rows are a maximum. All of it has been checked.
//
// gradient_quantize: x is dY. q and scale are the rows of x[r, c] * multiplier[c] quantized, q_transposed and
// column_scale its columns of x[r, c] * row_multiplier[r]; y (cols), in x's type, the column sums of x, may be absent.
// blocked_gradient_quantize: the problem's `group` is the length of a block; q's scales are per row and block of
// columns, scale.data[r * row_stride + c / group * col_stride], q_transposed's per block of rows and column,
// column_scale.data[r / group * row_stride + c * col_stride]. q, q_transposed and y may each be absent, with its scales
// and multiplier.
// grouped_gradient_quantize: the same for each expert's rows of x. Blocks of rows are an expert's: in q_transposed and
// column_scale expert e's begin behind those of the experts before it, the last of each padded with zeros to a multiple
// of kMinGradientBlock rows. The problem's rows are those of all blocks, max_blocks(..) * group. multiplier is that of
// expert 0, y (experts, cols), and expert e's seed is seed + e.
struct QuantizeOperands {
  ConstTensor x = {};           // (rows, cols): quantize, fake quantize, and the straight-through backwards
  ConstTensor q_in = {};        // dequantize
  ConstTensor dy = {};          // the backwards
  ConstTensor multiplier = {};  // (cols) or (rows); its stride may be 0, and then it may be a plan's own, on the CPU
  ConstTensor row_multiplier = {};  // gradient_quantize: (rows), likewise
  Scales given_scale = {};          // scale_type(x)
  Scales given_zero_point = {};     // s32
  Scales scale = {};                // out, may be absent
  Scales column_scale = {};         // out, gradient_quantize
  Scales zero_point = {};           // out, may be absent
  Tensor q = {};                    // out, (rows, cols), may be absent
  Tensor q_transposed = {};         // out, (cols, rows), may be absent
  Tensor y = {};                    // out: x of dequantize, y of fake quantize, dx or dq of the backwards
  std::uint64_t seed = 0;
  // prologue_quantize: `up` where the problem is gated; `norm_weight` (cols) of a norm and `norm_bias` of layer_norm;
  // residual (rows, cols) and `sum`, out, where the problem has one; mean and rstd (rows), out, may be absent.
  ConstTensor up = {}, norm_weight = {}, norm_bias = {}, residual = {};
  Tensor sum = {}, mean = {}, rstd = {};
  // grouped_gradient_quantize: (experts + 1), s32; and elements from an expert's multiplier to the next one's.
  ConstTensor offsets = {};
  std::int64_t multiplier_stride = 0;
  // The next launch has only_a_pending and must not start before all that is before this one has ended.
  bool next_reads_early = false;
};

// Whether a row of an s8 operand, or a column, is contiguous.
enum class Major : std::uint8_t { contraction, outer };

// What a product kernel is selected for. m is a maximum.
struct GemmProblem {
  Operation operation = Operation::gemm;
  std::int64_t m = 0;  // rows of a and y
  std::int64_t n = 0;  // rows of b, columns of y
  std::int64_t k = 0;  // the contraction
  DType a = DType::s8;
  // Of b: granularity is row, group (with its length, k for a whole row) or, under a float a alone, column: a scale for
  // each term. The plan turns tensor into row for an s8 a, and both into a group of k for a float a.
  WeightFormat b = {};
  DType y = DType::f32;
  DType scale = DType::f32;  // of all scales, and of the arithmetic
  Major a_major = Major::contraction;
  Major b_major = Major::contraction;
  Major y_major = Major::contraction;  // contraction: rows of y are contiguous
  std::int64_t a_block = 0;  // blocked_gemm: terms of a block, a multiple of 128; a is K-major, without a bias
  bool b_packed = false;     // b is the plan's packed weight: packed_weight.h
  bool bias = false;
  bool accumulate = false;   // y = y + (the product, rounded to y's type), y of type `scale`; without a bias
  std::int64_t experts = 0;  // grouped_gemm: m is the rows of all of them, n the channels of one
  bool gather = false;       // grouped_gemm: `token` says which row of a a row of y is of
  bool by_terms = false;  // grouped_gradient: experts have terms of their own (k is those of all), and m rows of y each
  Device device = {};
  int threads = 0;

  bool grouped() const { return b.granularity == Granularity::group; }
};

// What a product multiplies, as far as rows differ in it: w8a8, w8a16, w4a8, w4a16.
struct GemmFormat {
  DType b = DType::s8;
  bool float_a = false;
  friend constexpr auto operator<=>(GemmFormat, GemmFormat) = default;
};
inline constexpr GemmFormat kW8A8 = {DType::s8, false};
inline constexpr GemmFormat kW8A16 = {DType::s8, true};
inline constexpr GemmFormat kW4A8 = {DType::s4, false};
inline constexpr GemmFormat kW4A16 = {DType::s4, true};

constexpr bool has_format(Operation operation) {
  return operation == Operation::gemm || operation == Operation::grouped_gemm ||
         operation == Operation::grouped_gradient;
}

// What a kernel computes: rows of the same task may stand in for each other. Only gemms have a format.
struct Task {
  Operation operation = Operation::quantize;
  GemmFormat format = {};
  friend constexpr auto operator<=>(Task, Task) = default;
};
constexpr Task task_of(const GemmProblem& p) {
  return {p.operation, has_format(p.operation) ? GemmFormat{p.b.type, is_float(p.a)} : GemmFormat{}};
}
// Whether all rows of a product give the same bits, in any order of summation.
constexpr bool is_exact(Task task) {
  return task.operation == Operation::blocked_gemm || (has_format(task.operation) && !task.format.float_a);
}
std::string_view name(Operation operation);
std::string name(Task task);  // "w4a16_gemm"

// The most blocks of `size` rows that experts with `rows` rows together can have: the last of each may be short.
constexpr std::int64_t max_blocks(std::int64_t experts, std::int64_t rows, std::int64_t size) {
  return (rows + (experts < rows ? experts : rows) * (size - 1)) / size;
}

// What a grouped_gemm is given besides: b, b_scale, zero_point and bias are those of expert 0, and the next expert's
// are this many of their elements (a packed b's bytes) further on. Rows of y are those of all experts, sorted; the
// values of offsets and token are in device memory. A grouped_gradient has the same, or (by_terms) y (m, n) of expert
// 0, and terms of a and b that are those of all experts, sorted; but those of an s8 a, and its scales, are in blocks as
// grouped_gradient_quantize writes them. Nothing is added to the y of an expert without terms.
struct ExpertOperands {
  ConstTensor offsets =
      {};                  // (experts + 1), s32: expert e has the rows of y from offsets[e] on; others are not written
  ConstTensor token = {};  // (m), s32: rows of a and a_scale; absent: those of y
  std::int64_t b_stride = 0, b_scale_stride = 0, zero_point_stride = 0, bias_stride = 0, y_stride = 0;
};

// What a product kernel is given. Sizes come from here: a is (m, k), b is (n, k), y is (m, n), whichever of the two
// strides is 1. Strides of scales may be 0. A packed b is bytes that hold its scales and zero points too. A scale that
// the plan itself keeps (of a or b) is on the CPU whatever the problem's device is, with stride 0.
struct GemmOperands {
  ConstTensor a = {};
  ConstTensor b = {};
  ConstTensor a_scale = {};     // (m); blocked_gemm: (m, blocks), any strides
  ConstTensor b_scale = {};     // by b's granularity: (n), (n, k / group) or, along the contraction, (k)
  ConstTensor zero_point = {};  // (n, k / group), s32
  ConstTensor bias = {};        // (n), dtype of y; of a grouped_gemm any float type's
  Tensor y = {};
  ExpertOperands experts = {};
  // Of what the kernel reads, a and a_scale alone come from the launch before this one, which waits for all before it
  // and only then lets this one start.
  bool only_a_pending = false;
};

struct Launch {
  Workspace workspace;
  Stream stream;
};

struct Cost {
  double operations = 0;  // multiplications and additions
  double bytes = 0;       // read and written, each operand once
  double seconds = 0;     // expected
};

// One row.
template <class Problem, class Operands>
struct Kernel {
  std::string_view name;  // <format>_<operation>_<arch>
  Task task;
  DeviceType device = DeviceType::cpu;
  // Why the kernel cannot do this problem; empty: it can. Null: it always can.
  std::string (*supports)(const Problem&) = nullptr;
  Cost (*cost)(const Problem&) = nullptr;
  // Bytes of scratch. Null: none.
  std::size_t (*workspace)(const Problem&) = nullptr;
  void (*launch)(const Problem&, const Operands&, const Launch&) = nullptr;
  // Called once, at select: what launch must not do, as loading code onto a GPU. May be null.
  void (*prepare)(const Problem&) = nullptr;
  // What the kernel chose by itself, a line for people. May be null.
  std::string (*detail)(const Problem&) = nullptr;
  // Whether addresses and strides of these operands suit the kernel; another row of the plan runs where they do not.
  // Null: any do.
  bool (*aligned)(const Problem&, const Operands&) = nullptr;
  // How far a product may be from the exact value.
  Bound bound = Bound::exact;
  // A product that reads b before it waits for the launch before it, where only_a_pending allows that.
  bool reads_b_early = false;
};

using QuantizeKernel = Kernel<QuantizeProblem, QuantizeOperands>;
constexpr bool is_norm(Prologue prologue) { return prologue == Prologue::rms_norm || prologue == Prologue::layer_norm; }

using GemmKernel = Kernel<GemmProblem, GemmOperands>;

// All rows of this library, and those of one folder.
std::span<const QuantizeKernel* const> quantize_kernels();
std::span<const GemmKernel* const> gemm_kernels();

struct KernelRows {
  std::span<const QuantizeKernel* const> quantize;
  std::span<const GemmKernel* const> gemm;
};
namespace reference {
KernelRows kernels();
}
namespace cpu {
KernelRows kernels();
}
namespace cuda {
KernelRows kernels();  // none where Octile is built without CUDA

// y of an empty contraction: the bias, or zero.
void write_empty_sum(const GemmOperands& operands, Stream stream);

// The sum over slots: octile/grouped_linear.h. All of f32 or f64, but y.
struct SlotOperands {
  ConstTensor z = {};              // (m, n)
  ConstTensor offsets = {};        // (experts + 1), s32
  ConstTensor place = {};          // (tokens, slots), s32
  ConstTensor router_weight = {};  // (tokens, slots)
  Tensor y = {};                   // (tokens, n)
};
void prepare_sum_slots(DType y);
// Rows of y without an expert become 0.
void prepare_clear_rest();
void clear_rest(const ConstTensor& offsets, const Tensor& y, Stream stream);
void sum_slots(const SlotOperands& operands, Stream stream);
}  // namespace cuda

}  // namespace octile
