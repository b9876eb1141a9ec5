#include "reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/access.h"
#include "base/fields.h"
#include "base/parts.h"
#include "plan/kernel.h"
#include "reference/kernels.h"

namespace octile::oracle {

namespace {

QuantizeProblem resolved(QuantizeDescription d) {
  if (d.q_min == 0 && d.q_max == 0) std::tie(d.q_min, d.q_max) = default_range(d.q, d.mapping);
  return d;
}

Scales scales(const QuantizeDescription& d, const ConstTensor& t, std::int64_t cols) {
  return t.present() ? scales_over(d, t, cols) : Scales{};
}

// The scale of row m of X, and of output channel n of W: one for all where the tensor has one value.
template <class Real>
Real scale_of(const ConstTensor& scale, bool one_for_all, std::int64_t i) {
  return load<Real>(scale, one_for_all ? 0 : i);
}

// All elements of a matrix, row by row, so that a sum over a row runs over memory: sums take most of the time of a
// check.
template <class T, class Element>
std::vector<T> dense(std::int64_t rows, std::int64_t cols, const Element& element) {
  std::vector<T> all(static_cast<std::size_t>(rows * cols));
  T* next = all.data();
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) *next++ = element(r, c);
  }
  return all;
}

std::int64_t dot(const std::int8_t* a, const std::int32_t* b, std::int64_t size) {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < size; ++i) sum += std::int64_t{a[i]} * b[i];
  return sum;
}
// Onto `sum`, term by term.
double dot(const double* a, const double* b, std::int64_t size, double sum) {
  for (std::int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// X as integers and a scale for each row.
template <class Real>
struct QuantizedRows {
  std::vector<std::int8_t> q;
  std::vector<Real> s;
};

template <class Real>
QuantizedRows<Real> quantized_x(const LinearDescription& d, const LinearArgs& args) {
  const std::int64_t m = args.x.rows();
  QuantizedRows<Real> x{std::vector<std::int8_t>(static_cast<std::size_t>(m * d.k)),
                        std::vector<Real>(static_cast<std::size_t>(m))};
  const bool per_tensor = d.activation == Activation::dynamic_per_tensor;
  if (d.x == DType::s8) {
    for (std::int64_t i = 0; i < m; ++i) {
      x.s[static_cast<std::size_t>(i)] = d.activation == Activation::static_per_tensor
                                             ? static_cast<Real>(d.static_scale)
                                             : scale_of<Real>(args.x_scale, per_tensor, i);
      for (std::int64_t k = 0; k < d.k; ++k) {
        x.q[static_cast<std::size_t>(i * d.k + k)] = static_cast<std::int8_t>(load_integer(args.x, i, k));
      }
    }
    return x;
  }
  Real given = static_cast<Real>(d.static_scale);
  QuantizeDescription q{.rows = m, .cols = d.k, .x = d.x};
  q.granularity = per_tensor ? Granularity::tensor : Granularity::row;
  q.multiplier = d.x_multiplier ? Multiplier::per_column : Multiplier::none;
  QuantizeArgs a{.x = args.x, .multiplier = args.x_multiplier};
  a.q = matrix(x.q.data(), m, d.k);
  a.scale = vector(x.s.data(), per_tensor ? 1 : m);
  if (d.activation == Activation::static_per_tensor) {
    q.scale = ScaleSource::given;
    a.given_scale = vector(&given, m, 0);
  }
  quantize(q, a);
  if (per_tensor) x.s.assign(x.s.size(), x.s.empty() ? Real{} : x.s[0]);
  return x;
}

// The meaning of W: value (n, k) less its zero point, and its scale.
struct Weight {
  const LinearDescription& d;
  const LinearArgs& args;
  std::int64_t group = d.weight.granularity == Granularity::group && d.weight.group > 0 ? d.weight.group : d.k;

  std::int32_t value(std::int64_t n, std::int64_t k) const {
    const std::int32_t z = d.weight.zero_point ? load_integer(args.weight_zero_point, n, k / group) : 0;
    return (d.weight_layout == WeightLayout::out_in ? load_integer(args.weight, n, k)
                                                    : load_integer(args.weight, k, n)) -
           z;
  }
  template <class Real>
  Real scale(std::int64_t n, std::int64_t k) const {
    return d.weight.granularity == Granularity::group
               ? load<Real>(args.weight_scale, n, k / group)
               : scale_of<Real>(args.weight_scale, d.weight.granularity == Granularity::tensor, n);
  }
};

// Y[m, n] = round(fma(f32(sum_k Xq[m, k] * Wq[n, k]), s_x[m] * s_w[n], bias[n])); with scales in groups
// Y[m, n] = round(fma(t, s_x[m], bias[n])), t the fold over the groups g of fma(f32(acc_g), s_w[n, g], t) from 0.
template <class Real>
void linear_integer(const LinearDescription& d, const LinearArgs& args) {
  const QuantizedRows<Real> x = quantized_x<Real>(d, args);
  const Weight weight{d, args};
  const auto w = dense<std::int32_t>(d.n, d.k, [&](std::int64_t n, std::int64_t k) { return weight.value(n, k); });
  const bool in_groups = d.weight.granularity == Granularity::group;
  for (std::int64_t m = 0; m < args.x.rows(); ++m) {
    for (std::int64_t n = 0; n < d.n; ++n) {
      if (d.k == 0) {
        store(args.y, m, n, d.bias ? load<Real>(args.bias, n) : Real{});
        continue;
      }
      Real total{};
      Real scale = x.s[static_cast<std::size_t>(m)];
      for (std::int64_t first = 0; first < d.k; first += weight.group) {
        const auto acc = static_cast<Real>(dot(x.q.data() + m * d.k + first, w.data() + n * d.k + first, weight.group));
        total = in_groups ? std::fma(acc, weight.scale<Real>(n, first), total) : acc;
      }
      if (!in_groups) scale *= weight.scale<Real>(n, 0);
      store(args.y, m, n, d.bias ? std::fma(total, scale, load<Real>(args.bias, n)) : total * scale);
    }
  }
}

// Y[m, n] = round(sum_k X[m, k] * ((q[n, k] - z) * s) + bias[n]).
template <class Real>
void linear_float(const LinearDescription& d, const LinearArgs& args) {
  const Weight weight{d, args};
  const auto x =
      dense<double>(args.x.rows(), d.k, [&](std::int64_t m, std::int64_t k) { return load<double>(args.x, m, k); });
  const auto w = dense<double>(
      d.n, d.k, [&](std::int64_t n, std::int64_t k) { return weight.value(n, k) * weight.scale<double>(n, k); });
  for (std::int64_t m = 0; m < args.x.rows(); ++m) {
    for (std::int64_t n = 0; n < d.n; ++n) {
      const double bias = d.bias ? load<double>(args.bias, n) : 0.0;
      store(args.y, m, n, static_cast<Real>(dot(x.data() + m * d.k, w.data() + n * d.k, d.k, bias)));
    }
  }
}

// The meaning of the backward's operands.
template <class Real>
struct Backward {
  const LinearBackwardDescription& d;
  const LinearBackwardArgs& args;

  std::int64_t m() const { return args.dy.rows(); }
  std::int32_t w(std::int64_t n, std::int64_t k) const {
    return d.weight_layout == WeightLayout::out_in ? load_integer(args.weight, n, k) : load_integer(args.weight, k, n);
  }
  std::int32_t x(std::int64_t i, std::int64_t k) const {
    return d.x_transposed ? load_integer(args.x, k, i) : load_integer(args.x, i, k);
  }
  Real s_w(std::int64_t n) const {
    return scale_of<Real>(args.weight_scale, d.weight == WeightFormat::s8_per_tensor, n);
  }
  Real s_x(std::int64_t i) const {
    return d.activation == Activation::static_per_tensor
               ? static_cast<Real>(d.static_scale)
               : scale_of<Real>(args.x_scale, d.activation == Activation::dynamic_per_tensor, i);
  }
  void store_dw(std::int64_t n, std::int64_t k, Real value) const {
    const auto [r, c] =
        d.dw_layout.value_or(d.weight_layout) == WeightLayout::out_in ? std::pair(n, k) : std::pair(k, n);
    if (d.dw_accumulate && m() == 0) return;
    store(args.dw, r, c, d.dw_accumulate ? load<Real>(args.dw, r, c) + value : value);
  }

  // Terms of the contraction that share a scale, and how many such blocks there are.
  std::int64_t block(std::int64_t contraction) const {
    return d.gradient_block > 0 ? d.gradient_block : std::max<std::int64_t>(contraction, 1);
  }
  std::int64_t blocks(std::int64_t contraction) const {
    return (contraction + block(contraction) - 1) / block(contraction);
  }

  // dY with a scale folded in, quantized per row or per column, in blocks along the other dimension: scale i of block b
  // is s[b * (m or n) + i].
  QuantizedRows<Real> quantized_dy(bool rows) const {
    const std::int64_t outer = rows ? m() : d.n;
    const std::int64_t contraction = rows ? d.n : m();
    QuantizedRows<Real> out{std::vector<std::int8_t>(static_cast<std::size_t>(m() * d.n)),
                            std::vector<Real>(static_cast<std::size_t>(outer * blocks(contraction)))};
    std::vector<Real> fold(static_cast<std::size_t>(rows ? d.n : m()));
    for (std::size_t i = 0; i < fold.size(); ++i) {
      fold[i] = rows ? s_w(static_cast<std::int64_t>(i)) : s_x(static_cast<std::int64_t>(i));
    }
    QuantizeProblem q = resolved({.rows = m(), .cols = d.n, .x = d.dy, .min_scale = kMinScale});
    q.granularity = rows ? Granularity::group : Granularity::column;
    q.group = block(contraction);
    q.multiplier = rows ? Multiplier::per_column : Multiplier::per_row;
    q.rounding = d.rounding;
    QuantizeOperands o{.x = args.dy};
    o.multiplier = vector(static_cast<const Real*>(fold.data()), static_cast<std::int64_t>(fold.size()));
    o.q = matrix(out.q.data(), m(), d.n);
    o.scale = {out.s.data(), rows ? 1 : outer, rows ? outer : 1, rows ? q.group : 1};
    o.scale.row_group = rows ? 1 : q.group;
    o.seed = args.seed;
    reference::quantize_reference.launch(q, o, {});
    return out;
  }

  // The fold over the blocks b of the scales of `i`: fma(Real(acc_b), s[b], t) from 0, acc_b the sum of q * other in b.
  Real folded(const QuantizedRows<Real>& quantized, std::int64_t outer, std::int64_t i, const std::int8_t* q,
              const std::int32_t* other, std::int64_t contraction) const {
    Real total{};
    for (std::int64_t b = 0; b < blocks(contraction); ++b) {
      const std::int64_t first = b * block(contraction);
      const std::int64_t acc = dot(q + first, other + first, std::min(block(contraction), contraction - first));
      total = std::fma(static_cast<Real>(acc), quantized.s[static_cast<std::size_t>(b * outer + i)], total);
    }
    return total;
  }

  // d1 = dY * s_w, quantized per row: dX[m, k] = s1[m] * sum_n q1[m, n] * Wq[n, k].
  void dx_int8() const {
    const QuantizedRows<Real> q1 = quantized_dy(true);
    const auto w_t = dense<std::int32_t>(d.k, d.n, [&](std::int64_t k, std::int64_t n) { return w(n, k); });
    for (std::int64_t i = 0; i < m(); ++i) {
      for (std::int64_t k = 0; k < d.k; ++k) {
        store(args.dx, i, k, folded(q1, m(), i, q1.q.data() + i * d.n, w_t.data() + k * d.n, d.n));
      }
    }
  }

  // d2 = dY * s_x, quantized per column: dW[n, k] = s2[n] * sum_m q2[m, n] * Xq[m, k].
  void dw_int8() const {
    const QuantizedRows<Real> q2 = quantized_dy(false);
    const auto q2_t = dense<std::int8_t>(
        d.n, m(), [&](std::int64_t n, std::int64_t i) { return q2.q[static_cast<std::size_t>(i * d.n + n)]; });
    const auto x_t = dense<std::int32_t>(d.k, m(), [&](std::int64_t k, std::int64_t i) { return x(i, k); });
    for (std::int64_t n = 0; n < d.n; ++n) {
      for (std::int64_t k = 0; k < d.k; ++k) {
        store_dw(n, k, folded(q2, d.n, n, q2_t.data() + n * m(), x_t.data() + k * m(), m()));
      }
    }
  }

  // dX[m, k] = sum_n dY[m, n] * (Wq[n, k] * s_w[n]).
  void dx_dequantized() const {
    const auto dy =
        dense<double>(m(), d.n, [&](std::int64_t i, std::int64_t n) { return load<double>(args.dy, i, n); });
    const auto w_t =
        dense<double>(d.k, d.n, [&](std::int64_t k, std::int64_t n) { return w(n, k) * static_cast<double>(s_w(n)); });
    for (std::int64_t i = 0; i < m(); ++i) {
      for (std::int64_t k = 0; k < d.k; ++k) {
        store(args.dx, i, k, static_cast<Real>(dot(dy.data() + i * d.n, w_t.data() + k * d.n, d.n, 0)));
      }
    }
  }

  // dW[n, k] = sum_m (Xq[m, k] * s_x[m]) * dY[m, n].
  void dw_dequantized() const {
    const auto dy_t =
        dense<double>(d.n, m(), [&](std::int64_t n, std::int64_t i) { return load<double>(args.dy, i, n); });
    const auto x_t =
        dense<double>(d.k, m(), [&](std::int64_t k, std::int64_t i) { return x(i, k) * static_cast<double>(s_x(i)); });
    for (std::int64_t n = 0; n < d.n; ++n) {
      for (std::int64_t k = 0; k < d.k; ++k) {
        store_dw(n, k, static_cast<Real>(dot(dy_t.data() + n * m(), x_t.data() + k * m(), m(), 0)));
      }
    }
  }

  // dB[n] = sum_m dY[m, n].
  void db() const {
    for (std::int64_t n = 0; n < d.n; ++n) {
      double sum = 0;
      for (std::int64_t i = 0; i < m(); ++i) sum += load<double>(args.dy, i, n);
      store(args.db, n, 0, static_cast<Real>(sum));
    }
  }

  void run() const {
    if (d.dx == Product::int8) dx_int8();
    if (d.dx == Product::dequantized) dx_dequantized();
    if (d.dw == Product::int8) dw_int8();
    if (d.dw == Product::dequantized) dw_dequantized();
    if (d.db) db();
  }
};

// What a quantizer's row takes. `scale` is what a quantizer writes, and what the others are given.
template <class Args>
void launch(const QuantizeKernel& row, const QuantizeDescription& d, const Args& args, const ConstTensor& matrix) {
  constexpr bool kQuantizes = requires { args.given_scale; };
  const std::int64_t cols = matrix.cols();
  QuantizeOperands o;
  if constexpr (kQuantizes) {
    if (matrix.rows() == 0 || cols == 0) return;
    o.given_scale = scales(d, args.given_scale, cols);
    o.given_zero_point = scales(d, args.given_zero_point, cols);
    o.scale = scales(d, args.scale, cols);
    o.zero_point = scales(d, args.zero_point, cols);
    o.seed = args.seed;
  } else {
    o.given_scale = scales(d, args.scale, cols);
    if constexpr (requires { args.zero_point; }) o.given_zero_point = scales(d, args.zero_point, cols);
  }
  if constexpr (std::is_same_v<Args, DequantizeArgs>) {
    o.q_in = args.q;
    o.y = args.x;
  } else {
    if constexpr (requires { args.x; }) o.x = args.x;
    if constexpr (requires { args.dy; }) o.dy = args.dy;
    if constexpr (requires { args.y; }) o.y = args.y;
    if constexpr (requires { args.dx; }) o.y = args.dx;
    if constexpr (requires { args.dq; }) o.y = args.dq;
  }
  if constexpr (std::is_same_v<Args, QuantizeArgs>) {
    o.multiplier = args.multiplier;
    o.q = args.q;
    o.q_transposed = args.q_transposed;
    o.up = args.up;
    o.norm_weight = args.norm_weight, o.norm_bias = args.norm_bias, o.residual = args.residual;
    o.sum = args.sum, o.mean = args.mean, o.rstd = args.rstd;
  }
  const QuantizeProblem p = resolved(d);
  std::vector<std::byte> workspace(row.workspace ? row.workspace(p) : 0);
  Launch launch{};
  launch.workspace = {workspace.data(), workspace.size()};
  row.launch(p, o, launch);
}

}  // namespace

void quantize(const QuantizeDescription& d, const QuantizeArgs& args) {
  const bool plain = d.prologue == Prologue::none;
  launch(plain ? reference::quantize_reference : reference::prologue_quantize_reference, d, args, args.x);
}
void dequantize(const QuantizeDescription& d, const DequantizeArgs& args) {
  launch(reference::dequantize_reference, d, args, args.q);
}
void quantize_backward(const QuantizeDescription& d, const QuantizeBackwardArgs& args) {
  launch(reference::quantize_backward_reference, d, args, args.x);
}
void dequantize_backward(const QuantizeDescription& d, const DequantizeBackwardArgs& args) {
  launch(reference::dequantize_backward_reference, d, args, args.dy);
}
void fake_quantize(const QuantizeDescription& d, const FakeQuantizeArgs& args) {
  launch(reference::fake_quantize_reference, d, args, args.x);
}
void fake_quantize_backward(const QuantizeDescription& d, const FakeQuantizeBackwardArgs& args) {
  launch(reference::fake_quantize_backward_reference, d, args, args.x);
}

void linear(const LinearDescription& d, const LinearArgs& args) {
  const bool f64 = d.y == DType::f64;
  if (d.activation == Activation::none) {
    f64 ? linear_float<double>(d, args) : linear_float<float>(d, args);
  } else {
    f64 ? linear_integer<double>(d, args) : linear_integer<float>(d, args);
  }
}

namespace {

// z a row at a time, so that no row can depend on another.
template <class Real>
std::vector<Real> grouped_rows(const GroupedLinearDescription& d, const GroupedLinearArgs& args, DType z_type) {
  const std::int64_t m = d.gather ? args.token.rows() : args.x.rows();
  std::vector<Real> z(static_cast<std::size_t>(m * d.n));
  std::vector<double> row(static_cast<std::size_t>(d.n));  // of any type
  for (std::int64_t e = 0; e < d.experts; ++e) {
    for (std::int64_t r = load_integer(args.offsets, e); r < load_integer(args.offsets, e + 1); ++r) {
      const std::int64_t t = d.gather ? load_integer(args.token, r) : r;
      const Tensor y{row.data(), z_type, {}, 2, {1, d.n}, {d.n, 1}};
      LinearArgs one{.x = rows_at(args.x, t, 1), .x_scale = rows_at(args.x_scale, t, 1), .y = y};
      one.weight = expert_rows(args.weight, e, d.n);
      const std::int64_t scales = d.weight.granularity == Granularity::tensor ? 1 : d.n;
      one.weight_scale = expert_rows(args.weight_scale, e, scales);
      one.weight_zero_point = expert_rows(args.weight_zero_point, e, d.n);
      if (d.bias) one.bias = as_vector(rows_at(args.bias, e, 1));
      auto dense = with_fields<LinearDescription>(
          OCTILE_FIELDS(a.n, a.k, a.x, a.activation, a.static_scale, a.weight, a.bias), d);
      dense.m = 1;
      dense.y = z_type;
      linear(dense, one);
      for (std::int64_t n = 0; n < d.n; ++n) z[static_cast<std::size_t>(r * d.n + n)] = load<Real>(y, 0, n);
    }
  }
  return z;
}

template <class Real>
void grouped(const GroupedLinearDescription& d, const GroupedLinearArgs& args) {
  const std::int32_t begin = load_integer(args.offsets, 0), end = load_integer(args.offsets, d.experts);
  const std::vector<Real> z = grouped_rows<Real>(d, args, d.slots > 0 ? scale_type(d.y) : d.y);
  const auto at = [&](std::int64_t r, std::int64_t n) { return z[static_cast<std::size_t>(r * d.n + n)]; };
  for (std::int64_t n = 0; n < d.n; ++n) {
    for (std::int64_t r = 0; d.slots == 0 && r < args.y.rows(); ++r) {
      const bool of_expert = begin <= r && r < end;
      if (of_expert || d.clear_rest) store(args.y, r, n, of_expert ? at(r, n) : 0);
    }
    for (std::int64_t t = 0; d.slots > 0 && t < args.y.rows(); ++t) {
      Real sum{};
      for (std::int64_t s = 0; s < d.slots; ++s) {
        const std::int32_t r = load_integer(args.place, t, s);
        if (begin <= r && r < end) sum = std::fma(load<Real>(args.router_weight, t, s), at(r, n), sum);
      }
      store(args.y, t, n, sum);
    }
  }
}

}  // namespace

void grouped_linear(const GroupedLinearDescription& d, const GroupedLinearArgs& args) {
  d.y == DType::f64 ? grouped<double>(d, args) : grouped<float>(d, args);
}

void linear_backward(const LinearBackwardDescription& d, const LinearBackwardArgs& args) {
  d.dy == DType::f64 ? Backward<double>{d, args}.run() : Backward<float>{d, args}.run();
}

void grouped_linear_backward(const GroupedLinearBackwardDescription& d, const GroupedLinearBackwardArgs& args) {
  const std::int64_t scales = d.weight.granularity == Granularity::tensor ? 1 : d.n;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    const std::int64_t first = load_integer(args.offsets, e), count = load_integer(args.offsets, e + 1) - first;
    const bool adds_nothing = count == 0 && d.dw_accumulate;
    LinearBackwardArgs one{.dy = rows_at(args.dy, first, count)};
    one.weight = expert_rows(args.weight, e, d.n);
    one.weight_scale = expert_rows(args.weight_scale, e, scales);
    one.x = rows_at(args.x, first, count);
    one.x_scale = rows_at(args.x_scale, first, count);
    one.dx = rows_at(args.dx, first, count);
    one.dw = expert_rows(args.dw, e, d.n);
    if (d.db) one.db = as_vector(rows_at(args.db, e, 1));
    one.seed = args.seed + static_cast<std::uint64_t>(e);
    auto dense = with_fields<LinearBackwardDescription>(
        OCTILE_FIELDS(a.n, a.k, a.dy, a.dw_dtype, a.dw_accumulate, a.dx, a.dw, a.db, a.activation, a.static_scale,
                      a.weight, a.rounding, a.gradient_block),
        d);
    dense.m = count;
    if (adds_nothing) dense.dw = Product::none;
    linear_backward(dense, one);
  }
  const std::int32_t begin = load_integer(args.offsets, 0), end = load_integer(args.offsets, d.experts);
  for (std::int64_t r = 0; d.clear_rest && d.dx != Product::none && r < args.dx.rows(); ++r) {
    for (std::int64_t k = 0; (r < begin || r >= end) && k < d.k; ++k) store(args.dx, r, k, 0);
  }
}

}  // namespace octile::oracle
