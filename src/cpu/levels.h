// Rounding to levels: offset_level = clamp(rint(x / s) + z, q_min, q_max) - z, for a run with one scale or with one per
// element, as bytes or as floats.
//
// The quotient decides only where it is near a tie; elsewhere x * (1 / s) rounds to the same level and is several times
// as fast. With u = 2^-24, t = x / s, r the product and q the IEEE quotient:
//   |r - t| <= |t| (2u + u^2), as 1 / s and the product round once each; |q - t| <= |t| u; so |r - q| < 4u |t|.
// Clamped to integer limits of magnitude `limit`, both lie in one half-open interval of rounding unless r is within
// 4u (limit + 1) of a tie: beyond the limits both round to the limit, and inside |t| is below limit + 1. Normal scales
// alone have such an inverse, and a product that underflows rounds to 0 like its quotient.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "cpu/extremes.h"
#include "cpu/multiversion.h"
#include "cpu/rows.h"

namespace octile::cpu {

// Rounds |x| < 2^22 (2^51) to an integer, ties to even: the sum has no bits left for a fraction. It vectorizes without
// SSE4.1's rounding instructions, and the low bits of the sum are the integer.
template <class Real>
inline constexpr Real kRounder = sizeof(Real) == 4 ? static_cast<Real>(0x1.8p23) : static_cast<Real>(0x1.8p52);

template <class Real>
OCTILE_INLINE std::int32_t rounded_to_integer(Real x) {
  return static_cast<std::int32_t>(std::bit_cast<Key<Real>>(x + kRounder<Real>) -
                                   std::bit_cast<Key<Real>>(kRounder<Real>));
}

template <class Real>
OCTILE_INLINE Real clamped(Real x, Real low, Real high) {
  const Real above = x < low ? low : x;
  return above > high ? high : above;
}

// Clamping first changes nothing, for the limits are integers, and keeps the ratio small enough to be rounded by an
// addition. Stochastic: floor(x / s + u) in place of rint(x / s).
template <bool stochastic, class Real>
OCTILE_INLINE std::int32_t offset_level(Real ratio, Real low, Real high, std::uint16_t noise) {
  if constexpr (!stochastic) return rounded_to_integer(clamped(ratio, low, high));
  const Real shifted = clamped(ratio + static_cast<Real>(noise) * static_cast<Real>(0x1p-16), low, high);
  const Real nearest = (shifted + kRounder<Real>)-kRounder<Real>;
  return rounded_to_integer(shifted) - static_cast<std::int32_t>(nearest > shifted);
}

// 1 / s where the bound above holds; else NaN, whose product is near every tie.
template <class Real>
OCTILE_INLINE Real inverse(Real s) {
  return s > static_cast<Real>(0x1p-100) && s < static_cast<Real>(0x1p100) ? 1 / s
                                                                           : std::numeric_limits<Real>::quiet_NaN();
}

// The scale and zero point of a run; s is NaN if the segment is bad.
template <class Real>
struct OneScale {
  Real scale;
  std::int32_t zero;
  Real inverted;

  OCTILE_INLINE OneScale(Real s, std::int32_t z) : scale(s), zero(z), inverted(inverse(s)) {}
  OCTILE_INLINE Real s(std::int64_t) const { return scale; }
  OCTILE_INLINE std::int32_t z(std::int64_t) const { return zero; }
  OCTILE_INLINE Real inv(std::int64_t) const { return inverted; }
  OCTILE_INLINE OneScale from(std::int64_t) const { return *this; }
};

// Those of each element.
template <bool affine, class Real>
struct ScaleEach {
  const Real* scales;
  const Real* inverses;
  const std::int32_t* zeros;

