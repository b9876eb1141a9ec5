// The product of s8 matrices on Hopper's matrix unit: the kernel.
//
//   y[i, j] = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]), or without a bias added to y
//
//   a   (m, k) s8, rows contiguous       b   (n, k) s8, rows contiguous       y   (m, n), the sum in s32 over all of k
//
// A persistent grid of clusters of two blocks. In each block one warpgroup copies: a warp has the copy engine fill a
// ring of stages with tiles of a and b, swizzled, 128 bytes of k at a time, of which the two blocks share one operand;
// another warp brings the scales. Two warpgroups multiply, and write y by way of shared memory and the copy engine.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/device/epilogue.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/operands.h"

namespace octile::cuda::large {

inline constexpr int kStep = 128;  // bytes of k in a stage: one swizzled row
inline constexpr int kCluster = 2;
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;

// ping_pong: each warpgroup has tiles of its own, and multiplies while the other one stores.
// cooperative: each has half of a tile's rows, and nothing is multiplied while they store.
enum class Schedule { ping_pong, cooperative };

// rows x cols of y in a block. The blocks of a cluster lie below each other and share b, or beside each other and share
// a.
template <int rows_, int cols_, bool share_b_, int stages_, int boxes_, Schedule schedule_>
struct Tile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr bool share_b = share_b_;
  static constexpr int stages = stages_;
  static constexpr int boxes = boxes_;  // of a warp, filled in turn
  static constexpr Schedule schedule = schedule_;
  static constexpr bool ping_pong = schedule == Schedule::ping_pong;
  static constexpr int cluster_rows = share_b ? kCluster : 1;
  static constexpr int cluster_cols = share_b ? 1 : kCluster;
  static constexpr int blocks = (ping_pong ? rows : rows / kConsumers) / 64;  // 64 rows each, of a warpgroup
  static constexpr int readers = ping_pong ? 4 : 4 * kConsumers;              // warps that read a stage
  static constexpr int tiles = ping_pong ? kConsumers : 1;                    // at a time
};

template <class T, class Y>
struct Shared {
  struct Stage {
    std::uint8_t a[T::rows * kStep];
    std::uint8_t b[T::cols * kStep];
  };
  using Box = cuda::Box<Y, T::cols>;

  Stage stages[T::stages];
  std::uint8_t boxes[kConsumers * 4][T::boxes][Box::bytes];  // of a warp
  float4 col_scales[T::tiles][T::cols / 2];                  // {scale, scale, bias, bias} of two columns
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
  std::uint64_t turn[kConsumers];
  std::uint64_t scales_full[T::tiles];
  std::uint64_t scales_empty[T::tiles];
};

template <class Y>
struct Arguments {
  int steps = 0;    // of k
  TileOrder order;  // of the clusters' tiles
  RowScale<float> a_scale;
  RowScale<float> b_scale;
  const Y* bias = nullptr;
  std::int64_t bias_stride = 0;
  Destination<Y> y;
  bool accumulate = false;  // y of f32: onto what it holds
  // Where a tile begins, at the latest.
  int2 last = {std::numeric_limits<int>::max(), std::numeric_limits<int>::max()};
  int engine_cols = 0;  // the copy engine may store tiles that end here or before
};

// Where a block is, and what it shares.
template <class T>
struct Place {
  int clusters = static_cast<int>(gridDim.x) / kCluster;
  int cluster = static_cast<int>(blockIdx.x) / kCluster;
  int rank = static_cast<int>(blockIdx.x) % kCluster;

  template <class Y>
  __device__ int2 origin(int number, const Arguments<Y>& arguments) const {
    const int2 tile = arguments.order[number];
    return {min((tile.x * T::cluster_rows + (T::share_b ? rank : 0)) * T::rows, arguments.last.x),
            min((tile.y * T::cluster_cols + (T::share_b ? 0 : rank)) * T::cols, arguments.last.y)};
  }
};

template <class T, class Y>
__device__ void init(Shared<T, Y>& shared) {
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), static_cast<std::uint32_t>(arrivals));
  };
  for (auto& barrier : shared.full) init(barrier, 1);
  for (auto& barrier : shared.empty) init(barrier, kCluster * T::readers);
  for (auto& barrier : shared.turn) init(barrier, 4);
  for (auto& barrier : shared.scales_full) init(barrier, 32);
  for (auto& barrier : shared.scales_empty) init(barrier, T::readers);
  ptx::barrier_init_done();
}

