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

}  // namespace octile::cuda
