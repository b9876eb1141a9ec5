// Octile: statistics of a layer's inputs (Calibrator), and SmoothQuant, which moves outliers from inputs to weights.
//
// clang-format off
// G. Xiao, J. Lin, M. Seznec, H. Wu, J. Demouth, S. Han: "SmoothQuant: Accurate and Efficient Post-Training
// Quantization for Large Language Models", 2022, arXiv 2211.10438. For Y = X * W^T with X (M, K) and W (N, K), and a
// factor per input channel j:
//   s_j = max(max|X_j|^alpha / max|W_j|^(1 - alpha), 1e-5), both maxima at least 1e-5
//   Y   = (X / s) * (W * s)^T
// clang-format on
// alpha = 0 makes the weight's channels equally large, alpha = 1 the input's. X / s costs nothing if the preceding
// layer can be divided (smooth_before); otherwise it is LinearPlan's x_multiplier = 1 / s.
//
// Everything here runs on the CPU, once, before a model is served. Errors throw octile::Error before anything is
// written. Results do not depend on the machine or the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "octile/error.h"
#include "octile/tensor.h"
#include "octile/types.h"

namespace octile {

struct CalibratorDescription {
  std::int64_t features = 0;
  bool second_moments = false;  // keep H as well: 8 * features^2 bytes instead of 4 * features
  int threads = 0;              // maximum number of CPU threads (0: all)
};

// clang-format off
// Running statistics over rows x of `features` values; f64 is rounded to f32 first.
//   channel_max[j] = max |x_j|          max = max_j channel_max[j]
//   H[i, j] = sum over rows x_i * x_j   in f64, where each product is exact; added row by row, so that the bits do not
//                                       depend on how the rows were split into calls
//   excess = (p, e)                     for one more row, averaged over its channels: p is the probability that
//                                       |x_j| > channel_max[j], e = E max(|x_j| / channel_max[j] - 1, 0)^2
// clang-format on
// The excess is estimated from how far each row exceeded the maxima of the blocks of 128 rows before its own; up to
// 128 rows it is that of independent rows with exponential tails.
// A NaN or an infinity in column j, or a value beyond f32, makes channel_max[j], max, and H's row and column j NaN from
// then on. A weight (OUT, IN) may be observed too: channel_max is then max|W_j| over all weights observed.
class OCTILE_API Calibrator {
 public:
  explicit Calibrator(const CalibratorDescription& description);
  Calibrator(const Calibrator&) = delete;
  Calibrator& operator=(const Calibrator&) = delete;

  // (rows, features), f16, bf16, f32 or f64.
  void observe(const ConstTensor& x);
  // As if `other`'s rows had been observed here; H is the sum of both. The two have the same description, threads
  // apart, or it throws.
  void merge(const Calibrator& other);

