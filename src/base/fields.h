// The fields of a structure as a list: their names, and references to those of any structure that has fields of these
// names. So one list serves a structure of the C++ interface and its twin in the C one, or experts and one of them.
#pragma once

#include <string_view>
#include <tuple>

#include "octile/grouped_linear.h"
#include "octile/linear.h"
#include "octile/quantize.h"

namespace octile {

template <class Tie>
struct FieldList {
  Tie tie;                // (structure) -> references to its fields
  std::string_view text;  // "a.x, a.scale"

  constexpr FieldList(Tie references, std::string_view names) : tie(references), text(names) {}
};

// Of the structure `a`: OCTILE_FIELDS(a.x, a.scale).
#define OCTILE_FIELDS(...)                                      \
  FieldList {                                                   \
    [](auto& a) { return std::tie(__VA_ARGS__); }, #__VA_ARGS__ \
  }

// A structure whose fields of the list are those of `from`; the others have their defaults.
template <class To, class List, class From>
To with_fields(const List& list, const From& from) {
  To to;
  list.tie(to) = list.tie(from);
  return to;
}

// Of arguments: their tensors.
template <class Structure>
inline constexpr int kFields = 0;
template <>
inline constexpr auto kFields<QuantizeArgs> = OCTILE_FIELDS(a.x, a.multiplier, a.given_scale, a.given_zero_point, a.q,
                                                            a.q_transposed, a.scale, a.zero_point, a.up, a.norm_weight,
                                                            a.norm_bias, a.residual, a.sum, a.mean, a.rstd);
template <>
inline constexpr auto kFields<DequantizeArgs> = OCTILE_FIELDS(a.q, a.scale, a.zero_point, a.x);
template <>
inline constexpr auto kFields<QuantizeBackwardArgs> = OCTILE_FIELDS(a.dy, a.x, a.scale, a.zero_point, a.dx);
template <>
inline constexpr auto kFields<DequantizeBackwardArgs> = OCTILE_FIELDS(a.dy, a.scale, a.dq);
template <>
inline constexpr auto kFields<FakeQuantizeArgs> = OCTILE_FIELDS(a.x, a.given_scale, a.given_zero_point, a.y, a.scale,
                                                                a.zero_point);
template <>
inline constexpr auto kFields<FakeQuantizeBackwardArgs> = OCTILE_FIELDS(a.dy, a.x, a.scale, a.zero_point, a.dx);
template <>
inline constexpr auto kFields<LinearArgs> = OCTILE_FIELDS(a.x, a.x_scale, a.x_multiplier, a.weight, a.weight_scale,
                                                          a.weight_zero_point, a.bias, a.y);
template <>
inline constexpr auto kFields<LinearPackArgs> = OCTILE_FIELDS(a.weight, a.weight_scale, a.weight_zero_point, a.packed);
template <>
inline constexpr auto kFields<LinearBackwardArgs> = OCTILE_FIELDS(a.dy, a.weight, a.weight_scale, a.x, a.x_scale, a.dx,
                                                                  a.dw, a.db);
template <>
inline constexpr auto kFields<GroupedLinearArgs> = OCTILE_FIELDS(a.x, a.x_scale, a.offsets, a.token, a.weight,
                                                                 a.weight_scale, a.weight_zero_point, a.bias, a.place,
                                                                 a.router_weight, a.y);
template <>
inline constexpr auto kFields<GroupedLinearBackwardArgs> = OCTILE_FIELDS(a.dy, a.offsets, a.weight, a.weight_scale, a.x,
                                                                         a.x_scale, a.dx, a.dw, a.db);

}  // namespace octile
