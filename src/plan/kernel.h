// The kernel table: what a kernel is asked, what it is given, and one row per kernel. The rows are in kernels.cpp.
//
// A plan is a short list of steps, and each step is one row of the table. Two families of rows exist: the quantizer's
// (one matrix, a scale per segment) and the product's (two matrices, or one to be summed).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "octile/plan.h"
#include "octile/quantize.h"
#include "octile/tensor.h"

namespace octile {

enum class Operation : std::uint8_t {
  quantize,
  dequantize,
  quantize_backward,
  dequantize_backward,
  fake_quantize,
  fake_quantize_backward,
  gradient_quantize,  // both quantizers of dY and its column sums at once: QuantizeOperands
  w8a8_linear,        // a is float: quantized per row to s8 and a scale, as quantize does, and then w8a8_gemm
  w8a8_gemm,          // y[i, j] = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a and b s8
  w8a16_gemm,         // y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]); a float, b s8
  w4a16_gemm,         // y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, c / group]) * b_scale[j, c / group]) + bias[j]; b s4
  w4a8_gemm,   // y[i, j] = fma(t, a_scale[i], bias[j]); t = the fold over groups g of fma(f32(acc), b_scale[j, g], t)
               // from t = 0; acc = sum_{c in g} a[i, c] * (b[j, c] - z[j, g]); a s8, b s4
  column_sum,  // y[0, j] = sum_i a[i, j]
};

std::string_view name(Operation operation);

// What a quantizer kernel is selected for: the public description with q_min and q_max resolved.
using QuantizeProblem = QuantizeDescription;

// The least that least_scale may be, and what the backward takes for dY: below it, products with 1 / s would no longer
// be exact enough to stand for quotients.
inline constexpr double kLeastScale = 0x1p-79;

// One scale per segment, as strides over the matrix: element (r, c) uses data[r * row_stride + c / group * col_stride].
// Absent: data is null. A scale that a plan keeps itself lies in host memory whatever the device is: on_host, one
// value.
struct Scales {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;
  std::int64_t group = 1;
  bool on_host = false;

