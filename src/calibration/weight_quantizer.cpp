// quantize_weight and weight_error: check everything, then round strips of rows in parallel. All errors are thrown
// before the first value is written.
#include "octile/weight_quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/access.h"
#include "base/float_environment.h"
#include "base/float_rows.h"
#include "base/message.h"
#include "base/parallel.h"
#include "base/pick.h"
#include "base/validate.h"
#include "calibration/weight_moments.h"
#include "calibration/weight_problem.h"
#include "cpu/support/isa.h"

namespace octile {

namespace {

void check(std::string_view function, const WeightQuantizerDescription& d) {
  check_size(function, "n", d.n);
  check_size(function, "k", d.k);
  check_bytes(function, "W", d.n, d.k);
  check_choice(function, "w", d.w, kLastDType);
  check_weight_format(function, d.weight, d.k);
  check_choice(function, "scale", d.scale, kLastDType);
  check_choice(function, "method", d.method, WeightMethod::error_feedback);
  check_choice(function, "order", d.order, ColumnOrder::by_moment);
  if (!is_float(d.w)) fail(Status::unsupported, function, ": w = ", d.w, ", expected f16, bf16, f32 or f64");
  if (d.scale != DType::f32 && d.scale != DType::f16 && d.scale != DType::bf16) {
    fail(Status::unsupported, function, ": scale = ", d.scale, ", expected f16, bf16 or f32");
  }
  if (!(d.damping >= 0 && d.damping <= 1)) {
    fail(Status::invalid_argument, function, ": damping = ", d.damping, ", expected 0 to 1");
  }
  if (!(d.min_clip > 0 && d.min_clip <= 1)) {
    fail(Status::invalid_argument, function, ": min_clip = ", d.min_clip, ", expected above 0, at most 1");
  }
  if (d.clip_steps < 1 || d.clip_steps > 1001) {
    fail(Status::invalid_argument, function, ": clip_steps = ", d.clip_steps, ", expected 1 to 1001");
  }
  check_threads(function, d.threads);
}

// The integers and their scales: outputs of quantize_weight, inputs of weight_error.
template <class Void>
struct Quantized {
  BasicTensor<Void> q, scale, zero_point;
};

template <class Void>
void bind_quantized(TensorChecks& checks, WeightProblem& p, Quantized<Void>& t) {
  const WeightQuantizerDescription& d = p.description;
  const bool grouped = d.weight.granularity == Granularity::group;
  p.segment = segment_length(d.weight, d.k);
  p.segments = !grouped ? 1 : d.k > 0 ? d.k / p.segment : 0;
  t.q = checks.matrix("q", t.q, d.weight.type, {d.n, d.k});
  if (grouped) {
    t.scale = checks.matrix("scale", t.scale, DType::f32, {d.n, p.segments});
  } else {
    t.scale = checks.vector("scale", t.scale, DType::f32, d.weight.granularity == Granularity::row ? d.n : 1);
  }
  t.zero_point = checks.matrix("zero_point", t.zero_point, DType::s32, {d.n, p.segments}, d.weight.zero_point);
}

void bind_statistics(TensorChecks& checks, WeightProblem& p, const ConstTensor& moments,
                     const ConstTensor& importance) {
  if (moments.present() && importance.present()) {
    fail(Status::invalid_argument, p.function, ": second_moments and importance, expected one of them");
  }
  if (moments.present()) p.second_moments = check_moments(checks, moments, p.description.k);
  if (importance.present()) {
    p.importance = checks.vector("importance", importance, DType::f32, p.description.k);
    check_positive(p.function, "importance", importance, true);
  }
}

WeightProblem bind(std::string_view function, const WeightQuantizerDescription& d, const WeightQuantizerArgs& args) {
  WeightProblem p;
  p.function = function;
  p.description = d;
  TensorChecks checks(function, {});
  p.weight = checks.matrix("weight", args.weight, d.w, {d.n, d.k});
  Quantized<void> quantized{args.q, args.scale, args.zero_point};
  bind_quantized(checks, p, quantized);
  p.q = quantized.q, p.scale = quantized.scale, p.zero_point = quantized.zero_point;
  const bool feedback = d.method == WeightMethod::error_feedback;
  if (feedback && !args.second_moments.present()) {
    fail(Status::invalid_argument, function, ": method = error_feedback without second_moments");
  }
  if (d.method == WeightMethod::nearest) {
    checks.absent("second_moments", args.second_moments);
    checks.absent("importance", args.importance);
  }
  if (feedback) checks.absent("importance", args.importance);
  bind_statistics(checks, p, args.second_moments, args.importance);
  checks.no_overlap();
  return p;
}

// The range of the whole weight. Checks that the weight and its scales are finite.
Range check_weight(const WeightProblem& p) {
  const std::int64_t n = p.description.n;
  const std::int64_t k = p.description.k;
  std::vector<Range> ranges(static_cast<std::size_t>(n));
  std::vector<char> finite(static_cast<std::size_t>(n));
  parallel_parts(p.description.threads, n, [&](std::int64_t r) {
    std::vector<float> row(static_cast<std::size_t>(k));
    read_row(p.weight, r, row.data());
    float poison = 0;
    for (const float w : row) poison += w - w;
    finite[static_cast<std::size_t>(r)] = poison == 0;
    ranges[static_cast<std::size_t>(r)] = range_of(row.data(), k);
  });
  const ScaleRule rule(p.description);
  Range whole;
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < k && !finite[static_cast<std::size_t>(r)]; ++c) {
      const double value = load<double>(p.weight, r, c);
      if (std::isfinite(static_cast<float>(value))) continue;
      fail(Status::invalid_argument, p.function, ": weight[", r, ", ", c, "] = ", value, ", expected finite in f32");
    }
    const Range range = ranges[static_cast<std::size_t>(r)];
    if (!std::isfinite(rule.of(range, 0).s)) {
      fail(Status::invalid_argument, p.function, ": row ", r, " of weight goes from ", range.low, " to ", range.high,
           ": a scale of it is beyond ", p.description.scale);
    }
    whole = {std::min(whole.low, range.low), std::max(whole.high, range.high)};
  }
  return whole;
}

