// search_smoothing: tries every alpha of a grid on the weight, with calibration rows or their second moments.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "base/access.h"
#include "base/float_environment.h"
#include "base/float_rows.h"
#include "base/message.h"
#include "base/parallel.h"
#include "base/validate.h"
#include "calibration/input_excess.h"
#include "calibration/outer_sum.h"
#include "calibration/weight_moments.h"
#include "calibration/weight_scales.h"
#include "cpu/support/isa.h"
#include "octile/linear.h"
#include "octile/smooth_quant.h"
#include "octile/weight_quantizer.h"

namespace octile {

namespace {

constexpr std::string_view kFunction = "search_smoothing";
// An alpha must lower the unsmoothed error to this share. The estimates are off by more than 0.2 dB.
constexpr double kWorthwhile = 0.95;

void check(const SmoothingSearchDescription& d) {
  check_size(kFunction, "n", d.n);
  check_size(kFunction, "k", d.k);
  check_bytes(kFunction, "W", d.n, d.k);
  check_choice(kFunction, "x", d.x, kLastDType);
  check_choice(kFunction, "w", d.w, kLastDType);
  check_choice(kFunction, "activation", d.activation, Activation::static_per_tensor);
  check_weight_format(kFunction, d.weight, d.k);
  check_threads(kFunction, d.threads);
  if (d.weight.zero_point) {
    fail(Status::unsupported, kFunction, ": weight_zero_point: the search quantizes without zero points");
  }
  if (!is_float(d.x)) fail(Status::unsupported, kFunction, ": x = ", d.x, ", expected f16, bf16, f32 or f64");
  if (!is_float(d.w)) fail(Status::unsupported, kFunction, ": w = ", d.w, ", expected f16, bf16, f32 or f64");
  if (d.activation == Activation::none) {
    fail(Status::unsupported, kFunction, ": activation = none: without quantized inputs there is nothing to smooth");
  }
  const auto alpha = [](double a) { return a >= 0 && a <= 1; };
  if (!alpha(d.first_alpha) || !alpha(d.last_alpha)) {
    fail(Status::invalid_argument, kFunction, ": first_alpha = ", d.first_alpha, ", last_alpha = ", d.last_alpha,
         ", expected 0 to 1");
  }
  if (d.calibration_rows < 0) {
    fail(Status::invalid_argument, kFunction, ": calibration_rows = ", d.calibration_rows, ", expected at least 0");
  }
  if (d.steps < 1 || d.steps > 1001) {
    fail(Status::invalid_argument, kFunction, ": steps = ", d.steps, ", expected 1 to 1001");
  }
}

InputExcess checked_excess(const ConstTensor& t) {
  const InputExcess excess = {static_cast<double>(read_f32(t, 0)), static_cast<double>(read_f32(t, 1))};
  const bool is_none = excess.probability == 0 && excess.square == 0;
  const bool is_some = excess.probability > 0 && excess.probability <= 1 && excess.square >= 0;
  if ((is_none || is_some) && std::isfinite(excess.square)) return excess;
  fail(Status::invalid_argument, kFunction, ": input_excess = (", excess.probability, ", ", excess.square,
       "), expected a probability and a mean square, both 0 or both finite and positive");
}

double alpha_of(const SmoothingSearchDescription& d, int step) {
  return d.steps == 1 ? d.first_alpha : d.first_alpha + (d.last_alpha - d.first_alpha) * step / (d.steps - 1);
}

// `to` (cols, rows) becomes the transpose of `from` (rows, cols).
void transpose(const std::vector<float>& from, std::int64_t rows, std::int64_t cols, std::vector<float>& to) {
  constexpr std::int64_t kSquare = 32;
  to.resize(from.size());
  for (std::int64_t top = 0; top < rows; top += kSquare) {
    for (std::int64_t c = 0; c < cols; ++c) {
      for (std::int64_t r = top; r < std::min(rows, top + kSquare); ++r) {
        to[static_cast<std::size_t>(c * rows + r)] = from[static_cast<std::size_t>(r * cols + c)];
      }
    }
  }
}

// The weight times s, rounded to its own type and quantized to nearest.
struct SmoothedWeight {
  std::vector<float> factors, multiplier;  // (k)
  float smoothed_max = 0;
  std::vector<float> values;  // (n, k): W * s
  bool finite = true;         // f16 may be too narrow
  std::vector<std::uint8_t> q;
  std::vector<float> scale;
};

class Search {
 public:
  Search(const SmoothingSearchDescription& d, const SmoothingSearchArgs& args) : d_(d) {
    cpu::check_requested_isa(kFunction);
    check(d);
    TensorChecks checks(kFunction, {});
    weight_ = checks.matrix("weight", args.weight, d.w, {d.n, d.k});
    input_max_ = checks.vector("input_channel_max", args.input_channel_max, DType::f32, d.k);
    if (args.x.present() == args.second_moments.present()) {
      fail(Status::invalid_argument, kFunction, ": x is ", args.x, ", second_moments is ", args.second_moments,
           ", expected one of them");
    }
    if (args.x.present()) {
      check_size(kFunction, "the rows of x", args.x.shape[0]);
      x_ = checks.matrix("x", args.x, d.x, {args.x.shape[0], d.k});
      if (d.k > kMaxContraction) {
        fail(Status::unsupported, kFunction, ": k = ", d.k, ", expected at most ", kMaxContraction);
      }
    } else {
      moments_ = check_moments(checks, args.second_moments, d.k);
      if (args.rows < 1) fail(Status::invalid_argument, kFunction, ": rows = ", args.rows, ", expected at least 1");
      if (d.activation == Activation::dynamic_per_token) {
        fail(Status::unsupported, kFunction,
             ": activation = dynamic_per_token with second_moments, which do not tell the scale of a row: expected x");
      }
      moment_rows_ = args.rows;
    }
    if (args.input_excess.present()) {
      excess_ = checked_excess(checks.vector("input_excess", args.input_excess, DType::f32, 2));
    } else if (d.calibration_rows > 0) {
      excess_ = modelled_excess(d.calibration_rows);
    }
    if (args.errors.present()) checks.vector("errors", args.errors, DType::f64, d.steps);
    checks.no_overlap();
    check_positive(kFunction, "input_channel_max", input_max_, true);
    read();
  }

