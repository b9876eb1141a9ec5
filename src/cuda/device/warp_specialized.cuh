// The frame of Hopper's large GEMMs: a persistent grid of clusters of two blocks that share an operand by TMA
// multicast; in each block a producer warpgroup, whose warps fill a ring of stages, and two consumer warpgroups, which
// multiply and store. What the warps do is up to the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/grid.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"

namespace octile::cuda {

inline constexpr int kClusterSize = 2;
inline constexpr std::uint16_t kBothBlocks = 3;  // of a cluster, as a multicast mask
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kGemmThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kMaxSharedBytes = 227 * 1024;

// A persistent grid: where a block is.
struct ClusterPlace {
  int clusters = static_cast<int>(gridDim.x) / kClusterSize;
  int cluster = static_cast<int>(blockIdx.x) / kClusterSize;
  int rank = static_cast<int>(blockIdx.x) % kClusterSize;
};

// The operands of kernels that compute y^T = B * A^T and dequantize B in registers. B's even and odd rows come apart,
// so that a thread gets two neighbouring ones.
struct GemmMaps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap b_odd;
  CUtensorMap y;

  __device__ void prefetch() const {
    ptx::prefetch_tensormap(a);
    ptx::prefetch_tensormap(b);
    ptx::prefetch_tensormap(b_odd);
    ptx::prefetch_tensormap(y);
  }
};

__device__ inline int uniform_warp() {  // by a shuffle, so that the compiler knows it is uniform
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
}

// Before the first access to global memory. init(): prefetches the tensor maps and initializes the barriers.
template <class Init>
__device__ void gemm_prologue(const Init& init) {
  if (threadIdx.x == 0) {
    init();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_sync_relaxed();
  wait_for_previous();
  let_next_start();
}

// Registers: the producers' and the consumers'. produce(warp): in each warp of the producers; consume(warpgroup, warp).
template <int producer_registers, int consumer_registers, class Produce, class Consume>
__device__ void produce_and_consume(int warp, const Produce& produce, const Consume& consume) {
  if (warp < 4) {
    ptx::setmaxnreg_dec<producer_registers>();
    produce(warp);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<consumer_registers>();
    consume(warp / 4 - 1, warp % 4);
  }
  ptx::cluster_sync_relaxed();  // no block leaves while another one reads its shared memory, or writes to it
}

}  // namespace octile::cuda
