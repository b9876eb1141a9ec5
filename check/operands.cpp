#include "check/operands.h"

#include <algorithm>
#include <tuple>

#include "check/cases.h"
#include "plan/kernel.h"

namespace octile::check {

namespace {

using Operands = std::vector<Operand>;

Operand if_present(bool present, const Operand& operand) { return present ? operand : Operand{}; }

Operand out(std::string_view name, DType dtype, const Size& size) {
  return {.name = name,
          .dtype = dtype,
          .size = size,
          .content = is_float(dtype) ? Content::real : Content::integer,
          .output = true};
}

struct Quantizer {
  const QuantizeDescription& d;
  std::int64_t rows;
  std::array<int, 2> range = {d.q_min, d.q_max};

  Quantizer(const QuantizeDescription& description, std::int64_t rows_run) : d(description), rows(rows_run) {
    if (d.q_min == 0 && d.q_max == 0) std::tie(range[0], range[1]) = default_range(d.q, d.mapping);
  }

  bool given() const { return d.scale == ScaleSource::given; }
  bool affine() const { return d.mapping == Mapping::affine; }
  Size whole() const { return {rows, d.cols}; }
  Size segments() const {
    switch (d.granularity) {
      case Granularity::tensor:
        return {1};
      case Granularity::row:
        return {rows};
      case Granularity::column:
        return {d.cols};
      case Granularity::group:
        break;
    }
    return {rows, d.cols / d.group};
  }

  Operand real(std::string_view name) const { return {.name = name, .dtype = d.x, .size = whole()}; }
  Operand scale(std::string_view name, Content content) const {
    return {.name = name, .dtype = scale_type(d.x), .size = segments(), .content = content, .range = range};
  }
  Operand zero_point(std::string_view name) const {
    return {.name = name, .dtype = DType::s32, .size = segments(), .content = Content::zero_point, .range = range};
  }
  Operand scale_out() const { return out("scale", scale_type(d.x), segments()); }
  Operand zero_point_out() const { return if_present(!given() && affine(), out("zero_point", DType::s32, segments())); }