  SmoothingSearchResult run(const Tensor& errors, const std::function<void()>& on_step) {
    SmoothingSearchResult result;
    std::vector<double> all;
    for (int step = 0; step < d_.steps; ++step) {
      if (on_step) on_step();
      all.push_back(error_when_smoothed(smoothed(alpha_of(d_, step))));
      if (step > 0 && !(all.back() < result.error)) continue;
      result.error = all.back();
      result.alpha = alpha_of(d_, step);
    }
    result.unsmoothed_error = error(unsmoothed());
    result.smooth = result.error < kWorthwhile * result.unsmoothed_error;
    if (!std::isfinite(result.error) || !std::isfinite(result.unsmoothed_error)) {
      fail(Status::invalid_argument, kFunction, ": the errors are ", result.error, " and, unsmoothed, ",
           result.unsmoothed_error, ": weights or inputs are too large for ", d_.w, " or for sums in f32");
    }
    for (int step = 0; step < d_.steps && errors.present(); ++step) {
      static_cast<double*>(errors.data)[step * errors.strides[0]] = all[static_cast<std::size_t>(step)];
    }
    return result;
  }

 private:
  // Every value of a matrix that was read to (rows, k).
  void check_finite(std::string_view name, const std::vector<float>& values) const {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) continue;
      const auto k = static_cast<std::size_t>(d_.k);
      fail(Status::invalid_argument, kFunction, ": ", name, "[", i / k, ", ", i % k, "] = ", values[i],
           ", expected finite in f32");
    }
  }

  // Reads the weight with its maxima, and computes the layer's output from the rows or their second moments.
  void read() {
    const auto cells = static_cast<std::size_t>(d_.n * d_.k);
    values_.resize(cells);
    Calibrator maxima({.features = d_.k});
    for (std::int64_t r = 0; r < d_.n; ++r) read_row(weight_, r, values_.data() + r * d_.k);
    check_finite("weight", values_);
    if (d_.n > 0) maxima.observe(matrix<const float>(values_.data(), d_.n, d_.k));
    weight_max_ = maxima.channel_max();
    weight_norms_.resize(static_cast<std::size_t>(d_.k));
    for (std::size_t i = 0; i < cells; ++i) {
      const auto value = static_cast<double>(values_[i]);
      weight_norms_[i % weight_norms_.size()] += value * value;
    }
    if (!moments_.present()) return read_rows();
    form_.emplace(moments_, ConstTensor{}, d_.k, d_.threads);
    const auto row = [&](std::int64_t r, float* out) { std::copy_n(values_.data() + r * d_.k, d_.k, out); };
    signal_ = form_->sum_of_rows(d_.n, row);
  }

