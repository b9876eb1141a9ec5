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

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/philox.h"
#include "cpu/quantize/extremes.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"

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

// One scale and zero point for a run.
template <class Real>
struct OneScale {
  Real scale;
  std::int32_t zero;
  Real inverted;

  OneScale() = default;
  OCTILE_INLINE OneScale(Real s, std::int32_t z) : scale(s), zero(z), inverted(inverse(s)) {}
  OCTILE_INLINE Real s(std::int64_t) const { return scale; }
  OCTILE_INLINE std::int32_t z(std::int64_t) const { return zero; }
  OCTILE_INLINE Real inv(std::int64_t) const { return inverted; }
};

// One for each `advance` steps of kAheadStep elements, or, where it is 0, for all.
template <class Real>
struct ScaleSteps {
  const OneScale<Real>* scales;
  std::int64_t advance;

  OCTILE_INLINE OneScale<Real> step() const { return *scales; }
  OCTILE_INLINE ScaleSteps from(std::int64_t i) const { return {scales + i / kAheadStep * advance, advance}; }
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
  OCTILE_INLINE ScaleEach step() const { return *this; }
  OCTILE_INLINE ScaleEach from(std::int64_t i) const {
    return {scales + i, inverses + i, affine ? zeros + i : nullptr};
  }
};

// The scale and zero point of a segment; s is NaN if the segment is bad.
template <class Real>
struct Segment {
  Real s;
  std::int32_t z;
};

// Symmetric scales of `count` segments.
struct ScalesOfMagnitudes {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Extremes<Real>* __restrict extremes, std::int64_t count, Real q_max, Real least,
                                Segment<Real>* __restrict segments) {
    for (std::int64_t k = 0; k < count; ++k) {
      // The bits of a magnitude are its key; one that is not finite leaves a scale that is not.
      const Real s = std::bit_cast<Real>(extremes[k].high) / q_max;
      const Real most = s > least ? s : least;
      const bool finite = extremes[k].high < kInfinityKey<Real> && most < std::numeric_limits<Real>::infinity();
      segments[k] = {finite ? most : std::numeric_limits<Real>::quiet_NaN(), 0};
    }
  }
};

// The scales of `count` segments of `length` elements, for each element.
template <bool affine>
struct SpreadScales {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Segment<Real>* __restrict segments, std::int64_t count, std::int64_t length,
                                Real* __restrict s, Real* __restrict inverses, std::int32_t* __restrict z) {
    if (length == 1) {
      for (std::int64_t k = 0; k < count; ++k) s[k] = segments[k].s;
      for (std::int64_t k = 0; k < count; ++k) inverses[k] = inverse(segments[k].s);
      for (std::int64_t k = 0; affine && k < count; ++k) z[k] = segments[k].z;
      return;
    }
    for (std::int64_t k = 0; k < count; ++k) {
      const OneScale<Real> one(segments[k].s, segments[k].z);
      std::int64_t i = 0;
      for (; i + 32 <= length; i += 32) {
        for (std::int64_t j = 0; j < 32; ++j) s[i + j] = one.scale;
        for (std::int64_t j = 0; j < 32; ++j) inverses[i + j] = one.inverted;
        for (std::int64_t j = 0; affine && j < 32; ++j) z[i + j] = one.zero;
      }
      for (; i < length; ++i) {
        s[i] = one.scale;
        inverses[i] = one.inverted;
        if (affine) z[i] = one.zero;
      }
      s += length, inverses += length, z += length;
    }
  }
};

