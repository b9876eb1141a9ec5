// What a weight's values are like, and how far two of them are apart.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace octile::checkpoint {

struct WeightStatistics {
  float least = 0;
  float most = 0;
  double rms = 0;
  std::int64_t not_finite = 0;
  double median_channel_max = 0;       // of max |W_j| over the input channels j
  std::vector<std::int64_t> outliers;  // input channels whose max |W_j| is more than `times` that median, worst first
};

// values (n, k).
WeightStatistics measure(std::span<const float> values, std::int64_t n, std::int64_t k, double times);

struct Difference {
  double signal = 0;  // sum of a^2
  double noise = 0;   // sum of (a - b)^2
  double max_error = 0;
  bool operator==(const Difference&) const = default;

  void add(std::span<const float> a, std::span<const float> b);
  // 10 log10(signal / noise); infinite for equal values, NaN where a value is not finite.
  double sqnr() const;
};

}  // namespace octile::checkpoint
