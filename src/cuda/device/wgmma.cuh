// WGMMA: D (64, n) = A (64, k) * B (n, k)^T, or D += it, one instruction of a warpgroup. B is in shared memory, A
// there or in registers. s8 with sums in s32, 32 terms at a time; f16 and bf16 with sums in f32, 16 terms.
//
// With g = lane / 4 and c = lane % 4, sums[4j + 2h + e] of a thread of warp w is row 16w + g + 8h, column 8j + 2c + e.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace octile::cuda {

namespace ptx {

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last `pending` groups have completed.
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

}  // namespace ptx

// Keeps the compiler from moving accesses to the sums across the wait above it.
template <int n>
__device__ inline void wgmma_fence_operand(int (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}
template <int n>
__device__ inline void wgmma_fence_operand(float (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// A in registers. f16 and bf16: [0] row 16 warp + g, terms 2c and 2c + 1; [1] row 16 warp + g + 8, the same terms; [2],
// [3] the same rows, terms 2c + 8 and 2c + 9. s8: terms 4c to 4c + 3, and 4c + 16 to 4c + 19.
using Fragment = std::uint32_t[4];

// The lower half of a shared-memory descriptor of swizzled, K-major rows. In its units 32 bytes further along a row is
// 2 more, and, with rows of 128 bytes, 64 rows further down is 512 more.
__device__ inline std::uint32_t smem_descriptor(std::uint32_t address) { return address >> 4 | 1u << 16; }

// The same for addresses of any block of a cluster, which have bits above the descriptor's field. outer: MN-major, a
// line of 64 rows for each term, 64 lines, and then the next 64 rows.
template <bool outer>
__device__ std::uint32_t smem_descriptor_in_cluster(std::uint32_t address) {
  constexpr std::uint32_t kNextRows = outer ? 64 * 128 / 16 : 1;
  return (address >> 4 & 0x3fff) | kNextRows << 16;
}
// From 16 terms of 16 bits to the next, in a descriptor.
template <bool outer>
constexpr std::uint32_t kNextTerms = outer ? 16 * 128 / 16 : 32 / 16;

// The upper half: the stride between groups of eight rows, in units of 16 bytes, and the swizzle, of 64 or 128 bytes.
template <int row_bytes>
constexpr unsigned kDescriptorUpper = row_bytes / 2 | (row_bytes == 128 ? 1u : 2u) << 30;

// clang-format off
#define OCTILE_E0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define OCTILE_E1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define OCTILE_E2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define OCTILE_E3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define OCTILE_E4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define OCTILE_E5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define OCTILE_E6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define OCTILE_E7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define OCTILE_E8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define OCTILE_E9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define OCTILE_E10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define OCTILE_E11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define OCTILE_E12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define OCTILE_E13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define OCTILE_E14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define OCTILE_E15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define OCTILE_LIST_16 OCTILE_E0 ", " OCTILE_E1
#define OCTILE_LIST_32 OCTILE_LIST_16 ", " OCTILE_E2 ", " OCTILE_E3
#define OCTILE_LIST_48 OCTILE_LIST_32 ", " OCTILE_E4 ", " OCTILE_E5
#define OCTILE_LIST_56 OCTILE_LIST_48 ", " OCTILE_E6
#define OCTILE_LIST_64 OCTILE_LIST_56 ", " OCTILE_E7
#define OCTILE_LIST_72 OCTILE_LIST_64 ", " OCTILE_E8
#define OCTILE_LIST_80 OCTILE_LIST_72 ", " OCTILE_E9
#define OCTILE_LIST_88 OCTILE_LIST_80 ", " OCTILE_E10
#define OCTILE_LIST_96 OCTILE_LIST_88 ", " OCTILE_E11
#define OCTILE_LIST_104 OCTILE_LIST_96 ", " OCTILE_E12
#define OCTILE_LIST_112 OCTILE_LIST_96 ", " OCTILE_E12 ", " OCTILE_E13
#define OCTILE_LIST_128 OCTILE_LIST_112 ", " OCTILE_E14 ", " OCTILE_E15
#define OCTILE_R8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define OCTILE_REGS_16(c, d) OCTILE_R8(c, d, 0), OCTILE_R8(c, d, 8)
#define OCTILE_REGS_32(c, d) OCTILE_REGS_16(c, d), OCTILE_R8(c, d, 16), OCTILE_R8(c, d, 24)
#define OCTILE_REGS_48(c, d) OCTILE_REGS_32(c, d), OCTILE_R8(c, d, 32), OCTILE_R8(c, d, 40)
#define OCTILE_REGS_56(c, d) OCTILE_REGS_48(c, d), OCTILE_R8(c, d, 48)
#define OCTILE_REGS_64(c, d) OCTILE_REGS_56(c, d), OCTILE_R8(c, d, 56)
#define OCTILE_REGS_72(c, d) OCTILE_REGS_64(c, d), OCTILE_R8(c, d, 64)
#define OCTILE_REGS_80(c, d) OCTILE_REGS_72(c, d), OCTILE_R8(c, d, 72)
#define OCTILE_REGS_88(c, d) OCTILE_REGS_80(c, d), OCTILE_R8(c, d, 80)
#define OCTILE_REGS_96(c, d) OCTILE_REGS_88(c, d), OCTILE_R8(c, d, 88)
#define OCTILE_REGS_104(c, d) OCTILE_REGS_96(c, d), OCTILE_R8(c, d, 96)
#define OCTILE_REGS_112(c, d) OCTILE_REGS_96(c, d), OCTILE_R8(c, d, 96), OCTILE_R8(c, d, 104)
#define OCTILE_REGS_128(c, d) OCTILE_REGS_112(c, d), OCTILE_R8(c, d, 112), OCTILE_R8(c, d, 120)
// clang-format on

// Of an instruction with `count` sums and n columns; the numbers are those of the operands after the sums.

// sums = or += A * B, both in shared memory, s8, rows of 64 or 128 bytes. _of_zero: sums = A * B; before it the
// registers of the sums hold nothing, and are the compiler's.
#define OCTILE_WGMMA_S8(count, n, a, b, p, upper)                                                                \
  template <int row_bytes>                                                                                       \
  __device__ void wgmma_s8(int(&sums)[count], std::uint32_t left, std::uint32_t right, bool accumulate) {        \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #p                                        \
                 ", 0;\n"                                                                                        \
                 "mov.b64 a, {%" #a ", %" #upper "};\nmov.b64 b, {%" #b ", %" #upper                             \
                 "};\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" OCTILE_LIST_##count "}, a, b, p;\n}\n" \
                 : OCTILE_REGS_##count("+r", sums)                                                               \
                 : "r"(left), "r"(right), "r"(static_cast<int>(accumulate)), "n"(kDescriptorUpper<row_bytes>));  \
  }                                                                                                              \
  template <int row_bytes>                                                                                       \
  __device__ void wgmma_s8_of_zero(int(&sums)[count], std::uint32_t left, std::uint32_t right) {                 \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, 0, 0;\nmov.b64 a, {%" #a ", %" #p            \
                 "};\nmov.b64 b, {%" #b ", %" #p                                                                 \
                 "};\n"                                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" OCTILE_LIST_##count "}, a, b, p;\n}\n" \
                 : OCTILE_REGS_##count("=r", sums)                                                               \
                 : "r"(left), "r"(right), "n"(kDescriptorUpper<row_bytes>));                                     \
  }
OCTILE_WGMMA_S8(16, 32, 16, 17, 18, 19)
OCTILE_WGMMA_S8(32, 64, 32, 33, 34, 35)
OCTILE_WGMMA_S8(56, 112, 56, 57, 58, 59)
OCTILE_WGMMA_S8(64, 128, 64, 65, 66, 67)
OCTILE_WGMMA_S8(72, 144, 72, 73, 74, 75)
OCTILE_WGMMA_S8(88, 176, 88, 89, 90, 91)
OCTILE_WGMMA_S8(96, 192, 96, 97, 98, 99)
OCTILE_WGMMA_S8(104, 208, 104, 105, 106, 107)
OCTILE_WGMMA_S8(112, 224, 112, 113, 114, 115)
OCTILE_WGMMA_S8(128, 256, 128, 129, 130, 131)

// The same with A in registers, rows of 128 bytes.
#define OCTILE_WGMMA_S8_RS(count, n, a0, a1, a2, a3, b, p, upper)                                                  \
  __device__ inline void wgmma_s8(int(&sums)[count], const Fragment& left, std::uint32_t right, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #p ", 0;\nmov.b64 b, {%" #b ", %" #upper       \
                 "};\n"                                                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" OCTILE_LIST_##count                      \
                 "}, "                                                                                             \
                 "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, b, p;\n}\n"                                            \
                 : OCTILE_REGS_##count("+r", sums)                                                                 \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right),                             \
                   "r"(static_cast<int>(accumulate)), "n"(kDescriptorUpper<128>));                                 \
  }