// The 16-bit halves that `uniform` takes for elements index .. index + n - 1; the first is noise[index % 8].
struct FillNoise {
  template <Isa>
  OCTILE_INLINE static void run(std::uint64_t first_block, std::int64_t blocks, std::uint64_t seed,
                                std::uint16_t* __restrict noise) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::uint64_t counter = first_block + static_cast<std::uint64_t>(b);
      const std::array<std::uint32_t, 4> words = philox_4x32_10(counter, seed);
      for (int w = 0; w < 4; ++w) {
        noise[8 * b + 2 * w] = static_cast<std::uint16_t>(words[static_cast<std::size_t>(w)]);
        noise[8 * b + 2 * w + 1] = static_cast<std::uint16_t>(words[static_cast<std::size_t>(w)] >> 16);
      }
    }
  }
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
  bool fits = false;  // nothing rounds to a level beyond q_min and q_max
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

// Ratios that round to other levels by product and by quotient differ from a tie by less; see above.
OCTILE_INLINE std::int32_t tie_key(float q_min, float q_max) {
  const float limit = q_max - q_min;  // of |q - z|, as z is in the range
  return std::bit_cast<std::int32_t>(0.5f - (limit + 1) * 0x1p-22f);
}

// a * b + c, rounded once where that is one instruction.
template <Isa isa>
OCTILE_INLINE float multiply_add(float a, float b, float c) {
  if constexpr (isa == Isa::baseline) return a * b + c;
  return std::fma(a, b, c);
}

// kAheadStep elements by multiplication. False if one of them was near a tie, beyond 2^22 or not finite: then they have
// to be done again by division.
template <Isa isa, bool clamp, class Out, class Scale>
OCTILE_INLINE bool multiplied_levels(const LevelRun<float, Out>& p, const Scale& scale) {
  const float* __restrict x = p.x;
  Out* __restrict out = p.out;
  std::int32_t nearest_tie = 0;
  for (std::int64_t i = 0; i < kAheadStep; ++i) {
    const float rounded = multiply_add<isa>(x[i], scale.inv(i), kRounder<float>);
    const float distance = multiply_add<isa>(x[i], scale.inv(i), kRounder<float> - rounded);
    nearest_tie = std::max(nearest_tie, magnitude_key(distance));
    const float low = p.q_min - static_cast<float>(scale.z(i)) + kRounder<float>;
    const float high = p.q_max - static_cast<float>(scale.z(i)) + kRounder<float>;
    const float level = clamp ? clamped(rounded, low, high) : rounded;
    if constexpr (sizeof(Out) == 1) {
      out[i] = static_cast<std::uint8_t>(std::bit_cast<std::int32_t>(level) + scale.z(i));
    } else {
      out[i] = (level - kRounder<float>)*scale.s(i);
    }
  }
  return nearest_tie < tie_key(p.q_min, p.q_max);
}

template <bool stochastic>
struct RoundToLevels {
  template <Isa isa, class Real, class Out, class Scale>
  OCTILE_INLINE static void run(LevelRun<Real, Out> p, Scale scale) {
    if constexpr (!stochastic && sizeof(Real) == 4) {
      p.fits ? multiply<isa, false>(p, scale) : multiply<isa, true>(p, scale);
    }
    for (; p.n > kAheadStep; advance(p, scale)) divided_levels<stochastic>(p, scale.step(), kAheadStep);
    if (p.n > 0) divided_levels<stochastic>(p, scale.step(), p.n);
  }

  template <Isa isa, bool clamp, class Out, class Scale>
  OCTILE_INLINE static void multiply(LevelRun<float, Out>& p, Scale& scale) {
    for (; p.n >= kAheadStep; advance(p, scale)) {
      p.ahead.prefetch();
      const auto step = scale.step();
      if (!multiplied_levels<isa, clamp>(p, step)) divided_levels<false>(p, step, kAheadStep);
    }
  }

  template <class Run, class Scale>
  OCTILE_INLINE static void advance(Run& p, Scale& scale) {
    p.x += kAheadStep;
    p.out += kAheadStep;
    if (p.noise) p.noise += kAheadStep;
    p.n -= kAheadStep;
    scale = scale.from(kAheadStep);
  }
};