// One thread: a's and b's tiles, stage by stage. Of the shared operand each block loads half, for both.
template <class T, class Y>
__device__ void load_operands(Shared<T, Y>& shared, const Place<T>& place, const CUtensorMap& a, const CUtensorMap& b,
                              const Arguments<Y>& arguments) {
  constexpr std::uint16_t kBoth = 3;
  constexpr int kSharedRows = (T::share_b ? T::cols : T::rows) / kCluster;
  const int half = place.rank * kSharedRows;
  RingPosition<T::stages> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int2 origin = place.origin(t, arguments);
#pragma unroll 1
    for (int step = 0; step < arguments.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const int col = step * kStep;
      ptx::wait(ptx::shared_address(&shared.empty[at.stage]), at.parity ^ 1);
      ptx::arrive_and_expect(full, sizeof(stage));
      if constexpr (T::share_b) {
        ptx::load_box(ptx::shared_address(stage.a), a, col, origin.x, full);
        ptx::load_box_to(kBoth, ptx::shared_address(stage.b + half * kStep), b, {col, origin.y + half}, full);
      } else {
        ptx::load_box_to(kBoth, ptx::shared_address(stage.a + half * kStep), a, {col, origin.x + half}, full);
        ptx::load_box(ptx::shared_address(stage.b), b, col, origin.y, full);
      }
      at.next();
    }
  }
}

// One warp: the columns' scales and bias of each tile, any stride, long before their use. Where there is no bias it is
// -0: fma(x, y, -0) is the rounded product, its sign included.
template <class T, class Y>
__device__ void load_scales(Shared<T, Y>& shared, const Place<T>& place, const Arguments<Y>& arguments) {
  const auto column = [&](int j, float& scale, float& bias) {
    const bool inside = j < arguments.y.cols;
    scale = inside ? arguments.b_scale[j] : 0.0f;
    bias = inside && arguments.bias ? widen(__ldcg(arguments.bias + j * arguments.bias_stride)) : -0.0f;
  };
  RingPosition<T::tiles> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int first = place.origin(t, arguments).y;
    ptx::wait(ptx::shared_address(&shared.scales_empty[at.stage]), at.parity ^ 1);
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x) % 32; j < T::cols / 2; j += 32) {
      float4 pair;
      column(first + 2 * j, pair.x, pair.z);
      column(first + 2 * j + 1, pair.y, pair.w);
      shared.col_scales[at.stage][j] = pair;
    }
    ptx::arrive(ptx::shared_address(&shared.scales_full[at.stage]));
    at.next();
  }
}

