// Ampere's instructions for matrix products: cp.async, ldmatrix and mma.sync, one wrapper each. The PTX manual
// describes them in "cp.async", "ldmatrix", "mma.m16n8k32" and "mma.m16n8k16".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace octile::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes; both addresses are multiples of 16.
__device__ inline void copy_async(std::uint32_t to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}

// The first `count` bytes of 16, and zeros; nothing else is read.
__device__ inline void copy_async(std::uint32_t to_shared, const void* from, int count) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(count)
               : "memory");
}

// Either of them if `really`, without a branch.
__device__ inline void copy_async_if(bool really, std::uint32_t to_shared, const void* from) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0;\n\t"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(to_shared),
      "l"(from), "r"(static_cast<int>(really))
      : "memory");
}
__device__ inline void copy_async_if(bool really, std::uint32_t to_shared, const void* from, int count) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %3, 0;\n\t"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(to_shared),
      "l"(from), "r"(count), "r"(static_cast<int>(really))
      : "memory");
}

// Four bytes; zeros where !really, and then `from` is any address.
__device__ inline void copy_word_async(std::uint32_t to_shared, const void* from, bool really) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to_shared), "l"(from), "r"(really ? 4 : 0)
               : "memory");
}

// The line that has this address: a hint.
__device__ inline void prefetch_to_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Closes a group of copies, perhaps an empty one.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last `kGroups` groups of this thread have arrived.
template <int kGroups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// 16 bytes.
__device__ inline uint4 load_shared(std::uint32_t from_shared) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from_shared)
               : "memory");
  return v;
}
// 8 bytes.
__device__ inline uint2 load_shared_pair(std::uint32_t from_shared) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from_shared) : "memory");
  return v;
}
__device__ inline std::uint32_t load_shared_word(std::uint32_t from_shared) {
  std::uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from_shared) : "memory");
  return v;
}
__device__ inline void store_shared(std::uint32_t to_shared, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to_shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ inline void store_shared(std::uint32_t to_shared, std::uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to_shared), "r"(v) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lane l passes the address of row l % 8 of matrix l / 8, and gets the 4 bytes
// at 4 * (l % 4) of row l / 4 of each.
__device__ inline void load_matrices(std::uint32_t address, std::uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same matrices, transposed in units of 2 bytes: lane l gets the units l / 4 of rows 2 * (l % 4) and the next.
__device__ inline void load_matrices_transposed(std::uint32_t address, std::uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// sums (16, 8) += a (16, 32) * b (8, 32)^T. With g = lane / 4 and t = lane % 4 a lane holds of
//   a     [g or g + 8][4 t .. or 16 + 4 t ..]: a[0], a[1] are the two rows' first 16, a[2], a[3] their second
//   b     [g][4 t ..], [g][16 + 4 t ..]
//   sums  [g][2 t], [g][2 t + 1], [g + 8][2 t], [g + 8][2 t + 1]
__device__ inline void multiply_add_s8(std::int32_t (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b_first,
                                       std::uint32_t b_second) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_second));
}

// The same, all sums from `start`.
__device__ inline void multiply_s8(std::int32_t (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b_first,
                                   std::uint32_t b_second, std::int32_t start = 0) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_second), "r"(start));
}

// sums (16, 8) += a (16, 16) * b (8, 16)^T, 16-bit floats in pairs; sums lie as above, and a lane holds of
//   a     [g or g + 8][2 t, 2 t + 1 or 8 + 2 t, 8 + 2 t + 1]: a[0], a[1] the two rows' first 8, a[2], a[3] their second
//   b     [g][2 t, 2 t + 1], [g][8 + 2 t, 8 + 2 t + 1]
__device__ inline void multiply_add_16(__half, float (&sums)[4], const std::uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
__device__ inline void multiply_add_16(__nv_bfloat16, float (&sums)[4], const std::uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// The same, all sums from zero.
__device__ inline void multiply_16(__half, float (&sums)[4], const std::uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}
__device__ inline void multiply_16(__nv_bfloat16, float (&sums)[4], const std::uint32_t (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}

}  // namespace octile::cuda