  OCTILE_INLINE Real s(std::int64_t i) const { return scales[i]; }
  OCTILE_INLINE std::int32_t z(std::int64_t i) const { return affine ? zeros[i] : 0; }
  OCTILE_INLINE Real inv(std::int64_t i) const { return inverses[i]; }
  OCTILE_INLINE ScaleEach from(std::int64_t i) const { return {scales + i, inverses + i, zeros + i}; }
};

// A run to be rounded. `Out` is std::uint8_t for integers as their low bytes, which serve s8, u8 and s4 alike and are 0
// in a bad segment; or Real for (level - z) * s, which is NaN where x or s is not finite.
template <class Real, class Out>
struct LevelRun {
  const Real* x;
  const std::uint16_t* noise;  // null: nearest
  Real q_min, q_max;
  std::int64_t n;
  Ahead ahead;
  Out* out;
};

template <bool stochastic, class Real, class Scale>
OCTILE_INLINE void divided_levels(const LevelRun<Real, std::uint8_t>& p, const Scale& scale, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Real s = scale.s(i);
    const Real offset = static_cast<Real>(scale.z(i));
    const std::uint16_t u = stochastic ? p.noise[i] : std::uint16_t{0};
    const std::int32_t level = offset_level<stochastic>(p.x[i] / s, p.q_min - offset, p.q_max - offset, u) + scale.z(i);
    p.out[i] = static_cast<std::uint8_t>(s == s ? level : 0);
  }
}

template <bool stochastic, class Real, class Scale>
OCTILE_INLINE void divided_levels(const LevelRun<Real, Real>& p, const Scale& scale, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const Real x = p.x[i];
    const Real s = scale.s(i);
    const Real offset = static_cast<Real>(scale.z(i));
    const std::uint16_t u = stochastic ? p.noise[i] : std::uint16_t{0};
    const std::int32_t level = offset_level<stochastic>(x / s, p.q_min - offset, p.q_max - offset, u);
    const Real poison = (x - x) + (s - s);
    p.out[i] = poison == 0 ? static_cast<Real>(level) * s : std::numeric_limits<Real>::quiet_NaN();
  }
}

// kAheadStep elements by multiplication. False if one of them was near a tie, or not finite: then they have to be done
// again by division.
template <class Out, class Scale>
OCTILE_INLINE bool multiplied_levels(const float* __restrict x, const Scale& scale, float q_min, float q_max,
                                     Out* __restrict out) {
  const float limit = q_max - q_min;  // of |q - z|, as z is in the range
  const float near = 0.5f - (limit + 1) * 0x1p-22f;
  std::int32_t nearest_tie = 0;
  for (std::int64_t i = 0; i < kAheadStep; ++i) {
    const float offset = static_cast<float>(scale.z(i));
    const float ratio = clamped(x[i] * scale.inv(i), q_min - offset, q_max - offset);
    const float sum = ratio + kRounder<float>;
    const float level = sum - kRounder<float>;
    float distance = ratio - level;
    if constexpr (sizeof(Out) == 1) {
      out[i] = static_cast<std::uint8_t>(std::bit_cast<std::int32_t>(sum) + scale.z(i));
    } else {
      out[i] = level * scale.s(i);
      distance += x[i] - x[i];
    }
    nearest_tie = std::max(nearest_tie, magnitude_key(distance));
  }
  return nearest_tie < std::bit_cast<std::int32_t>(near);
}

template <bool stochastic>
struct RoundToLevels {
  template <Isa, class Real, class Out, class Scale>
  OCTILE_INLINE static void run(LevelRun<Real, Out> p, Scale scale) {
    if constexpr (!stochastic && sizeof(Real) == 4) {
      for (; p.n >= kAheadStep; advance(p, scale)) {
        p.ahead.prefetch();
        if (multiplied_levels(p.x, scale, p.q_min, p.q_max, p.out)) continue;
        divided_levels<false>(p, scale, kAheadStep);
      }
    }
    divided_levels<stochastic>(p, scale, p.n);
  }

  template <class Run, class Scale>
  OCTILE_INLINE static void advance(Run& p, Scale& scale) {
    p.x += kAheadStep;
    p.out += kAheadStep;
    p.n -= kAheadStep;
    scale = scale.from(kAheadStep);
  }
};

// Chooses the loop. A run with one scale is common enough for a loop without arrays.
template <class Real, class Out, class Scale>
void round_to_levels(const LevelRun<Real, Out>& run, const Scale& scale) {
  run.noise ? multiversion<RoundToLevels<true>>(run, scale) : multiversion<RoundToLevels<false>>(run, scale);
}

}  // namespace octile::cpu