// The weights of rounding errors without feedback, relative to the largest; zeros beyond k.
std::vector<float> column_weights(const WeightProblem& p) {
  const std::int64_t k = p.description.k;
  const auto weight = [&](std::int64_t j) {
    if (p.second_moments.present()) return moment_at(p.second_moments, j, j);
    return p.importance.present() ? static_cast<double>(read_f32(p.importance, j)) : 1.0;
  };
  double largest = 0;
  for (std::int64_t j = 0; j < k; ++j) largest = std::max(largest, weight(j));
  std::vector<float> weights(static_cast<std::size_t>(padded_length(k)));
  for (std::int64_t j = 0; j < k && largest > 0; ++j) {
    weights[static_cast<std::size_t>(j)] = static_cast<float>(weight(j) / largest);
  }
  return weights;
}

// One scale for all rows: the errors of each candidate are those of the rows, added in their order.
SegmentScale tensor_scale(const WeightProblem& p, Range range, const std::vector<float>& weights) {
  const ScaleRule rule(p.description);
  const std::int64_t n = p.description.n;
  const std::int64_t k = p.description.k;
  const std::vector<SegmentScale> scales = candidates(rule, range);
  const std::size_t steps = scales.size();
  std::vector<double> errors(static_cast<std::size_t>(n) * steps);
  parallel_parts(p.description.threads, steps > 1 ? n : 0, [&](std::int64_t r) {
    std::vector<float> row(static_cast<std::size_t>(padded_length(k)));
    read_row(p.weight, r, row.data());
    rounding_errors(rule, scales, {row.data(), weights.data(), padded_length(k)},
                    errors.data() + static_cast<std::size_t>(r) * steps);
  });
  std::vector<double> totals(steps);
  for (std::size_t i = 0; i < errors.size(); ++i) totals[i % steps] += errors[i];
  return scales[static_cast<std::size_t>(std::min_element(totals.begin(), totals.end()) - totals.begin())];
}

void round_to_nearest(const WeightProblem& p, SegmentScale whole, const std::vector<float>& weights, std::int64_t r) {
  const ScaleRule rule(p.description);
  const std::int64_t k = p.description.k;
  std::vector<float> row(static_cast<std::size_t>(padded_length(k)));
  std::vector<std::int8_t> levels(static_cast<std::size_t>(k));
  read_row(p.weight, r, row.data());
  for (std::int64_t i = 0; i < p.segments; ++i) {
    const float* w = row.data() + i * p.segment;
    SegmentScale scale = whole;
    if (p.description.weight.granularity != Granularity::tensor) {
      const std::int64_t length = p.segments > 1 ? p.segment : padded_length(k);
      scale = best_scale(rule, {w, weights.data() + i * p.segment, length});
      write_scale(p, r, i, scale);
    }
    round_weights(rule, scale, w, p.segment, levels.data() + i * p.segment);
  }
  write_levels(p, r, levels.data());
}