  void read_rows() {
    const std::int64_t m = x_.rows();
    rows_.resize(static_cast<std::size_t>(m * d_.k));
    for (std::int64_t r = 0; r < m; ++r) read_row(x_, r, rows_.data() + r * d_.k);
    check_finite("x", rows_);
    std::vector<float> left, right;  // (k, m), (k, n)
    transpose(rows_, m, d_.k, left);
    transpose(values_, d_.n, d_.k, right);
    y_.resize(static_cast<std::size_t>(m * d_.n));
    constexpr std::int64_t kRows = 64;
    parallel_parts(d_.threads, (m + kRows - 1) / kRows, [&](std::int64_t part) {
      const std::int64_t first = part * kRows;
      add_outer({left.data() + first, m, right.data(), d_.n, y_.data() + first * d_.n, d_.n, d_.k,
                 std::min(kRows, m - first), d_.n});
    });
    for (const float y : y_) signal_ += static_cast<double>(y) * static_cast<double>(y);
  }

  SmoothedWeight smoothed(double alpha) const {
    SmoothedWeight w;
    w.factors.resize(static_cast<std::size_t>(d_.k));
    w.multiplier.resize(w.factors.size());
    w.smoothed_max = smoothing_factors({.alpha = alpha,
                                        .input_channel_max = input_max_,
                                        .weight_channel_max = vector<const float>(weight_max_.data(), d_.k),
                                        .factors = vector(w.factors.data(), d_.k),
                                        .multiplier = vector(w.multiplier.data(), d_.k)});
    quantize(w);
    return w;
  }

  SmoothedWeight unsmoothed() const {
    SmoothedWeight w;
    w.factors.assign(static_cast<std::size_t>(d_.k), 1.0f);
    w.multiplier = w.factors;
    for (std::int64_t j = 0; j < d_.k; ++j) w.smoothed_max = std::max(w.smoothed_max, read_f32(input_max_, j));
    quantize(w);
    return w;
  }

  WeightQuantizerDescription quantizer() const {
    WeightQuantizerDescription q;
    q.n = d_.n;
    q.k = d_.k;
    q.weight = d_.weight;
    q.threads = d_.threads;
    return q;
  }

  std::int64_t segment() const { return std::max<std::int64_t>(segment_length(d_.weight, d_.k), 1); }
  std::int64_t segments() const { return d_.k / segment(); }

  Tensor q_of(SmoothedWeight& w) const { return matrix_of<void>(d_.weight.type, w.q.data(), d_.n, d_.k); }
  Tensor scale_of(SmoothedWeight& w) const {
    if (d_.weight.granularity == Granularity::group) return matrix(w.scale.data(), d_.n, segments());
    return vector(w.scale.data(), d_.weight.granularity == Granularity::row ? d_.n : 1);
  }

  void quantize(SmoothedWeight& w) const {
    w.values.resize(values_.size());
    parallel_parts(d_.threads, d_.n, [&](std::int64_t r) {
      for (std::int64_t j = 0; j < d_.k; ++j) {
        const auto at = static_cast<std::size_t>(r * d_.k + j);
        w.values[at] = rounded_to(d_.w, values_[at] * w.factors[static_cast<std::size_t>(j)]);
      }
    });
    w.finite = std::all_of(w.values.begin(), w.values.end(), [](float value) { return std::isfinite(value); });
    if (!w.finite) return;
    w.q.resize(static_cast<std::size_t>(d_.n * ((d_.k * bits(d_.weight.type) + 7) / 8)));
    w.scale.resize(static_cast<std::size_t>(d_.n * std::max<std::int64_t>(segments(), 1) + 1));
    quantize_weight(quantizer(),
                    {.weight = matrix<const float>(w.values.data(), d_.n, d_.k), .q = q_of(w), .scale = scale_of(w)});
  }

