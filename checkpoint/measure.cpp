#include "octile/checkpoint/measure.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octile::checkpoint {

WeightStatistics measure(std::span<const float> values, std::int64_t n, std::int64_t k, double times) {
  WeightStatistics result;
  if (n == 0 || k == 0) return result;  // whatever the other one is
  std::vector<float> channel_max(static_cast<std::size_t>(k));
  double squares = 0;
  bool first = true;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      const float value = values[static_cast<std::size_t>(i * k + j)];
      if (!std::isfinite(value)) {
        ++result.not_finite;
        continue;
      }
      result.least = first ? value : std::min(result.least, value);
      result.most = first ? value : std::max(result.most, value);
      first = false;
      squares += static_cast<double>(value) * value;
      float& most = channel_max[static_cast<std::size_t>(j)];
      most = std::max(most, std::fabs(value));
    }
  }
  result.rms = std::sqrt(squares / static_cast<double>(n * k));
  std::vector<float> sorted = channel_max;
  const auto middle = sorted.begin() + k / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  result.median_channel_max = *middle;
  for (std::int64_t j = 0; j < k; ++j) {
    if (channel_max[static_cast<std::size_t>(j)] > times * result.median_channel_max) result.outliers.push_back(j);
  }
  std::stable_sort(result.outliers.begin(), result.outliers.end(), [&](std::int64_t a, std::int64_t b) {
    return channel_max[static_cast<std::size_t>(a)] > channel_max[static_cast<std::size_t>(b)];
  });
  return result;
}

void Difference::add(std::span<const float> a, std::span<const float> b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double value = a[i];
    const double error = value - b[i];
    signal += value * value;
    noise += error * error;
    if (!std::isnan(max_error) && !(std::fabs(error) <= max_error)) max_error = std::fabs(error);  // a NaN stays one
  }
}

double Difference::sqnr() const {
  if (noise == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(signal / noise);
}

}  // namespace octile::checkpoint
