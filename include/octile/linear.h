// Octile: the linear layer Y = X * W^T + bias with quantized operands, and its gradients.
//
// X (M, K) = (batch, IN); W (N, K) = (OUT, IN) or (K, N) = (IN, OUT); Y (M, N) = (batch, OUT).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "octile/plan.h"
#include "octile/tensor.h"

namespace octile {

// X is quantized to s8 with a scale s_x (activation dynamic or static) or used as it is, in float (activation none). W
// is described by its WeightFormat. q are integers, z zero points (0 without them), s_w scales; g is a group along k.
//
// s8 X, one scale per channel (W8A8)
//   acc = sum_k Xq[m, k] * q[n, k], exact in s32
//   Y[m, n] = round_to_y(fma(f32(acc), s_x[m] * s_w[n], bias[n]))
// s8 X, groups (W8A8 with s8_group, W4A8), g in ascending order
//   acc_g = sum_{k in g} Xq[m, k] * (q[n, k] - z[n, g]), exact in s32
//   t = fma(f32(acc_g), s_w[n, g], t), from t = 0
//   Y[m, n] = round_to_y(fma(t, s_x[m], bias[n]))
// float X (W8A16, W4A16), f32 sums in an order that depends on the kernel
//   Y[m, n] = round_to_y(sum_k X[m, k] * ((q[n, k] - z[n, g]) * s_w[n, g]) + bias[n])
//
// f32 is f64 when y is f64. Without a bias, fma(a, b, bias) is a * b. With s8 X the result has the same bits on every
// backend, and row m of Y depends only on row m of X, unless one dynamic scale serves the whole tensor.
struct LinearDescription {
  // Maximum number of rows; `run` accepts fewer. On a CPU fewer rows take no longer than with a plan made for that
  // number. On a GPU the kernel and its tiles are chosen for m, and the bits of W4A16 and W8A16 depend on the kernel:
  // make a plan for each size that matters.
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;    // with s8 X: at most kMaxContraction
  DType x = DType::f32;  // f16, bf16, f32, f64; or s8: X is already quantized
  DType y = DType::f32;  // f16, bf16, f32; f64 exactly when x is f64, or for s8 x with f64 scales
  Activation activation = Activation::dynamic_per_token;
  double static_scale = 0;  // with Activation::static_per_tensor: the scale of X, positive and finite in scale_type(y)
  WeightFormat weight = WeightFormat::s8_per_channel;
  WeightLayout weight_layout = WeightLayout::out_in;  // in_out: W8A8 with a scale per channel or tensor
  bool packed_weight = false;  // `run` takes what `pack` wrote, the fastest form; weight_layout is that of pack's input
  bool bias = false;
  bool x_multiplier = false;  // X is multiplied per input channel before it is quantized (SmoothQuant's 1 / s)
  Device device = {};
  int threads = 0;          // maximum number of CPU threads; 0: all. Results do not depend on it
  std::string kernel = {};  // empty: the fastest. A row's name, or an arch ("reference"), restricts the choice
};

struct LinearArgs {
  ConstTensor x = {};             // (M, K)
  ConstTensor x_scale = {};       // only if x is s8: (M) for per_token, (1) for dynamic_per_tensor; absent for static
  ConstTensor x_multiplier = {};  // (K), scale_type(y)
  ConstTensor weight = {};  // (N, K) or (K, N); with packed_weight: (packed_weight_size()), u8, at a multiple of 64
  ConstTensor weight_scale = {};       // (N); (1) per tensor; (N, K / group) in groups. scale_type(y); absent if packed
  ConstTensor weight_zero_point = {};  // (N, K / group), s32, within -8..7 (unchecked on a GPU); absent if packed
  ConstTensor bias = {};               // (N), dtype of y
  Tensor y = {};                       // (M, N)
};

struct LinearPackArgs {
  ConstTensor weight = {};             // (N, K) or (K, N)
  ConstTensor weight_scale = {};       // as in LinearArgs
  ConstTensor weight_zero_point = {};  // as in LinearArgs
  Tensor packed = {};                  // (packed_weight_size()), u8
};

// octile/plan.h has what select, can_implement and run of every plan do.
class OCTILE_API LinearPlan : public Plan {
 public:
  static LinearPlan select(const LinearDescription& description);
  // Bytes of the packed weight; 0 without packed_weight. It (docs/reference/packed-weights.md) includes the scales and
  // zero points, and depends only on n, k and the weight's format, not on m, the machine or the kernel.
  std::size_t packed_weight_size() const;
  // Packs a weight on the CPU, once for all runs. The packed bytes must begin at a multiple of 64, here and in run, so
  // that a vector never crosses a cache line: std::aligned_alloc(64, packed_weight_size()).
  void pack(const LinearPackArgs& args) const;
  Verdict can_implement(const LinearArgs& args) const;
  void run(const LinearArgs& args, Workspace workspace = {}, Stream stream = {}) const;

