// 4-bit weights to the int8 operand of WGMMA.
#pragma once

#include <cstdint>

#include "cuda/device/int4.cuh"
#include "cuda/device/wgmma.cuh"

namespace octile::cuda {

// From nibbles in shared memory to the s8 fragments of WGMMA. A tile of the weight, rows x 128:
//
//   row-major: the even rows, then the odd ones, lines of 64 bytes, swizzled
//     packed: rows / 16 panels of sixteen lines of 64 bytes
//
// Without zero points a byte becomes 16 q, by at most one shift and one logical operation; with them it becomes q - z,
// two more operations.
//
// A warp's 16 rows of a tile. Rows g and g + 8 of the WGMMA are rows 2g and 2g + 1 of the tile.
template <int rows, bool packed, bool zero_points>
class NibbleBytes {
 public:
  // sixteen: which 16 of the tile's rows.
  __device__ explicit NibbleBytes(unsigned sixteen) {
    const unsigned g = threadIdx.x % 32 / 4;
    const unsigned c = threadIdx.x % 4;
    if constexpr (packed) {
      place_ = sixteen * 1024 + c / 2 * 64 + g * 8;
      shift_ = c % 2 == (zero_points ? 1 : 0) ? 4 : 0;
    } else {
      place_ = (sixteen * 8 + g) * 64 + g / 2 * 16 + 2 * c;
    }
  }

  // A slice: 32 columns of 128. offsets: 8 + z in all four bytes, of the thread's two rows.
  __device__ void convert(int slice, Fragment& to, const std::uint8_t* tile, const std::uint32_t (&offsets)[2]) const {
    if constexpr (packed) {
      const uint2 first = *reinterpret_cast<const uint2*>(tile + place_ + slice * 256);
      const uint2 second = *reinterpret_cast<const uint2*>(tile + place_ + slice * 256 + 128);
      to[0] = of_panel(first.x, offsets[0]), to[1] = of_panel(first.y, offsets[1]);
      to[2] = of_panel(second.x, offsets[0]), to[3] = of_panel(second.y, offsets[1]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint8_t* const at = tile + (place_ ^ slice * 16) + h * (rows / 2 * 64);
        const std::uint32_t low = *reinterpret_cast<const std::uint16_t*>(at);
        const std::uint32_t high = *reinterpret_cast<const std::uint16_t*>(at + 8);
        const std::uint32_t halves = low | high << 16;
        // The low nibbles where a byte's nibble is expected, and the high ones.
        const std::uint32_t firsts = zero_points ? halves : halves << 4;
        const std::uint32_t seconds = zero_points ? halves >> 4 : halves;
        to[h] = of_row(__byte_perm(firsts, seconds, 0x5140), offsets[h]);
        to[h + 2] = of_row(__byte_perm(firsts, seconds, 0x7362), offsets[h]);
      }
    }
  }

 private:
  // Of four nibbles, u = q + 8.
  __device__ std::uint32_t of_panel(std::uint32_t word, std::uint32_t offset) const {
    if constexpr (!zero_points) return and_xor(word << shift_, 0xf0f0f0f0u, 0x80808080u);
    return subtract(and_xor(word >> shift_, 0x0f0f0f0fu, 0x80808080u), offset);
  }

  // Of four nibbles, q.
  __device__ static std::uint32_t of_row(std::uint32_t word, std::uint32_t offset) {
    if constexpr (!zero_points) return word & 0xf0f0f0f0u;
    return subtract(and_xor(word, 0x0f0f0f0fu, 0x88888888u), offset);
  }

  // Four bytes 128 + u: no borrow crosses a byte.
  __device__ static std::uint32_t subtract(std::uint32_t biased, std::uint32_t offset) {
    return (biased - offset) ^ 0x80808080u;
  }

  unsigned place_;  // of this thread's bytes
  unsigned shift_;  // packed: to the expected position of a nibble
};

}  // namespace octile::cuda
