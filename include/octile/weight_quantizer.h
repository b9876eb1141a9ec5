// Octile: quantizes weights to s8 and s4, with less error than rounding each to the nearest level.
//
// clang-format off
// W (N, K) becomes integers q, scales s and, optionally, zero points z, as LinearPlan takes them:
//   W'[n, k] = (q[n, k] - z) * s
// A segment is what shares a scale: the tensor, a row, or a group of consecutive elements of a row. With H = sum over
// calibration rows of x x^T (K, K) and E = W' - W, the error of the layer's output over those rows is
//   ||X E^T||^2 = trace(E H E^T)
//
// nearest         s and z of the contract (octile/quantize.h), min_scale 1e-8. s8, and s4 with z, have QuantizePlan's
//                 bits with an f32 scale. Symmetric s4 uses all of -8..7. Of the scales
//                   max|W| / 7,  max(-min W / 8, max W / 7),  max|W| / 7.5,  max|W| / 8
//                 the one with the smallest sum_k (W'[n, k] - W[n, k])^2 is taken, the first of equal ones.
// clip_search     Of clip_steps candidates c = 1, ..., min_clip: the segment's extremes times c give s and z, and q is
//                 rounded to nearest and clamped (s4: to -8..7). The c with the smallest
//                   sum_k h_k (W'[n, k] - W[n, k])^2
//                 is taken, the largest of equal ones. h is H's diagonal, or the importance given, or 1.
// error_feedback  E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh: "GPTQ: Accurate Post-Training Quantization for
//                 Generative Pre-trained Transformers", 2022, arXiv 2210.17323; in the equivalent form of J. Chee,
//                 Y. Cai, V. Kuleshov, C. De Sa: "QuIP", 2023, arXiv 2307.13304, theorem 6. Columns are rounded one
//                 after another, and later columns compensate for the errors of earlier ones. With the columns in the
//                 order of rounding, H + damping * mean(diag H) * I = U D U^T, U upper triangular with a unit diagonal:
//                   t_j = W_j + sum_{i < j} (W_i - W'_i) * U_ij
//                   q_j = clamp(rint(t_j / s) + z)
//                 U and D are computed in f64, U then rounded to f32, and t summed in f32 in the order of i. s and z
//                 are W's; with the columns in their own order, a group's are those of its t when the group is reached.
//                 With clip_steps > 1 they are found by clip_search, weighted by D.
//                 A dead channel, H_jj = 0, is rounded to nearest and compensates for nothing; the mean leaves it out.
// clang-format on
//
// H is the sum or the mean over n rows: only ratios matter. It must be symmetric (to 1e-3 * sqrt(H_ii * H_jj)); the
// upper triangle is read. Everything runs on the CPU. Results do not depend on the machine or the number of threads.
// Errors throw octile::Error before anything is written: among others a NaN or an infinity in W or H, and an H that is
// not positive definite after damping.
#pragma once

#include <cstdint>

#include "octile/error.h"
#include "octile/tensor.h"
#include "octile/types.h"

namespace octile {

// The numbers are part of the C ABI.
enum class WeightMethod : std::uint8_t { nearest, clip_search, error_feedback };
// The order in which error_feedback rounds the columns: their own, or by H's diagonal, the largest first, ties in their
// own order. Groups consist of consecutive columns either way.
enum class ColumnOrder : std::uint8_t { as_they_lie, by_moment };

OCTILE_API std::string_view name(WeightMethod value);
OCTILE_API std::string_view name(ColumnOrder value);

struct WeightQuantizerDescription {
  std::int64_t n = 0;
  std::int64_t k = 0;
  DType w = DType::f32;  // f16, bf16, f32; f64 is rounded to f32 first
  WeightFormat weight = WeightFormat::s8_per_channel;
  // Scales are written as f32. With f16 or bf16 here, they are rounded to that type before use, so that a file can hold
  // them in it without loss.
  DType scale = DType::f32;
  WeightMethod method = WeightMethod::nearest;
  ColumnOrder order = ColumnOrder::by_moment;  // error_feedback
  double damping = 0.05;                       // error_feedback: 0 to 1
  double min_clip = 0.4;                       // clip_search, error_feedback: above 0, at most 1
  int clip_steps = 61;                         // 1 to 1001; 1: no search, the extremes decide
  int threads = 0;                             // maximum number of CPU threads (0: all)
};

struct WeightQuantizerArgs {
  ConstTensor weight = {};          // (N, K)
  ConstTensor second_moments = {};  // (K, K), f32 or f64: H. error_feedback needs it, clip_search may use it
  ConstTensor importance = {};      // (K), f32, not negative: h. clip_search may use it instead of H
  Tensor q = {};                    // (N, K), s8 or s4
  Tensor scale = {};                // (N); (1) for s8_per_tensor; (N, K / group) in groups. f32
  Tensor zero_point = {};           // (N, K / group), s32, within -8..7
};

OCTILE_API void quantize_weight(const WeightQuantizerDescription& description, const WeightQuantizerArgs& args);

// trace(E H E^T) and trace(W H W^T), or sum_nk h_k E_nk^2 and sum_nk h_k W_nk^2: the cost of quantizing the weight.
struct WeightError {
  double noise = 0;
  double signal = 0;
};

struct WeightErrorArgs {
  ConstTensor weight = {};          // (N, K)
  ConstTensor second_moments = {};  // H, or
  ConstTensor importance = {};      // h, or neither: 1
  ConstTensor q = {};
  ConstTensor scale = {};
  ConstTensor zero_point = {};
};

// Reads n, k, w, weight and threads of the description.
OCTILE_API WeightError weight_error(const WeightQuantizerDescription& description, const WeightErrorArgs& args);

}  // namespace octile
