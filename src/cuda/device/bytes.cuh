// Bytes within words.
#pragma once

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

}  // namespace octile::cuda