  double error_when_smoothed(SmoothedWeight w) const {
    const double rows = static_cast<double>(moments_.present() ? moment_rows_ : x_.rows());
    const double clipped = signal_ > 0 ? rows * expected_clipping_of(w) / signal_ : 0;
    return error(std::move(w)) + clipped;
  }

  // Of one unseen row.
  double expected_clipping_of(const SmoothedWeight& w) const {
    if (d_.activation != Activation::static_per_tensor) return 0;
    double sum = 0;
    for (std::size_t j = 0; j < weight_norms_.size(); ++j) {
      const double max = static_cast<double>(read_f32(input_max_, static_cast<std::int64_t>(j)));
      const double limit = static_cast<double>(w.smoothed_max) * static_cast<double>(w.factors[j]);
      sum += weight_norms_[j] * expected_clipping(excess_, max, limit);
    }
    return sum;
  }

  double error(SmoothedWeight w) const {
    if (!w.finite) return std::numeric_limits<double>::infinity();
    const double noise = moments_.present() ? error_of_moments(w) : error_of_rows(w);
    return signal_ > 0 ? noise / signal_ : 0;
  }

  double error_of_rows(SmoothedWeight& w) const {
    const std::int64_t m = x_.rows();
    const auto plan = LinearPlan::select({.m = m,
                                          .n = d_.n,
                                          .k = d_.k,
                                          .activation = d_.activation,
                                          .static_scale = std::max(w.smoothed_max / 127, kMinWeightScale),
                                          .weight = d_.weight,
                                          .x_multiplier = true,
                                          .threads = d_.threads});
    std::vector<float> y(y_.size());
    std::vector<std::byte> scratch(plan.workspace_size());
    plan.run({.x = matrix<const float>(rows_.data(), m, d_.k),
              .x_multiplier = vector<const float>(w.multiplier.data(), d_.k),
              .weight = q_of(w),
              .weight_scale = scale_of(w),
              .y = matrix(y.data(), m, d_.n)},
             {scratch.data(), scratch.size()});
    double noise = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double e = static_cast<double>(y[i]) - static_cast<double>(y_[i]);
      noise += e * e;
    }
    return noise;
  }

  double error_of_moments(SmoothedWeight& w) const {
    // Dequantized in place; then E = W' / s - W.
    double squares = 0;
    std::vector<double> row_squares(static_cast<std::size_t>(d_.n));
    const ConstTensor q = q_of(w);
    parallel_parts(d_.threads, d_.n, [&](std::int64_t r) {
      for (std::int64_t j = 0; j < d_.k; ++j) {
        const bool whole = d_.weight.granularity == Granularity::tensor;
        const std::int64_t at = whole ? 0 : r * segments() + j / segment();
        const float value = static_cast<float>(load_integer(q, r, j)) * w.scale[static_cast<std::size_t>(at)];
        row_squares[static_cast<std::size_t>(r)] += static_cast<double>(value) * static_cast<double>(value);
        w.values[static_cast<std::size_t>(r * d_.k + j)] = value;
      }
    });
    for (const double row : row_squares) squares += row;
    const auto error_row = [&](std::int64_t r, float* out) {
      for (std::int64_t j = 0; j < d_.k; ++j) {
        const auto at = static_cast<std::size_t>(r * d_.k + j);
        out[j] = w.values[at] / w.factors[static_cast<std::size_t>(j)] - values_[at];
      }
    };
    const double noise = form_->sum_of_rows(d_.n, error_row);
    const double step = static_cast<double>(std::max(w.smoothed_max / 127, kMinWeightScale));
    return noise + static_cast<double>(moment_rows_) * step * step / 12 * squares;
  }

  const SmoothingSearchDescription d_;
  ConstTensor weight_, input_max_, x_, moments_;
  std::int64_t moment_rows_ = 0;
  std::vector<float> values_;         // (n, k): W
  std::vector<float> weight_max_;     // (k)
  std::vector<double> weight_norms_;  // (k): ||W_j||^2
  InputExcess excess_;
  std::vector<float> rows_, y_;  // (m, k), (m, n): X and Y
  std::optional<MomentForm> form_;
  double signal_ = 0;  // ||Y||^2
};

}  // namespace

SmoothingSearchResult search_smoothing(const SmoothingSearchDescription& description, const SmoothingSearchArgs& args) {
  const cpu::FloatEnvironment environment;
  return Search(description, args).run(args.errors, args.on_step);
}

}  // namespace octile
