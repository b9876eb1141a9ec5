#include "calibration/weight_scales.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/float_rows.h"

namespace octile {

namespace {

constexpr float kMinHalf = 0x1p-24f;   // the smallest positive f16
constexpr float kRounder = 0x1.8p23f;  // as in rounded_level

struct ErrorSums {
  const ScaleRule* rule;
  const SegmentScale* scales;
  std::int64_t count;  // of scales
  const float* w;
  const float* h;
  std::int64_t n;
  double* errors;  // (count)
};

struct SumErrors {
  template <cpu::Isa isa>
  OCTILE_INLINE static void run(ErrorSums p) {
    for (std::int64_t i = 0; i < p.count; ++i) {
      const SegmentScale scale = p.scales[i];
      float sums[kErrorLanes];
      add_lanes<isa>(p, scale.s, {p.rule->low(scale.z), p.rule->high(scale.z)}, sums);
      double totals[kErrorLanes];
      for (std::int64_t l = 0; l < kErrorLanes; ++l) totals[l] = static_cast<double>(sums[l]);
      for (std::int64_t half = kErrorLanes / 2; half > 0; half /= 2) {
        for (std::int64_t l = 0; l < half; ++l) totals[l] += totals[l + half];
      }
      p.errors[i] = totals[0];
    }
  }

 private:
  template <cpu::Isa isa>
  OCTILE_INLINE static void add_lanes(const ErrorSums& p, float s, Range levels, float* out) {
    constexpr int kBytes = isa >= cpu::Isa::avx512 ? 64 : isa >= cpu::Isa::avx2 ? 32 : 16;
    constexpr int kParts = static_cast<int>(kErrorLanes * sizeof(float)) / kBytes;
    constexpr std::int64_t kLanes = kBytes / static_cast<std::int64_t>(sizeof(float));
    typedef float Vector __attribute__((vector_size(kBytes)));
    const Vector low = Vector{} + levels.low;
    const Vector high = Vector{} + levels.high;
    const float inverse = 1 / s;
    Vector sums[kParts] = {};
    for (std::int64_t i = 0; i < p.n; i += kErrorLanes) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Vector w, h;
        std::memcpy(&w, p.w + i + part * kLanes, sizeof w);
        std::memcpy(&h, p.h + i + part * kLanes, sizeof h);
        Vector level = w * inverse;
        level = level < low ? low : level;
        level = level > high ? high : level;
        level = (level + kRounder) - kRounder;
        const Vector error = level * s - w;
        sums[part] += error * error * h;
      }
    }
    std::memcpy(out, sums, sizeof sums);
  }
};

struct Round {
  template <cpu::Isa>
  OCTILE_INLINE static void run(const float* __restrict w, std::int64_t n, float s, float low, float high, float z,
                                std::int8_t* __restrict q) {
    for (std::int64_t i = 0; i < n; ++i) {
      q[i] = static_cast<std::int8_t>(rounded_level(w[i] / s, low, high) + z);
    }
  }
};

}  // namespace

Range range_of(const float* w, std::int64_t n) {
  Range range;
  for (std::int64_t i = 0; i < n; ++i) {
    range.low = std::min(range.low, w[i]);
    range.high = std::max(range.high, w[i]);
  }
  return range;
}

ScaleRule::ScaleRule(const WeightQuantizerDescription& d)
    : affine_(d.weight.zero_point),
      searches_(is_packed(d.weight.type) && d.method == WeightMethod::nearest && !d.weight.zero_point),
      scale_(d.scale),
      q_max_(static_cast<float>((1 << (bits(d.weight.type) - 1)) - 1)),
      q_min_(is_packed(d.weight.type) ? -q_max_ - 1 : -q_max_),
      steps_(searches_                           ? 4
             : d.method == WeightMethod::nearest ? 1
                                                 : d.clip_steps),
      min_clip_(d.min_clip) {}

float ScaleRule::span(Range range, int step) const {
  if (searches_) {
    const float largest = std::max(-range.low, range.high);
    switch (step) {
      case 0:
        return largest / q_max_;
      case 1:
        return std::max(-range.low / (q_max_ + 1), range.high / q_max_);
      case 2:
        return largest / (q_max_ + 0.5f);
      default:
        return largest / (q_max_ + 1);
    }
  }
  return affine_ ? (range.high - range.low) / (q_max_ - q_min_) : std::max(-range.low, range.high) / q_max_;
}

SegmentScale ScaleRule::of(Range range, int step) const {
  if (!searches_ && step > 0) {
    const auto c = static_cast<float>(1 - (1 - min_clip_) * step / (steps_ - 1));
    range = {range.low * c, range.high * c};
  }
  float s = rounded_to(scale_, std::max(span(range, step), kMinWeightScale));
  if (!(s > 0)) s = kMinHalf;
  if (!affine_) return {s, 0};
  const float z = std::clamp(q_min_ - std::nearbyint(range.low / s), q_min_, q_max_);
  return {s, static_cast<std::int32_t>(z)};
}

std::vector<SegmentScale> candidates(const ScaleRule& rule, Range range) {
  std::vector<SegmentScale> scales;
  for (int step = 0; step < rule.steps(); ++step) scales.push_back(rule.of(range, step));
  return scales;
}

void rounding_errors(const ScaleRule& rule, const std::vector<SegmentScale>& scales, const WeightedRun& run,
                     double* errors) {
  cpu::multiversion<SumErrors>(
      ErrorSums{&rule, scales.data(), static_cast<std::int64_t>(scales.size()), run.w, run.h, run.n, errors});
}

SegmentScale best_scale(const ScaleRule& rule, const WeightedRun& run) {
  const Range range = range_of(run.w, run.n);
  if (rule.steps() == 1) return rule.of(range, 0);
  const std::vector<SegmentScale> scales = candidates(rule, range);
  std::vector<double> errors(scales.size());
  rounding_errors(rule, scales, run, errors.data());
  return scales[static_cast<std::size_t>(std::min_element(errors.begin(), errors.end()) - errors.begin())];
}

void round_weights(const ScaleRule& rule, SegmentScale scale, const float* w, std::int64_t n, std::int8_t* q) {
  cpu::multiversion<Round>(w, n, scale.s, rule.low(scale.z), rule.high(scale.z), static_cast<float>(scale.z), q);
}

}  // namespace octile
