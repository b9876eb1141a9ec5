// Hopper's matrix unit with its first operand from registers, and an s8 operand on its way there from a swizzled tile
// in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx.cuh"
#include "cuda/gemm/w8a16_gemm_sm90.cuh"

namespace octile::cuda {

// ---- Products.

// What products of 16-bit operands read: 16 terms of 64 rows, of which a thread has, with g = lane / 4, c = lane % 4
//   [0] row 16 warp + g, terms 2c, 2c + 1   [1] row 16 warp + g + 8, the same   [2], [3] the same, terms 2c + 8, 2c + 9
using Fragment = std::uint32_t[4];

// The other operand in shared memory, in swizzled lines of 128 bytes: a line of 64 terms for each row, or, outer-major,
// a line of 64 rows for each term, 64 lines, and then the next 64 rows. The address of a block that is not its
// cluster's first has bits above the descriptor's field.
template <bool outer>
__device__ std::uint32_t operand_descriptor(std::uint32_t address) {
  constexpr std::uint32_t kNextRows = outer ? 64 * 128 / 16 : 1;
  return (address >> 4 & 0x3fff) | kNextRows << 16;
}
// From 16 terms to the next, in a descriptor.
template <bool outer>
constexpr std::uint32_t kNextTerms = outer ? 16 * 128 / 16 : 32 / 16;

template <int n>
__device__ void hold(float (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// clang-format off
#define OCTILE_N32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OCTILE_N64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OCTILE_N48 OCTILE_N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define OCTILE_N80 OCTILE_N64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define OCTILE_N96 OCTILE_N80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OCTILE_N128 OCTILE_N96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OCTILE_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OCTILE_F16(d, i) OCTILE_F8(d, i), OCTILE_F8(d, i + 8)
#define OCTILE_F32(d, i) OCTILE_F8(d, i), OCTILE_F8(d, i + 8), OCTILE_F8(d, i + 16), OCTILE_F8(d, i + 24)
#define OCTILE_PRODUCT(shape, type, names, a0, a1, a2, a3, b, p, upper, outer) \
  "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, " p ", 0;\nmov.b64 b, {" b ", " upper "};\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, b, p, 1, 1, " outer ";\n}\n"
#define OCTILE_256(type) OCTILE_PRODUCT("m64n256k16", type, OCTILE_N128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")
#define OCTILE_192(type) OCTILE_PRODUCT("m64n192k16", type, OCTILE_N96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103")
#define OCTILE_160(type) OCTILE_PRODUCT("m64n160k16", type, OCTILE_N80, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87")
#define OCTILE_128(type) OCTILE_PRODUCT("m64n128k16", type, OCTILE_N64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
#define OCTILE_96(type) OCTILE_PRODUCT("m64n96k16", type, OCTILE_N48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55")
#define OCTILE_64(type) OCTILE_PRODUCT("m64n64k16", type, OCTILE_N32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
#define OCTILE_IN(a, b, accumulate, outer) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kOperandUpper), "n"(static_cast<int>(outer))
// clang-format on

// The upper half of a descriptor: what eight lines take, and the swizzle of 128 bytes.
constexpr std::uint32_t kOperandUpper = 1024 / 16 | 1u << 30;

// sums (64 x 256, 192, 160, 128 or 64) = or += a (64 x 16) by the operand b (256, .. x 16). Of the sums, [4j + 2h + e]
// is row 16 warp + g + 8h, column 8j + 2c + e.
#define OCTILE_MULTIPLY(count, product, ...)                                                              \
  template <class T, bool outer>                                                                          \
  __device__ void multiply_16(float(&sums)[count], const Fragment& a, std::uint32_t b, bool accumulate) { \
    if constexpr (std::is_same_v<T, __half>) {                                                            \
      asm volatile(product("f16") : __VA_ARGS__ : OCTILE_IN(a, b, accumulate, outer));                    \
    } else {                                                                                              \
      asm volatile(product("bf16") : __VA_ARGS__ : OCTILE_IN(a, b, accumulate, outer));                   \
    }                                                                                                     \
  }
OCTILE_MULTIPLY(128, OCTILE_256, OCTILE_F32(sums, 0), OCTILE_F32(sums, 32), OCTILE_F32(sums, 64), OCTILE_F32(sums, 96))
OCTILE_MULTIPLY(96, OCTILE_192, OCTILE_F32(sums, 0), OCTILE_F32(sums, 32), OCTILE_F32(sums, 64))
OCTILE_MULTIPLY(80, OCTILE_160, OCTILE_F32(sums, 0), OCTILE_F32(sums, 32), OCTILE_F16(sums, 64))
OCTILE_MULTIPLY(64, OCTILE_128, OCTILE_F32(sums, 0), OCTILE_F32(sums, 32))
OCTILE_MULTIPLY(48, OCTILE_96, OCTILE_F32(sums, 0), OCTILE_F16(sums, 32))
OCTILE_MULTIPLY(32, OCTILE_64, OCTILE_F32(sums, 0))

#undef OCTILE_N32
#undef OCTILE_N48
#undef OCTILE_N64
#undef OCTILE_N80
#undef OCTILE_N96
#undef OCTILE_N128
#undef OCTILE_F8
#undef OCTILE_F16
#undef OCTILE_F32
#undef OCTILE_PRODUCT
#undef OCTILE_256
#undef OCTILE_192
#undef OCTILE_160
#undef OCTILE_128
#undef OCTILE_96
#undef OCTILE_64
#undef OCTILE_IN
#undef OCTILE_MULTIPLY

// ---- Bytes.

// A tile of s8, 128 rows by 64 terms, and what of it a warp makes fragments of: 16 rows, of which a thread has rows 2g
// and 2g + 1 (an outer-major tile has them in one word) as rows g and g + 8 of the product.
// contraction-major: the even rows, then the odd ones, lines of 64 bytes, swizzled.
// outer-major: lines of 128 rows, one for each term, swizzled.
template <class T, bool outer>
class BytesReader {
 public:
  // sixteen: which of the tile's eight sixteens of rows.
  __device__ explicit BytesReader(unsigned sixteen) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned i = 0; i < kPlaces; ++i) {
      const unsigned twist = outer ? sixteen ^ lane % 8 : i ^ lane / 8;
      places[i] = (outer ? lane * 128 : (8 * sixteen + lane / 4) * 64 + lane % 4 * 2) + twist * 16;
      asm volatile("" : "+r"(places[i]));  // kept, rather than computed each time
    }
  }

  // Brings slice `slice` of sixteen terms, of which the scales are too, four of them.
  template <int slice>
  __device__ void fetch(const std::uint8_t* tile, const Scales16<T>* all) {
    scales = all[threadIdx.x % 4];
    if constexpr (!outer) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        words[part] =
            *reinterpret_cast<const std::uint16_t*>(tile + places[slice] + (part % 2 * 64 * 64 + part / 2 * 8));
      }
    } else if constexpr (slice % 2 == 0) {  // and the next one
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(ptx::shared_address(tile) + places[0] + 16 * 128 * slice)
                   : "memory");
    }
  }

  // The slice fetched last.
  template <int slice>
  __device__ void convert(Fragment& to) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const Pair<T> scale = scales.scale[part];
      const Pair<T> offset = scales.offset[part];
      if constexpr (outer) {
        const std::uint32_t word = words[slice % 2 * 2 + part];
        to[2 * part] = scaled_bytes<T, 0, 2>(word, scale, offset);
        to[2 * part + 1] = scaled_bytes<T, 1, 3>(word, scale, offset);
      } else {
        to[2 * part] = scaled_bytes<T, 0, 1>(words[2 * part], scale, offset);
        to[2 * part + 1] = scaled_bytes<T, 0, 1>(words[2 * part + 1], scale, offset);
      }
    }
  }

 private:
  static constexpr int kPlaces = outer ? 1 : 4;
  std::uint32_t places[kPlaces];  // of this thread's bytes: of each slice, or outer-major of the first
  std::uint32_t words[4];         // of one slice, or outer-major of two
  Scales16<T> scales;
};

}  // namespace octile::cuda
