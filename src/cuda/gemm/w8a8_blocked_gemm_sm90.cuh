// w8a8_blocked_gemm_sm90, the kernel:
//
//   acc_g = sum_{c in block g} a[i, c] * b[j, c];  t = fma(f32(acc_g), a_scale[i, g], t), g ascending, from t = 0
//   y[i, j] = t, or added to y
//
//   a  (m, k) s8, rows contiguous    b  (n, k) s8, rows contiguous    a_scale  (blocks, m)    y  (m, n)
//
// The frame is that of w8a8_gemm_sm90. Each consumer warpgroup has 64 rows of the tile, its sums in s32 and their
// totals in f32. It has two sets of sums: while it folds one block into the totals, the tensor cores multiply the next.
#pragma once

#include "cuda/gemm/w8a8_gemm_sm90.cuh"

namespace octile::cuda::w8a8 {

// 128 x 128, and the blocks of a cluster lie side by side. More sums than these do not fit the registers twice.
struct BlockedTile {
  static constexpr int rows = 64 * kConsumers;
  static constexpr int cols = 128;
  static constexpr bool share_b = false;
  static constexpr int stages = 6;
  static constexpr int store_buffers = 1;  // of a warp
  static constexpr int cluster_rows = 1;
  static constexpr int cluster_cols = kClusterSize;
};

inline constexpr int kScaleBlocks = 4;  // whose scales are in shared memory at a time

template <class Y>
struct BlockedShared {
  using T = BlockedTile;
  struct Stage {
    std::uint8_t a[T::rows * kTileK];
    std::uint8_t b[T::cols * kTileK];
  };
  using Store = StoreTile<Y, T::cols>;

  Stage stages[T::stages];
  std::uint8_t store_buffers[kConsumers * 4][T::store_buffers][Store::bytes];  // of a warp
  float scales[kScaleBlocks][T::rows];
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
  std::uint64_t scales_full[kScaleBlocks];
  std::uint64_t scales_empty[kScaleBlocks];
};

// totals = fma(f32(sums), scale, totals).
template <int n>
__device__ void fold(const int (&sums)[n], float2 scale, float (&totals)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    totals[i] = __fmaf_rn(static_cast<float>(sums[i]), i % 4 < 2 ? scale.x : scale.y, totals[i]);
  }
}

template <class Y>
struct BlockedArguments {
  int steps = 0;        // of k, kTileK terms each
  int block_steps = 1;  // of a block
  TileOrder order;      // of the clusters' tiles
  const float* a_scale = nullptr;
  std::int64_t a_scale_pitch = 0;  // from one block to the next
  Destination<Y> y;
  bool accumulate = false;  // y += instead of y =; y is f32
  // The last row and column at which a tile may begin.
  int2 last = {std::numeric_limits<int>::max(), std::numeric_limits<int>::max()};
  int tma_cols = 0;  // TMA may store tiles that end here or before
};

// One warp: the scales of each block's rows. A load into registers would have the consumers wait for L2 in each block.
template <class Y>
__device__ void load_scales(BlockedShared<Y>& shared, const Place<BlockedTile>& place,
                            const BlockedArguments<Y>& arguments) {
  using T = BlockedTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<kScaleBlocks> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int first = place.origin(t, arguments).x;
    const float* scales = arguments.a_scale + first;
#pragma unroll 1
    for (int step = 0; step < arguments.steps; step += arguments.block_steps) {
      ptx::mbarrier_wait(shared.scales_empty[at.stage], at.parity ^ 1);
#pragma unroll
      for (int row = 0; row < T::rows; row += 32) {
        const bool inside = first + row + lane < arguments.y.rows;
        ptx::cp_async_4(&shared.scales[at.stage][row + lane], inside ? scales + row + lane : arguments.a_scale, inside);
      }
      ptx::cp_async_mbarrier_arrive(ptx::shared_address(&shared.scales_full[at.stage]));
      at.next();
      scales += arguments.a_scale_pitch;
    }
  }
}

// A warp of a consumer.
template <class Y>
struct BlockedConsumer {
  using T = BlockedTile;

