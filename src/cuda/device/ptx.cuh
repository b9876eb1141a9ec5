// PTX instructions of Hopper, one function each: clusters, mbarriers, TMA, named barriers. WGMMA is in wgmma.cuh.
// Shared-memory addresses are 32-bit, as the instructions take them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace octile::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Clusters.

__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// All threads of the cluster; does not order memory.
__device__ inline void cluster_sync_relaxed() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// The same shared-memory address in another block of the cluster.
__device__ inline std::uint32_t mapa(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Distributed shared memory: addresses from mapa.
__device__ inline void store_cluster(std::uint32_t to, const float* four) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(four[0]), "f"(four[1]), "f"(four[2]),
               "f"(four[3])
               : "memory");
}
// `barrier`, of the same block as `to`, counts the 16 bytes when they have arrived.
__device__ inline void store_cluster_async(std::uint32_t to, const uint4& words, std::uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(barrier)
      : "memory");
}
__device__ inline void load_cluster(std::uint32_t from, float (&four)[4]) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
               : "r"(from)
               : "memory");
}

template <int count>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- Named barriers of a block; 0 is __syncthreads'.

template <int barrier, int threads>
__device__ inline void bar_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}
template <int barrier, int threads>
__device__ inline void bar_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}
template <int threads>
__device__ inline void bar_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}
template <int threads>
__device__ inline void bar_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

// ---- Mbarriers. A phase completes when all arrivals and all expected bytes have come in.

__device__ inline void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After all mbarrier_init: makes them visible to the cluster and to TMA.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// `barrier` comes from mapa. Predicated rather than branched, so the warp stays converged.
__device__ inline void mbarrier_arrive_cluster(std::uint32_t barrier, bool predicate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<int>(predicate))
      : "memory");
}

__device__ inline void mbarrier_arrive_expect_tx(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once this thread's earlier cp.async copies have landed.
__device__ inline void cp_async_mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of this parity has completed; the phase before a barrier's first has parity 1, and has completed.
__device__ inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
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

// Whether it has.
__device__ inline bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same, of a barrier in this block's shared memory.
__device__ inline void mbarrier_init(std::uint64_t& barrier, std::uint32_t arrivals) {
  mbarrier_init(shared_address(&barrier), arrivals);
}
__device__ inline void mbarrier_arrive(std::uint64_t& barrier) { mbarrier_arrive(shared_address(&barrier)); }
__device__ inline void mbarrier_wait(std::uint64_t& barrier, std::uint32_t parity) {
  mbarrier_wait(shared_address(&barrier), parity);
}

__device__ inline bool mbarrier_test(std::uint64_t& barrier, std::uint32_t parity) {
  return mbarrier_test(shared_address(&barrier), parity);
}

// For phase 0, an acquire at cluster scope.
__device__ inline void mbarrier_wait_acquire_cluster(std::uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(barrier)
      : "memory");
}

// ---- TMA. Coordinates count elements, the contiguous dimension first.

__device__ inline void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

// One lane of a converged warp.
__device__ inline bool elect_one() {
  std::uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, -1;\nselp.b32 %0, 1, 0, p;\n}\n" : "=r"(one));
  return one != 0;
}

__device__ inline void tma_load(std::uint32_t to, const CUtensorMap& map, int col, int row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

__device__ inline void tma_load(std::uint32_t to, const CUtensorMap& map, int3 at, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(at.z), "r"(barrier)
      : "memory");
}

// To the same address, and the same barrier, of every block of the cluster whose bit is set in `blocks`.
__device__ inline void tma_load_multicast(std::uint16_t blocks, std::uint32_t to, const CUtensorMap& map, int2 at,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(barrier), "h"(blocks)
      : "memory");
}

// L2 policies for the loads below. A weight is read once: it should be evicted first.
__device__ inline std::uint64_t evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// For data that many blocks read: 1 to 2 us faster than without a policy.
__device__ inline std::uint64_t evict_last() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void tma_load(std::uint32_t to, const CUtensorMap& map, int2 at, std::uint32_t barrier,
                                std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline void tma_load(std::uint32_t to, const CUtensorMap& map, int3 at, std::uint32_t barrier,
                                std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(at.z), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline void tma_load(std::uint32_t to, const CUtensorMap& map, int4 at, std::uint32_t barrier,
                                std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline void tma_load_multicast(std::uint16_t blocks, std::uint32_t to, const CUtensorMap& map, int2 at,
                                          std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// A bulk copy without a tensor map; `bytes` is a multiple of 16.
__device__ inline void bulk_load(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier,
                                 std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline void tma_store(const CUtensorMap& map, int col, int row, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<std::uint64_t>(&map)),
               "r"(col), "r"(row), "r"(from)
               : "memory");
}

// Adds to f32 in memory, each element once. TMA flushes subnormals to zero.
__device__ inline void tma_reduce_add(const CUtensorMap& map, int col, int row, std::uint32_t from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   reinterpret_cast<std::uint64_t>(&map)),
               "r"(col), "r"(row), "r"(from)
               : "memory");
}

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last `pending` store groups have read their shared memory, or have written global memory.
template <int pending>
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
template <int pending>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA and WGMMA, once the threads have synchronized.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Shared memory.

// Four bytes by cp.async; zeros where !inside, and then `from` is any address.
__device__ inline void cp_async_4(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}

// 16 bytes by cp.async, past the L1.
__device__ inline void cp_async_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Waits until all of this thread's copies have arrived.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 8 x 8 matrices of 16-bit values: lane 8i + r holds the address of row r of matrix i; of the values of row r, lane
// 4r + c has columns 2c and 2c + 1.
__device__ inline void stmatrix(std::uint32_t row, const std::uint32_t (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

// Each matrix transposed: the address is that of a column.
__device__ inline void stmatrix_trans(std::uint32_t col, const std::uint32_t (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(col), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

__device__ inline void stmatrix(std::uint32_t row, const std::uint32_t (&values)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(values[0]), "r"(values[1])
               : "memory");
}

__device__ inline void store_shared(std::uint32_t to, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ inline void store_shared_v2(std::uint32_t to, std::uint32_t first, std::uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

}  // namespace octile::cuda::ptx