  std::int64_t features() const;
  std::int64_t rows() const;  // seen so far
  float max() const;
  std::vector<float> channel_max() const;
  void channel_max(const Tensor& out) const;  // to (features), f32
  void excess(const Tensor& out) const;       // to (2), f32
  // Writes H to (features, features), f32 or f64. Throws without second_moments in the description.
  void second_moments(const Tensor& h) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

struct SmoothingArgs {
  double alpha = 0.5;                   // 0 to 1
  ConstTensor input_channel_max = {};   // (K), f32
  ConstTensor weight_channel_max = {};  // (K), f32: over the rows of every layer that reads this input
  Tensor factors = {};                  // (K), f32: s
  Tensor multiplier = {};               // (K), f32: 1 / s, for LinearPlan; may be absent
};

// Writes s, and returns the largest smoothed input, max_j(max|X_j| * (1 / s_j)). Divided by 127 it is a static scale.
OCTILE_API float smoothing_factors(const SmoothingArgs& args);

// W[n, j] = W[n, j] * s_j, in place, rounded once (f64: in f64).
//   weight (N, K), any float type; factors (K), f32
OCTILE_API void smooth_weight(const Tensor& weight, const ConstTensor& factors);

struct SmoothBeforeArgs {
  ConstTensor factors = {};  // (K), f32
  Tensor weight = {};        // (K): of a LayerNorm or an RMSNorm; or (K, P): of a linear layer with K outputs
  Tensor bias = {};          // (K); may be absent
};

// Divides the preceding layer: weight[j] / s_j or row j / s_j, and bias[j] / s_j, in place, rounded once. Every other
// reader of that layer's output must be smoothed with the same s.
OCTILE_API void smooth_before(const SmoothBeforeArgs& args);

// Finds alpha by the error of the layer's output. For each alpha of a grid, factors are computed, W * s is quantized to
// nearest, X / s is quantized as `activation` says, and the error is
// clang-format off
//   - with x:
//       ||Y' - Y||^2 / ||Y||^2
//     over these rows, Y' as LinearPlan computes it, Y = X * W^T in f32;
//   - with second_moments:
//       (trace(E H E^T) + rows * d^2 / 12 * ||W'||^2) / trace(W H W^T)
//     where W' is the quantized weight, E = W' / s - W, and d = max / 127 the static scale, whose rounding errors are
//     assumed to be uniform and independent. This needs a scale of the whole tensor (static or dynamic_per_tensor).
// With static_per_tensor, unseen rows may exceed the calibrated maxima and are clamped. Smoothing makes many channels
// equally large, so any of them can exceed them; calibration rows never do, so on them the error of a large alpha looks
// too small. If input_excess or calibration_rows is given, each alpha's error therefore includes, per row,
//   sum_j ||W_j||^2 * E max(|x_j| - T * s_j, 0)^2     T = max_j(max|X_j| / s_j)
// clang-format on
// from an exponential tail beyond max|X_j| with the given probability and mean square. Without smoothing only the
// largest channel can exceed its maximum, and its loss is neglected.
// s8 activations only. Layers that read the same input are searched as one weight, stacked.
struct SmoothingSearchDescription {
  std::int64_t n = 0;
  std::int64_t k = 0;  // at most kMaxContraction
  DType x = DType::f32;
  DType w = DType::f32;
  Activation activation = Activation::static_per_tensor;
  WeightFormat weight = WeightFormat::s8_per_channel;  // without zero points
  double first_alpha = 0;  // the grid: `steps` alphas from the first to the last, both included
  double last_alpha = 1;
  int steps = 21;   // 1 to 1001
  int threads = 0;  // maximum number of CPU threads (0: all)
  // The number of rows behind input_channel_max. Without input_excess, unseen rows then exceed the maxima as
  // independent rows with exponential tails do. 0: unknown; rows are assumed to stay within the maxima.
  std::int64_t calibration_rows = 0;
};

// With fewer rows, smoothing often gains little, since unseen rows exceed the maxima too often. (Measured on small
// Llama, BERT and ViT models: below about 1,000 rows the search leaves most layers without outliers as they are.)
inline constexpr std::int64_t kFewCalibrationRows = 1024;

struct SmoothingSearchArgs {
  ConstTensor weight = {};             // (N, K)
  ConstTensor input_channel_max = {};  // (K), f32
  ConstTensor x = {};                  // (rows, K): calibration rows
  ConstTensor second_moments = {};     // (K, K), f32 or f64: H. x or this
  std::int64_t rows = 0;               // summed in H
  ConstTensor input_excess = {};       // (2), f32: what Calibrator::excess() gives; may be absent
  Tensor errors = {};                  // (steps), f64: the error of each alpha; may be absent
  std::function<void()> on_step = {};  // called before each alpha; an exception ends the search
};

struct SmoothingSearchResult {
  double alpha = 0;             // of the smallest error; the first of equal ones
  double error = 0;             // relative, of that alpha
  double unsmoothed_error = 0;  // relative, with s = 1
  bool smooth = true;           // error < 0.95 * unsmoothed_error; otherwise leave the layer as it is
};

OCTILE_API SmoothingSearchResult search_smoothing(const SmoothingSearchDescription& description,
                                                  const SmoothingSearchArgs& args);

}  // namespace octile
