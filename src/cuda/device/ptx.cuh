// The instructions of Hopper that C++ has no words for, one function each: barriers in shared memory, the copy engine,
// the matrix unit. Addresses in shared memory are 32-bit numbers here, as the instructions take them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace octile::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster meet; memory is ordered by other means.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Those that wait see what this thread wrote before.
__device__ inline void cluster_arrive_released() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The same place in the shared memory of another block of the cluster.
__device__ inline std::uint32_t in_block(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Registers are handed from the warpgroup that only copies to those that compute.
template <int count>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Barriers in shared memory. A phase ends when all arrivals, and all bytes that were announced, have come in.

__device__ inline void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After all barrier_init: the other blocks of the cluster and the copy engine see them.
__device__ inline void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// `barrier` is of in_block. Without a branch, so that the warp stays together.
__device__ inline void arrive_in_cluster(std::uint32_t barrier, bool really) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(really))
      : "memory");
}

__device__ inline void arrive_and_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended; the one before a barrier's first has parity 1, and has ended.
__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The copy engine. Coordinates of a tensor map count elements, the contiguous dimension first.

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

__device__ inline void load_box(std::uint32_t to, const CUtensorMap& map, int col, int row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

// To the same place, and the same barrier, of every block of the cluster that has its bit in `blocks`.
__device__ inline void load_box_to(std::uint16_t blocks, std::uint32_t to, const CUtensorMap& map, int2 at,
                                   std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(barrier), "h"(blocks)
      : "memory");
}

__device__ inline void store_box(const CUtensorMap& map, int col, int row, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<std::uint64_t>(&map)),
               "r"(col), "r"(row), "r"(from)
               : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last `pending` groups of stores have read their shared memory.
template <int pending>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// What this thread wrote to shared memory is seen by the copy engine and the matrix unit, once the threads have met.
__device__ inline void publish_to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 8 x 8 matrices of 16-bit values to shared memory: lane 8i + r holds the address of row r of matrix i; of the values
// of row r, lane 4r + c has columns 2c and 2c + 1.
__device__ inline void store_matrices(std::uint32_t row, const std::uint32_t (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

__device__ inline void store_matrices(std::uint32_t row, const std::uint32_t (&values)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(values[0]), "r"(values[1])
               : "memory");
}

__device__ inline void store_pair(std::uint32_t to, std::uint32_t first, std::uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

// The matrix unit.

// A matrix of swizzled rows, eight at a time. This is the lower half of its descriptor; 32 bytes further along the rows
// is 2 more, and with rows of 128 bytes 64 rows further down is 512 more.
__device__ inline std::uint32_t matrix_descriptor(std::uint32_t address) { return address >> 4 | 1u << 16; }

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last `pending` groups of products are done.
template <int pending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// sums (64 x n) of s32 = or += the product of 64 rows of 32 bytes of a by n rows of 32 bytes of b, all s8. Of the sums,
// lane 4r + c of warp w has rows 16w + r (first two of each four) and 16w + r + 8, columns 8j + 2c and 8j + 2c + 1.
template <int n>
struct Columns {};
// The upper half of a descriptor, for rows of 64 or 128 bytes: what eight take, in units of 16, and the swizzle.
template <int row_bytes>
constexpr unsigned kUpper = row_bytes / 2 | (row_bytes == 128 ? 1u : 2u) << 30;

// Keeps the compiler from reading sums before the wait above it.
template <int n>
__device__ inline void hold(int (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

// clang-format off
#define OCTILE_N16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define OCTILE_N32_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OCTILE_N32_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OCTILE_N24_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define OCTILE_N32_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OCTILE_N24_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define OCTILE_N16_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define OCTILE_N32_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OCTILE_S8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define OCTILE_S32(d, i) OCTILE_S8(d, i), OCTILE_S8(d, i + 8), OCTILE_S8(d, i + 16), OCTILE_S8(d, i + 24)
#define OCTILE_PRODUCT(shape, names, a, b, p, upper) \
  "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " p ", 0;\nmov.b64 a, {" a ", " upper "};\nmov.b64 b, {" b ", " upper "};\nwgmma.mma_async.sync.aligned." shape ".s32.s8.s8 {" names "}, a, b, p;\n}\n"
// clang-format on

template <int row_bytes>
__device__ inline void multiply_s8(Columns<32>, int (&sums)[16], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(OCTILE_PRODUCT("m64n32k32", OCTILE_N16_0, "%16", "%17", "%18", "%19")
               : OCTILE_S8(sums, 0), OCTILE_S8(sums, 8)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<64>, int (&sums)[32], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(OCTILE_PRODUCT("m64n64k32", OCTILE_N32_0, "%32", "%33", "%34", "%35")
               : OCTILE_S32(sums, 0)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<112>, int (&sums)[56], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(OCTILE_PRODUCT("m64n112k32", OCTILE_N32_0 ", " OCTILE_N24_1, "%56", "%57", "%58", "%59")
               : OCTILE_S32(sums, 0), OCTILE_S8(sums, 32), OCTILE_S8(sums, 40), OCTILE_S8(sums, 48)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<128>, int (&sums)[64], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(OCTILE_PRODUCT("m64n128k32", OCTILE_N32_0 ", " OCTILE_N32_1, "%64", "%65", "%66", "%67")
               : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<176>, int (&sums)[88], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(
      OCTILE_PRODUCT("m64n176k32", OCTILE_N32_0 ", " OCTILE_N32_1 ", " OCTILE_N24_2, "%88", "%89", "%90", "%91")
      : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32), OCTILE_S8(sums, 64), OCTILE_S8(sums, 72), OCTILE_S8(sums, 80)
      : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<192>, int (&sums)[96], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(
      OCTILE_PRODUCT("m64n192k32", OCTILE_N32_0 ", " OCTILE_N32_1 ", " OCTILE_N32_2, "%96", "%97", "%98", "%99")
      : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32), OCTILE_S32(sums, 64)
      : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<224>, int (&sums)[112], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(OCTILE_PRODUCT("m64n224k32", OCTILE_N32_0 ", " OCTILE_N32_1 ", " OCTILE_N32_2 ", " OCTILE_N16_3, "%112",
                              "%113", "%114", "%115")
               : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32), OCTILE_S32(sums, 64), OCTILE_S8(sums, 96),
                 OCTILE_S8(sums, 104)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

template <int row_bytes>
__device__ inline void multiply_s8(Columns<256>, int (&sums)[128], std::uint32_t a, std::uint32_t b, bool accumulate) {
  asm volatile(OCTILE_PRODUCT("m64n256k32", OCTILE_N32_0 ", " OCTILE_N32_1 ", " OCTILE_N32_2 ", " OCTILE_N32_3, "%128",
                              "%129", "%130", "%131")
               : OCTILE_S32(sums, 0), OCTILE_S32(sums, 32), OCTILE_S32(sums, 64), OCTILE_S32(sums, 96)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kUpper<row_bytes>));
}

#undef OCTILE_N16_0
#undef OCTILE_N32_0
#undef OCTILE_N32_1
#undef OCTILE_N24_1
#undef OCTILE_N32_2
#undef OCTILE_N24_2
#undef OCTILE_N32_3
#undef OCTILE_N16_3
#undef OCTILE_S8
#undef OCTILE_S32
#undef OCTILE_PRODUCT

}  // namespace octile::cuda::ptx
