// w8a8_gemm_sm90, the kernel:
//
//   y[i, j] = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]), or without a bias added to y
//
//   a   (m, k) s8, rows contiguous       b   (n, k) s8, rows contiguous       y   (m, n), sums in s32 over all of k
//
// A persistent grid of clusters of two blocks, which share one operand by TMA multicast. In each block a producer warp
// fills a ring of stages with swizzled tiles of a and b, 128 bytes of k at a time, and another loads the scales. Two or
// three consumer warpgroups multiply by int8 WGMMA and store y through shared memory and TMA. WGMMA takes 64 rows of
// its left operand at a time and 16 of the right one, so y^T = b * a^T suits numbers of tokens that 64 does not divide
// well: then this file's a is the weight, and b the tokens.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/ceil_div.h"
#include "cuda/device/store_tiles.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/operands.h"

namespace octile::cuda::w8a8 {

inline constexpr int kTileK = 128;  // bytes of k in a stage: one swizzled row

// ---- Epilogue: scales and bias.

__device__ inline float scaled(int sum, float a_scale, float b_scale, float bias) {
  return __fmaf_rn(static_cast<float>(sum), __fmul_rn(a_scale, b_scale), bias);
}

// Sums 4j .. 4j + 3 of a thread, scaled: columns 8j + 2c, 8j + 2c + 1 of its upper row, then of its lower row. col is
// {scale, scale, bias, bias}.
__device__ inline float4 scaled_four(const int* sums, float upper, float lower, const float4& col) {
  return {scaled(sums[0], upper, col.x, col.z), scaled(sums[1], upper, col.y, col.w),
          scaled(sums[2], lower, col.x, col.z), scaled(sums[3], lower, col.y, col.w)};
}

// ---- The kernel.

// ping_pong: each consumer has tiles of its own, and multiplies while the other one stores.
// cooperative: each has half of a tile's rows, and nothing is multiplied while they store.
enum class Schedule { ping_pong, cooperative };

// rows x cols: of y, of a block. The blocks of a cluster are stacked and share b, or lie side by side and share a.
template <int rows_, int cols_, bool share_b_, int stages_, int store_buffers_, Schedule schedule_,
          int consumers_ = kConsumers, bool transposed_ = false>
struct Tile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr bool share_b = share_b_;
  static constexpr int stages = stages_;
  static constexpr int store_buffers = store_buffers_;  // of a warp, used in turn
  static constexpr Schedule schedule = schedule_;
  static constexpr int consumers = consumers_;     // warpgroups
  static constexpr bool transposed = transposed_;  // of y^T; y has 16 bits
  static constexpr int threads = (1 + consumers) * kWarpgroup;
  static constexpr int consumer_registers = consumers == kConsumers ? kConsumerRegisters : 152;
  static constexpr bool ping_pong = schedule == Schedule::ping_pong;
  static constexpr int cluster_rows = share_b ? kClusterSize : 1;
  static constexpr int cluster_cols = share_b ? 1 : kClusterSize;
  static constexpr int blocks = (ping_pong ? rows : rows / consumers) / 64;  // of 64 rows, of a warpgroup
  static constexpr int readers = ping_pong ? 4 : 4 * consumers;              // warps that read a stage
  static constexpr int tiles = ping_pong ? consumers : 1;                    // at a time
};

// Where a warpgroup has 64 rows of y^T, for TMA: parts of these columns, lines of 128 bytes, swizzled.
struct TransposedStore {
  static constexpr int rows = 64;  // of y^T
  static constexpr int cols = 48;
  static constexpr int bytes = cols * 128;
};

template <class T, class Y>
struct Shared {
  struct Stage {
    std::uint8_t a[T::rows * kTileK];
    std::uint8_t b[T::cols * kTileK];
  };
  using Store = std::conditional_t<T::transposed, TransposedStore, StoreTile<Y, T::cols>>;
  static constexpr int kStorers = T::transposed ? T::consumers : 4 * T::consumers;  // warpgroups, or warps

