// The frame of Hopper's large GEMMs: a persistent grid of clusters of two blocks that share an operand by TMA
// multicast; in each block a producer warpgroup, whose warps fill a ring of stages, and two consumer warpgroups, which
// multiply and store. What the warps do is up to the kernel.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/ceil_div.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/launch.h"

namespace octile::cuda {

inline constexpr int kClusterSize = 2;
inline constexpr std::uint16_t kBothBlocks = 3;  // of a cluster, as a multicast mask
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kGemmThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kMaxSharedBytes = 227 * 1024;

// ---- The ring of stages, and the tile order.

// A position in the ring, and the parity of its lap: the phase of the full barriers there. The phase of the empty
// barriers is the opposite one.
template <int stages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  // count: at most `stages`
  __device__ void next(int count = 1) {
    stage += count;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }

  __device__ RingPosition ahead(int steps) const {
    const int there = stage + steps;
    return {there % stages, parity ^ (there / stages & 1)};
  }
};

template <std::size_t n>
__device__ void init_barriers(std::uint64_t (&barriers)[n], std::uint32_t arrivals) {
  for (auto& barrier : barriers) ptx::mbarrier_init(barrier, arrivals);
}

// Tiles in bands, `band` tiles wide across the whole matrix, every second band backwards. What the grid works on at any
// time is then nearly square, and its operands stay in L2.
struct TileOrder {
  int rows = 0;  // of tiles
  int cols = 0;
  int band = 1;
  bool bands_of_rows = false;

  __host__ __device__ int count() const { return rows * cols; }

  // {row, column} of a tile.
  __device__ int2 operator[](int index) const {
    const int length = bands_of_rows ? cols : rows;
    const int width = bands_of_rows ? rows : cols;
    const int number = index / (band * length);
    const int first = number * band;
    const int across = min(band, width - first);
    const int within = index - first * length;
    int along = within / across;
    const int beside = first + within - along * across;
    if (number & 1) along = length - 1 - along;
    return bands_of_rows ? int2{beside, along} : int2{along, beside};
  }
};

// ---- The frame.

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

// Of kernels that compute y^T: tiles of rows_a by rows_b, the blocks of a cluster stacked along b.
template <int rows_a, int rows_b>
struct TransposedPlace : ClusterPlace {
  // First row of b and of a.
  __device__ int2 origin(int2 tile) const { return {(tile.x * kClusterSize + rank) * rows_b, tile.y * rows_a}; }
};

// Their clusters' tiles: rows of b down, rows of a across.
inline TileOrder transposed_order(std::int64_t m, std::int64_t n, int rows_a, int rows_b) {
  constexpr int kBand = 11;  // with six tiles of a, 66 clusters
  return {static_cast<int>(ceil_div(n, rows_b * kClusterSize)), static_cast<int>(ceil_div(m, rows_a)), kBand, true};
}

// A persistent grid, which goes over this many tiles: of as many clusters as there are tiles, or as run at once.
inline LaunchShape persistent_shape(std::int64_t tiles, int at_once, int cluster, int threads,
                                    std::size_t shared_bytes) {
  const auto clusters = static_cast<unsigned>(std::min<std::int64_t>(tiles, at_once));
  const auto blocks = static_cast<unsigned>(cluster);
  return {clusters * blocks, static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes), dim3(blocks)};
}

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
