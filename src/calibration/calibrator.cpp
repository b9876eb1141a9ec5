// Calibrator: maxima as the bits of magnitudes, which order like the values as integers, infinity and NaN last; H's
// upper triangle as sums of exact products; the excess of unseen rows, from how far each row exceeded earlier maxima.
#include <algorithm>
#include <bit>
#include <limits>

#include "base/float_environment.h"
#include "base/float_rows.h"
#include "base/message.h"
#include "base/thread_pool.h"
#include "base/validate.h"
#include "calibration/input_excess.h"
#include "calibration/outer_sum.h"
#include "cpu/support/isa.h"
#include "octile/smooth_quant.h"

namespace octile {

namespace {

constexpr std::int64_t kRows = 128;  // widened to f64 at a time
constexpr std::int64_t kTile = 64;   // rows of H per task
// The rows of a block are compared with the maxima of all earlier blocks. Rows of one text resemble each other:
// compared with the previous row, they would exceed the maxima less often than rows of another text do.
constexpr std::int64_t kBlock = 128;

constexpr std::uint32_t kInfinity = 0x7f800000u;

std::uint32_t magnitude_of(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu; }

float value_of(std::uint32_t magnitude) {
  return magnitude < kInfinity ? std::bit_cast<float>(magnitude) : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

struct __attribute__((visibility("hidden"))) Calibrator::Impl {
  CalibratorDescription description;
  std::int64_t rows = 0;
  std::vector<std::uint32_t> magnitudes;  // (features)
  std::vector<double> moments;            // (features, features), the upper triangle; or empty

  // How far rows exceeded the maxima of earlier blocks. The probability falls as 1 / rows, so each row's excess times
  // the number of rows before it estimates the same value.
  std::vector<std::uint32_t> earlier;  // magnitudes at the start of the block
  std::int64_t earlier_rows = 0;
  std::int64_t block_rows = 0;
  std::vector<double> excess;  // (features): sum over compared rows of earlier_rows * (|x| - earlier)^2
  double exceeding = 0;        // sum of earlier_rows over the values that exceed
  std::int64_t compared = 0;   // rows

  void begin_block() {
    earlier = magnitudes;
    earlier_rows = rows;
    block_rows = 0;
  }

  void observe_maxima(const float* row) {
    if (block_rows == kBlock) begin_block();
    bool exceeds = false;
    for (std::size_t j = 0; j < magnitudes.size(); ++j) {
      const std::uint32_t magnitude = magnitude_of(row[j]);
      exceeds |= magnitude > earlier[j];
      magnitudes[j] = std::max(magnitudes[j], magnitude);
    }
    ++block_rows;
    ++rows;
    if (earlier_rows == 0) return;
    ++compared;
    if (exceeds) add_excess(row);
  }

  void add_excess(const float* row) {
    const auto weight = static_cast<double>(earlier_rows);
    for (std::size_t j = 0; j < magnitudes.size(); ++j) {
      const std::uint32_t magnitude = magnitude_of(row[j]);
      if (magnitude <= earlier[j]) continue;
      const double by = static_cast<double>(value_of(magnitude)) - static_cast<double>(value_of(earlier[j]));
      excess[j] += weight * (by * by);
      exceeding += weight;
    }
  }

  InputExcess expected_excess() const {
    if (rows == 0 || magnitudes.empty()) return {};
    if (compared == 0) return modelled_excess(rows);
    double squares = 0;
    for (std::size_t j = 0; j < magnitudes.size(); ++j) {
      const auto max = static_cast<double>(value_of(magnitudes[j]));
      if (excess[j] != 0) squares += excess[j] / (max * max);
    }
    const double all = static_cast<double>(magnitudes.size()) * static_cast<double>(compared);
    const auto count = static_cast<double>(rows);
    return {exceeding / all / count, squares / all / count};
  }

  // x (count, features).
  void add_moments(const double* x, std::int64_t count) {
    const std::int64_t k = description.features;
    cpu::parallel_for(description.threads, (k + kTile - 1) / kTile, [&](std::int64_t part) {
      const std::int64_t first = part * kTile;
      add_outer({x + first, k, x + first, k, moments.data() + first * k + first, k, count, std::min(kTile, k - first),
                 k - first});
    });
  }
};

Calibrator::Calibrator(const CalibratorDescription& description) : impl_(std::make_shared<Impl>()) {
  constexpr std::string_view kFunction = "Calibrator";
  cpu::check_requested_isa(kFunction);
  check_size(kFunction, "features", description.features);
  check_bytes(kFunction, "H", description.features, description.second_moments ? description.features : 1);
  check_threads(kFunction, description.threads);
  const auto features = static_cast<std::size_t>(description.features);
  impl_->description = description;
  impl_->magnitudes.resize(features);
  impl_->earlier.resize(features);
  impl_->excess.resize(features);
  if (description.second_moments) impl_->moments.resize(features * features);
}

void Calibrator::observe(const ConstTensor& x) {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "Calibrator::observe";
  const std::int64_t k = impl_->description.features;
  if (!is_float(x.dtype)) {
    fail(Status::unsupported, kFunction, ": x is ", x, ", expected f16, bf16, f32 or f64");
  }
  check_size(kFunction, "the rows of x", x.shape[0]);
  TensorChecks checks(kFunction, {});
  const ConstTensor plain = checks.matrix("x", x, x.dtype, {x.shape[0], k});
  std::vector<float> row(static_cast<std::size_t>(k));
  std::vector<double> block(impl_->moments.empty() ? 0 : static_cast<std::size_t>(kRows * k));
  for (std::int64_t r = 0; r < plain.rows(); ++r) {
    read_row(plain, r, row.data());
    impl_->observe_maxima(row.data());
    if (block.empty()) continue;
    // An infinity becomes a NaN, so that no product is an infinity that a later step could mistake for a value.
    double* wide = block.data() + r % kRows * k;
    for (std::int64_t j = 0; j < k; ++j) {
      const double value = row[static_cast<std::size_t>(j)];
      wide[j] = value + (value - value);
    }
    if (r % kRows == kRows - 1 || r == plain.rows() - 1) impl_->add_moments(block.data(), r % kRows + 1);
  }
}

void Calibrator::merge(const Calibrator& other) {
  const cpu::FloatEnvironment environment;
  const CalibratorDescription& a = impl_->description;
  const CalibratorDescription& b = other.impl_->description;
  if (a.features != b.features || a.second_moments != b.second_moments) {
    fail(Status::shape_mismatch, "Calibrator::merge: features = ", b.features, ", second_moments = ", b.second_moments,
         " to be added to features = ", a.features, ", second_moments = ", a.second_moments);
  }
  const Impl& from = *other.impl_;
  for (std::size_t j = 0; j < from.magnitudes.size(); ++j) {
    impl_->magnitudes[j] = std::max(impl_->magnitudes[j], from.magnitudes[j]);
  }
  for (std::size_t i = 0; i < from.moments.size(); ++i) impl_->moments[i] += from.moments[i];
  for (std::size_t j = 0; j < from.excess.size(); ++j) impl_->excess[j] += from.excess[j];
  impl_->exceeding += from.exceeding;
  impl_->compared += from.compared;
  impl_->rows += from.rows;
  impl_->begin_block();
}

std::int64_t Calibrator::features() const { return impl_->description.features; }

std::int64_t Calibrator::rows() const { return impl_->rows; }

float Calibrator::max() const {
  const std::vector<std::uint32_t>& all = impl_->magnitudes;
  return all.empty() ? 0.0f : value_of(*std::max_element(all.begin(), all.end()));
}

std::vector<float> Calibrator::channel_max() const {
  std::vector<float> values(impl_->magnitudes.size());
  std::transform(impl_->magnitudes.begin(), impl_->magnitudes.end(), values.begin(), value_of);
  return values;
}

void Calibrator::channel_max(const Tensor& out) const {
  TensorChecks checks("Calibrator::channel_max", {});
  checks.vector("out", out, DType::f32, features());
  const std::vector<float> values = channel_max();
  for (std::int64_t j = 0; j < features(); ++j) {
    write_f32(out, j, values[static_cast<std::size_t>(j)]);
  }
}

void Calibrator::excess(const Tensor& out) const {
  const cpu::FloatEnvironment environment;
  TensorChecks checks("Calibrator::excess", {});
  checks.vector("out", out, DType::f32, 2);
  const InputExcess expected = impl_->expected_excess();
  write_f32(out, 0, static_cast<float>(expected.probability));
  write_f32(out, 1, static_cast<float>(expected.square));
}

void Calibrator::second_moments(const Tensor& h) const {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "Calibrator::second_moments";
  const std::int64_t k = features();
  if (!impl_->description.second_moments) {
    fail(Status::unsupported, kFunction, ": the calibrator was made with second_moments = false");
  }
  if (h.dtype != DType::f32 && h.dtype != DType::f64) {
    fail(Status::unsupported, kFunction, ": h is ", h, ", expected f32 or f64");
  }
  TensorChecks checks(kFunction, {});
  const Tensor out = checks.matrix("h", h, h.dtype, {k, k});
  for (std::int64_t i = 0; i < k; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      const double value = impl_->moments[static_cast<std::size_t>(std::min(i, j) * k + std::max(i, j))];
      const std::int64_t at = i * out.strides[0] + j;
      if (h.dtype == DType::f64) {
        static_cast<double*>(out.data)[at] = value;
      } else {
        static_cast<float*>(out.data)[at] = static_cast<float>(value);
      }
    }
  }
}

}  // namespace octile
