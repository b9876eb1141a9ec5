// How far a product may be from its exact value before the rounding to y's type: one rule per row of the kernel table,
// which precision_guarantee() puts into words and `octile check` and the tests evaluate.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "octile/types.h"

namespace octile {

enum class Bound : std::uint8_t {
  exact,           // every rounding is in the contract: bit for bit
  sum,             // floats are added in some order
  flushed_sum,     // the same, and what is subnormal in a bf16 a, or in a sum before it is scaled, counts as zero
  rounded_weight,  // the same, and where a row of b has several scales, (q - z) s is first rounded to a's 16-bit type
  rounded_scale,   // the same, and a value of b times its scale, along the contraction, is rounded to a's 16-bit type
  offset_weight,   // a s times q + 8 or q + 24 is added up, and what was added and z are taken off with the sum of a
};

// What the error of one element of y depends on. Magnitudes are sums over the contraction of absolute values.
struct SumFacts {
  DType a = DType::f32;         // of the float operand
  std::int64_t terms = 0;       // products in the sum
  bool several_scales = false;  // a row of b has more than one scale along the contraction
  double magnitude = 0;         // of the terms, scales applied, and the bias
  double offset_magnitude = 0;  // of |a s| (q + 24 + |24 + z|), and the bias; for offset_weight
  double a_magnitude = 0;       // of a
  double max_scale = 0;         // the largest scale of the row of b
};

double max_error(Bound bound, const SumFacts& facts);

// Whether an infinite a may give NaN where the exact value is infinite.
constexpr bool may_turn_infinity_into_nan(Bound bound) { return bound == Bound::offset_weight; }

// The rule in words, of a sum over `terms` ("K") with a y of this type.
struct BoundText {
  std::string_view terms;
  DType a = DType::f32;
  DType y = DType::f32;
  bool several_scales = false;
};
std::string in_words(Bound bound, const BoundText& text);

}  // namespace octile
