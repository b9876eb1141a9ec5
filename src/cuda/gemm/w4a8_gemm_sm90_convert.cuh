// Hopper's matrix unit on a 4-bit weight: s8 by s8, the first operand from registers, where nibbles have just become
// bytes. The tile of the weight in shared memory has 128 rows of 128 terms:
//
//   as LinearArgs has it: the even rows, then the odd ones, lines of 64 bytes, swizzled
//   packed: eight panels of sixteen lines of 64 bytes
//
// Without zero points a byte holds 16 q, which takes one shift, or none, and one operation on bits; with them it is
// q - z, two operations more.
#pragma once

#include <cstdint>

#include "cuda/device/int4.cuh"
#include "cuda/device/ptx.cuh"

namespace octile::cuda {

// 32 terms of 64 rows, of which a thread has, with g = lane / 4, c = lane % 4
//   [0] row 16 warp + g, terms 4c to 4c + 3   [1] row 16 warp + g + 8, the same   [2], [3] the same, terms 4c + 16 on
using BytesFragment = std::uint32_t[4];

// The other operand in shared memory, in swizzled lines of 128 terms. The address of a block that is not its cluster's
// first has bits above the descriptor's field. 32 terms further is 2 more.
__device__ inline std::uint32_t lines_descriptor(std::uint32_t address) { return (address >> 4 & 0x3fff) | 1u << 16; }
constexpr std::uint32_t kLinesUpper = 1024 / 16 | 1u << 30;  // what eight lines take, and the swizzle of 128 bytes

// clang-format off
#define OCTILE_S8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define OCTILE_S32(d, i) OCTILE_S8(d, i), OCTILE_S8(d, i + 8), OCTILE_S8(d, i + 16), OCTILE_S8(d, i + 24)
#define OCTILE_N64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// clang-format on

// sums (64 x 128) = or += a (64 x 32) by b (128 x 32). Of the sums, [4j + 2h + e] is row 16 warp + g + 8h, column
// 8j + 2c + e.
__device__ inline void multiply_32(int (&sums)[64], const BytesFragment& a, std::uint32_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, %70};\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" OCTILE_N64 "}, {%64, %65, %66, %67}, b, p;\n}\n"
      : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kLinesUpper));
}

#define OCTILE_N96                                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, " \
  "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, " \
  "%90, %91, %92, %93, %94, %95"

// The same with 192 columns.
__device__ inline void multiply_32(int (&sums)[96], const BytesFragment& a, std::uint32_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %101, 0;\nmov.b64 b, {%100, %102};\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.s32.s8.s8 {" OCTILE_N96 "}, {%96, %97, %98, %99}, b, p;\n}\n"
      : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32), OCTILE_S32(sums, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kLinesUpper));
}
#undef OCTILE_N96

#undef OCTILE_S8
#undef OCTILE_S32
#undef OCTILE_N64

// What of a tile a warp makes fragments of: 16 rows, of which a thread has rows 2g and 2g + 1 as rows g and g + 8 of
// the product.
template <bool packed, bool zero_points>
class NibbleBytes {
 public:
  static constexpr int kTileBytes = 128 * 64;

  // sixteen: which of the tile's eight sixteens of rows.
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

  // 32 terms of 128. offsets: four times 8 + z, of the thread's two rows.
  template <int slice>
  __device__ void convert(BytesFragment& to, const std::uint8_t* tile, const std::uint32_t (&offsets)[2]) const {
    if constexpr (packed) {
      const uint2 first = *reinterpret_cast<const uint2*>(tile + place_ + slice * 256);
      const uint2 second = *reinterpret_cast<const uint2*>(tile + place_ + slice * 256 + 128);
      to[0] = of_panel(first.x, offsets[0]), to[1] = of_panel(first.y, offsets[1]);
      to[2] = of_panel(second.x, offsets[0]), to[3] = of_panel(second.y, offsets[1]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint8_t* const at = tile + (place_ ^ slice * 16) + h * kTileBytes / 2;
        const std::uint32_t low = *reinterpret_cast<const std::uint16_t*>(at);
        const std::uint32_t high = *reinterpret_cast<const std::uint16_t*>(at + 8);
        const std::uint32_t pieces = low | high << 16;
        // Of each byte its second term, where a term's nibble is expected, and beside it the first one.
        const std::uint32_t firsts = zero_points ? pieces : pieces << 4;
        const std::uint32_t seconds = zero_points ? pieces >> 4 : pieces;
        to[h] = of_row(__byte_perm(firsts, seconds, 0x5140), offsets[h]);
        to[h + 2] = of_row(__byte_perm(firsts, seconds, 0x7362), offsets[h]);
      }
    }
  }

 private:
  // Of four nibbles, u = q + 8.
  __device__ std::uint32_t of_panel(std::uint32_t word, std::uint32_t offset) const {
    if constexpr (!zero_points) return raise(word << shift_, 0xf0f0f0f0u, 0x80808080u);
    return subtract(raise(word >> shift_, 0x0f0f0f0fu, 0x80808080u), offset);
  }

  // Of four nibbles, q.
  __device__ static std::uint32_t of_row(std::uint32_t word, std::uint32_t offset) {
    if constexpr (!zero_points) return word & 0xf0f0f0f0u;
    return subtract(raise(word, 0x0f0f0f0fu, 0x88888888u), offset);
  }

  // Of four bytes 128 + u, of which nothing is borrowed.
  __device__ static std::uint32_t subtract(std::uint32_t raised, std::uint32_t offset) {
    return (raised - offset) ^ 0x80808080u;
  }

  unsigned place_;  // of this thread's bytes
  unsigned shift_;  // packed: to where a term's nibble is expected
};

}  // namespace octile::cuda