  Stage stages[T::stages];
  std::uint8_t store_buffers[kStorers][T::store_buffers][Store::bytes];
  float4 col_scales[T::tiles][T::cols / 2];  // {scale, scale, bias, bias} of two columns
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
  std::uint64_t turn[T::consumers];
  std::uint64_t scales_full[T::tiles];
  std::uint64_t scales_empty[T::tiles];
};

template <class Y>
struct Arguments {
  int steps = 0;    // of k
  TileOrder order;  // of the clusters' tiles
  // Of y, or of y^T:
  RowScale<float> a_scale;
  RowScale<float> b_scale;
  const Y* bias = nullptr;
  std::int64_t bias_stride = 0;
  Destination<Y> y;
  bool accumulate = false;  // y += instead of y =; y is f32
  // The last row and column at which a tile may begin.
  int2 last = {std::numeric_limits<int>::max(), std::numeric_limits<int>::max()};
  int tma_cols = 0;  // TMA may store tiles that end here or before

  // A missing bias is -0: fma(x, y, -0) is the rounded product, its sign included.
  __device__ float bias_at(bool inside, int i) const {
    return inside && bias ? widen(__ldcg(bias + i * bias_stride)) : -0.0f;
  }
};

template <class T>
struct Place : ClusterPlace {
  template <class Arguments>
  __device__ int2 origin(int number, const Arguments& arguments) const {
    const int2 tile = arguments.order[number];
    return {min((tile.x * T::cluster_rows + (T::share_b ? rank : 0)) * T::rows, arguments.last.x),
            min((tile.y * T::cluster_cols + (T::share_b ? 0 : rank)) * T::cols, arguments.last.y)};
  }
};

// One thread: tiles of a and b, stage by stage. Each block loads half of the shared operand for both.
template <class T, class Shared, class Arguments>
__device__ void load_operands(Shared& shared, const Place<T>& place, const CUtensorMap& a, const CUtensorMap& b,
                              const Arguments& arguments) {
  constexpr int kSharedRows = (T::share_b ? T::cols : T::rows) / kClusterSize;
  const int half = place.rank * kSharedRows;
  RingPosition<T::stages> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int2 origin = place.origin(t, arguments);
#pragma unroll 1
    for (int step = 0; step < arguments.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const int col = step * kTileK;
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      if constexpr (T::share_b) {
        ptx::tma_load(ptx::shared_address(stage.a), a, col, origin.x, full);
        ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(stage.b + half * kTileK), b, {col, origin.y + half},
                                full);
      } else {
        ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(stage.a + half * kTileK), a, {col, origin.x + half},
                                full);
        ptx::tma_load(ptx::shared_address(stage.b), b, col, origin.y, full);
      }
      at.next();
    }
  }
}

// One warp: scales and bias of each tile's columns, any stride, well ahead of their use.
template <class T, class Y>
__device__ void load_scales(Shared<T, Y>& shared, const Place<T>& place, const Arguments<Y>& arguments) {
  const auto column = [&](int j, float& scale, float& bias) {
    const bool inside = j < arguments.y.cols;
    scale = inside ? arguments.b_scale[j] : 0.0f;
    bias = arguments.bias_at(inside && !T::transposed, j);
  };
  RingPosition<T::tiles> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int first = place.origin(t, arguments).y;
    ptx::mbarrier_wait(shared.scales_empty[at.stage], at.parity ^ 1);
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x) % 32; j < T::cols / 2; j += 32) {
      float4 pair;
      column(first + 2 * j, pair.x, pair.z);
      column(first + 2 * j + 1, pair.y, pair.w);
      shared.col_scales[at.stage][j] = pair;
    }
    ptx::mbarrier_arrive(shared.scales_full[at.stage]);
    at.next();
  }
}

