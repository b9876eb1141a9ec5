// exp2 and division on a GPU in fewer instructions, with the bits of scalar::Exp2 and scalar::Divide. Each serves
// a stated range; outside it the plain functions run.
#pragma once

#include <cmath>

#include "octile/tile/cuda_device.h"
#include "octile/tile/scalar.h"

namespace octile::tile::gpu {

constexpr float kExp2Normal = 125.0f;  // up to here every result and intermediate is a normal number

// scalar::Exp2 where |x| <= kExp2Normal: what it multiplies by two powers of two goes to the exponent.
TILE_FUNCTION f32 exp2_normal(f32 x) {
  const f32 shifted = x + 12582912.0f;
  const f32 r = x - (shifted - 12582912.0f);
  return bits_as<f32>(bits_as<Word>(scalar::Exp2::power(r)) + (bits_as<Word>(shifted) << 23));
}

// Of Math::fast: within 2^-22 of the result where that is normal; 0 below.
TILE_FUNCTION f32 exp2_fast(f32 x) {
#if defined(__CUDA_ARCH__)
  f32 result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const f32 result = scalar::Exp2{}(x);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

TILE_FUNCTION f32 reciprocal(f32 y) {  // rounded to nearest
#if defined(__CUDA_ARCH__)
  return __frcp_rn(y);
#else
  return 1.0f / y;
#endif
}

// x / y, rounded to nearest, where y > 0 and both are between 2^-60 and 2^60, or x is a zero; r is reciprocal(y). The
// quotient of the first step is less than two units in the last place off. The error after the correction is less than
// half the minimum distance of a quotient from the midpoint of two floats, except for a few quotients of each y; all of
// those were tested. The remainder is negated so that zeros keep their signs.
TILE_FUNCTION f32 divide_plainly(f32 x, f32 y, f32 r) {
  const f32 q = x * r;
  return fmaf(fmaf(q, y, -x), -r, q);
}
constexpr f32 kPlainLeast = 0x1p-60f, kPlainMost = 0x1p60f;

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

// Four numbers as bytes.
template <class F>
inline constexpr bool is_rounding_to_bytes = false;
template <class To, Round kRound>
inline constexpr bool is_rounding_to_bytes<scalar::Cast<To, kRound>> = is_rounding<scalar::Cast<To, kRound>> &&
                                                                       sizeof(To) == 1;
template <class To, Round kRound>
TILE_FUNCTION void round_to_bytes([[maybe_unused]] scalar::Cast<To, kRound> cast, To* out, const f32 (&x)[4]) {
#if defined(__CUDA_ARCH__)
  const s32 a = rounded_to<s32, kRound>(x[0]), b = rounded_to<s32, kRound>(x[1]);
  const s32 c = rounded_to<s32, kRound>(x[2]), d = rounded_to<s32, kRound>(x[3]);
  Word word;
  if constexpr (std::is_same_v<To, u8>) {
    asm("{ .reg .b32 high; cvt.pack.sat.u8.s32.b32 high, %4, %3, 0; cvt.pack.sat.u8.s32.b32 %0, %2, %1, high; }"
        : "=r"(word)
        : "r"(a), "r"(b), "r"(c), "r"(d));
  } else {
    asm("{ .reg .b32 high; cvt.pack.sat.s8.s32.b32 high, %4, %3, 0; cvt.pack.sat.s8.s32.b32 %0, %2, %1, high; }"
        : "=r"(word)
        : "r"(a), "r"(b), "r"(c), "r"(d));
  }
  memcpy(static_cast<void*>(out), &word, 4);
#else
  for (int i = 0; i < 4; ++i) out[i] = cast(x[i]);
#endif
}

}  // namespace octile::tile::gpu
