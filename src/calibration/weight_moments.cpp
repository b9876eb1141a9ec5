#include "calibration/weight_moments.h"

#include <algorithm>
#include <cmath>

#include "base/float_rows.h"
#include "base/message.h"
#include "base/parallel.h"
#include "calibration/outer_sum.h"

namespace octile {

namespace {

constexpr std::int64_t kStrip = 128;  // rows multiplied by H together
constexpr double kAsymmetry = 1e-3;

double element(const ConstTensor& h, std::int64_t i, std::int64_t j) {
  const std::int64_t at = i * h.strides[0] + j;
  return h.dtype == DType::f64 ? static_cast<const double*>(h.data)[at]
                               : static_cast<double>(static_cast<const float*>(h.data)[at]);
}

}  // namespace

double moment_at(const ConstTensor& h, std::int64_t i, std::int64_t j) {
  return element(h, std::min(i, j), std::max(i, j));
}

ConstTensor check_moments(TensorChecks& checks, const ConstTensor& h, std::int64_t k) {
  const std::string_view function = checks.function();
  if (h.dtype != DType::f32 && h.dtype != DType::f64) {
    fail(Status::unsupported, function, ": second_moments is ", h, ", expected f32 or f64");
  }
  const ConstTensor plain = checks.matrix("second_moments", h, h.dtype, {k, k});
  std::vector<double> roots(static_cast<std::size_t>(k));
  for (std::int64_t j = 0; j < k; ++j) {
    const double value = element(plain, j, j);
    if (!(value >= 0) || !std::isfinite(value)) {
      fail(Status::invalid_argument, function, ": second_moments[", j, ", ", j, "] = ", value,
           ", expected finite and not negative");
    }
    roots[static_cast<std::size_t>(j)] = std::sqrt(value);
  }
  // In square tiles, since one side of the diagonal is read down its columns.
  constexpr std::int64_t kSquare = 64;
  for (std::int64_t top = 0; top < k; top += kSquare) {
    for (std::int64_t left = top; left < k; left += kSquare) {
      for (std::int64_t i = top; i < std::min(k, top + kSquare); ++i) {
        for (std::int64_t j = std::max(i + 1, left); j < std::min(k, left + kSquare); ++j) {
          const double upper = element(plain, i, j);
          const double lower = element(plain, j, i);
          const double bound = kAsymmetry * roots[static_cast<std::size_t>(i)] * roots[static_cast<std::size_t>(j)];
          if (std::abs(upper - lower) <= bound) continue;  // false for a NaN too
          fail(Status::invalid_argument, function, ": second_moments[", i, ", ", j, "] = ", upper, " and [", j, ", ", i,
               "] = ", lower, ", expected finite and symmetric");
        }
      }
    }
  }
  return plain;
}

MomentForm::MomentForm(const ConstTensor& h, const ConstTensor& importance, std::int64_t k, int threads)
    : k_(k), threads_(threads) {
  if (h.present()) {
    // Divided by its largest element, which may be beyond f32.
    double largest = 0;
    for (std::int64_t j = 0; j < k; ++j) largest = std::max(largest, element(h, j, j));
    unit_ = largest > 0 ? largest : 1;
    moments_.resize(static_cast<std::size_t>(k * k));
    for (std::int64_t i = 0; i < k; ++i) {
      for (std::int64_t j = i; j < k; ++j) {
        const auto value = static_cast<float>(element(h, i, j) / unit_);
        moments_[static_cast<std::size_t>(i * k + j)] = value;
        moments_[static_cast<std::size_t>(j * k + i)] = value;
      }
    }
    return;
  }
  importance_.assign(static_cast<std::size_t>(k), 1.0f);
  for (std::int64_t j = 0; j < k && importance.present(); ++j) {
    importance_[static_cast<std::size_t>(j)] = read_f32(importance, j);
  }
}

double MomentForm::sum_of_rows(std::int64_t rows, const std::function<void(std::int64_t, float*)>& fill) const {
  std::vector<double> forms(static_cast<std::size_t>(rows));
  parallel_parts(threads_, (rows + kStrip - 1) / kStrip, [&](std::int64_t part) {
    const std::int64_t first = part * kStrip;
    const std::int64_t count = std::min(kStrip, rows - first);
    std::vector<float> row(static_cast<std::size_t>(k_));
    std::vector<float> transposed(moments_.empty() ? 0 : static_cast<std::size_t>(k_ * kStrip));  // (k, kStrip)
    std::vector<float> products(transposed.size());                                               // H * transposed
    for (std::int64_t r = 0; r < count; ++r) {
      fill(first + r, row.data());
      double sum = 0;
      for (std::int64_t j = 0; j < k_; ++j) {
        const auto at = static_cast<std::size_t>(j);
        if (moments_.empty()) {
          sum += static_cast<double>(importance_[at]) * static_cast<double>(row[at]) * static_cast<double>(row[at]);
        } else {
          transposed[static_cast<std::size_t>(j * kStrip + r)] = row[at];
        }
      }
      forms[static_cast<std::size_t>(first + r)] = sum;
    }
    if (moments_.empty()) return;
    add_outer({moments_.data(), k_, transposed.data(), kStrip, products.data(), kStrip, k_, k_, count});
    for (std::int64_t j = 0; j < k_; ++j) {
      for (std::int64_t r = 0; r < count; ++r) {
        const auto at = static_cast<std::size_t>(j * kStrip + r);
        forms[static_cast<std::size_t>(first + r)] +=
            static_cast<double>(transposed[at]) * static_cast<double>(products[at]);
      }
    }
  });
  double sum = 0;
  for (const double form : forms) sum += form * unit_;
  return sum;
}

}  // namespace octile
