// From s8 and a scale along the contraction to f16 or bf16.
//
// A byte v in the lowest bits of a 16-bit float is v steps, the step being the type's smallest number: in f16 a
// subnormal, in bf16 that or, from 128 on, in the first binade, whose step is the same. So with v = q + 128 one fma
// makes
//   q * scale * 2^(shift + exponent of the step) = v steps * scale' - 128 steps * scale',   scale' = scale * 2^shift
// of them. Scales are rounded to 16 bits, and so is the product; 128 steps * scale' is exact but for scales so far
// below the largest one that T has no bits left for them.
//
// The shift brings the largest scale to the top of what T holds: none overflows, and as few bits as possible are lost
// at the other end. y gets it back. One scale for all is left to y altogether, and then nothing is rounded here. With u
// of T the result is within
//   sum |a b scale| (2u + k 2^-24) + sum |a| largest scale 2^-15 (f16 alone) + k largest scale 2^-116 (bf16 alone)
// of the exact one, and half a unit in the last place of y. The last term: the matrix unit takes subnormals for zeros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/operands.h"

namespace octile::cuda {

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// Those of a thread for 16 terms: 2c, 2c + 1, and 2c + 8, 2c + 9.
template <class T>
struct alignas(16) Scales16 {
  Pair<T> scale[2];   // scale'
  Pair<T> offset[2];  // -128 steps * scale'
};

template <class T>
__device__ Pair<T> offset_of(Pair<T> scale) {
  constexpr std::uint32_t kFactor = 0x80808080u;  // twice -128 steps, in either type
  return __hmul2(scale, reinterpret_cast<const Pair<T>&>(kFactor));
}

// Bytes `first` and `second` of a word, times two scales.
template <class T, int first, int second>
__device__ std::uint32_t scaled_bytes(std::uint32_t bytes, Pair<T> scale, Pair<T> offset) {
  constexpr unsigned kPlaces = first | 4u << 4 | second << 8 | 4u << 12;
  const std::uint32_t steps = __byte_perm(bytes ^ 0x80808080u, 0, kPlaces);
  const Pair<T> product = __hfma2(reinterpret_cast<const Pair<T>&>(steps), scale, offset);
  return reinterpret_cast<const std::uint32_t&>(product);
}

// exponent: of the step. largest: that of the largest scale'. guard: what is added to its bits, lest it be rounded to
// the next power of two, which f16 does not have.
template <class T>
struct Step;
template <>
struct Step<__half> {
  static constexpr int exponent = -24;
  static constexpr int largest = 15;
  static constexpr unsigned guard = 0x1000;
};
template <>
struct Step<__nv_bfloat16> {
  static constexpr int exponent = -133;
  static constexpr int largest = 125;  // so that y's factor is an f32 wherever the scale is not enormous
  static constexpr unsigned guard = 0;
};

struct Scaling {
  int shift;
  float after;  // what y is multiplied by
};

// largest: the bits of the largest magnitude among the scales.
template <class T>
__device__ Scaling scaling(const RowScale<float>& scale, unsigned largest) {
  constexpr int kBias = 127;
  constexpr int kAbove = Step<T>::largest + Step<T>::exponent;
  if (scale.stride == 0) return {Step<T>::largest, ldexpf(scale.data ? __ldcg(scale.data) : scale.value, -kAbove)};
  const int exponent = static_cast<int>((largest + Step<T>::guard) >> 23) - kBias;
  const int after = min(exponent - kAbove, kBias);  // at least -118
  return {-Step<T>::exponent - after, ldexpf(1.0f, after)};
}

// The bits of the largest finite magnitude among `count` scales, by `threads` threads, of which this is one, in whole
// warps: an atomicMax a warp on `largest` in shared memory. Past the first-level cache, which a grid that starts early
// may find stale.
__device__ inline void find_largest(const RowScale<float>& scale, std::int64_t count, int2 thread_of,
                                    unsigned* largest) {
  constexpr int kAtOnce = 8;
  constexpr unsigned kInfinity = 0x7f800000u;
  unsigned most = 0;
  for (std::int64_t i = thread_of.x; i < count; i += kAtOnce * thread_of.y) {
    unsigned found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int64_t at = min(i + j * thread_of.y, count - 1);
      found[j] = __float_as_uint(__ldcg(scale.data + at * scale.stride)) & ~(1u << 31);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) most = max(most, found[j] < kInfinity ? found[j] : 0);
  }
  most = __reduce_max_sync(0xffffffff, most);
  if (threadIdx.x % 32 == 0) atomicMax(largest, most);
}

}  // namespace octile::cuda
