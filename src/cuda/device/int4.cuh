// From 4-bit weights to 16-bit floats: the integers q - z, which f16 and bf16 hold exactly.
//
// A nibble u = q + 8 in the lowest bits of a float whose unit in the last place is 1 makes that float plus u: 1024 + u
// in f16, 128 + u in bf16. In f16 a nibble four bits higher fits as well, and counts 16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace octile::cuda {

template <class T>
using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class Pair>
__device__ Pair as_pair(std::uint32_t bits) {
  return reinterpret_cast<const Pair&>(bits);
}
template <class Pair>
__device__ std::uint32_t as_bits(Pair pair) {
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// The same 16 bits in both halves.
__device__ inline std::uint32_t twice(std::uint32_t half) { return half * 0x10001u; }

// (value & mask) ^ magic, in one instruction.
__device__ inline std::uint32_t and_xor(std::uint32_t value, std::uint32_t mask, std::uint32_t magic) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(value), "r"(mask), "r"(magic));
  return result;
}

// What turns biased nibbles into q - z when added, in both halves. u = 8 + z
template <class T>
struct Offset;
template <>
struct Offset<__half> {
  std::uint32_t low, high;
  // -(1024 + u); for a nibble that counts 16, -(64 + u)
  __device__ explicit Offset(unsigned u = 8) : low(twice(0xe400u + u)), high(twice(0xd400u + 16 * u)) {}
};
template <>
struct Offset<__nv_bfloat16> {
  std::uint32_t low;
  __device__ explicit Offset(unsigned u = 8) : low(twice(0xc300u + u)) {}  // -(128 + u)
};

// The eight nibbles of a word: pair i gets nibbles i and i + 4. flip: nibbles are q in two's complement, not q + 8.
template <bool flip>
__device__ void integers(std::uint32_t word, const Offset<__half>& offset, std::uint32_t (&pairs)[4]) {
  constexpr std::uint32_t kLow = 0x64006400u ^ (flip ? 0x00080008u : 0);
  constexpr std::uint32_t kHigh = 0x64006400u ^ (flip ? 0x00800080u : 0);
  const __half2 sixteenth = as_pair<__half2>(0x2c002c00u);
  const std::uint32_t above = word >> 8;
  pairs[0] = as_bits(__hadd2(as_pair<__half2>(and_xor(word, 0x000f000fu, kLow)), as_pair<__half2>(offset.low)));
  pairs[1] =
      as_bits(__hfma2(as_pair<__half2>(and_xor(word, 0x00f000f0u, kHigh)), sixteenth, as_pair<__half2>(offset.high)));
  pairs[2] = as_bits(__hadd2(as_pair<__half2>(and_xor(above, 0x000f000fu, kLow)), as_pair<__half2>(offset.low)));
  pairs[3] =
      as_bits(__hfma2(as_pair<__half2>(and_xor(above, 0x00f000f0u, kHigh)), sixteenth, as_pair<__half2>(offset.high)));
}

template <bool flip>
__device__ void integers(std::uint32_t word, const Offset<__nv_bfloat16>& offset, std::uint32_t (&pairs)[4]) {
  constexpr std::uint32_t kLow = 0x43004300u ^ (flip ? 0x00080008u : 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = as_bits(__hadd2(as_pair<__nv_bfloat162>(and_xor(word >> 4 * i, 0x000f000fu, kLow)),
                               as_pair<__nv_bfloat162>(offset.low)));
  }
}

// Eight activations, permuted to match the pairs above. packed: the weight is packed
// (docs/reference/packed-weights.md); else it is in the order of LinearArgs.
template <bool packed>
__device__ uint4 to_unpack_order(uint4 v) {
  if constexpr (packed) {
    return {__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
            __byte_perm(v.z, v.w, 0x7632)};
  }
  return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
          __byte_perm(v.y, v.w, 0x7632)};
}

}  // namespace octile::cuda
