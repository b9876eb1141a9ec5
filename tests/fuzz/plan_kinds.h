// What differs between the kinds of plans: descriptions from bytes, and the same in C; operands, rows and work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "bytes.h"
#include "check/cases.h"
#include "check/operands.h"
#include "octile/octile.h"
#include "octile/octile.hpp"

namespace octile::fuzz {

// ---- Descriptions ----

inline void common_choices(Bytes& in, Device& device, int& threads, std::string& kernel) {
  if (in.rarely(40)) device = {static_cast<DeviceType>(in.byte()), in.below(3) - 1};
  threads = in.rarely(10) ? in.pick<int>({-1, 1024, 1025, 1 << 30, 0}) : in.below(4);
  if (!in.rarely(4)) return;
  const std::vector<KernelInfo> rows = kernels();
  switch (in.below(4)) {
    case 0:
      kernel = "reference";
      break;
    case 1:
      kernel = "portable";
      break;
    case 2:
      kernel = rows[in.byte() % rows.size()].name;
      break;
    default:
      for (int i = in.below(40); i > 0; --i) kernel += static_cast<char>(in.byte());
  }
}

inline QuantizeDescription quantize_description(Bytes& in, bool forward) {
  QuantizeDescription d;
  d.rows = in.size();
  d.cols = in.size();
  d.x = in.choice<DType>(4);
  d.q = in.rarely(50) ? in.choice<DType>(9) : in.pick<DType>({DType::s8, DType::u8, DType::s4});
  d.granularity = in.choice<Granularity>(4);
  if (d.granularity == Granularity::group || in.rarely(20)) {
    d.group = in.rarely(10) ? in.size() : in.pick<std::int64_t>({32, 1, 2, 3, 8, 64, 128, 5});
    if (!in.rarely(10) && d.group > 0 && d.group < 1000) d.cols = d.group * in.below(5);
  }
  d.scale = in.choice<ScaleSource>(2);
  d.mapping = in.choice<Mapping>(2);
  d.rounding = in.choice<Rounding>(2);
  if (forward || in.rarely(50)) {
    d.orientation = in.choice<Orientation>(3);
    d.multiplier = in.choice<Multiplier>(3);
  }
  d.mask = in.choice<Mask>(2);
  if (in.rarely(4)) {
    d.q_min = in.rarely(8) ? static_cast<int>(in.word()) : -in.below(129);
    d.q_max = in.rarely(8) ? static_cast<int>(in.word()) : in.below(128);
  }
  common_choices(in, d.device, d.threads, d.kernel);
  if (forward && in.rarely(6)) {
    if (!in.rarely(4))
      d = {.rows = d.rows, .cols = d.cols, .x = d.x, .orientation = d.orientation, .threads = d.threads};
    d.prologue = in.choice<Prologue>(5);
    const bool norm = d.prologue == Prologue::rms_norm || d.prologue == Prologue::layer_norm;
    d.gated = in.rarely(norm ? 20 : 2);
    d.residual = in.rarely(norm ? 2 : 20);
    d.norm_weight = in.rarely(8) ? in.choice<DType>(6) : in.rarely(2) ? d.x : DType::f32;
  }
  return d;
}

constexpr WeightFormat kFormats[] = {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor, WeightFormat::s4_group,
                                     WeightFormat::s8_group};  // by their numbers in C

inline WeightFormat weight_format(Bytes& in) { return in.pick(kFormats); }

inline LinearDescription linear_description(Bytes& in) {
  LinearDescription d;
  d.m = in.size();
  d.n = in.size();
  d.k = in.size();
  d.x = in.choice<DType>(5);
  d.y = d.x;
  if (d.x == DType::s8 || (d.x != DType::f64 && in.rarely(3))) d.y = in.choice<DType>(d.x == DType::s8 ? 4 : 3);
  d.weight = weight_format(in);
  const bool float_x = in.below(2) == 1;
  d.activation = float_x ? Activation::none : static_cast<Activation>(1 + in.below(3));
  if (d.x == DType::s8 && float_x) d.x = d.y;
  d.static_scale = in.real();
  if (d.weight.granularity == Granularity::group) {
    d.weight.group = in.pick<std::int64_t>({32, 64, 128, 0});
    if (d.weight.group != 0 && !in.rarely(10)) d.k = d.weight.group * in.below(4);
    d.weight.zero_point = d.weight.type == DType::s4 && in.below(2) == 1;
  } else if (!float_x) {
    d.weight_layout = in.choice<WeightLayout>(2);
  }
  d.x_multiplier = d.x != DType::s8 && !float_x && in.below(2) == 1;
  d.bias = in.below(2) == 1;
  if (in.rarely(20)) {  // anything at all
    d.activation = in.choice<Activation>(5);
    d.y = in.choice<DType>(9);
    d.weight_layout = in.choice<WeightLayout>(3);
    d.x_multiplier = in.below(2) == 1;
    d.weight.zero_point = in.below(2) == 1;
    d.weight.group = in.size();
    d.weight.type = in.choice<DType>(9);
    d.weight.granularity = in.choice<Granularity>(4);
  }
  common_choices(in, d.device, d.threads, d.kernel);
  return d;
}

inline GroupedLinearDescription grouped_linear_description(Bytes& in) {
  const LinearDescription e = linear_description(in);
  GroupedLinearDescription d{.experts = in.rarely(30) ? in.size() : in.below(6), .m = e.m, .n = e.n, .k = e.k};
  d.gather = in.below(2) == 1;
  d.slots = in.rarely(30) ? in.size() : in.below(4);
  d.clear_rest = in.below(4) == 0;
  if (d.gather || d.slots > 0) d.tokens = in.rarely(30) ? in.size() : in.below(12);
  d.x = e.x, d.y = e.y, d.activation = e.activation, d.static_scale = e.static_scale, d.weight = e.weight;
  if (d.activation == Activation::dynamic_per_tensor && !in.rarely(20)) d.activation = Activation::dynamic_per_token;
  d.bias = e.bias, d.device = e.device, d.threads = e.threads, d.kernel = e.kernel;
  return d;
}

inline LinearBackwardDescription linear_backward_description(Bytes& in) {
  LinearBackwardDescription d;
  d.m = in.size();
  d.n = in.size();
  d.k = in.size();
  d.dy = in.choice<DType>(4);
  if (in.rarely(3)) d.dw_dtype = in.rarely(10) ? in.choice<DType>(9) : d.dy == DType::f64 ? DType::f64 : DType::f32;
  d.dx = in.choice<Product>(3);
  d.dw = in.choice<Product>(3);
  d.db = in.below(2) == 1;
  d.activation = static_cast<Activation>(1 + in.below(3));
  if (in.rarely(40)) d.activation = in.choice<Activation>(5);
  d.static_scale = in.real();
  d.x_transposed = in.below(2) == 1;
  d.weight = in.rarely(40) ? weight_format(in) : kFormats[in.below(2)];
  d.weight.group = 0;  // which the C interface does not return
  d.weight_layout = in.choice<WeightLayout>(2);
  d.rounding = in.choice<Rounding>(2);
  const bool may_add = d.dw != Product::none && d.dw_dtype.value_or(d.dy) == scale_type(d.dy);
  d.dw_accumulate = in.below(3) == 1 && (may_add || in.rarely(10));
  if (in.below(2) == 1)
    d.gradient_block = in.rarely(10) ? in.below(2000) : in.pick<std::int64_t>({128, 256, 512, 1024});
  common_choices(in, d.device, d.threads, d.kernel);
  return d;
}

inline GroupedLinearBackwardDescription grouped_linear_backward_description(Bytes& in) {
  const LinearBackwardDescription e = linear_backward_description(in);
  GroupedLinearBackwardDescription d{.experts = in.rarely(30) ? in.size() : in.below(6), .m = e.m, .n = e.n, .k = e.k};
  d.dy = e.dy, d.dw_dtype = e.dw_dtype, d.dw_accumulate = e.dw_accumulate, d.dx = e.dx, d.dw = e.dw, d.db = e.db;
  d.activation = e.activation, d.static_scale = e.static_scale, d.weight = e.weight, d.rounding = e.rounding;
  if (d.activation == Activation::dynamic_per_tensor && !in.rarely(20)) d.activation = Activation::dynamic_per_token;
  d.gradient_block = e.gradient_block, d.device = e.device, d.threads = e.threads, d.kernel = e.kernel;
  d.clear_rest = in.rarely(3);
  return d;
}

// ---- Operands of a run ----

template <class Args, class Description>
std::vector<check::Operand> described(const Description& d, std::int64_t rows, Bytes&) {
  return check::operands<Args>(d, rows);
}

inline std::int32_t random_below(Bytes& in, std::int64_t count) {
  return static_cast<std::int32_t>(in.random() % static_cast<std::uint64_t>(count));
}

// Some rows belong to no expert, and some experts have no rows.
inline std::vector<std::int32_t> random_offsets(Bytes& in, std::int64_t experts, std::int64_t rows) {
  std::vector<std::int32_t> offsets;
  for (std::int64_t e = 0; e <= experts; ++e) offsets.push_back(random_below(in, rows + 1));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

// Some slots have no row.
template <>
inline std::vector<check::Operand> described<GroupedLinearArgs>(const GroupedLinearDescription& d, std::int64_t rows,
                                                                Bytes& in) {
  check::GroupedLinearCase c;
  c.description = d;
  c.rows = d.gather && d.tokens == 0 ? 0 : rows;
  c.offsets = random_offsets(in, d.experts, c.rows);
  for (std::int64_t r = 0; d.gather && r < c.rows; ++r) c.token.push_back(random_below(in, d.tokens));
  // An empty `place` is filled with random values, which are legal.
  const bool few = d.slots < 100 && d.tokens < 100;
  for (std::int64_t i = 0; few && i < d.slots * d.tokens; ++i) c.place.push_back(random_below(in, c.rows + 2) - 1);
  return check::operands(c);
}

template <>
inline std::vector<check::Operand> described<GroupedLinearBackwardArgs>(const GroupedLinearBackwardDescription& d,
                                                                        std::int64_t rows, Bytes& in) {
  check::GroupedLinearBackwardCase c;
  c.description = d;
  c.rows = rows;
  c.offsets = random_offsets(in, d.experts, rows);
  return check::operands(c);
}

// One specialization per plan: its description and its C functions.
template <class Args>
struct Kind;

#define OCTILE_KIND(args, kind, description, from_bytes)                  \
  template <>                                                             \
  struct Kind<args> : check::Kind<args> {                                 \
    using CArgs = octile_##kind##_args;                                   \
    using CDescription = octile_##description##_description;              \
    static constexpr auto init = octile_##description##_description_init; \
    static constexpr auto create = octile_##kind##_plan_create;           \
    static constexpr auto can_implement = octile_##kind##_can_implement;  \
    static constexpr auto run = octile_##kind##_run;                      \
    static constexpr const char* name = #kind;                            \
    static auto describe(Bytes& in) { return from_bytes; }                \
  }

OCTILE_KIND(QuantizeArgs, quantize, quantize, quantize_description(in, true));
OCTILE_KIND(DequantizeArgs, dequantize, quantize, quantize_description(in, false));
OCTILE_KIND(QuantizeBackwardArgs, quantize_backward, quantize, quantize_description(in, false));
OCTILE_KIND(DequantizeBackwardArgs, dequantize_backward, quantize, quantize_description(in, false));
OCTILE_KIND(FakeQuantizeArgs, fake_quantize, quantize, quantize_description(in, false));
OCTILE_KIND(FakeQuantizeBackwardArgs, fake_quantize_backward, quantize, quantize_description(in, false));
OCTILE_KIND(LinearArgs, linear, linear, linear_description(in));
OCTILE_KIND(LinearBackwardArgs, linear_backward, linear_backward, linear_backward_description(in));
OCTILE_KIND(GroupedLinearArgs, grouped_linear, grouped_linear, grouped_linear_description(in));
OCTILE_KIND(GroupedLinearBackwardArgs, grouped_linear_backward, grouped_linear_backward,
            grouped_linear_backward_description(in));

inline std::int64_t rows_of(const QuantizeDescription& d) { return d.rows; }
inline std::int64_t rows_of(const LinearDescription& d) { return d.m; }
inline std::int64_t rows_of(const LinearBackwardDescription& d) { return d.m; }
inline std::int64_t rows_of(const GroupedLinearDescription& d) { return d.m; }
inline std::int64_t rows_of(const GroupedLinearBackwardDescription& d) { return d.m; }

// Multiplications in one run, or a number above the limit.
inline double work_of(const QuantizeDescription& d, std::int64_t rows) {
  return static_cast<double>(rows) * static_cast<double>(d.cols);
}
inline double work_of(const LinearDescription& d, std::int64_t rows) {
  return static_cast<double>(rows) * static_cast<double>(d.n) * static_cast<double>(d.k);
}
inline double work_of(const GroupedLinearDescription& d, std::int64_t rows) {
  return static_cast<double>(rows + d.tokens * d.slots) * static_cast<double>(d.n) * static_cast<double>(d.k + 1);
}
inline double work_of(const LinearBackwardDescription& d, std::int64_t rows) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(d.n) * static_cast<double>(d.k);
}
inline double work_of(const GroupedLinearBackwardDescription& d, std::int64_t rows) {
  return static_cast<double>(2 * rows + d.experts) * static_cast<double>(d.n) * static_cast<double>(d.k + 1);
}

// ---- The descriptions of the C interface ----

template <class Enum>
inline std::int32_t number(Enum value) {
  return static_cast<std::int32_t>(value);
}

inline void describe(const QuantizeDescription& d, octile_quantize_description& c) {
  c.rows = d.rows, c.cols = d.cols, c.group = d.group;
  c.x = number(d.x), c.q = number(d.q), c.granularity = number(d.granularity), c.scale = number(d.scale);
  c.mapping = number(d.mapping), c.rounding = number(d.rounding), c.orientation = number(d.orientation);
  c.multiplier = number(d.multiplier), c.mask = number(d.mask), c.q_min = d.q_min, c.q_max = d.q_max;
  c.prologue = number(d.prologue), c.gated = d.gated, c.norm_weight = number(d.norm_weight), c.residual = d.residual;
}

// A format's number in C; one past the last where C has no name for it.
inline std::int32_t number(const WeightFormat& weight) {
  const auto same = [&](const WeightFormat& f) { return f.type == weight.type && f.granularity == weight.granularity; };
  return static_cast<std::int32_t>(std::find_if(std::begin(kFormats), std::end(kFormats), same) - kFormats);
}

inline void describe(const LinearDescription& d, octile_linear_description& c) {
  c.m = d.m, c.n = d.n, c.k = d.k, c.group = d.weight.group, c.static_scale = d.static_scale;
  c.x = number(d.x), c.y = number(d.y), c.activation = number(d.activation), c.weight = number(d.weight);
  c.weight_layout = number(d.weight_layout), c.weight_zero_point = d.weight.zero_point, c.bias = d.bias;
  c.x_multiplier = d.x_multiplier;
}

inline void describe(const GroupedLinearDescription& d, octile_grouped_linear_description& c) {
  c.experts = d.experts, c.m = d.m, c.n = d.n, c.k = d.k, c.tokens = d.tokens, c.slots = d.slots;
  c.group = d.weight.group, c.static_scale = d.static_scale, c.x = number(d.x), c.y = number(d.y);
  c.activation = number(d.activation), c.weight = number(d.weight), c.weight_zero_point = d.weight.zero_point;
  c.bias = d.bias, c.gather = d.gather, c.clear_rest = d.clear_rest;
}

inline void describe(const LinearBackwardDescription& d, octile_linear_backward_description& c) {
  c.m = d.m, c.n = d.n, c.k = d.k, c.static_scale = d.static_scale;
  c.dy = number(d.dy), c.dw_dtype = d.dw_dtype ? number(*d.dw_dtype) : OCTILE_DTYPE_SAME;
  c.dx = number(d.dx), c.dw = number(d.dw), c.db = d.db, c.activation = number(d.activation);
  c.x_transposed = d.x_transposed, c.weight = number(d.weight), c.weight_layout = number(d.weight_layout);
  c.rounding = number(d.rounding), c.gradient_block = static_cast<std::int32_t>(d.gradient_block);
  c.dw_accumulate = d.dw_accumulate;
}

inline void describe(const GroupedLinearBackwardDescription& d, octile_grouped_linear_backward_description& c) {
  c.experts = d.experts, c.m = d.m, c.n = d.n, c.k = d.k, c.static_scale = d.static_scale;
  c.dy = number(d.dy), c.dw_dtype = d.dw_dtype ? number(*d.dw_dtype) : OCTILE_DTYPE_SAME;
  c.dx = number(d.dx), c.dw = number(d.dw), c.db = d.db, c.activation = number(d.activation);
  c.weight = number(d.weight), c.rounding = number(d.rounding), c.dw_accumulate = d.dw_accumulate;
  c.gradient_block = static_cast<std::int32_t>(d.gradient_block), c.clear_rest = d.clear_rest;
}

}  // namespace octile::fuzz
