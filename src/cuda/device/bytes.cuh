// Bytes within words, and from s8 to 16-bit floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace octile::cuda {

// Bytes (r, c) of four words of four columns to four words of four rows.
__device__ inline void transpose_4x4(const std::uint32_t (&rows)[4], std::uint32_t (&cols)[4]) {
  const std::uint32_t a = __byte_perm(rows[0], rows[1], 0x5140);
  const std::uint32_t b = __byte_perm(rows[2], rows[3], 0x5140);
  const std::uint32_t c = __byte_perm(rows[0], rows[1], 0x7362);
  const std::uint32_t d = __byte_perm(rows[2], rows[3], 0x7362);
  cols[0] = __byte_perm(a, b, 0x5410);
  cols[1] = __byte_perm(a, b, 0x7632);
  cols[2] = __byte_perm(c, d, 0x5410);
  cols[3] = __byte_perm(c, d, 0x7632);
}

// The lowest bytes of four words.
__device__ inline std::uint32_t low_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// 16 bytes from byte `shift` of 32 on.
__device__ inline uint4 shifted_bytes(const uint4& first, const uint4& second, unsigned shift) {
  std::uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
  const unsigned bits = shift % 4 * 8;
  return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
          __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
}

// Bytes `first` and `second` of a word as two 16-bit floats.
template <class T>
struct FromBytes;

template <>
struct FromBytes<__half> {
  using Pair = __half2;
  std::uint32_t word;

  __device__ explicit FromBytes(std::uint32_t bytes) : word(bytes ^ 0x80808080u) {}

  // 0x64 before a byte u makes 1024 + u.
  template <int kFirst, int kSecond>
  __device__ Pair pair() const {
    const std::uint32_t raised = __byte_perm(word, 0x64646464u, 0x4040 | kFirst | kSecond << 8);
    return __hsub2(reinterpret_cast<const Pair&>(raised), __half2half2(__ushort_as_half(0x6480)));
  }
};

template <>
struct FromBytes<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  std::uint32_t low, sign;

  __device__ explicit FromBytes(std::uint32_t bytes) : low(bytes & 0x7f7f7f7fu), sign(bytes & 0x80808080u) {}

  // 0x43 before the lower seven bits u makes 128 + u, before the eighth alone 128 or 256: the byte is their difference.
  template <int kFirst, int kSecond>
  __device__ Pair pair() const {
    constexpr int kOrder = 0x4040 | kFirst | kSecond << 8;
    const std::uint32_t raised = __byte_perm(low, 0x43434343u, kOrder);
    const std::uint32_t raise = __byte_perm(sign, 0x43434343u, kOrder);
    return __hsub2(reinterpret_cast<const Pair&>(raised), reinterpret_cast<const Pair&>(raise));
  }
};

}  // namespace octile::cuda
