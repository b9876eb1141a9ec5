// Error feedback: rounds one column after another, after adding the errors of the earlier ones.
//
// A strip of 64 rows is transposed, so that a vector holds one column of 16 rows. A panel of columns first receives the
// errors of all earlier panels, in one product, and then those of its own columns in turn. Each t_j is a sum in the
// order of the columns, so the bits depend neither on panels nor on strips.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/float_rows.h"
#include "base/message.h"
#include "base/parallel.h"
#include "calibration/cholesky.h"
#include "calibration/outer_sum.h"
#include "calibration/weight_moments.h"
#include "calibration/weight_problem.h"
#include "cpu/support/multiversion.h"

namespace octile {

namespace {

std::vector<std::int64_t> order_of_columns(const WeightProblem& p) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.description.k));
  std::iota(order.begin(), order.end(), 0);
  if (p.description.order == ColumnOrder::by_moment) {
    const ConstTensor& h = p.second_moments;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return moment_at(h, a, a) > moment_at(h, b, b); });
  }
  return order;
}

// The damped H with its columns in reverse order of rounding: its V^T V is U D U^T rotated by 180 degrees.
std::vector<double> reversed_moments(const WeightProblem& p, const std::vector<std::int64_t>& order) {
  const auto k = static_cast<std::int64_t>(order.size());
  const ConstTensor& h = p.second_moments;
  double sum = 0;
  std::int64_t alive = 0;
  for (std::int64_t j = 0; j < k; ++j) {
    sum += moment_at(h, j, j);
    alive += moment_at(h, j, j) > 0;
  }
  const double mean = alive > 0 ? sum / static_cast<double>(alive) : 1;
  std::vector<double> reversed(static_cast<std::size_t>(k * k));
  parallel_parts(p.description.threads, k, [&](std::int64_t a) {
    const std::int64_t i = order[static_cast<std::size_t>(k - 1 - a)];
    double* row = reversed.data() + a * k;
    const bool dead = moment_at(h, i, i) == 0;
    row[a] = dead ? mean : moment_at(h, i, i) + p.description.damping * mean;
    for (std::int64_t b = a + 1; b < k; ++b) {
      const std::int64_t j = order[static_cast<std::size_t>(k - 1 - b)];
      row[b] = dead || moment_at(h, j, j) == 0 ? 0 : moment_at(h, i, j);
    }
  });
  return reversed;
}

std::vector<FeedbackFactor::Panel> panels_of(const WeightProblem& p) {
  // Where groups get their scales during rounding, a panel is a group.
  const bool groups = p.segments > 1 && p.description.order == ColumnOrder::as_they_lie;
  const std::int64_t width = groups ? p.segment : kPanelColumns;
  std::vector<FeedbackFactor::Panel> panels;
  std::int64_t at = 0;
  for (std::int64_t first = 0; first < p.description.k; first += width) {
    const std::int64_t last = std::min(p.description.k, first + width);
    panels.push_back({first, last, at});
    at += last * (last - first);
  }
  return panels;
}

// 64 rows of the weight during rounding. Arrays of (columns, kStripRows) in the order of rounding.
struct Strip {
  std::vector<float> weights;
  std::vector<float> errors;  // W - W'
  std::vector<std::int8_t> levels;
  std::vector<float> scales;       // (segments, kStripRows)
  std::vector<float> zero_points;  // the same
};

struct PanelRun {
  const float* couplings;  // (last, last - first)
  std::int64_t first, last, segment;
  const std::int64_t* order;
  const float* weights;
  float* t;       // (last - first, kStripRows)
  float* errors;  // (k, kStripRows)
  const float* scales;
  const float* zero_points;
  float q_min, q_max;
  std::int8_t* levels;  // (k, kStripRows)
};

// Rounds the columns of a panel in turn; t already holds the errors of the panels before it.
struct RoundPanel {
  template <cpu::Isa>
  OCTILE_INLINE static void run(PanelRun p) {
    const std::int64_t width = p.last - p.first;
    for (std::int64_t j = p.first; j < p.last; ++j) {
      float* __restrict t = p.t + (j - p.first) * kStripRows;
      for (std::int64_t i = p.first; i < j; ++i) {
        const float coupling = p.couplings[i * width + j - p.first];
        const float* __restrict e = p.errors + i * kStripRows;
        for (std::int64_t r = 0; r < kStripRows; ++r) t[r] += e[r] * coupling;
      }
      const std::int64_t segment = p.order[j] / p.segment;
      const float* __restrict w = p.weights + j * kStripRows;
      const float* __restrict s = p.scales + segment * kStripRows;
      const float* __restrict z = p.zero_points + segment * kStripRows;
      float* __restrict e = p.errors + j * kStripRows;
      std::int8_t* __restrict q = p.levels + j * kStripRows;
      for (std::int64_t r = 0; r < kStripRows; ++r) {
        const float level = rounded_level(t[r] / s[r], p.q_min - z[r], p.q_max - z[r]);
        e[r] = w[r] - level * s[r];
        q[r] = static_cast<std::int8_t>(level + z[r]);
      }
    }
  }
};

}  // namespace