OCTILE_WGMMA_S8_RS(16, 32, 16, 17, 18, 19, 20, 21, 22)
OCTILE_WGMMA_S8_RS(32, 64, 32, 33, 34, 35, 36, 37, 38)
OCTILE_WGMMA_S8_RS(64, 128, 64, 65, 66, 67, 68, 69, 70)
OCTILE_WGMMA_S8_RS(96, 192, 96, 97, 98, 99, 100, 101, 102)

// sums = or += A * B, A in registers, f16 or bf16, B in lines of 128 bytes. outer: B is MN-major.
#define OCTILE_WGMMA_F32_OF(type, count, n, a0, a1, a2, a3, b, p, upper, mn)                               \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #p ", 0;\nmov.b64 b, {%" #b ", %" #upper \
               "};\n"                                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" OCTILE_LIST_##count    \
               "}, "                                                                                       \
               "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, b, p, 1, 1, %" #mn ";\n}\n"                      \
               : OCTILE_REGS_##count("+f", sums)                                                           \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right),                       \
                 "r"(static_cast<int>(accumulate)), "n"(kDescriptorUpper<128>), "n"(static_cast<int>(outer)))
#define OCTILE_WGMMA_F32(count, ...)                                                                           \
  template <class T, bool outer = false>                                                                       \
  __device__ void wgmma_f32(float(&sums)[count], const Fragment& left, std::uint32_t right, bool accumulate) { \
    if constexpr (std::is_same_v<T, __half>) {                                                                 \
      OCTILE_WGMMA_F32_OF("f16", count, __VA_ARGS__);                                                          \
    } else {                                                                                                   \
      OCTILE_WGMMA_F32_OF("bf16", count, __VA_ARGS__);                                                         \
    }                                                                                                          \
  }
OCTILE_WGMMA_F32(16, 32, 16, 17, 18, 19, 20, 21, 22, 23)
OCTILE_WGMMA_F32(32, 64, 32, 33, 34, 35, 36, 37, 38, 39)
OCTILE_WGMMA_F32(48, 96, 48, 49, 50, 51, 52, 53, 54, 55)
OCTILE_WGMMA_F32(64, 128, 64, 65, 66, 67, 68, 69, 70, 71)
OCTILE_WGMMA_F32(80, 160, 80, 81, 82, 83, 84, 85, 86, 87)
OCTILE_WGMMA_F32(96, 192, 96, 97, 98, 99, 100, 101, 102, 103)
OCTILE_WGMMA_F32(128, 256, 128, 129, 130, 131, 132, 133, 134, 135)

#undef OCTILE_WGMMA_S8
#undef OCTILE_WGMMA_S8_RS
#undef OCTILE_WGMMA_F32_OF
#undef OCTILE_WGMMA_F32

}  // namespace octile::cuda