  std::int64_t index(std::int64_t r, std::int64_t c) const { return r * row_stride + c / group * col_stride; }
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
};

// Whether a row of an s8 operand, or a column, is contiguous.
enum class Major : std::uint8_t { contraction, outer };

// What a product kernel is selected for. m is a maximum.
struct GemmProblem {
  Operation operation = Operation::w8a8_gemm;
  std::int64_t m = 0;  // rows of a and y
  std::int64_t n = 0;  // rows of b, columns of y
  std::int64_t k = 0;  // the contraction
  DType a = DType::s8;
  DType y = DType::f32;
  DType scale = DType::f32;  // of all scales, and of the arithmetic
  Major a_major = Major::contraction;
  Major b_major = Major::contraction;
  Major y_major = Major::contraction;  // contraction: rows of y are contiguous
  std::int64_t group = 0;              // w4a16, w4a8: 32, 64, 128 or k
  bool zero_point = false;             // w4a16, w4a8
  bool b_packed = false;               // b is the plan's packed weight: packed_weight.h
  bool bias = false;
  bool accumulate = false;  // y = y + (the product, rounded to y's type), y of type `scale`; without a bias
  bool dynamic = true;      // w8a8_linear: the scale of a row is computed; otherwise a_scale is one given value
  bool multiplier = false;  // w8a8_linear: a is multiplied by c_scale, per column, before it is quantized
  Device device = {};
  int threads = 0;
};

// What a product kernel is given. Sizes come from here: a is (m, k), b is (n, k), y is (m, n), whichever of the two
// strides is 1. Strides of scales may be 0. A packed b is bytes that hold its scales and zero points too. A scale that
// the plan itself keeps (of a or b, or the multiplier) is on the CPU whatever the problem's device is, with stride 0.
struct GemmOperands {
  ConstTensor a = {};
  ConstTensor b = {};
  ConstTensor a_scale = {};     // (m)
  ConstTensor b_scale = {};     // (n), or (n, k / group)
  ConstTensor c_scale = {};     // (k); w8a8_linear: the multiplier
  ConstTensor zero_point = {};  // (n, k / group), s32
  ConstTensor bias = {};        // (n), dtype of y
  Tensor y = {};
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

// What a product of floats with 4-bit weights adds up: a (q - z) s; a times (q - z) s rounded to a's 16-bit type, where
// a row has several scales; or a s times q + 8 or q + 24, and what was added and z taken off with the sum of a.
enum class NibbleTerms { exact, rounded, raised };

// One row. `supports` returns a reason, empty means yes; `workspace` is in bytes; `prepare`, where there is one, is
// called once, at select, and does what `launch` must not: loading code onto a GPU. `detail` says in a line for a
// person what the kernel chose by itself.
template <class Problem, class Operands>
struct Kernel {
  std::string_view name;
  Operation operation;
  DeviceType device;
  std::string (*supports)(const Problem&);
  Cost (*cost)(const Problem&);
  std::size_t (*workspace)(const Problem&);
  void (*launch)(const Problem&, const Operands&, const Launch&);
  void (*prepare)(const Problem&) = nullptr;
  std::string (*detail)(const Problem&) = nullptr;
  NibbleTerms nibble_terms = NibbleTerms::exact;
};

using QuantizeKernel = Kernel<QuantizeProblem, QuantizeOperands>;
using GemmKernel = Kernel<GemmProblem, GemmOperands>;

std::span<const QuantizeKernel> quantize_kernels();
std::span<const GemmKernel> gemm_kernels();

// The launchers, one namespace per folder.
namespace reference {
void quantize(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void dequantize(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void quantize_backward(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void dequantize_backward(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void fake_quantize(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void fake_quantize_backward(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void gradient_quantize(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void w8a8_gemm(const GemmProblem&, const GemmOperands&, const Launch&);
void w8a16_gemm(const GemmProblem&, const GemmOperands&, const Launch&);
void w4a16_gemm(const GemmProblem&, const GemmOperands&, const Launch&);
void w4a8_gemm(const GemmProblem&, const GemmOperands&, const Launch&);
void column_sum(const GemmProblem&, const GemmOperands&, const Launch&);
}  // namespace reference

namespace cpu {
void quantize_portable(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void dequantize_portable(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void quantize_backward_portable(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void dequantize_backward_portable(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void fake_quantize_portable(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void fake_quantize_backward_portable(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
std::size_t quantize_portable_workspace(const QuantizeProblem&);
std::size_t fake_quantize_portable_workspace(const QuantizeProblem&);
void w8a8_gemm_portable(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_portable_workspace(const GemmProblem&);
void w8a8_gemm_avx2(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_avx2_workspace(const GemmProblem&);
void w8a8_gemm_avxvnni(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_avxvnni_workspace(const GemmProblem&);
void w8a8_gemm_avx512vnni(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_avx512vnni_workspace(const GemmProblem&);
void w8a8_gemm_amx(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_amx_workspace(const GemmProblem&);
void w8a8_gemm_neon(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_neon_workspace(const GemmProblem&);
void w8a8_gemm_i8mm(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a8_gemm_i8mm_workspace(const GemmProblem&);
void w4a8_gemm_avx2(const GemmProblem&, const GemmOperands&, const Launch&);
void w4a8_gemm_avx512vnni(const GemmProblem&, const GemmOperands&, const Launch&);
void w4a8_gemm_neon(const GemmProblem&, const GemmOperands&, const Launch&);
void w4a8_gemm_i8mm(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w4a8_gemm_workspace(const GemmProblem&);
void w8a16_gemm_portable(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w8a16_gemm_portable_workspace(const GemmProblem&);
void w4a16_gemm_portable(const GemmProblem&, const GemmOperands&, const Launch&);
std::size_t w4a16_gemm_portable_workspace(const GemmProblem&);
void column_sum_portable(const GemmProblem&, const GemmOperands&, const Launch&);
}  // namespace cpu

// src/no_cuda.cpp has them where Octile is built without CUDA.
namespace cuda {
std::string quantizer_sm80_supports(const QuantizeProblem&);
Cost quantize_sm80_cost(const QuantizeProblem&);
std::size_t quantize_sm80_workspace(const QuantizeProblem&);
void quantize_sm80_prepare(const QuantizeProblem&);
void quantize_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
std::string quantize_sm90_supports(const QuantizeProblem&);
Cost quantize_sm90_cost(const QuantizeProblem&);
std::size_t quantize_sm90_workspace(const QuantizeProblem&);
void quantize_sm90_prepare(const QuantizeProblem&);
void quantize_sm90(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
std::string gradient_quantize_sm90_supports(const QuantizeProblem&);
Cost gradient_quantize_sm90_cost(const QuantizeProblem&);
std::size_t gradient_quantize_sm90_workspace(const QuantizeProblem&);
void gradient_quantize_sm90_prepare(const QuantizeProblem&);
void gradient_quantize_sm90(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void dequantize_sm80_prepare(const QuantizeProblem&);
void dequantize_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void straight_through_sm80_prepare(const QuantizeProblem&);
void quantize_backward_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void dequantize_backward_sm80_prepare(const QuantizeProblem&);
void dequantize_backward_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
std::size_t fake_quantize_sm80_workspace(const QuantizeProblem&);
void fake_quantize_sm80_prepare(const QuantizeProblem&);
void fake_quantize_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
void fake_quantize_backward_sm80(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
std::string w8a8_gemm_sm80_supports(const GemmProblem&);
Cost w8a8_gemm_sm80_cost(const GemmProblem&);
void w8a8_gemm_sm80_prepare(const GemmProblem&);
void w8a8_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w8a8_gemm_sm90_supports(const GemmProblem&);
Cost w8a8_gemm_sm90_cost(const GemmProblem&);
std::size_t w8a8_gemm_sm90_workspace(const GemmProblem&);
void w8a8_gemm_sm90_prepare(const GemmProblem&);
std::string w8a8_gemm_sm90_detail(const GemmProblem&);
void w8a8_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w8a8_gemm_skinny_sm90_supports(const GemmProblem&);
Cost w8a8_gemm_skinny_sm90_cost(const GemmProblem&);
std::size_t w8a8_gemm_skinny_sm90_workspace(const GemmProblem&);
void w8a8_gemm_skinny_sm90_prepare(const GemmProblem&);
std::string w8a8_gemm_skinny_sm90_detail(const GemmProblem&);
void w8a8_gemm_skinny_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w8a8_linear_sm90_supports(const GemmProblem&);
Cost w8a8_linear_sm90_cost(const GemmProblem&);
std::size_t w8a8_linear_sm90_workspace(const GemmProblem&);
void w8a8_linear_sm90_prepare(const GemmProblem&);
void w8a8_linear_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string column_sum_sm80_supports(const GemmProblem&);
Cost column_sum_sm80_cost(const GemmProblem&);
std::size_t column_sum_sm80_workspace(const GemmProblem&);
void column_sum_sm80_prepare(const GemmProblem&);
void column_sum_sm80(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w8a16_gemm_sm80_supports(const GemmProblem&);
Cost w8a16_gemm_sm80_cost(const GemmProblem&);
void w8a16_gemm_sm80_prepare(const GemmProblem&);
void w8a16_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w8a16_gemm_sm90_supports(const GemmProblem&);
Cost w8a16_gemm_sm90_cost(const GemmProblem&);
void w8a16_gemm_sm90_prepare(const GemmProblem&);
std::string w8a16_gemm_sm90_detail(const GemmProblem&);
void w8a16_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w4a16_gemm_sm80_supports(const GemmProblem&);
Cost w4a16_gemm_sm80_cost(const GemmProblem&);
void w4a16_gemm_sm80_prepare(const GemmProblem&);
void w4a16_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w4a16_gemv_sm90_supports(const GemmProblem&);
Cost w4a16_gemv_sm90_cost(const GemmProblem&);
void w4a16_gemv_sm90_prepare(const GemmProblem&);
std::string w4a16_gemv_sm90_detail(const GemmProblem&);
void w4a16_gemv_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w4a16_gemm_skinny_sm90_supports(const GemmProblem&);
Cost w4a16_gemm_skinny_sm90_cost(const GemmProblem&);
void w4a16_gemm_skinny_sm90_prepare(const GemmProblem&);
std::string w4a16_gemm_skinny_sm90_detail(const GemmProblem&);
void w4a16_gemm_skinny_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w4a16_gemm_sm90_supports(const GemmProblem&);
Cost w4a16_gemm_sm90_cost(const GemmProblem&);
void w4a16_gemm_sm90_prepare(const GemmProblem&);
std::string w4a16_gemm_sm90_detail(const GemmProblem&);
void w4a16_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w4a8_gemm_sm80_supports(const GemmProblem&);
Cost w4a8_gemm_sm80_cost(const GemmProblem&);
void w4a8_gemm_sm80_prepare(const GemmProblem&);
void w4a8_gemm_sm80(const GemmProblem&, const GemmOperands&, const Launch&);
std::string w4a8_gemm_sm90_supports(const GemmProblem&);
Cost w4a8_gemm_sm90_cost(const GemmProblem&);
void w4a8_gemm_sm90_prepare(const GemmProblem&);
std::string w4a8_gemm_sm90_detail(const GemmProblem&);
void w4a8_gemm_sm90(const GemmProblem&, const GemmOperands&, const Launch&);
// The sum over nothing (k = 0): y is the bias, or zero.
void write_empty_sum(const GemmOperands&, Stream);
}  // namespace cuda

}  // namespace octile
