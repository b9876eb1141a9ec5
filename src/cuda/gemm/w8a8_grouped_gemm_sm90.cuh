// w8a8_grouped_gemm_sm90, the kernel:
//
//   y[i, j] = fma(f32(sum_c a[t, c] * b[e, j, c]), a_scale[t] * b_scale[e, j], bias[e, j])
//
//   rows i of y are those of expert e, t the row of a that i is of
//   a   (rows, k) s8, rows contiguous       b   (experts * n, k) s8, rows contiguous       y   (m, n)
//
// A persistent grid over the tiles of all experts, of blocks or of clusters of two, which are stacked and share b by
// TMA multicast. The producer warpgroup fills a ring of stages, 128 bytes of k at a time: b by TMA, a by TMA or, where
// rows are gathered, by cp.async into the same swizzled lines. Each of two consumer warpgroups has tiles of its own
// (ping-pong): one multiplies by int8 WGMMA while the other one stores.
#pragma once

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/store_tiles.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/operands.h"

namespace octile::cuda::w8a8_experts {

inline constexpr int kTileK = 128;  // bytes of k in a stage: one swizzled row

// rows x cols: of y, of a block. Stages and store buffers of a warp; f32 has twice the bytes to store.
template <int rows_, int cols_, int cluster_, int stages_, int store_buffers_>
struct Tile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr int cluster = cluster_;  // blocks
  static constexpr int stages = stages_;
  static constexpr int store_buffers = store_buffers_;
  static constexpr int blocks = rows / 64;  // of 64 rows
};

template <class T, class Y>
struct Shared {
  struct Stage {
    std::uint8_t a[T::rows * kTileK];
    std::uint8_t b[T::cols * kTileK];
  };
  using Store = StoreTile<Y, T::cols>;

  Stage stages[T::stages];
  std::uint8_t store_buffers[kConsumers * 4][T::store_buffers][Store::bytes];  // of a warp
  float4 col_scales[kConsumers][T::cols / 2];  // {scale, scale, bias, bias} of two columns
  ExpertTable experts;
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
  std::uint64_t turn[kConsumers];
};

template <class Y>
struct Arguments {
  Experts experts;
  const std::uint8_t* a = nullptr;  // rows that are gathered
  std::int64_t a_pitch = 0;
  int k = 0;
  int steps = 0;  // of k
  int col_tiles = 0;
  RowScale<float> a_scale, b_scale;
  const void* bias = nullptr;  // null: none
  std::int64_t bias_stride = 0;
  DType bias_type = DType::f32;
  Destination<Y> y;
  int tma_cols = 0;  // TMA may store tiles that end here or before
};

struct Place {
  int expert;
  int row, end;  // the tile's first row, and the end of its expert's
  int col;
};

// The cluster's tiles, as a role walks them: first, first + apart .. below total.
template <class T, class Shared>
struct Walk {
  ExpertWalk tiles;
  int total;
  int rank = static_cast<int>(blockIdx.x) % T::cluster;
  int first = static_cast<int>(blockIdx.x) / T::cluster;
  int apart = static_cast<int>(gridDim.x) / T::cluster;

  __device__ Walk(const Shared& s, int columns, int experts)
      : tiles{s.experts, experts, columns}, total(tiles.count()) {}

  // In rising order.
  __device__ Place operator[](int number) {
    const int2 tile = tiles[number];
    return {tiles.expert, tiles.first_row() + (tile.x * T::cluster + rank) * T::rows, tiles.end_row(),
            tile.y * T::cols};
  }
};

// The part of b that this block loads for its cluster.
template <class T, class Stage>
__device__ void load_b(Stage& stage, const CUtensorMap& b, int col, int row, int rank, std::uint32_t full) {
  if constexpr (T::cluster == 1) {
    ptx::tma_load(ptx::shared_address(stage.b), b, col, row, full);
  } else {
    constexpr int kRows = T::cols / T::cluster;
    ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(stage.b + rank * kRows * kTileK), b,
                            {col, row + rank * kRows}, full);
  }
}

// One thread: tiles of a and b, stage by stage.
template <class T, class Shared, class Arguments>
__device__ void load_operands(Shared& shared, const CUtensorMap& a, const CUtensorMap& b, const Arguments& p, int n) {
  Walk<T, Shared> walk(shared, p.col_tiles, p.experts.count);
  RingPosition<T::stages> at;
  for (int t = walk.first; t < walk.total; t += walk.apart) {
    const Place place = walk[t];
    const int b_row = place.expert * n + place.col;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      ptx::tma_load(ptx::shared_address(stage.a), a, step * kTileK, place.row, full);
      load_b<T>(stage, b, step * kTileK, b_row, walk.rank, full);
      at.next();
    }
  }
}

