// Statistics of a weight, and the difference between two.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace octile::checkpoint {

struct WeightStatistics {
  float min = 0;
  float max = 0;
  double rms = 0;
  std::int64_t not_finite = 0;
  double median_channel_max = 0;       // of max |W_j| over the input channels j
  std::vector<std::int64_t> outliers;  // input channels whose max |W_j| exceeds `times` that median, worst first
};

// values (n, k).
WeightStatistics measure(std::span<const float> values, std::int64_t n, std::int64_t k, double times);

struct Difference {
  double signal = 0;  // sum of (a / unit)^2
  double noise = 0;   // sum of ((a - b) / unit)^2
  double unit = 1;    // a power of two; not 1 only where squares would leave f64
  double max_error = 0;
  bool operator==(const Difference&) const = default;

  void add(std::span<const float> a, std::span<const float> b);
  void add(std::span<const double> a, std::span<const double> b);
  bool is_exact() const { return max_error == 0; }
  // 10 log10(signal / noise); infinite for equal values, NaN where a value is not finite.
  double sqnr() const;

 private:
  template <class Real>
  void add_values(std::span<const Real> a, std::span<const Real> b);
};

// The number of runs of `length` values (those that share a scale) that are all zero in b but not in a.
std::int64_t count_vanished(std::span<const double> a, std::span<const double> b, std::int64_t length);

}  // namespace octile::checkpoint
