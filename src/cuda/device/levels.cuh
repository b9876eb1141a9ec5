// From floats to integers: the extremes of a segment, its scale and zero point, and
//
//   q = clamp(rint(x / s) + z, q_min, q_max)    stochastic: floor(x / s + u)
//
// The quotient decides only where it is near a tie; elsewhere x * (1 / s) rounds to the same level n in a quarter of
// the instructions. Whatever n is: if |x - n s| < (1/2 - 2^-17) s, then x / s is further than 2^-17 from a tie, and
// below 256 the IEEE quotient is within 2^-17 of x / s, so that it rounds to n too; from 256 on both are clamped. The
// difference is one fma, which rounds by at most 2^-25 s, and so does the bound; kNearTie has room for both. A
// bound on the error of the product, as in cpu/levels.h, would have eight times as many elements divided where x is
// spread evenly; of f16 rows of 8192 normals one in 4,600 is, since max / 2 is a tie itself.
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "cuda/device/floats.cuh"

namespace octile::cuda {

// How segments become scales, and elements become integers.
template <class Real>
struct Rules {
  Real q_min = 0;
  Real q_max = 0;
  Real min_scale = 0;
  bool symmetric = true;  // also where scales are given: then nothing is measured but whether all is finite
  bool given = false;
  bool stochastic = false;
  std::uint64_t seed = 0;
};

// A NaN on either side is the result.
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline double max_nan(double a, double b) { return a > b || a != a ? a : b; }
__device__ inline double min_nan(double a, double b) { return a < b || a != a ? a : b; }

// The smallest and the largest value, 0 included; NaN if there was one. Symmetric: `high` is the largest magnitude.
template <class Real>
struct Extremes {
  Real low = 0;
  Real high = 0;

  __device__ void include(Real x, bool symmetric) {
    if (symmetric) {
      high = max_nan(high, fabs(x));
    } else {
      low = min_nan(low, x);
      high = max_nan(high, x);
    }
  }
  __device__ void add(const Extremes& other) {
    low = min_nan(low, other.low);
    high = max_nan(high, other.high);
  }
};

// Of `width` neighbouring lanes, a power of two; for all of them.
template <class Real>
__device__ void reduce_lanes(Extremes<Real>& e, int width, bool symmetric) {
  for (int i = width / 2; i > 0; i /= 2) {
    e.high = max_nan(e.high, __shfl_xor_sync(~0u, e.high, i));
    if (!symmetric) e.low = min_nan(e.low, __shfl_xor_sync(~0u, e.low, i));
  }
}

// Of a whole one-dimensional block of whole warps; for all of it. `scratch` holds an entry per warp.
template <class Real>
__device__ Extremes<Real> reduce_block(Extremes<Real> e, bool symmetric, Extremes<Real>* scratch) {
  reduce_lanes(e, 32, symmetric);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = e;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  e = lane < blockDim.x / 32 ? scratch[lane] : Extremes<Real>{};
  reduce_lanes(e, 32, symmetric);
  return e;
}

// The scale and zero point of a segment; s is NaN, and z 0, if it is bad.
template <class Real>
struct Segment {
  Real s;
  std::int32_t z;
};

// Rounds |x| < 2^22 (2^51) to an integer, ties to even: the sum has no bits left for a fraction, and its low bits are
// the integer.
__device__ constexpr float rounder(float) { return 0x1.8p23f; }
__device__ constexpr double rounder(double) { return 0x1.8p52; }
__device__ inline std::int32_t low_bits(float x) { return __float_as_int(x); }
__device__ inline std::int32_t low_bits(double x) { return __double2loint(x); }

template <class Real>
__device__ Segment<Real> resolve(const Extremes<Real>& e, const Segment<Real>& given, const Rules<Real>& rules) {
  bool finite = isfinite(e.low) && isfinite(e.high);
  Segment<Real> g = given;
  if (!rules.given) {
    const Real range = rules.symmetric ? e.high : e.high - e.low;
    const Real steps = rules.symmetric ? rules.q_max : rules.q_max - rules.q_min;
    g.s = fmax(quotient(range, steps), rules.min_scale);
    const Real z = rules.q_min - rint(quotient(e.low, g.s));
    g.z = rules.symmetric ? 0 : static_cast<std::int32_t>(fmin(fmax(z, rules.q_min), rules.q_max));
  }
  finite = finite && isfinite(g.s);
  return finite ? g : Segment<Real>{not_a_number(Real()), 0};
}

// 1 / s where products may stand for quotients, else 0.
template <class Real>
__device__ Real inverse(Real s) {
  return s > static_cast<Real>(0x1p-80) && s < static_cast<Real>(0x1p100) ? quotient(Real(1), s) : Real(0);
}

// The noise of elements index .. index + n - 1, n up to 8: 16-bit halves of the one or two blocks that they lie in.
template <int n>
struct Noise {
  std::uint32_t words[8];