FeedbackFactor factor_moments(const WeightProblem& p) {
  const std::int64_t k = p.description.k;
  FeedbackFactor f;
  f.order = order_of_columns(p);
  f.panels = panels_of(p);
  std::vector<double> v = reversed_moments(p, f.order);
  const BadPivot bad = factor_cholesky(v.data(), k, p.description.threads);
  if (bad.column >= 0) {
    fail(Status::invalid_argument, p.function,
         ": second_moments are not positive definite with damping = ", p.description.damping,
         ": what is left of column ", f.order[static_cast<std::size_t>(k - 1 - bad.column)], " is ", bad.value,
         "; more damping or more calibration rows help");
  }
  // U[i, j] and D[j] of the i-th and the j-th column in the order of rounding.
  const auto u = [&](std::int64_t i, std::int64_t j) {
    const double* row = v.data() + (k - 1 - j) * k;
    return row[k - 1 - i] / row[k - 1 - j];
  };
  f.couplings.resize(f.panels.empty() ? 0
                                      : static_cast<std::size_t>(f.panels.back().at + k * (k - f.panels.back().first)));
  parallel_parts(p.description.threads, static_cast<std::int64_t>(f.panels.size()), [&](std::int64_t part) {
    const auto& panel = f.panels[static_cast<std::size_t>(part)];
    for (std::int64_t j = panel.first; j < panel.last; ++j) {
      float* out = f.couplings.data() + panel.at + j - panel.first;
      for (std::int64_t i = 0; i < j; ++i) out[i * (panel.last - panel.first)] = static_cast<float>(u(i, j));
    }
  });
  const auto root = [&](std::int64_t j) { return v[static_cast<std::size_t>((k - 1 - j) * (k + 1))]; };
  double largest = 0;
  for (std::int64_t j = 0; j < k; ++j) largest = std::max(largest, root(j));
  f.weights.resize(static_cast<std::size_t>(padded_length(k)));
  for (std::int64_t j = 0; j < k; ++j) {
    const double relative = root(j) / largest;
    f.weights[static_cast<std::size_t>(f.order[static_cast<std::size_t>(j)])] = static_cast<float>(relative * relative);
  }
  return f;
}

void round_with_feedback(const WeightProblem& p, const FeedbackFactor& factor, SegmentScale tensor_scale,
                         std::int64_t first, std::int64_t count) {
  const ScaleRule rule(p.description);
  const std::int64_t k = p.description.k;
  const auto cells = static_cast<std::size_t>(k * kStripRows);
  Strip strip{std::vector<float>(cells), std::vector<float>(cells), std::vector<std::int8_t>(cells),
              std::vector<float>(static_cast<std::size_t>(p.segments * kStripRows), 1.0f),
              std::vector<float>(static_cast<std::size_t>(p.segments * kStripRows))};
  const auto keep_scale = [&](std::int64_t row, std::int64_t segment, SegmentScale scale) {
    const auto at = static_cast<std::size_t>(segment * kStripRows + row);
    strip.scales[at] = scale.s;
    strip.zero_points[at] = static_cast<float>(scale.z);
    if (p.description.weight.granularity != Granularity::tensor) write_scale(p, first + row, segment, scale);
  };
  const bool scales_during_rounding = p.segments > 1 && p.description.order == ColumnOrder::as_they_lie;

  std::vector<float> row(static_cast<std::size_t>(padded_length(k)));
  for (std::int64_t r = 0; r < count; ++r) {
    read_row(p.weight, first + r, row.data());
    for (std::int64_t j = 0; j < k; ++j) {
      strip.weights[static_cast<std::size_t>(j * kStripRows + r)] =
          row[static_cast<std::size_t>(factor.order[static_cast<std::size_t>(j)])];
    }
    for (std::int64_t i = 0; i < p.segments && !scales_during_rounding; ++i) {
      const std::int64_t at = i * p.segment;
      const std::int64_t length = p.segments > 1 ? p.segment : padded_length(k);
      keep_scale(r, i,
                 p.description.weight.granularity == Granularity::tensor
                     ? tensor_scale
                     : best_scale(rule, {row.data() + at, factor.weights.data() + at, length}));
    }
  }

  std::vector<float> t;
  for (const FeedbackFactor::Panel& panel : factor.panels) {
    const std::int64_t width = panel.last - panel.first;
    const float* couplings = factor.couplings.data() + panel.at;
    t.assign(strip.weights.begin() + panel.first * kStripRows, strip.weights.begin() + panel.last * kStripRows);
    add_outer(
        {couplings, width, strip.errors.data(), kStripRows, t.data(), kStripRows, panel.first, width, kStripRows});
    if (scales_during_rounding) {
      for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t j = 0; j < width; ++j)
          row[static_cast<std::size_t>(j)] = t[static_cast<std::size_t>(j * kStripRows + r)];
        keep_scale(r, panel.first / p.segment,
                   best_scale(rule, {row.data(), factor.weights.data() + panel.first, width}));
      }
    }
    cpu::multiversion<RoundPanel>(PanelRun{couplings, panel.first, panel.last, p.segment, factor.order.data(),
                                           strip.weights.data(), t.data(), strip.errors.data(), strip.scales.data(),
                                           strip.zero_points.data(), rule.low(0), rule.high(0), strip.levels.data()});
  }

  std::vector<std::int8_t> levels(static_cast<std::size_t>(k));
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t j = 0; j < k; ++j) {
      levels[static_cast<std::size_t>(factor.order[static_cast<std::size_t>(j)])] =
          strip.levels[static_cast<std::size_t>(j * kStripRows + r)];
    }
    write_levels(p, first + r, levels.data());
  }
}

}  // namespace octile