  BlockedShared<Y>& shared;
  const BlockedArguments<Y>& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  // One per lane, the empty barriers of the blocks that fill this one's stages.
  std::uint32_t empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kClusterSize));

  __device__ void release(int stage) const { ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < kClusterSize); }

  struct Block {
    int sums[T::cols / 2];
    float2 scale;  // of the thread's two rows
  };
  using Totals = float[T::cols / 2];

  struct State {
    RingPosition<T::stages> at;
    RingPosition<kScaleBlocks> scales;
    int last = 0;       // the stage of the step before
    bool first = true;  // no step is under way
  };

  // Begins a step of a block: its sums are complete after the next wait. The first WGMMA of a block overwrites them:
  // with one that adds, and a false predicate, 8192 cubed in blocks of 256 took 1.1 times as long.
  template <bool first>
  __device__ void multiply(Block& block, State& state) const {
    ptx::mbarrier_wait(shared.full[state.at.stage], state.at.parity);
    const auto& stage = shared.stages[state.at.stage];
    const std::uint32_t a = smem_descriptor(ptx::shared_address(stage.a + group * 64 * kTileK));
    const std::uint32_t b = smem_descriptor(ptx::shared_address(stage.b));
    ptx::wgmma_fence();
    if constexpr (first) wgmma_s8_of_zero<kTileK>(block.sums, a, b);
#pragma unroll
    for (int part = first; part < kTileK / 32; ++part) {
      wgmma_s8<kTileK>(block.sums, a + 2 * part, b + 2 * part, true);
    }
    ptx::wgmma_commit();
  }

  // Waits for the step before, if there is one.
  __device__ void advance(State& state) const {
    ptx::wgmma_wait<1>();
    if (!state.first) release(state.last);
    state.last = state.at.stage;
    state.at.next();
  }

  // A block of `steps` steps. meanwhile(): once the first one is under way, and all before it are done.
  template <class Meanwhile>
  __device__ void multiply_block(Block& block, int steps, State& state, const Meanwhile& meanwhile) const {
    ptx::mbarrier_wait(shared.scales_full[state.scales.stage], state.scales.parity);
    const float* const scales = shared.scales[state.scales.stage] + group * 64 + 16 * warp + lane / 4;
    block.scale = {scales[0], scales[8]};
    ptx::mbarrier_arrive(shared.scales_empty[state.scales.stage]);  // every lane: racecheck cannot follow __syncwarp()
    state.scales.next();
    multiply<true>(block, state);
    advance(state);
    meanwhile();
    state.first = false;
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      multiply<false>(block, state);
      advance(state);
    }
  }

  __device__ static void fold_block(Block& block, Totals& totals) {
    wgmma_fence_operand(block.sums);
    fold(block.sums, block.scale, totals);
  }

  // Folds the last block.
  __device__ void finish(Block& block, State& state, Totals& totals) const {
    ptx::wgmma_wait<0>();
    release(state.last);
    state.first = true;
    fold_block(block, totals);
  }

  // All blocks of a tile.
  __device__ void multiply_tile(State& state, Totals& totals) const {
    int left = arguments.steps;
    Block even;
    Block odd;
#pragma unroll 1
    while (true) {
      multiply_block(even, min(left, arguments.block_steps), state, [&] {
        if (!state.first) fold_block(odd, totals);
      });
      left -= arguments.block_steps;
      if (left <= 0) return finish(even, state, totals);
      multiply_block(odd, min(left, arguments.block_steps), state, [&] { fold_block(even, totals); });
      left -= arguments.block_steps;
      if (left <= 0) return finish(odd, state, totals);
    }
  }

  __device__ void run(const Place<T>& place, const CUtensorMap& y) const {
    using Store = typename BlockedShared<Y>::Store;
    const StoreTarget<Y> target{y, arguments.y, arguments.tma_cols, arguments.accumulate};
    State state;
    for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
      const int2 origin = place.origin(t, arguments);
      const int row = origin.x + 64 * group + 16 * warp;
      Totals totals = {};
      multiply_tile(state, totals);
      store_tiles<Y, Store>(shared.store_buffers[4 * group + warp], 0, {row, origin.y}, target, [&](int j) {
        return float4{totals[4 * j], totals[4 * j + 1], totals[4 * j + 2], totals[4 * j + 3]};
      });
    }
    if (lane == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }
};

template <class Y>
__global__ void __launch_bounds__(kGemmThreads, 1)
    w8a8_blocked_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                             const __grid_constant__ CUtensorMap y,
                             const __grid_constant__ BlockedArguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<BlockedShared<Y>*>(shared_bytes);
  const int warp = uniform_warp();
  const Place<BlockedTile> place;
  gemm_prologue([&] {
    ptx::prefetch_tensormap(a);
    ptx::prefetch_tensormap(b);
    ptx::prefetch_tensormap(y);
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, kClusterSize * 4 * kConsumers);
    init_barriers(shared.scales_full, 32);
    init_barriers(shared.scales_empty, 32 * 4 * kConsumers);
  });
  if (warp >= 4) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    BlockedConsumer<Y>{shared, arguments, warp / 4 - 1, warp % 4}.run(place, y);
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands(shared, place, a, b, arguments);
    if (warp == 1) load_scales(shared, place, arguments);
    __syncwarp();
  }
  ptx::cluster_sync_relaxed();  // no block leaves while the other one still writes to its shared memory
}

}  // namespace octile::cuda::w8a8
