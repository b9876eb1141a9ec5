// The quantizer in the common case: symmetric, to nearest, into bytes, in whole aligned vectors of 16 bytes.
#pragma once

#include "cuda/device/bytes.cuh"
#include "cuda/device/levels.cuh"
#include "plan/kernel.h"

namespace octile::cuda {

// The largest magnitude, NaN if there is a NaN. 16-bit floats are compared as they are, two at a time.
template <class T>
struct Magnitude {
  T largest = 0;

  __device__ void include(const Vector<T>& v) {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) largest = max_nan(largest, fabs(v.at[i]));
  }
  __device__ T value() const { return largest; }
};

template <class T, class Pair>
struct PackedMagnitude {
  Pair largest = {T(0.0f), T(0.0f)};

  __device__ void include(const Vector<T>& v) {
    const auto* pairs = reinterpret_cast<const Pair*>(&v);
#pragma unroll
    for (int i = 0; i < kVectorSize<T> / 2; ++i) largest = __hmax2_nan(largest, __habs2(pairs[i]));
  }
  __device__ float value() const { return max_nan(widen(largest.x), widen(largest.y)); }
};

template <>
struct Magnitude<__half> : PackedMagnitude<__half, __half2> {};
template <>
struct Magnitude<__nv_bfloat16> : PackedMagnitude<__nv_bfloat16, __nv_bfloat162> {};

// Of no negative numbers: they are in order as integers are, and NaN comes last.
__device__ inline float max_of_warp(float x) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x))); }

__device__ inline float max_of_lanes(float x, int width = 32) {
  for (int i = width / 2; i > 0; i /= 2) x = max_nan(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

struct PlainRules {
  float q_min, q_max, min_scale;
  bool given;
  bool fits;  // nothing rounds to a level beyond q_min and q_max
};

inline PlainRules plain_rules(const QuantizeProblem& p) {
  return {static_cast<float>(p.q_min), static_cast<float>(p.q_max), static_cast<float>(p.min_scale),
          p.scale == ScaleSource::given,
          p.scale == ScaleSource::dynamic && p.rounding == Rounding::nearest && p.q_min <= -p.q_max};
}

// What the elements of a segment are rounded with. s is NaN in a bad segment. Products stand for quotients where
// |x - n s| is below `sure`, which is 0 where they cannot, and infinite in a bad segment.
struct PlainScale {
  float s, inv, sure;

  __device__ bool good() const { return s == s; }
};

// `given` counts where rules.given.
__device__ inline PlainScale plain_scale(const PlainRules& rules, float largest, float given) {
  const float s = rules.given ? given : fmaxf(__fdiv_rn(largest, rules.q_max), rules.min_scale);
  const bool finite = largest <= 0x1.fffffep127f && s <= 0x1.fffffep127f;
  if (!finite) return {not_a_number(s), 0.0f, __int_as_float(0x7f800000)};
  const float inv = inverse(s);
  return {s, inv, inv != 0 ? kNearTie * s : 0.0f};
}

// The low bytes of `levels`; false if they have to be divided.
template <int n>
__device__ bool plain_levels(const float (&x)[n], const PlainScale& g, const PlainRules& rules,
                             std::int32_t (&levels)[n]) {
  const float low = rules.q_min + rounder(g.s);
  const float high = rules.q_max + rounder(g.s);
  const float farthest = rules.fits ? multiplied_levels<false>(x, g.s, g.inv, low, high, levels)
                                    : multiplied_levels<true>(x, g.s, g.inv, low, high, levels);
  return farthest < g.sure;
}

// A scale to divide by, as product and corrections. s is NaN in a bad segment; inv is 0 there, and where s is so small
// or so large that only a division will do.
struct Divisor {
  float s, inv;
};

// `given` counts where rules.given.
__device__ inline Divisor divisor(const PlainRules& rules, float largest, float given) {
  const float s = rules.given ? given : fmaxf(__fdiv_rn(largest, rules.q_max), rules.min_scale);
  const bool finite = largest <= 0x1.fffffep127f && s <= 0x1.fffffep127f;
  const float inv = inverse(s);
  return {finite ? s : not_a_number(s), finite && largest * inv < 0x1p100f ? inv : 0.0f};
}

// The level of a quotient, plus rounder(): its low bits are the integer. To nearest, or the integer below ratio + u.
template <bool kStochastic>
__device__ inline float plus_rounder(float ratio, float u) {
  return kStochastic ? __fadd_rd(ratio + u, rounder(u)) : ratio + rounder(ratio);
}
__device__ inline float clamped(float sum, const PlainRules& rules) {
  return fminf(fmaxf(sum, rules.q_min + rounder(sum)), rules.q_max + rounder(sum));
}

// As bytes; zeros where the segment is bad.
template <int n>
struct LevelBytes {
  std::uint32_t words[n / 4];

  __device__ LevelBytes(const std::int32_t (&levels)[n], bool good) {
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      words[i / 4] = good ? low_bytes(levels[i], levels[i + 1], levels[i + 2], levels[i + 3]) : 0;
    }
  }
  __device__ void set(std::uint64_t all) {
    words[0] = static_cast<std::uint32_t>(all);
    if constexpr (n == 8) words[1] = static_cast<std::uint32_t>(all >> 32);
  }
  // kStream: the caches need not keep them.
  template <bool kStream = false>
  __device__ void store(void* p) const {
    if constexpr (n == 8) {
      const uint2 both = {words[0], words[1]};
      kStream ? __stcs(static_cast<uint2*>(p), both) : static_cast<void>(*static_cast<uint2*>(p) = both);
    } else {
      kStream ? __stcs(static_cast<unsigned*>(p), words[0]) : static_cast<void>(*static_cast<unsigned*>(p) = words[0]);
    }
  }
};

// The rare vector that needs a division; out of line, to keep it out of the loops' registers and instructions.
template <class T>
__device__ __noinline__ std::uint64_t divided_bytes(uint4 v, float factor, float s, float q_min, float q_max) {
  constexpr int n = kVectorSize<T>;
  float x[n];
  std::int32_t levels[n];
  widen(*reinterpret_cast<const Vector<T>*>(&v), x);
#pragma unroll
  for (int i = 0; i < n; ++i) levels[i] = nearest_level(quotient(__fmul_rn(x[i], factor), s), q_min, q_max);
  const LevelBytes<n> bytes(levels, true);
  return n == 8 ? bytes.words[0] | std::uint64_t{bytes.words[n / 4 - 1]} << 32 : bytes.words[0];
}

__device__ __noinline__ inline std::int32_t divided_level(float x, float s, float q_min, float q_max) {
  return nearest_level(quotient(x, s), q_min, q_max);
}

// The bytes of a vector of one segment.
template <class T>
__device__ LevelBytes<kVectorSize<T>> plain_bytes(const Vector<T>& v, const PlainScale& g, const PlainRules& rules) {
  constexpr int n = kVectorSize<T>;
  float x[n];
  std::int32_t levels[n];
  widen(v, x);
  const bool sure = plain_levels(x, g, rules, levels);
  LevelBytes<n> bytes(levels, g.good());
  if (!sure) bytes.set(divided_bytes<T>(*reinterpret_cast<const uint4*>(&v), 1.0f, g.s, rules.q_min, rules.q_max));
  return bytes;
}

}  // namespace octile::cuda
