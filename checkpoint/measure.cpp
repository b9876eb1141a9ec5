#include "octile/checkpoint/measure.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octile::checkpoint {

WeightStatistics measure(std::span<const float> values, std::int64_t n, std::int64_t k, double times) {
  WeightStatistics result;
  if (n == 0 || k == 0) return result;
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
      result.min = first ? value : std::min(result.min, value);
      result.max = first ? value : std::max(result.max, value);
      first = false;
      squares += static_cast<double>(value) * value;
      float& max = channel_max[static_cast<std::size_t>(j)];
      max = std::max(max, std::fabs(value));
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

template <class Real>
void Difference::add_values(std::span<const Real> a, std::span<const Real> b) {
  double largest = 0;
  for (const auto& values : {a, b}) {
    for (const Real value : values) largest = std::max(largest, std::isfinite(value) ? std::fabs(double{value}) : 0);
  }
  // Squares of 2^-400 to 2^400, and their sums, are normal numbers.
  const bool is_first = signal == 0 && noise == 0;
  if (largest > 0 && (is_first || largest > unit)) {
    const double wanted = largest > 0x1p-400 && largest < 0x1p400 ? 1 : std::ldexp(1.0, std::ilogb(largest));
    if (!is_first && wanted > unit) {
      signal *= unit / wanted * (unit / wanted);
      noise *= unit / wanted * (unit / wanted);
    }
    if (is_first || wanted > unit) unit = wanted;
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double value = a[i];
    const double error = value - b[i];
    signal += value / unit * (value / unit);
    noise += error / unit * (error / unit);
    if (!std::isnan(max_error) && !(std::fabs(error) <= max_error)) max_error = std::fabs(error);  // a NaN stays NaN
  }
}

void Difference::add(std::span<const float> a, std::span<const float> b) { add_values(a, b); }
void Difference::add(std::span<const double> a, std::span<const double> b) { add_values(a, b); }

std::int64_t count_vanished(std::span<const double> a, std::span<const double> b, std::int64_t length) {
  std::int64_t vanished = 0;
  const auto run = static_cast<std::size_t>(length);
  const auto is_zero = [](double value) { return value == 0; };
  for (std::size_t i = 0; i < a.size(); i += run) {
    const auto from = a.subspan(i, std::min(run, a.size() - i)), to = b.subspan(i, from.size());
    vanished += std::all_of(to.begin(), to.end(), is_zero) && !std::all_of(from.begin(), from.end(), is_zero);
  }
  return vanished;
}

double Difference::sqnr() const {
  if (is_exact()) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(signal / noise);
}

}  // namespace octile::checkpoint
