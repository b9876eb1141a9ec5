// The quantizer family, as the contract defines it: one loop over segments, one over the elements of a segment.
//
//   symmetric  s = max(max|x| / q_max, min_scale)                      q = clamp(rint(x / s), q_min, q_max)
//   affine     s = max((x_max - x_min) / (q_max - q_min), min_scale)     q = clamp(rint(x / s) + z, q_min, q_max)
//              z = clamp(q_min - rint(x_min / s), q_min, q_max)
//
// Reference rows of the kernel table, and the oracle that every other row is compared with.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/access.h"
#include "base/float_rows.h"
#include "base/norm.h"
#include "base/philox.h"
#include "base/sigmoid.h"
#include "plan/cost.h"
#include "plan/either.h"
#include "reference/kernels.h"

namespace octile::reference {

namespace {

template <class Real>
Real scale_at(const Scales& scales, std::int64_t r, std::int64_t c) {
  return static_cast<const Real*>(scales.data)[scales.index(r, c)];
}

std::int32_t zero_point_at(const Scales& zero_points, std::int64_t r, std::int64_t c) {
  return zero_points.data ? static_cast<const std::int32_t*>(zero_points.data)[zero_points.index(r, c)] : 0;
}

// sigma(t) of z = -t log2(e): base/sigmoid.h.
float sigmoid(float z) {
  const float limited = std::clamp(z, kMinExponent, kMaxExponent);
  const float n = std::rint(limited);
  const float f = limited - n;
  float p = kExp2[4];
  for (int k = 3; k >= 0; --k) p = std::fma(p, f, kExp2[k]);
  p = std::fma(p, f, 1.0f);
  return 1 / (1 + std::ldexp(p, static_cast<int>(n)));
}

// An activation of x, or that times up, rounded to x's type.
float activated(const QuantizeProblem& p, const QuantizeOperands& o, std::int64_t r, std::int64_t c) {
  const auto x = load<float>(o.x, r, c);
  if (!std::isfinite(x)) return x;  // it would be one or a NaN
  const float z = p.prologue == Prologue::silu ? x * kSilu : x * std::fma(x * x, kGeluCubic, kGelu);
  const float y = x * sigmoid(z);
  return rounded_to(p.x, p.gated ? y * load<float>(o.up, r, c) : y);
}

// The sum of `terms` values in the contract's order: value c is added to lane c % kNormLanes, then adjacent lanes.
template <class Add>
float sum_of(std::int64_t terms, const Add& add) {
  std::array<float, kNormLanes> lanes = {};
  for (std::int64_t c = 0; c < terms; ++c) {
    float& lane = lanes[static_cast<std::size_t>(c) % kNormLanes];
    lane = add(c, lane);
  }
  for (std::size_t n = kNormLanes / 2; n > 0; n /= 2) {
    for (std::size_t i = 0; i < n; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
  }
  return lanes[0];
}

// Row r of a norm, rounded to x's type; writes the outputs that a norm has besides.
void normalize(const QuantizeProblem& p, const QuantizeOperands& o, std::int64_t r, float* h) {
  const std::int64_t cols = o.x.cols();
  const auto terms = static_cast<float>(cols);
  for (std::int64_t c = 0; c < cols; ++c) {
    h[c] = load<float>(o.x, r, c);
    if (!p.residual) continue;
    h[c] = rounded_to(p.x, h[c] + load<float>(o.residual, r, c));
    store(o.sum, r, c, h[c]);
  }
  const bool centred = p.prologue == Prologue::layer_norm;
  const float mean = centred ? sum_of(cols, [&](std::int64_t c, float sum) { return sum + h[c]; }) / terms : 0;
  const auto from_mean = [&](std::int64_t c) { return centred ? h[c] - mean : h[c]; };
  const float squares = sum_of(cols, [&](std::int64_t c, float sum) {
    const float d = from_mean(c);
    return std::fma(d, d, sum);
  });
  const float rstd = 1 / std::sqrt(squares / terms + static_cast<float>(p.epsilon));
  if (o.mean.present()) store(o.mean, r, 0, mean);
  if (o.rstd.present()) store(o.rstd, r, 0, rstd);
  for (std::int64_t c = 0; c < cols; ++c) {
    const float z = from_mean(c) * rstd;
    const auto weight = load<float>(o.norm_weight, c);
    h[c] = rounded_to(p.x, centred ? std::fma(z, weight, load<float>(o.norm_bias, c)) : z * weight);
  }
}

// x * multiplier, rounded once.
template <class Real>
Real input(const QuantizeProblem& p, const QuantizeOperands& o, std::int64_t r, std::int64_t c) {
  const Real x = load<Real>(o.x, r, c);
  if (p.multiplier == Multiplier::none) return x;
  return x * load<Real>(o.multiplier, p.multiplier == Multiplier::per_column ? c : r);
}

// rint(x / s) + z, or floor(x / s + u) + z, clamped to the range; x / s of element (r, c).
template <class Real>
std::int32_t quantized(const QuantizeProblem& p, const QuantizeOperands& o, std::int64_t r, std::int64_t c, Real ratio,
                       std::int32_t z) {
  const auto index = static_cast<std::uint64_t>(r * o.x.cols() + c);
  const Real rounded = p.rounding == Rounding::nearest ? std::rint(ratio)
                                                       : std::floor(ratio + static_cast<Real>(uniform(index, o.seed)));
  return static_cast<std::int32_t>(
      std::clamp(rounded + static_cast<Real>(z), static_cast<Real>(p.q_min), static_cast<Real>(p.q_max)));
}

template <class Real>
bool in_range(const QuantizeProblem& p, Real ratio, std::int32_t z) {
  const Real v = std::rint(ratio) + static_cast<Real>(z);
  const Real low = static_cast<Real>(p.q_min);
  const Real high = static_cast<Real>(p.q_max);
  return p.mask == Mask::inclusive ? low <= v && v <= high : low < v && v < high;
}

template <class Real>
struct Segment {
  std::int64_t row, col, rows, cols;  // where, and how much
  bool finite;                        // no NaN or infinity among its values
  Real s;
  std::int32_t z;
};

// Measures the segment that begins at (row, col) and writes its scale and zero point.
template <class Real>
void measure(const QuantizeProblem& p, const QuantizeOperands& o, Segment<Real>& g) {
  Real low = 0;
  Real high = 0;
  g.finite = true;
  for (std::int64_t r = g.row; r < g.row + g.rows; ++r) {
    for (std::int64_t c = g.col; c < g.col + g.cols; ++c) {
      const Real x = input<Real>(p, o, r, c);
      g.finite = g.finite && std::isfinite(x);
      low = std::min(low, x);
      high = std::max(high, x);
    }
  }
  const Real q_min = static_cast<Real>(p.q_min);
  const Real q_max = static_cast<Real>(p.q_max);
  g.z = 0;
  if (p.scale == ScaleSource::given) {
    g.s = scale_at<Real>(o.given_scale, g.row, g.col);
    g.z = zero_point_at(o.given_zero_point, g.row, g.col);
  } else if (p.mapping == Mapping::symmetric) {
    g.s = std::max(std::max(-low, high) / q_max, static_cast<Real>(p.min_scale));
  } else {
    g.s = std::max((high - low) / (q_max - q_min), static_cast<Real>(p.min_scale));
    if (g.finite && std::isfinite(g.s)) {
      g.z = static_cast<std::int32_t>(std::clamp(q_min - std::rint(low / g.s), q_min, q_max));
    }
  }
  g.finite = g.finite && std::isfinite(g.s);
  if (o.scale.data) {
    static_cast<Real*>(o.scale.data)[o.scale.index(g.row, g.col)] =
        g.finite ? g.s : std::numeric_limits<Real>::quiet_NaN();
  }
  if (o.zero_point.data) {
    static_cast<std::int32_t*>(o.zero_point.data)[o.zero_point.index(g.row, g.col)] = g.finite ? g.z : 0;
  }
}

// Calls visit(segment) for every segment of x, measured.
template <class Real, class Visit>
void for_each_segment(const QuantizeProblem& p, const QuantizeOperands& o, const Visit& visit) {
  const std::int64_t rows = o.x.rows();
  const std::int64_t cols = o.x.cols();
  const bool whole_rows = p.granularity == Granularity::tensor || p.granularity == Granularity::row;
  const bool whole_columns = p.granularity == Granularity::tensor || p.granularity == Granularity::column;
  // Blocks of a gradient's columns: decided by the operands, since a problem may have a group that is not used.
  const bool row_blocks = o.scale.row_group > 1;
  const std::int64_t segment_rows = row_blocks ? o.scale.row_group : whole_columns ? rows : 1;
  const std::int64_t segment_cols = whole_rows ? cols : p.granularity == Granularity::group ? p.group : 1;
  for (std::int64_t r = 0; r < rows; r += segment_rows) {
    for (std::int64_t c = 0; c < cols; c += segment_cols) {
      Segment<Real> g{r, c, std::min(segment_rows, rows - r), std::min(segment_cols, cols - c), true, 0, 0};
      measure(p, o, g);
      visit(g);
    }
  }
}

template <class Real>
void quantize(const QuantizeProblem& p, const QuantizeOperands& o) {
  for_each_segment<Real>(p, o, [&](const Segment<Real>& g) {
    for (std::int64_t r = g.row; r < g.row + g.rows; ++r) {
      for (std::int64_t c = g.col; c < g.col + g.cols; ++c) {
        std::int32_t q = 0;
        if (g.finite) q = quantized(p, o, r, c, input<Real>(p, o, r, c) / g.s, g.z);
        if (o.q.present()) store_integer(o.q, r, c, q);
        if (o.q_transposed.present()) store_integer(o.q_transposed, c, r, q);
      }
    }
  });
}

template <class Real>
void fake_quantize(const QuantizeProblem& p, const QuantizeOperands& o) {
  for_each_segment<Real>(p, o, [&](const Segment<Real>& g) {
    for (std::int64_t r = g.row; r < g.row + g.rows; ++r) {
      for (std::int64_t c = g.col; c < g.col + g.cols; ++c) {
        const Real x = load<Real>(o.x, r, c);
        Real y = std::numeric_limits<Real>::quiet_NaN();
        if (p.scale == ScaleSource::given ? std::isfinite(x) : g.finite) {
          y = static_cast<Real>(quantized(p, o, r, c, x / g.s, g.z) - g.z) * g.s;
        }
        store(o.y, r, c, y);
      }
    }
  });
}

template <class Real>
void dequantize(const QuantizeProblem&, const QuantizeOperands& o) {
  for (std::int64_t r = 0; r < o.q_in.rows(); ++r) {
    for (std::int64_t c = 0; c < o.q_in.cols(); ++c) {
      const std::int32_t difference = load_integer(o.q_in, r, c) - zero_point_at(o.given_zero_point, r, c);
      store(o.y, r, c, static_cast<Real>(difference) * scale_at<Real>(o.given_scale, r, c));
    }
  }
}

template <class Real>
void dequantize_backward(const QuantizeProblem&, const QuantizeOperands& o) {
  for (std::int64_t r = 0; r < o.dy.rows(); ++r) {
    for (std::int64_t c = 0; c < o.dy.cols(); ++c) {
      store(o.y, r, c, load<Real>(o.dy, r, c) * scale_at<Real>(o.given_scale, r, c));
    }
  }
}

// dx = dy / s or dy where in range, 0 elsewhere, NaN where there was nothing to round.
template <class Real, bool kDivides>
void straight_through(const QuantizeProblem& p, const QuantizeOperands& o) {
  for (std::int64_t r = 0; r < o.x.rows(); ++r) {
    for (std::int64_t c = 0; c < o.x.cols(); ++c) {
      const Real x = load<Real>(o.x, r, c);
      const Real s = scale_at<Real>(o.given_scale, r, c);
      const Real dy = load<Real>(o.dy, r, c);
      Real dx = 0;
      if (!std::isfinite(x) || !std::isfinite(s)) {
        dx = std::numeric_limits<Real>::quiet_NaN();
      } else if (in_range(p, x / s, zero_point_at(o.given_zero_point, r, c))) {
        dx = kDivides ? dy / s : dy;
      }
      store(o.y, r, c, dx);
    }
  }
}

constexpr decltype(QuantizeKernel::launch) launch_quantize = either<quantize<float>, quantize<double>>;

// h in f32, which has the values that x's type has rounded to, in the workspace, and the quantizer of that.
std::size_t prologue_workspace(const QuantizeProblem& p) {
  return static_cast<std::size_t>(p.rows * p.cols) * sizeof(float);
}
void prologue_quantize(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const std::int64_t rows = o.x.rows();
  const std::int64_t cols = o.x.cols();
  auto* const values = static_cast<float*>(launch.workspace.data);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const h = values + r * cols;
    if (is_norm(p.prologue)) {
      normalize(p, o, r, h);
    } else {
      for (std::int64_t c = 0; c < cols; ++c) h[c] = activated(p, o, r, c);
    }
  }
  QuantizeProblem plain = p;
  plain.x = DType::f32;
  plain.prologue = Prologue::none;
  QuantizeOperands of_h{.scale = o.scale, .q = o.q, .q_transposed = o.q_transposed};
  of_h.x = {.data = values, .dtype = DType::f32, .rank = 2, .shape = {rows, cols}, .strides = {cols, 1}};
  launch_quantize(plain, of_h, launch);
}

// Three operations that read the same x. With a group: in blocks.
void gradient_quantize(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  if (o.q.present()) {
    QuantizeProblem by_row = p;
    by_row.granularity = p.group > 0 ? Granularity::group : Granularity::row;
    by_row.multiplier = Multiplier::per_column;
    QuantizeOperands rows{.x = o.x, .multiplier = o.multiplier, .scale = o.scale, .q = o.q, .seed = o.seed};
    launch_quantize(by_row, rows, launch);
  }
  if (o.q_transposed.present()) {
    QuantizeProblem by_column = p;
    by_column.granularity = Granularity::column;
    by_column.multiplier = Multiplier::per_row;
    QuantizeOperands columns{.x = o.x, .multiplier = o.row_multiplier, .scale = o.column_scale};
    columns.q_transposed = o.q_transposed;
    columns.seed = o.seed;
    launch_quantize(by_column, columns, launch);
  }
  if (!o.y.present()) return;
  GemmProblem sum{.operation = Operation::column_sum};
  sum.scale = scale_type(p.x);
  GemmOperands operands{.a = o.x};
  operands.y = o.y;
  column_sum_reference.launch(sum, operands, launch);
}

Cost reference_cost(const QuantizeProblem& p) { return quantize_cost(p, 0.1e9); }
// As slow as its parts, and never chosen unless requested.
Cost gradient_cost(const QuantizeProblem& p) { return quantize_cost(p, 0.05e9); }

constexpr QuantizeKernel row(std::string_view name, Operation operation, decltype(QuantizeKernel::launch) launch,
                             decltype(QuantizeKernel::cost) cost = reference_cost,
                             decltype(QuantizeKernel::workspace) workspace = nullptr) {
  return {.name = name, .task = {operation}, .cost = cost, .workspace = workspace, .launch = launch};
}

}  // namespace

extern constinit const QuantizeKernel quantize_reference =
    row("quantize_reference", Operation::quantize, launch_quantize);
extern constinit const QuantizeKernel prologue_quantize_reference = row(
    "prologue_quantize_reference", Operation::prologue_quantize, prologue_quantize, reference_cost, prologue_workspace);
extern constinit const QuantizeKernel dequantize_reference =
    row("dequantize_reference", Operation::dequantize, either<dequantize<float>, dequantize<double>>);
extern constinit const QuantizeKernel quantize_backward_reference =
    row("quantize_backward_reference", Operation::quantize_backward,
        either<straight_through<float, true>, straight_through<double, true>>);
extern constinit const QuantizeKernel dequantize_backward_reference =
    row("dequantize_backward_reference", Operation::dequantize_backward,
        either<dequantize_backward<float>, dequantize_backward<double>>);
extern constinit const QuantizeKernel fake_quantize_reference =
    row("fake_quantize_reference", Operation::fake_quantize, either<fake_quantize<float>, fake_quantize<double>>);
extern constinit const QuantizeKernel fake_quantize_backward_reference =
    row("fake_quantize_backward_reference", Operation::fake_quantize_backward,
        either<straight_through<float, false>, straight_through<double, false>>);
extern constinit const QuantizeKernel gradient_quantize_reference =
    row("gradient_quantize_reference", Operation::gradient_quantize, gradient_quantize, gradient_cost);

extern constinit const QuantizeKernel blocked_gradient_quantize_reference =
    row("blocked_gradient_quantize_reference", Operation::blocked_gradient_quantize, gradient_quantize, gradient_cost);

}  // namespace octile::reference