// A warp of a consumer: its warpgroup, itself in that, and the barriers of the blocks that fill its stages, one a lane.
template <class T, class Y>
struct Consumer {
  Shared<T, Y>& shared;
  const Arguments<Y>& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty = ptx::in_block(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kCluster));
  std::uint32_t other_turn = ptx::in_block(ptx::shared_address(&shared.turn[group ^ 1]), ptx::cluster_rank());

  __device__ void release(int stage) const { ptx::arrive_in_cluster(empty + 8 * stage, lane < kCluster); }

  // sums (blocks x 64, cols) = a's rows by b, over all steps; leaves `at` behind the last one. One step's products are
  // in flight while the next one's are enqueued.
  __device__ void multiply(int (&sums)[T::blocks][T::cols / 2], RingPosition<T::stages>& at) const {
    const int first_row = T::ping_pong ? 0 : group * T::blocks * 64;
    int last = 0;
    for (int step = 0; step < arguments.steps; ++step) {
      ptx::wait(ptx::shared_address(&shared.full[at.stage]), at.parity);
      if constexpr (T::ping_pong) ptx::arrive_in_cluster(other_turn, step + 1 == arguments.steps && lane == 0);
      const std::uint32_t a =
          ptx::matrix_descriptor(ptx::shared_address(shared.stages[at.stage].a + first_row * kStep));
      const std::uint32_t b = ptx::matrix_descriptor(ptx::shared_address(shared.stages[at.stage].b));
      ptx::begin_products();
#pragma unroll
      for (int part = 0; part < kStep / 32; ++part) {
#pragma unroll
        for (int block = 0; block < T::blocks; ++block) {
          ptx::multiply_s8<kStep>(ptx::Columns<T::cols>(), sums[block], a + 512 * block + 2 * part, b + 2 * part,
                                  step > 0 || part > 0);
        }
      }
      ptx::commit_products();
      ptx::wait_products<1>();
      if (step > 0) release(last);
      last = at.stage;
      at.next();
    }
    ptx::wait_products<0>();
    release(last);
#pragma unroll
    for (int block = 0; block < T::blocks; ++block) ptx::hold(sums[block]);
  }

  // 64 rows of y from `at`, by way of this warp's boxes. upper and lower: the scales of this thread's two rows.
  __device__ void store(const int (&sums)[T::cols / 2], int2 at, float upper, float lower, const float4* cols,
                        int first_box, const CUtensorMap& y) const {
    using Box = typename Shared<T, Y>::Box;
    const bool by_engine = at.y + T::cols <= arguments.engine_cols;
    const int row = at.x + 16 * warp;
#pragma unroll
    for (int part = 0; part < Box::count; ++part) {
      const int col = at.y + part * Box::cols;
      std::uint8_t* const box = shared.boxes[4 * group + warp][(first_box + part) % T::boxes];
      BoxValues<Y, Box> values;
      values.compute(sums + part * 4 * Box::eights, upper, lower,
                     [&](int j) { return cols[4 * (part * Box::eights + j) + lane % 4]; });
      if (lane == 0) ptx::wait_stores_read<T::boxes - 1>();
      __syncwarp();
      values.write(ptx::shared_address(box));
      if constexpr (std::is_same_v<Y, float>) {
        if (arguments.accumulate) {
          __syncwarp();
          add_to_box<Box>(box, {row, col}, arguments.y);
        }
      }
      if (by_engine) ptx::publish_to_engines();
      __syncwarp();
      if (!by_engine) store_edge<Y, Box>(box, {row, col}, arguments.y);
      if (lane == 0) {
        if (by_engine) ptx::store_box(y, col, row, ptx::shared_address(box));
        ptx::commit_stores();  // a group for each box, if only an empty one: the wait above counts them
      }
    }
  }

  __device__ void run(const Place<T>& place, const CUtensorMap& y) const {
    const int set = T::ping_pong ? group : 0;
    const int first_row = T::ping_pong ? 0 : group * T::blocks * 64;
    const int apart = T::tiles * place.clusters;
    std::uint32_t parity = 0;
    RingPosition<T::stages> at;
    if constexpr (T::ping_pong) at = at.ahead(group * arguments.steps);
    int sums[T::blocks][T::cols / 2];
    for (int t = place.cluster + set * place.clusters; t < arguments.order.count(); t += apart) {
      int2 origin = place.origin(t, arguments);
      origin.x += first_row;
      float row_scales[T::blocks][2];
#pragma unroll
      for (int i = 0; i < 2 * T::blocks; ++i) {
        const int row = origin.x + 8 * i + 48 * (i / 2) + 16 * warp + lane / 4;
        row_scales[i / 2][i % 2] = row < arguments.y.rows ? arguments.a_scale[row] : 0.0f;
      }
      // The other warpgroup has waited for all of its stages: ours are at most a lap away, and the parities are right.
      if constexpr (T::ping_pong) ptx::wait(ptx::shared_address(&shared.turn[group]), parity ^ (group == 0));
      multiply(sums, at);
      if constexpr (T::ping_pong) at = at.ahead(arguments.steps);
      ptx::wait(ptx::shared_address(&shared.scales_full[set]), parity);
#pragma unroll
      for (int block = 0; block < T::blocks; ++block) {
        store(sums[block], {origin.x + 64 * block, origin.y}, row_scales[block][0], row_scales[block][1],
              shared.col_scales[set], block * Shared<T, Y>::Box::count, y);
      }
      if (lane == 0) ptx::arrive(ptx::shared_address(&shared.scales_empty[set]));
      __syncwarp();
      parity ^= 1;
    }
    if (lane == 0) ptx::wait_stores_read<0>();
    __syncwarp();
  }
};

template <class T, class Y>
__global__ void __launch_bounds__(kThreads, 1)
    w8a8_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                     const __grid_constant__ CUtensorMap y, const __grid_constant__ Arguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<T, Y>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const Place<T> place;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(a);
    ptx::prefetch_map(b);
    ptx::prefetch_map(y);
    init(shared);
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  wait_for_previous();
  let_next_start();
  // In this order the compiler puts the way to the first loads next to here, and not behind all the rest.
  if (warp >= 4) {
    ptx::take_registers<kConsumerRegisters>();
    Consumer<T, Y>{shared, arguments, warp / 4 - 1, warp % 4}.run(place, y);
  } else {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands(shared, place, a, b, arguments);
    if (warp == 1) load_scales(shared, place, arguments);
    __syncwarp();
  }
  ptx::cluster_arrive();  // no block leaves while the other one still writes to its shared memory
  ptx::cluster_wait();
}

}  // namespace octile::cuda::large