// Sums that a strip of error feedback may hold: k terms of an error, at most the weight and the widest level, times a
// coupling.
void check_feedback_range(const WeightProblem& p, Range range, const FeedbackFactor& factor) {
  float largest = 0;
  for (const float u : factor.couplings) largest = std::max(largest, std::abs(u));
  const double reach = 4.0 * std::max(-range.low, range.high) * static_cast<double>(p.description.k);
  if (reach * static_cast<double>(largest) < 1e38) return;
  fail(Status::invalid_argument, p.function, ": weights up to ", std::max(-range.low, range.high),
       " and couplings of columns up to ", largest, " leave f32's range; more damping makes couplings smaller");
}

}  // namespace

std::string_view name(WeightMethod value) {
  return pick({"nearest", "clip_search", "error_feedback"}, value, "unknown");
}
std::string_view name(ColumnOrder value) { return pick({"as_they_lie", "by_moment"}, value, "unknown"); }

void write_levels(const WeightProblem& p, std::int64_t row, const std::int8_t* levels) {
  const std::int64_t k = p.description.k;
  if (p.q.dtype == DType::s8) {
    if (k > 0) std::memcpy(static_cast<std::int8_t*>(p.q.data) + row * p.q.strides[0], levels, std::size_t(k));
    return;
  }
  const int each = per_byte(p.q.dtype), width = bits(p.q.dtype), mask = (1 << width) - 1;
  std::uint8_t* to = static_cast<std::uint8_t*>(p.q.data) + row * p.q.strides[0] / each;
  for (std::int64_t i = 0; i < k; i += each) {
    int byte = 0;
    for (int j = 0; j < each && i + j < k; ++j) byte |= (levels[i + j] & mask) << (j * width);
    *to++ = static_cast<std::uint8_t>(byte);
  }
}

void quantize_weight(const WeightQuantizerDescription& description, const WeightQuantizerArgs& args) {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "quantize_weight";
  cpu::check_requested_isa(kFunction);
  check(kFunction, description);
  const WeightProblem p = bind(kFunction, description, args);
  const WeightQuantizerDescription& d = p.description;
  const Range range = check_weight(p);

  FeedbackFactor factor;
  std::vector<float> weights;
  if (d.method == WeightMethod::error_feedback) {
    factor = factor_moments(p);
    check_feedback_range(p, range, factor);
  } else {
    weights = column_weights(p);
  }
  SegmentScale whole;
  if (d.weight.granularity == Granularity::tensor) {
    whole = tensor_scale(p, range, d.method == WeightMethod::error_feedback ? factor.weights : weights);
    static_cast<float*>(p.scale.data)[0] = whole.s;
  }
  if (d.method == WeightMethod::error_feedback) {
    parallel_parts(d.threads, (d.n + kStripRows - 1) / kStripRows, [&](std::int64_t part) {
      const std::int64_t first = part * kStripRows;
      round_with_feedback(p, factor, whole, first, std::min(kStripRows, d.n - first));
    });
  } else {
    parallel_parts(d.threads, d.n, [&](std::int64_t r) { round_to_nearest(p, whole, weights, r); });
  }
}

WeightError weight_error(const WeightQuantizerDescription& description, const WeightErrorArgs& args) {
  const cpu::FloatEnvironment environment;
  constexpr std::string_view kFunction = "weight_error";
  cpu::check_requested_isa(kFunction);
  check(kFunction, description);
  const WeightQuantizerDescription& d = description;
  WeightProblem p;
  p.function = kFunction;
  p.description = d;
  TensorChecks checks(kFunction, {});
  p.weight = checks.matrix("weight", args.weight, d.w, {d.n, d.k});
  Quantized<const void> t{args.q, args.scale, args.zero_point};
  bind_quantized(checks, p, t);
  bind_statistics(checks, p, args.second_moments, args.importance);

  const MomentForm form(p.second_moments, p.importance, d.k, d.threads);
  const auto signal = [&](std::int64_t r, float* out) { read_row(p.weight, r, out); };
  const auto noise = [&](std::int64_t r, float* out) {
    read_row(p.weight, r, out);
    for (std::int64_t c = 0; c < d.k; ++c) {
      const std::int64_t segment = c / p.segment;
      const float s = d.weight.granularity == Granularity::group
                          ? load<float>(t.scale, r, segment)
                          : load<float>(t.scale, d.weight.granularity == Granularity::tensor ? 0 : r);
      const std::int32_t z = t.zero_point.present() ? load_integer(t.zero_point, r, segment) : 0;
      out[c] = static_cast<float>(load_integer(t.q, r, c) - z) * s - out[c];
    }
  };
  return {.noise = form.sum_of_rows(d.n, noise), .signal = form.sum_of_rows(d.n, signal)};
}

}  // namespace octile