 private:
  using Plan::Plan;
};

// The gradients of Y = X * W^T + bias from dY and the int8 tensors that the forward used; any subset.
//   dequantized  dX[m, k] = sum_n dY[m, n] * (Wq[n, k] * s_w[n])
//                dW[n, k] = sum_m (Xq[m, k] * s_x[m]) * dY[m, n]
//                f32 sums (f64 for f64), the same bits on every run on one device
//   int8         d1 = dY[m, n] * s_w[n], quantized per row to q1, s1:     dX = s1[m] * sum_n q1[m, n] * Wq[n, k]
//                d2 = dY[m, n] * s_x[m], quantized per column to q2, s2:  dW = s2[n] * sum_m q2[m, n] * Xq[m, k]
//                with min_scale = 2^-79, exact s32 sums, bit-identical on every backend
//   int8 with gradient_block T: d1 and d2 have a scale for each block b of T terms of the contraction, the last one short:
//                s1[m, b] over T columns of d1, s2[b, n] over T rows of d2. acc_b is exact in s32;
//                t = fma(f32(acc_b), s[b], t) from t = 0, b in ascending order; dX, dW = t, rounded once
//   dB[n] = sum_m dY[m, n], f32 sums (f64 for f64)
struct LinearBackwardDescription {
  std::int64_t m = 0;  // maximum number of rows; at most kMaxContraction for an int8 dW
  std::int64_t n = 0;  // at most kMaxContraction for an int8 dX
  std::int64_t k = 0;
  DType dy = DType::f32;               // float type of dY, dX and dB; scales are scale_type(dy)
  std::optional<DType> dw_dtype = {};  // of dW: dy's, or f32
  bool dw_accumulate = false;          // dW is added to what dw holds, which is f32, or f64 for f64: dw + round(dW)
  Product dx = Product::dequantized;
  Product dw = Product::dequantized;
  bool db = false;
  Activation activation = Activation::dynamic_per_token;  // the scale that Xq was quantized with
  double static_scale = 0;                                // with static_per_tensor
  bool x_transposed = false;                              // Xq is given as (K, M)
  WeightFormat weight = WeightFormat::s8_per_channel;     // s8_per_channel or s8_per_tensor
  WeightLayout weight_layout = WeightLayout::out_in;      // of Wq
  std::optional<WeightLayout> dw_layout = {};             // of dW: weight_layout's, or the other one
  Rounding rounding = Rounding::nearest;                  // of dY in the int8 products
  // Terms of the contraction that share a scale of dY in the int8 products: 0 (all of them), 128, 256, 512 or 1024. The
  // shorter the block, the smaller the error of a gradient, and the lower the speed (docs/explanation/training.md).
  std::int64_t gradient_block = 0;
  Device device = {};
  int threads = 0;          // maximum number of CPU threads; 0: all. Results do not depend on it
  std::string kernel = {};  // empty: the fastest. A row's name, or an arch ("reference"), restricts the choice
};

struct LinearBackwardArgs {
  ConstTensor dy = {};            // (M, N)
  ConstTensor weight = {};        // (N, K) or (K, N), s8; for dX
  ConstTensor weight_scale = {};  // (N) or (1); for dX
  ConstTensor x = {};             // (M, K) or (K, M), s8; for dW
  ConstTensor x_scale = {};       // (M), (1), or absent if static; for dW
  Tensor dx = {};                 // (M, K)
  Tensor dw = {};                 // (N, K) or (K, N)
  Tensor db = {};                 // (N)
  std::uint64_t seed = 0;         // of stochastic rounding
};

// An output of the backward pass.
enum class Gradient : std::uint8_t { dx, dw, db };

OCTILE_API std::string_view name(Gradient value);

class OCTILE_API LinearBackwardPlan : public Plan {
 public:
  static LinearBackwardPlan select(const LinearBackwardDescription& description);
  // The guarantee for one output: an int8 dX is exact even if dB is a sum of floats. Throws if the plan does not
  // compute that output. Without an argument: the guarantee for all outputs. The reference is valid as long as the plan
  // exists.
  const PrecisionGuarantee& precision_guarantee(Gradient gradient) const;
  using Plan::precision_guarantee;
  Verdict can_implement(const LinearBackwardArgs& args) const;
  void run(const LinearBackwardArgs& args, Workspace workspace = {}, Stream stream = {}) const;

 private:
  using Plan::Plan;
};

}  // namespace octile