// The warpgroup: rows of a by cp.async, 16 bytes of 16 of them at a time, and one thread b by TMA. What copies have
// written is made visible to WGMMA kLag stages later. Rows beyond the expert's, and terms beyond k, are left as they
// are: b has zeros there.
template <class T, class Shared, class Arguments>
__device__ void gather_operands(Shared& shared, const CUtensorMap& b, const Arguments& p, int n) {
  constexpr int kLag = 2;
  constexpr int kTurns = T::rows / 16;
  static_assert(kLag < T::stages);
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % 8, line = thread / 8;
  const std::uint32_t place_in_line = line * kTileK + (chunk ^ line % 8) * 16;
  Walk<T, Shared> walk(shared, p.col_tiles, p.experts.count);
  RingPosition<T::stages> at, landed;
  int under_way = 0;
  const auto land = [&] {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(shared.full[landed.stage]);
    landed.next();
  };
  for (int t = walk.first; t < walk.total; t += walk.apart) {
    const Place place = walk[t];
    const int b_row = place.expert * n + place.col;
    int rows[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = place.row + line + 16 * i;
      rows[i] = row < place.end ? p.experts.row_of_a(row) : -1;
    }
    int col = chunk * 16;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step, col += kTileK) {
      auto& stage = shared.stages[at.stage];
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      if (thread == 0) {
        const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
        ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.b));
        load_b<T>(stage, b, step * kTileK, b_row, walk.rank, full);
      }
      const std::uint32_t to = ptx::shared_address(stage.a) + place_in_line;
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        copy_async_if(rows[i] >= 0 && col < p.k, to + i * 16 * kTileK, p.a + rows[i] * p.a_pitch + col);
      }
      commit_copies();
      if (++under_way > kLag) {
        wait_for_copies<kLag>();
        land();
        --under_way;
      }
      at.next();
    }
  }
  wait_for_copies<0>();
  for (; under_way > 0; --under_way) land();
}