// f16 and bf16 as stored, finite unless their scale is NaN.
template <class T>
struct NarrowRun {
  const T* x;
  float q_min, q_max;
  std::int64_t n;
  Ahead ahead;
  std::uint8_t* out;
  bool fits;  // nothing rounds to a level beyond q_min and q_max, and there are no zero points
};

struct NarrowLimits {
  float q_min, q_max;
};

// By one multiplication, and a correction by the error of the product: that is the IEEE quotient of an f16 or a bf16 by
// an f32 (all 2^33 pairs of significands were tried, docs/notes/gpu.md) unless it is so small that it rounds to 0. So
// ties need no division, and there is no buffer of floats.
struct RoundNarrow {
  template <Isa, class T, class Scale>
  OCTILE_INLINE static void run(NarrowRun<T> p, Scale scale) {
    p.fits ? steps<false>(p, scale) : steps<true>(p, scale);
  }

 private:
  template <bool clamp, class T, class Scale>
  OCTILE_INLINE static void steps(NarrowRun<T>& p, Scale& scale) {
    for (; p.n >= kAheadStep; p.n -= kAheadStep, scale = scale.from(kAheadStep)) {
      p.ahead.prefetch();
      step<clamp>(p, scale.step(), kAheadStep);
    }
    if (p.n > 0) step<clamp>(p, scale.step(), p.n);
  }

  // Of a finite x, by what can be vectorized.
  OCTILE_INLINE static float widened(const BFloat16& x) { return x; }
  OCTILE_INLINE static float widened(const Half& x) {
    const std::uint32_t bits = x.bits;
    const float magnitude = std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | (bits & 0x8000) << 16);
  }

  // The integer is in the low bits.
  template <bool clamp, class Scale>
  OCTILE_INLINE static std::int32_t level(const NarrowLimits& limits, const Scale& scale, std::int64_t i, float ratio) {
    if constexpr (!clamp) return std::bit_cast<std::int32_t>(ratio + kRounder<float>);
    const float z = static_cast<float>(scale.z(i));
    const float inside = clamped(ratio, limits.q_min - z, limits.q_max - z);
    return std::bit_cast<std::int32_t>(inside + kRounder<float>) + scale.z(i);
  }

  template <bool clamp, class T, class Scale>
  OCTILE_INLINE static void step(NarrowRun<T>& p, const Scale& scale, std::int64_t n) {
    const NarrowLimits limits = {p.q_min, p.q_max};
    const T* __restrict x = p.x;
    std::uint8_t* __restrict out = p.out;
    p.x += n, p.out += n;
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const float value = widened(x[i]), inv = scale.inv(i);
      const float product = value * inv;
      const float quotient = std::fma(std::fma(-product, scale.s(i), value), inv, product);
      // A product beyond the limits is clamped as its quotient is; an infinite one cannot be corrected.
      const bool beyond = clamp && magnitude_key(product) > std::bit_cast<std::int32_t>(0x1p20f);
      out[i] = static_cast<std::uint8_t>(level<clamp>(limits, scale, i, beyond ? product : quotient));
      largest = std::max(largest, magnitude_key(inv));
    }
    if (largest > kInfinityKey<float>) divide<clamp>(limits, x, out, scale, n);
  }

  // Where a scale has no inverse.
  template <bool clamp, class T, class Scale>
  OCTILE_INLINE static void divide(const NarrowLimits& limits, const T* x, std::uint8_t* out, const Scale& scale,
                                   std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const float s = scale.s(i);
      out[i] = static_cast<std::uint8_t>(s == s ? level<clamp>(limits, scale, i, widened(x[i]) / s) : 0);
    }
  }
};

// Chooses the loop. A run with one scale is common enough for a loop without arrays.
template <class Real, class Out, class Scale>
void round_to_levels(const LevelRun<Real, Out>& run, const Scale& scale) {
  run.noise ? multiversion<RoundToLevels<true>>(run, scale) : multiversion<RoundToLevels<false>>(run, scale);
}

}  // namespace octile::cpu