  __device__ Noise(std::uint64_t index, std::uint64_t seed) {
    const unsigned first = index % 8;
    philox_4x32_10(index / 8, seed, words);
    if (first + n > 8) philox_4x32_10(index / 8 + 1, seed, words + 4);
      // The first one moves to the front.
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = first & 4 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = first & 2 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = first & 1 ? __funnelshift_r(words[i], words[i + 1], 16) : words[i];
  }

  __device__ std::uint32_t operator[](int i) const { return words[i / 2] >> (i % 2 * 16) & 0xffffu; }
};

// rint(ratio), clamped. Clamping first changes nothing, for the limits are integers.
template <class Real>
__device__ std::int32_t nearest_level(Real ratio, Real low, Real high) {
  return low_bits(fmin(fmax(ratio, low), high) + rounder(ratio)) - low_bits(rounder(ratio));
}

template <class Real, int n>
__device__ void divided_levels(const Real (&x)[n], const Segment<Real>& g, Real q_min, Real q_max,
                               std::int32_t (&q)[n]) {
  const Real z = static_cast<Real>(g.z);
#pragma unroll
  for (int i = 0; i < n; ++i) q[i] = nearest_level(quotient(x[i], g.s), q_min - z, q_max - z) + g.z;
}

// x / s as IEEE has it, where inv is inverse(s) and not 0, and 2^-23 <= |x / s| < 2^100: the remainder of a quotient is
// exact, and corrects it. (A smaller quotient may be off by a unit of its last place, which no level shows.) From a
// quotient that is off by less than a unit of its last place that gives the IEEE quotient (Markstein's theorem), and x
// * inv is off by less than two, so that two corrections do for all x. One does for the 11 significant bits of an f16
// or a bf16: all 2^33 pairs of significands were tried.
template <int kCorrections, class Real>
__device__ Real quotient_by(Real x, Real s, Real inv) {
  Real q = x * inv;
#pragma unroll
  for (int i = 0; i < kCorrections; ++i) q = fma(fma(-q, s, x), inv, q);
  return q;
}

constexpr float kNearTie = 0.5f - 0x1.1p-17f;

// By multiplication: levels as the low bytes of `levels`, right if the result, the largest |x - n s|, is below
// kNearTie * s. `low` and `high` are the limits plus rounder(), or not needed (kClamp).
template <bool kClamp, int n>
__device__ float multiplied_levels(const float (&x)[n], float s, float inv, float low, float high,
                                   std::int32_t (&levels)[n]) {
  float farthest = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float rounded = __fmaf_rn(x[i], inv, rounder(s));
    farthest = fmaxf(farthest, fabsf(__fmaf_rn(rounder(s) - rounded, s, x[i])));
    levels[i] = low_bits(kClamp ? fminf(fmaxf(rounded, low), high) : rounded);
  }
  return farthest;
}

// Out of line, where it is rare.
__device__ __noinline__ inline float divided(float x, float s) { return quotient(x, s); }
__device__ inline double divided(double x, double s) { return quotient(x, s); }

// Whether quotient_by may divide them.
template <int n>
__device__ bool can_divide(const float (&x)[n], float inv) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) largest = fmaxf(largest, fabsf(x[i]));
  return inv != 0 && largest * inv < 0x1p100f;
}
template <int n>
__device__ bool can_divide(const double (&)[n], double) {
  return false;
}

// n elements of one segment, the first being number `index` of the matrix. `inv` is inverse(g.s).
template <class Real, int n>
__device__ void to_levels(const Real (&x)[n], const Segment<Real>& g, Real inv, const Rules<Real>& rules,
                          std::uint64_t index, std::int32_t (&q)[n]) {
  if (!(g.s == g.s)) {
#pragma unroll
    for (int i = 0; i < n; ++i) q[i] = 0;
    return;
  }
  const Real z = static_cast<Real>(g.z);
  if (rules.stochastic) {
    const Noise<n> noise(index, rules.seed);
    const bool by_product = can_divide(x, inv);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Real u = static_cast<Real>(noise[i]) * static_cast<Real>(0x1p-16);
      const Real ratio = by_product ? quotient_by<2>(x[i], g.s, inv) : divided(x[i], g.s);
      const Real level = floor(ratio + u) + z;
      q[i] = static_cast<std::int32_t>(fmin(fmax(level, rules.q_min), rules.q_max));
    }
    return;
  }
  if constexpr (sizeof(Real) == 4) {
    const float low = rules.q_min - z + rounder(z);
    const float high = rules.q_max - z + rounder(z);
    if (inv != 0 && multiplied_levels<true>(x, g.s, inv, low, high, q) < kNearTie * g.s) {
#pragma unroll
      for (int i = 0; i < n; ++i) q[i] += g.z - low_bits(rounder(z));
      return;
    }
  }
  divided_levels(x, g, rules.q_min, rules.q_max, q);
}

}  // namespace octile::cuda