// A consumer warp: its warpgroup, and its number in that.
template <class T, class Y>
struct Consumer {
  Shared<T, Y>& shared;
  const Arguments<Y>& p;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  // One per lane, of the blocks that fill this one's stages.
  std::uint32_t empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % T::cluster));
  std::uint32_t other_turn = ptx::mapa(ptx::shared_address(&shared.turn[group ^ 1]), ptx::cluster_rank());

  __device__ void release(int stage) const { ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < T::cluster); }

  // sums (blocks x 64, cols) = a * b^T over all steps. Leaves `at` behind the last one. One step's WGMMAs are in flight
  // while the next one's are issued.
  __device__ void multiply(int (&sums)[T::blocks][T::cols / 2], RingPosition<T::stages>& at) const {
    int last = 0;
    for (int step = 0; step < p.steps; ++step) {
      ptx::mbarrier_wait(shared.full[at.stage], at.parity);
      ptx::mbarrier_arrive_cluster(other_turn, step + 1 == p.steps && lane == 0);
      const std::uint32_t a = smem_descriptor(ptx::shared_address(shared.stages[at.stage].a));
      const std::uint32_t b = smem_descriptor(ptx::shared_address(shared.stages[at.stage].b));
      ptx::wgmma_fence();
#pragma unroll
      for (int part = 0; part < kTileK / 32; ++part) {
#pragma unroll
        for (int block = 0; block < T::blocks; ++block) {
          wgmma_s8<kTileK>(sums[block], a + 512 * block + 2 * part, b + 2 * part, step > 0 || part > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (step > 0) release(last);
      last = at.stage;
      at.next();
    }
    ptx::wgmma_wait<0>();
    release(last);
#pragma unroll
    for (int block = 0; block < T::blocks; ++block) wgmma_fence_operand(sums[block]);
  }

  // Scales and biases of the tile's columns. A missing bias is -0: fma(x, y, -0) is the rounded product.
  __device__ void load_columns(const Place& place) const {
    const auto* const scales = reinterpret_cast<const float*>(reinterpret_cast<const std::uint8_t*>(p.b_scale.data) +
                                                              place.expert * p.experts.b_scale);
    const auto* const biases = static_cast<const std::uint8_t*>(p.bias) + place.expert * p.experts.bias;
    const auto column = [&](int j, float& scale, float& bias) {
      const bool inside = j < p.y.cols;
      scale = inside ? __ldcg(scales + j * p.b_scale.stride) : 0.0f;
      bias = inside && p.bias ? load_float(biases, j * p.bias_stride, p.bias_type) : -0.0f;
    };
    for (int j = warp * 32 + lane; j < T::cols / 2; j += kWarpgroup) {
      float4 pair;
      column(place.col + 2 * j, pair.x, pair.z);
      column(place.col + 2 * j + 1, pair.y, pair.w);
      shared.col_scales[group][j] = pair;
    }
  }

  // 64 rows of y. Those that are not this expert's are another's, or no expert's.
  __device__ void store(const int (&sums)[T::cols / 2], const Place& place, int block, const float (&scales)[2],
                        const CUtensorMap& map) const {
    using Store = typename Shared<T, Y>::Store;
    const int2 at = {place.row + 64 * block + 16 * warp, place.col};
    if (at.x >= place.end) return;
    Destination<Y> y = p.y;
    y.rows = place.end;
    const ExpertStoreTarget<Y> target{{map, y, p.tma_cols, false}};
    const float4* const cols = shared.col_scales[group];
    const auto scaled = [](int sum, float a_scale, float b_scale, float bias) {
      return __fmaf_rn(static_cast<float>(sum), __fmul_rn(a_scale, b_scale), bias);
    };
    store_tiles<Y, Store>(shared.store_buffers[4 * group + warp], block * Store::count, at, target,
                          [&](int j) -> float4 {
                            const float4 col = cols[4 * j + lane % 4];
                            const int* const four = sums + 4 * j;
                            return {scaled(four[0], scales[0], col.x, col.z), scaled(four[1], scales[0], col.y, col.w),
                                    scaled(four[2], scales[1], col.x, col.z), scaled(four[3], scales[1], col.y, col.w)};
                          });
  }

  __device__ void run(const CUtensorMap& y) const {
    Walk<T, Shared<T, Y>> walk(shared, p.col_tiles, p.experts.count);
    std::uint32_t parity = 0;
    RingPosition<T::stages> at;
    at = at.ahead(group * p.steps);
    int sums[T::blocks][T::cols / 2];
    for (int t = walk.first + group * walk.apart; t < walk.total; t += kConsumers * walk.apart) {
      const Place place = walk[t];
      float row_scales[T::blocks][2];
#pragma unroll
      for (int i = 0; i < 2 * T::blocks; ++i) {
        const int row = place.row + 8 * i + 48 * (i / 2) + 16 * warp + lane / 4;
        row_scales[i / 2][i % 2] = row < place.end ? p.a_scale[p.experts.row_of_a(row)] : 0.0f;
      }
      ptx::bar_sync<kWarpgroup>(1 + group);  // all warps have read the last tile's columns
      load_columns(place);
      // The other consumer has waited for all of its stages, so ours are at most one lap away: the parities are valid.
      ptx::mbarrier_wait(shared.turn[group], parity ^ (group == 0));
      multiply(sums, at);
      at = at.ahead(p.steps);
      ptx::bar_sync<kWarpgroup>(1 + group);
      if (lane == 0) ptx::tma_store_wait_read<0>();  // of the last tile: store() begins with the first buffer again
#pragma unroll
      for (int block = 0; block < T::blocks; ++block) store(sums[block], place, block, row_scales[block], y);
      parity ^= 1;
    }
    if (lane == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }
};

template <class T, class Y>
__global__ void __launch_bounds__(kGemmThreads, 1)
    w8a8_grouped_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                             const __grid_constant__ CUtensorMap y, const __grid_constant__ Arguments<Y> p) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<T, Y>*>(shared_bytes);
  const int warp = uniform_warp();
  const bool gathers = p.experts.token != nullptr;
  gemm_prologue([&] {
    ptx::prefetch_tensormap(a);
    ptx::prefetch_tensormap(b);
    ptx::prefetch_tensormap(y);
    init_barriers(shared.full, gathers ? 1 + kWarpgroup : 1);
    init_barriers(shared.empty, 4 * T::cluster);
    init_barriers(shared.turn, 4);
  });
  fill_table(shared.experts, p.experts, T::rows * T::cluster);
  if (warp >= 4) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Consumer<T, Y>{shared, p, warp / 4 - 1, warp % 4}.run(y);
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (gathers) {
      gather_operands<T>(shared, b, p, p.y.cols);
    } else if (threadIdx.x == 0) {
      load_operands<T>(shared, a, b, p, p.y.cols);
    }
    __syncwarp();
  }
  ptx::cluster_sync_relaxed();  // no block leaves while the other one still writes to its shared memory
}

}  // namespace octile::cuda::w8a8_experts
