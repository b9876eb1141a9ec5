// exp2 and division on a GPU in fewer instructions, with the bits of scalar::Exp2 and scalar::Divide. Each is for
// numbers in a stated range; outside of it the plain ones are called.
#pragma once

#include <cmath>

#include "octile/tile/cuda_device.h"
#include "octile/tile/scalar.h"

namespace octile::tile::gpu {

constexpr float kExp2Normal = 125.0f;  // up to here no result, and no step, leaves the normal numbers

// scalar::Exp2 where |x| <= kExp2Normal: what it multiplies by two powers of two goes to the exponent.
TILE_FUNCTION f32 exp2_normal(f32 x) {
  const f32 shifted = x + 12582912.0f;
  const f32 r = x - (shifted - 12582912.0f);
  f32 p = 0.00015353359f;
  p = p * r + 0.0013398875f;
  p = p * r + 0.009618437f;
  p = p * r + 0.055503324f;
  p = p * r + 0.24022648f;
  p = p * r + 0.6931472f;
  p = p * r + 1.0f;
  return bits_as<f32>(bits_as<Word>(p) + (bits_as<Word>(shifted) << 23));
}

TILE_FUNCTION f32 reciprocal(f32 y) {  // rounded to nearest
#if defined(__CUDA_ARCH__)
  return __frcp_rn(y);
#else
  return 1.0f / y;
#endif
}

TILE_FUNCTION bool divides_plainly(f32 x) { return (fabsf(x) >= 0x1p-60f) & (fabsf(x) <= 0x1p60f); }

// x / y, rounded to nearest, where divides_plainly(x) and (y); r is reciprocal(y). The first correction makes the
// quotient right to within one unit in the last place, and then the second one rounds it (Markstein).
TILE_FUNCTION f32 divide_plainly(f32 x, f32 y, f32 r) {
  f32 q = x * r;
  q = fmaf(fmaf(-y, q, x), r, q);
  return fmaf(fmaf(-y, q, x), r, q);
}

template <class F>
inline constexpr bool is_extreme = std::is_same_v<F, scalar::Maximum> || std::is_same_v<F, scalar::Minimum>;

// One instruction, and the bits of scalar::Maximum or Minimum unless the result is a NaN or a zero.
template <class F>
TILE_FUNCTION f32 extreme(F f, f32 a, f32 b) {
#if defined(__CUDA_ARCH__)
  f32 result;
  if constexpr (std::is_same_v<F, scalar::Maximum>) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  } else {
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  }
  return result;
#else
  const f32 result = f(a, b);
  return result != result ? bits_as<f32>(0x7fffffffu) : result == 0.0f ? 0.0f : result;
#endif
}

// scalar::Cast from a float to at most 32 bits in one conversion, which saturates and makes 0 of a NaN.
template <class To, Round kRound>
TILE_FUNCTION To rounded_to(f32 x) {
#if defined(__CUDA_ARCH__)
  s32 whole = 0;
  if constexpr (kRound == Round::even) whole = __float2int_rn(x);
  if constexpr (kRound == Round::zero) whole = __float2int_rz(x);
  if constexpr (kRound == Round::down) whole = __float2int_rd(x);
  if constexpr (kRound == Round::up) whole = __float2int_ru(x);
  if constexpr (sizeof(To) == 1) {
    constexpr s32 kLow = std::is_same_v<To, u8> ? 0 : -128;
    whole = whole < kLow ? kLow : whole > kLow + 255 ? kLow + 255 : whole;
  }
  return static_cast<To>(whole);
#else
  return scalar::Cast<To, kRound>{}(x);
#endif
}

template <class F>
inline constexpr bool is_rounding = false;
template <class To, Round kRound>
inline constexpr bool is_rounding<scalar::Cast<To, kRound>> = is_integer_type<To> &&
                                                              sizeof(To) <= 4 && kRound != Round::unstated;
template <class To, Round kRound>
TILE_FUNCTION To round_with(scalar::Cast<To, kRound>, f32 x) {
  return rounded_to<To, kRound>(x);
}

}  // namespace octile::tile::gpu
