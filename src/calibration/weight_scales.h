// Scales and zero points of weights: from the extremes of a segment, or from a search among clipped extremes.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/support/multiversion.h"
#include "octile/weight_quantizer.h"

namespace octile {

// Neighbours in a row of k that share a scale.
inline std::int64_t segment_length(const WeightFormat& weight, std::int64_t k) {
  return weight.granularity == Granularity::group && weight.group > 0 ? weight.group : k;
}

constexpr float kMinWeightScale = 1e-8f;

// Clamps, and rounds |level| < 2^22 to an integer, ties to even, with instructions that every machine has.
OCTILE_INLINE float rounded_level(float level, float low, float high) {
  constexpr float kRounder = 0x1.8p23f;
  level = level < low ? low : level;
  level = level > high ? high : level;
  return (level + kRounder) - kRounder;
}

struct SegmentScale {
  float s = 0;
  std::int32_t z = 0;
};

// The min and max of a segment, 0 included.
struct Range {
  float low = 0;
  float high = 0;
};

Range range_of(const float* w, std::int64_t n);

// The scales that a description allows a segment.
class ScaleRule {
 public:
  explicit ScaleRule(const WeightQuantizerDescription& d);

  // Candidate `step`; the first has the largest scale.
  SegmentScale of(Range range, int step) const;
  int steps() const { return steps_; }
  // q - z lies between these.
  float low(std::int32_t z) const { return q_min_ - static_cast<float>(z); }
  float high(std::int32_t z) const { return q_max_ - static_cast<float>(z); }

 private:
  float span(Range range, int step) const;

  bool affine_;
  bool searches_;  // nearest, of few levels, and symmetric: of 4 scales the best
  DType scale_;
  float q_max_, q_min_;
  int steps_;
  double min_clip_;
};

// Lanes of the error sums on every machine: they decide near ties, and so the bits.
constexpr std::int64_t kErrorLanes = 16;

inline std::int64_t padded_length(std::int64_t n) { return (n + kErrorLanes - 1) / kErrorLanes * kErrorLanes; }

// Weights w, and the weights h of their errors. `n` is a multiple of 16; zeros pad.
struct WeightedRun {
  const float* w;
  const float* h;
  std::int64_t n;
};

// The scales to choose from; that of the whole range comes first.
std::vector<SegmentScale> candidates(const ScaleRule& rule, Range range);

// sum_k h_k * (W'[k] - W[k])^2 with each scale: in f32, term k in lane k % 16; the lanes are added in f64, l and l + 8
// first, then l and l + 4, and so on. Rounds by w * (1 / s), which differs from the contract's w / s only near ties.
void rounding_errors(const ScaleRule& rule, const std::vector<SegmentScale>& scales, const WeightedRun& run,
                     double* errors);

// The candidate of the smallest error, the first of equal ones. A single candidate is not measured.
SegmentScale best_scale(const ScaleRule& rule, const WeightedRun& run);

// q[i] = clamp(rint(w[i] / s) + z).
void round_weights(const ScaleRule& rule, SegmentScale scale, const float* w, std::int64_t n, std::int8_t* q);

}  // namespace octile