// A consumer warp: its warpgroup, its number in that, and, one per lane, the empty barriers of the blocks that fill its
// stages.
template <class T, class Y>
struct Consumer {
  Shared<T, Y>& shared;
  const Arguments<Y>& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kClusterSize));
  std::uint32_t other_turn =
      ptx::mapa(ptx::shared_address(&shared.turn[T::ping_pong ? group ^ 1 : 0]), ptx::cluster_rank());

  __device__ void release(int stage) const { ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < kClusterSize); }

  // The main loop: sums (blocks x 64, cols) = a * b^T over all steps. Leaves `at` behind the last one. One step's
  // WGMMAs are in flight while the next one's are issued.
  __device__ void multiply(int (&sums)[T::blocks][T::cols / 2], RingPosition<T::stages>& at) const {
    const int first_row = T::ping_pong ? 0 : group * T::blocks * 64;
    int last = 0;
    for (int step = 0; step < arguments.steps; ++step) {
      ptx::mbarrier_wait(shared.full[at.stage], at.parity);
      if constexpr (T::ping_pong) ptx::mbarrier_arrive_cluster(other_turn, step + 1 == arguments.steps && lane == 0);
      const std::uint32_t a = smem_descriptor(ptx::shared_address(shared.stages[at.stage].a + first_row * kTileK));
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

  // 64 rows of y^T from `at` on, scales and biases of this thread's two rows: through the warpgroup's store buffers.
  __device__ void store_transposed(const int (&sums)[T::cols / 2], int2 at, const float (&scales)[2],
                                   const float (&biases)[2], const float4* cols, const CUtensorMap& y,
                                   int& next) const {
    using Store = TransposedStore;
    static_assert(T::cols % Store::cols == 0 && T::store_buffers == 2);
    constexpr int kEights = Store::cols / 8;
    const bool leader = warp == 0 && lane == 0;
    // The column and the 16 bytes of it whose address this lane gives.
    const int col = lane / 16 * 8 + lane % 8;
    const int chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
#pragma unroll
    for (int part = 0; part < T::cols / Store::cols; ++part) {
      const std::uint32_t buffer = ptx::shared_address(shared.store_buffers[group][next]);
      next ^= 1;
      if (leader) ptx::tma_store_wait_read<1>();
      sync();
#pragma unroll
      for (int j = 0; j < kEights; j += 2) {
        std::uint32_t values[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int eight = part * kEights + j + i;
          const int* const four = sums + 4 * eight;
          const float4 scale = cols[4 * eight + lane % 4];
          values[2 * i] =
              pack<Y>(scaled(four[0], scales[0], scale.x, biases[0]), scaled(four[1], scales[0], scale.y, biases[0]));
          values[2 * i + 1] =
              pack<Y>(scaled(four[2], scales[1], scale.x, biases[1]), scaled(four[3], scales[1], scale.y, biases[1]));
        }
        ptx::stmatrix_trans(buffer + static_cast<std::uint32_t>((8 * j + col) * 128 + chunk * 16), values);
      }
      ptx::fence_proxy_async();
      sync();
      if (leader) {
        const int first = at.y + part * Store::cols;
        if (first < arguments.y.cols && at.x < arguments.y.rows) ptx::tma_store(y, at.x, first, buffer);
        ptx::tma_store_commit();
      }
    }
  }

  // All threads of this warpgroup.
  __device__ void sync() const { ptx::bar_sync<kWarpgroup>(1 + group); }

  // 64 rows of y from `at` on, through this warp's store buffers. upper and lower: the scales of this thread's two
  // rows.
  __device__ void store(const int (&sums)[T::cols / 2], int2 at, float upper, float lower, const float4* cols,
                        int first_buffer, const CUtensorMap& y) const {
    using Store = typename Shared<T, Y>::Store;
    const StoreTarget<Y> target{y, arguments.y, arguments.tma_cols, arguments.accumulate};
    store_tiles<Y, Store>(shared.store_buffers[4 * group + warp], first_buffer, {at.x + 16 * warp, at.y}, target,
                          [&](int j) { return scaled_four(sums + 4 * j, upper, lower, cols[4 * j + lane % 4]); });
  }

  __device__ void run(const Place<T>& place, const CUtensorMap& y) const {
    const int set = T::ping_pong ? group : 0;
    const int first_row = T::ping_pong ? 0 : group * T::blocks * 64;
    const int apart = T::tiles * place.clusters;
    std::uint32_t parity = 0;
    int next_buffer = 0;
    RingPosition<T::stages> at;
    if constexpr (T::ping_pong) at = at.ahead(group * arguments.steps);
    int sums[T::blocks][T::cols / 2];
    for (int t = place.cluster + set * place.clusters; t < arguments.order.count(); t += apart) {
      int2 origin = place.origin(t, arguments);
      origin.x += first_row;
      float row_scales[T::blocks][2];
      float biases[T::blocks][2];  // of y^T
#pragma unroll
      for (int i = 0; i < 2 * T::blocks; ++i) {
        const int row = origin.x + 8 * i + 48 * (i / 2) + 16 * warp + lane / 4;
        const bool inside = row < arguments.y.rows;
        row_scales[i / 2][i % 2] = inside ? arguments.a_scale[row] : 0.0f;
        if constexpr (T::transposed) biases[i / 2][i % 2] = arguments.bias_at(inside, row);
      }
      // The other consumer has waited for all of its stages, so ours are at most one lap away: the parities are valid.
      if constexpr (T::ping_pong) ptx::mbarrier_wait(shared.turn[group], parity ^ (group == 0));
      multiply(sums, at);
      if constexpr (T::ping_pong) at = at.ahead(arguments.steps);
      ptx::mbarrier_wait(shared.scales_full[set], parity);
#pragma unroll
      for (int block = 0; block < T::blocks; ++block) {
        const int2 at = {origin.x + 64 * block, origin.y};
        const float(&scales)[2] = row_scales[block];
        const float4* const cols = shared.col_scales[set];
        if constexpr (T::transposed) {
          store_transposed(sums[block], at, scales, biases[block], cols, y, next_buffer);
        } else {
          store(sums[block], at, scales[0], scales[1], cols, block * Shared<T, Y>::Store::count, y);
        }
      }
      // Every lane, though one behind a __syncwarp() would do: racecheck cannot follow that, and it costs nothing.
      ptx::mbarrier_arrive(shared.scales_empty[set]);
      __syncwarp();
      parity ^= 1;
    }
    if (lane == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }
};

template <class T, class Y>
__global__ void __launch_bounds__(T::threads, 1)
    w8a8_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                     const __grid_constant__ CUtensorMap y, const __grid_constant__ Arguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<T, Y>*>(shared_bytes);
  const int warp = uniform_warp();
  const Place<T> place;
  gemm_prologue([&] {
    ptx::prefetch_tensormap(a);
    ptx::prefetch_tensormap(b);
    ptx::prefetch_tensormap(y);
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, kClusterSize * T::readers);
    init_barriers(shared.turn, 4);
    init_barriers(shared.scales_full, 32);
    init_barriers(shared.scales_empty, 32 * T::readers);
  });
  // Not produce_and_consume: in this order the compiler places the code of the first loads here, not behind the
  // consumers'.
  if (warp >= 4) {
    ptx::setmaxnreg_inc<T::consumer_registers>();
    Consumer<T, Y>{shared, arguments, warp / 4 - 1, warp % 4}.run(place, y);
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands(shared, place, a, b, arguments);
    if (warp == 1) load_scales(shared, place, arguments);
    __syncwarp();
  }
  ptx::cluster_sync_relaxed();  // no block leaves while the other one still writes to its shared memory
}

// ---- The host's side.

inline constexpr std::int64_t kBandRows = 2048;  // of an operand that a band of tiles keeps in L2

// The clusters' tiles. kBandRows rows of the operand that blocks do not share stay in L2 while the other one streams
// past.
template <class T>
TileOrder cluster_tiles(std::int64_t rows, std::int64_t cols) {
  constexpr int kRows = T::rows * T::cluster_rows;
  constexpr int kCols = T::cols * T::cluster_cols;
  constexpr int kBand = kBandRows / (T::share_b ? kRows : kCols);
  return {static_cast<int>(ceil_div(rows, kRows)), static_cast<int>(ceil_div(cols, kCols)), kBand, T::share_b};
}

}  // namespace octile::cuda::w8a8
