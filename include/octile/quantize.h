// Octile: quantize, dequantize, fake quantize, and their straight-through gradients.
//
// All six plans share one description of a (rows, cols) matrix and of how it maps to integers. Each segment (the whole
// tensor, a row, a column, or a group of consecutive elements of a row) has, with IEEE division and ties to even:
//
//   symmetric  s = max(max|x| / q_max, min_scale)                       q = clamp(rint(x / s), q_min, q_max)
//   affine     s = max((x_max - x_min) / (q_max - q_min), min_scale), x_min <= 0 <= x_max
//              z = clamp(q_min - rint(x_min / s), q_min, q_max)           q = clamp(rint(x / s) + z, q_min, q_max)
//
// f16 and bf16 are widened to f32, f64 works in f64. Everything here is bit-identical on every backend. A NaN or an
// infinity in a segment makes its scale NaN and its integers and zero point 0, so everything computed from it is
// NaN.
#pragma once

#include <cstdint>
#include <string>

#include "octile/plan.h"
#include "octile/tensor.h"

namespace octile {

struct QuantizeDescription {
  std::int64_t rows = 0;  // maximum; `run` accepts fewer
  std::int64_t cols = 0;
  DType x = DType::f32;  // float type of x, y and the gradients; scales are scale_type(x)
  DType q = DType::s8;   // s8, u8 or s4
  Granularity granularity = Granularity::row;
  std::int64_t group = 0;  // with Granularity::group: its length, a divisor of cols
  ScaleSource scale = ScaleSource::dynamic;
  Mapping mapping = Mapping::symmetric;
  Rounding rounding = Rounding::nearest;
  Orientation orientation = Orientation::row_major;  // of QuantizePlan's output
  Multiplier multiplier = Multiplier::none;          // of QuantizePlan's input: x * multiplier, rounded once
  Mask mask = Mask::inclusive;                       // of the two straight-through backward plans
  // The range of q. Both 0: that of the type: symmetric s8 -127..127, u8 0..255, s4 -7..7; affine s8 -128..127,
  // u8 0..255, s4 -8..7. Symmetric needs q_max > 0.
  int q_min = 0;
  int q_max = 0;
  // Minimum of dynamic scales, rounded to scale_type(x); 2^-79 to 1. 1e-8 is too large for gradients.
  double min_scale = 1e-8;
  Device device = {};
  int threads = 0;          // maximum number of CPU threads; 0: all. Results do not depend on it
  std::string kernel = {};  // empty: the fastest. A row's name, or an arch ("reference"), restricts the choice
  // QuantizePlan then quantizes prologue(x), or with `gated` prologue(x) * up (activation functions only), rounded to
  // x's type: f16, bf16 and f32 to s8, symmetric with a dynamic scale for each row, to nearest, without a multiplier.
  Prologue prologue = Prologue::none;
  bool gated = false;
  double epsilon = 1e-6;           // of a norm; rounded to f32
  DType norm_weight = DType::f32;  // of a norm's weight and bias: f32 or x's
  bool residual = false;           // normalizes x + residual, rounded to x's type and written to `sum`
};

// Scales and zero points, wherever they appear below: shape (1) for tensor, (rows) for row, (cols) for column,
// (rows, cols / group) for group. Scales are scale_type(x), zero points s32, absent when symmetric.

// x -> q.
struct QuantizeArgs {
  ConstTensor x = {};                 // (rows, cols)
  ConstTensor multiplier = {};        // (cols) or (rows), scale_type(x)
  ConstTensor given_scale = {};       // with ScaleSource::given: positive and finite
  ConstTensor given_zero_point = {};  // with ScaleSource::given and affine: within q_min..q_max
  Tensor q = {};                      // (rows, cols), unless transposed only
  Tensor q_transposed = {};           // (cols, rows), if transposed or both
  Tensor scale = {};             // dynamic: written. given: if present, written with the given scale, or with NaN for a
                                 // segment that holds a NaN or an infinity (its integers are then 0)
  Tensor zero_point = {};        // dynamic affine: written
  std::uint64_t seed = 0;        // of stochastic rounding
  ConstTensor up = {};           // (rows, cols), if gated
  ConstTensor norm_weight = {};  // (cols), of a norm
  ConstTensor norm_bias = {};    // (cols), of layer_norm
  ConstTensor residual = {};     // (rows, cols), if residual
  Tensor sum = {};               // (rows, cols), if residual
  Tensor mean = {};              // (rows), f32, of layer_norm; may be absent
  Tensor rstd = {};              // (rows), f32, of a norm: 1 / sqrt(.. + epsilon); may be absent
};

// x = (q - z) * s.
struct DequantizeArgs {
  ConstTensor q = {};  // (rows, cols)
  ConstTensor scale = {};
  ConstTensor zero_point = {};  // affine
  Tensor x = {};                // (rows, cols)
};

// Straight-through gradient of quantize: dx = (dy / s) where rint(x / s) + z is in range, else 0; NaN where x or s is
// not finite.
struct QuantizeBackwardArgs {
  ConstTensor dy = {};  // (rows, cols)
  ConstTensor x = {};   // (rows, cols), as it was quantized
  ConstTensor scale = {};
  ConstTensor zero_point = {};  // affine
  Tensor dx = {};               // (rows, cols)
};

// Gradient of dequantize: dq = dy * s, in float.
struct DequantizeBackwardArgs {
  ConstTensor dy = {};  // (rows, cols)
  ConstTensor scale = {};
  Tensor dq = {};  // (rows, cols), float
};

// y = (clamp(rint(x / s) + z, q_min, q_max) - z) * s; NaN where x is not finite.
struct FakeQuantizeArgs {
  ConstTensor x = {};                 // (rows, cols)
  ConstTensor given_scale = {};       // with ScaleSource::given
  ConstTensor given_zero_point = {};  // with ScaleSource::given and affine
  Tensor y = {};                      // (rows, cols)
  Tensor scale = {};                  // dynamic: written
  Tensor zero_point = {};             // dynamic affine: written
  std::uint64_t seed = 0;             // of stochastic rounding
};

// Straight-through gradient of fake quantize: dx = dy where rint(x / s) + z is in range, else 0; NaN where x or s is
// not finite.
struct FakeQuantizeBackwardArgs {
  ConstTensor dy = {};  // (rows, cols)
  ConstTensor x = {};   // (rows, cols)
  ConstTensor scale = {};
  ConstTensor zero_point = {};  // affine
  Tensor dx = {};               // (rows, cols)
};

// One of the six plans, distinguished by its arguments. octile/plan.h has what the functions of every plan do.
template <class Args>
class OCTILE_API QuantizerPlan : public Plan {
 public:
  static QuantizerPlan select(const QuantizeDescription& description);
  Verdict can_implement(const Args& args) const;
  void run(const Args& args, Workspace workspace = {}, Stream stream = {}) const;

 private:
  using Plan::Plan;
};

extern template class OCTILE_API QuantizerPlan<QuantizeArgs>;
extern template class OCTILE_API QuantizerPlan<DequantizeArgs>;
extern template class OCTILE_API QuantizerPlan<QuantizeBackwardArgs>;
extern template class OCTILE_API QuantizerPlan<DequantizeBackwardArgs>;
extern template class OCTILE_API QuantizerPlan<FakeQuantizeArgs>;
extern template class OCTILE_API QuantizerPlan<FakeQuantizeBackwardArgs>;

using QuantizePlan = QuantizerPlan<QuantizeArgs>;
using DequantizePlan = QuantizerPlan<DequantizeArgs>;
using QuantizeBackwardPlan = QuantizerPlan<QuantizeBackwardArgs>;
using DequantizeBackwardPlan = QuantizerPlan<DequantizeBackwardArgs>;
using FakeQuantizePlan = QuantizerPlan<FakeQuantizeArgs>;
using FakeQuantizeBackwardPlan = QuantizerPlan<FakeQuantizeBackwardArgs>;

}  // namespace octile
