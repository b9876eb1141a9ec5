// The tile scheduler of w8a16_gemm_sm90 and w4a16_gemm_sm90, which compute y^T and may split K: a persistent grid of
// clusters, in which pairs of stacked blocks share a by multicast. With few tiles each pair of a cluster has a part of
// K; where the last wave would leave half of the clusters idle, the two blocks of a pair split K. The first part's
// block adds the sums.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/message.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp_specialized.cuh"

namespace octile::cuda {

struct SplitTiles {
  int steps = 0;    // of k
  int parts = 1;    // of k
  TileOrder order;  // of the clusters' tiles: rows of b down, rows of a across
  int halved = 0;   // of the last tiles, after whole waves
};

// A block's share of a tile: its first rows of b and of a, and its part of K.
struct SplitTask {
  int2 origin;
  int part;
  int parts;
  int first_step;
  int steps;

  // In units of this many steps.
  __device__ void take_part(int all_steps, int unit) {
    const int units = (all_steps + unit - 1) / unit;
    first_step = units * part / parts * unit;
    steps = min(units * (part + 1) / parts * unit, all_steps) - first_step;
  }
};

// unit: steps that are not parted. The two blocks of a pair compute stacked tiles. Of a tile that is halved a pair
// computes one, and each block half of its K.
template <int rows_a, int rows_b, int unit>
struct SplitPlace {
  const SplitTiles& p;
  int clusters;
  int cluster;
  int rank;  // in its pair
  SplitTask whole;

  __device__ explicit SplitPlace(const SplitTiles& tiles) : p(tiles) {
    const int blocks = kClusterSize * p.parts;
    clusters = static_cast<int>(gridDim.x) / blocks;
    cluster = static_cast<int>(blockIdx.x) / blocks;
    const int in_cluster = static_cast<int>(blockIdx.x) % blocks;
    rank = in_cluster % kClusterSize;
    whole.part = in_cluster / kClusterSize;
    whole.parts = p.parts;
    whole.take_part(p.steps, unit);
  }

  __device__ int tasks() const { return p.order.count() + p.halved; }
  __device__ bool is_halved(int index) const { return index >= p.order.count() - p.halved; }
  // Whether this block's last tile is split along K.
  __device__ bool adds() const { return p.parts > 1 || cluster < kClusterSize * p.halved; }

  __device__ SplitTask operator[](int index) const {
    SplitTask task = whole;
    int tile = index;
    int row = rank;
    if (is_halved(index)) {
      const int first = p.order.count() - p.halved;
      tile = first + (index - first) / kClusterSize;
      row = (index - first) % kClusterSize;
      task.part = rank;
      task.parts = kClusterSize;
      task.take_part(p.steps, unit);
    }
    const int2 at = p.order[tile];
    task.origin = {(at.x * kClusterSize + row) * rows_b, at.y * rows_a};
    return task;
  }

  // The pair's blocks, as a multicast mask.
  __device__ std::uint16_t pair() const { return static_cast<std::uint16_t>(kBothBlocks << kClusterSize * whole.part); }

  // An empty barrier, as this lane finds it in one of the blocks that fill its block's stages: both of the pair (in
  // turns over the lanes), or its own where a block fills its stages alone.
  __device__ std::uint32_t barrier_of(const std::uint64_t* empty, int lane, bool both) const {
    const int block = kClusterSize * whole.part + (both ? lane % kClusterSize : rank);
    return ptx::mapa(ptx::shared_address(empty), static_cast<std::uint32_t>(block));
  }

  // The block of the cluster with this part of the same tile.
  __device__ std::uint32_t block_of(int part) const {
    return static_cast<std::uint32_t>(p.parts > 1 ? kClusterSize * part + rank : part);
  }

  // All threads of a producer's warp, at its end: add_parts.
  __device__ void join_adding() const {
    if (!adds()) return;
    ptx::cluster_arrive_release();
    ptx::cluster_wait();
  }
};

// Adds the sums of a task's parts, in order, in the block of the first part, through `room` in shared memory, which
// no copy fills any more. All threads of the consumers, count sums each, of the same task in the whole cluster.
// barrier: of the consumers.
template <int barrier, int count, class Place>
__device__ void add_parts(float (&sums)[count], const SplitTask& task, const Place& place, std::uint32_t room) {
  constexpr int kFours = count / 4;
  constexpr int kInFlight = kFours % 8 == 0 ? 8 : 4;
  constexpr int kBetween = kConsumers * kWarpgroup * 16;
  static_assert(kFours % kInFlight == 0);
  const std::uint32_t mine = room + (threadIdx.x - kWarpgroup) * 16;
  ptx::bar_sync<barrier, kConsumers * kWarpgroup>();  // all stages are read
  if (task.part > 0) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * kBetween), "f"(sums[4 * i]),
                   "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3])
                   : "memory");
    }
  }
  ptx::cluster_arrive_release();
  ptx::cluster_wait();
  if (task.part > 0) return;
  for (int part = 1; part < task.parts; ++part) {
    const std::uint32_t from = ptx::mapa(mine, place.block_of(part));
#pragma unroll
    for (int first = 0; first < kFours; first += kInFlight) {
      float fours[kInFlight][4];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        ptx::load_cluster(from + (first + i) * kBetween, fours[i]);
      }
#pragma unroll
      for (int i = 0; i < 4 * kInFlight; ++i) sums[4 * first + i] += fours[i / 4][i % 4];
    }
  }
}

// ---- The host's side.

inline constexpr int kMaxParts = 4;  // of K, a pair of blocks each

struct SplitChoice {
  int rows_a = 0;
  int parts = 1;
  int halved = 0;  // of the last tiles
  double seconds = std::numeric_limits<double>::infinity();
};

// The choice of the least seconds: choice_of(T(), parts) for each T that with_each_tile(body) calls body(T()) with.
template <class WithEachTile, class ChoiceOf>
SplitChoice best_split(const WithEachTile& with_each_tile, const ChoiceOf& choice_of) {
  SplitChoice best;
  with_each_tile([&](auto tile) {
    for (int parts = 1; parts <= kMaxParts; ++parts) {
      if (const SplitChoice one = choice_of(tile, parts); one.seconds < best.seconds) best = one;
    }
  });
  return best;
}

inline std::string split_detail(const SplitChoice& choice, int rows_b) {
  return message("tile ", choice.rows_a, "x", rows_b, ", clusters of ", kClusterSize, "x", choice.parts, ", ",
                 choice.halved, " halved");
}

}  // namespace octile::cuda