  Operands straight_through() const {
    return {real("dy"), real("x"), scale("scale", Content::scale), if_present(affine(), zero_point("zero_point")),
            out("dx", d.x, whole())};
  }
};

// Of W(n, k), a scale for each tensor, row or group.
Size weight_scale_size(const WeightFormat& weight, std::int64_t n, std::int64_t k) {
  if (weight.granularity == Granularity::tensor) return {1};
  if (weight.granularity == Granularity::row) return {n};
  return {n, k / (weight.group == 0 ? std::max<std::int64_t>(k, 1) : weight.group)};
}

Operand weight_scale(const WeightFormat& weight, DType dtype, const Size& size) {
  return {.name = "weight_scale",
          .dtype = dtype,
          .size = size,
          .content = Content::scale,
          .typical = is_packed(weight.type) ? 0.1 : 0.01};
}

// Of all experts: one for each tensor is one for each expert.
template <class Description>
Size scales_of_experts(const Description& d) {
  if (d.weight.granularity == Granularity::tensor) return {d.experts};
  return weight_scale_size(d.weight, d.experts * d.n, d.k);
}

Operand given(std::string_view name, const Size& size, const std::vector<std::int32_t>& values) {
  return {.name = name, .dtype = DType::s32, .size = size, .content = Content::integer, .values = values};
}

Operand x_scale(Activation activation, DType dtype, std::int64_t rows) {
  return if_present(activation != Activation::static_per_tensor,
                    {.name = "x_scale",
                     .dtype = dtype,
                     .size = {activation == Activation::dynamic_per_token ? rows : 1},
                     .content = Content::scale,
                     .typical = 0.02});
}

Operand integers(std::string_view name, DType dtype, const Size& size) {
  const auto [low, high] = range_of(dtype);
  return {.name = name, .dtype = dtype, .size = size, .content = Content::integer, .range = {low, high}};
}

Operand x_of(DType dtype, const Size& size) {
  return dtype == DType::s8 ? integers("x", dtype, size) : Operand{.name = "x", .dtype = dtype, .size = size};
}

Operand weight_zero_point(DType weight, const Size& size) {
  Operand points = integers("weight_zero_point", weight, size);
  points.dtype = DType::s32;
  points.content = Content::zero_point;
  return points;
}

Size weight_size(WeightLayout layout, std::int64_t n, std::int64_t k) {
  return layout == WeightLayout::out_in ? Size{n, k} : Size{k, n};
}

}  // namespace

template <>
Operands operands<QuantizeArgs>(const QuantizeDescription& d, std::int64_t rows) {
  const Quantizer q(d, rows);
  Operand multiplier{.name = "multiplier", .dtype = scale_type(d.x), .content = Content::multiplier};
  multiplier.size = {d.multiplier == Multiplier::per_column ? d.cols : rows};
  Operand scale = q.scale_out();
  scale.optional = q.given();
  const bool norm = is_norm(d.prologue);
  const bool centred = d.prologue == Prologue::layer_norm;
  Operand mean = out("mean", DType::f32, {rows});
  Operand rstd = out("rstd", DType::f32, {rows});
  mean.optional = rstd.optional = true;
  return {q.real("x"),
          if_present(d.multiplier != Multiplier::none, multiplier),
          if_present(q.given(), q.scale("given_scale", Content::given_scale)),
          if_present(q.given() && q.affine(), q.zero_point("given_zero_point")),
          if_present(d.orientation != Orientation::transposed, out("q", d.q, q.whole())),
          if_present(d.orientation != Orientation::row_major, out("q_transposed", d.q, {d.cols, rows})),
          scale,
          q.zero_point_out(),
          if_present(d.gated, q.real("up")),
          if_present(norm, {.name = "norm_weight", .dtype = d.norm_weight, .size = {d.cols}}),
          if_present(centred, {.name = "norm_bias", .dtype = d.norm_weight, .size = {d.cols}}),
          if_present(d.residual, q.real("residual")),
          if_present(d.residual, out("sum", d.x, q.whole())),
          if_present(centred, mean),
          if_present(norm, rstd)};
}

template <>
Operands operands<DequantizeArgs>(const QuantizeDescription& d, std::int64_t rows) {
  const Quantizer q(d, rows);
  return {integers("q", d.q, q.whole()), q.scale("scale", Content::scale),
          if_present(q.affine(), q.zero_point("zero_point")), out("x", d.x, q.whole())};
}

template <>
Operands operands<QuantizeBackwardArgs>(const QuantizeDescription& d, std::int64_t rows) {
  return Quantizer(d, rows).straight_through();
}

template <>
Operands operands<DequantizeBackwardArgs>(const QuantizeDescription& d, std::int64_t rows) {
  const Quantizer q(d, rows);
  return {q.real("dy"), q.scale("scale", Content::scale), out("dq", d.x, q.whole())};
}

template <>
Operands operands<FakeQuantizeArgs>(const QuantizeDescription& d, std::int64_t rows) {
  const Quantizer q(d, rows);
  return {q.real("x"),
          if_present(q.given(), q.scale("given_scale", Content::given_scale)),
          if_present(q.given() && q.affine(), q.zero_point("given_zero_point")),
          out("y", d.x, q.whole()),
          if_present(!q.given(), q.scale_out()),
          q.zero_point_out()};
}

template <>
Operands operands<FakeQuantizeBackwardArgs>(const QuantizeDescription& d, std::int64_t rows) {
  return Quantizer(d, rows).straight_through();
}

template <>
Operands operands<LinearArgs>(const LinearDescription& d, std::int64_t rows) {
  const DType real = scale_type(d.y);
  const Size scales = weight_scale_size(d.weight, d.n, d.k);
  return {x_of(d.x, {rows, d.k}),
          if_present(d.x == DType::s8, x_scale(d.activation, real, rows)),
          if_present(d.x_multiplier,
                     {.name = "x_multiplier", .dtype = real, .size = {d.k}, .content = Content::multiplier}),
          integers("weight", d.weight.type, weight_size(d.weight_layout, d.n, d.k)),
          weight_scale(d.weight, real, scales),
          if_present(d.weight.zero_point, weight_zero_point(d.weight.type, scales)),
          if_present(d.bias, {.name = "bias", .dtype = d.y, .size = {d.n}}),
          out("y", d.y, {rows, d.n})};
}

template <>
Operands operands<LinearBackwardArgs>(const LinearBackwardDescription& d, std::int64_t rows) {
  const DType real = scale_type(d.dy);
  const bool dx = d.dx != Product::none;
  const bool dw = d.dw != Product::none;
  Operand dw_out = out("dw", d.dw_dtype.value_or(d.dy), weight_size(d.dw_layout.value_or(d.weight_layout), d.n, d.k));
  dw_out.accumulates = d.dw_accumulate;
  return {{.name = "dy", .dtype = d.dy, .size = {rows, d.n}},
          if_present(dx, integers("weight", DType::s8, weight_size(d.weight_layout, d.n, d.k))),
          if_present(dx, weight_scale(d.weight, real, weight_scale_size(d.weight, d.n, d.k))),
          if_present(dw, integers("x", DType::s8, d.x_transposed ? Size{d.k, rows} : Size{rows, d.k})),
          if_present(dw, x_scale(d.activation, real, rows)),
          if_present(dx, out("dx", d.dy, {rows, d.k})),
          if_present(dw, dw_out),
          if_present(d.db, out("db", d.dy, {d.n}))};
}

Operands operands(const GroupedLinearCase& c) {
  const GroupedLinearDescription& d = c.description;
  const DType real = scale_type(d.y);
  const std::int64_t rows = d.gather ? d.tokens : c.rows;
  const Size scales = scales_of_experts(d);
  return {x_of(d.x, {rows, d.k}),
          if_present(d.x == DType::s8, x_scale(d.activation, real, rows)),
          given("offsets", {d.experts + 1}, c.offsets),
          if_present(d.gather, given("token", {c.rows}, c.token)),
          integers("weight", d.weight.type, {d.experts * d.n, d.k}),
          weight_scale(d.weight, real, scales),
          if_present(d.weight.zero_point, weight_zero_point(d.weight.type, scales)),
          if_present(d.bias, {.name = "bias", .dtype = d.y, .size = {d.experts, d.n}}),
          if_present(d.slots > 0, given("place", {d.tokens, d.slots}, c.place)),
          if_present(d.slots > 0, {.name = "router_weight", .dtype = real, .size = {d.tokens, d.slots}}),
          out("y", d.y, {d.slots > 0 ? d.tokens : c.rows, d.n})};
}

Operands operands(const GroupedLinearBackwardCase& c) {
  const GroupedLinearBackwardDescription& d = c.description;
  const DType real = scale_type(d.dy);
  const bool dx = d.dx != Product::none, dw = d.dw != Product::none;
  Operand dw_out = out("dw", d.dw_dtype.value_or(d.dy), {d.experts * d.n, d.k});
  dw_out.accumulates = d.dw_accumulate;
  return {{.name = "dy", .dtype = d.dy, .size = {c.rows, d.n}},
          given("offsets", {d.experts + 1}, c.offsets),
          if_present(dx, integers("weight", DType::s8, {d.experts * d.n, d.k})),
          if_present(dx, weight_scale(d.weight, real, scales_of_experts(d))),
          if_present(dw, integers("x", DType::s8, {c.rows, d.k})),
          if_present(dw, x_scale(d.activation, real, c.rows)),
          if_present(dx, out("dx", d.dy, {c.rows, d.k})),
          if_present(dw, dw_out),
          if_present(d.db, out("db", d.dy, {d.experts, d.n}))};
}

}  // namespace octile::check
