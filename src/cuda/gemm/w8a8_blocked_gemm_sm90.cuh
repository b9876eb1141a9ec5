// w8a8_blocked_gemm_sm90, the kernel:
//
//   acc_g = sum_{c in block g} a[i, c] * b[j, c];  t = fma(f32(acc_g), a_scale[i, g], t), g ascending, from t = 0
//   y[i, j] = t, or added to y
//
//   a  (m, k) s8, rows contiguous    b  (n, k) s8, rows contiguous    a_scale  (blocks, m)    y  (m, n)
//
// The frame is that of w8a8_gemm_sm90. Each consumer warpgroup has 64 rows of the tile, its sums in s32 and their
// totals in f32. It has two sets of sums: while it folds one block into the totals, the tensor cores multiply the next.
// `Tiles` says which tiles a block has, of one product or, in w8a8_grouped_gradient_sm90, of each expert's.
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

// What a block multiplies, and where it goes.
struct BlockedPart {
  int2 a, b;  // {term, row} of the first step
  int steps;
  const float* scales;  // of the first block, from the first row on
  int2 y;               // the first row and column
  int end;              // of y's rows that are the part's
};

// The tiles of one product, as a role walks them.
template <class Y>
struct BlockedTiles {
  static constexpr bool kExperts = false;  // whose parts may have no step, and end anywhere

  const BlockedArguments<Y>& arguments;
  Place<BlockedTile> place = {};
  int at = place.cluster;

  __device__ bool next(BlockedPart& part) {
    if (at >= arguments.order.count()) return false;
    const int2 origin = place.origin(at, arguments);
    part = {{0, origin.x}, {0, origin.y}, arguments.steps, arguments.a_scale + origin.x, origin, arguments.y.rows};
    at += place.clusters;
    return true;
  }
};

// One thread: tiles of a and b, stage by stage. Each block loads half of a for both.
template <class Y, class Tiles>
__device__ void load_operands(BlockedShared<Y>& shared, Tiles tiles, const CUtensorMap& a, const CUtensorMap& b) {
  using T = BlockedTile;
  constexpr int kSharedRows = T::rows / kClusterSize;
  const int half = tiles.place.rank * kSharedRows;
  RingPosition<T::stages> at;
  for (BlockedPart part; tiles.next(part);) {
#pragma unroll 1
    for (int step = 0; step < part.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(stage.a + half * kTileK), a,
                              {part.a.x + step * kTileK, part.a.y + half}, full);
      ptx::tma_load(ptx::shared_address(stage.b), b, part.b.x + step * kTileK, part.b.y, full);
      at.next();
    }
  }
}

// One warp: the scales of each block's rows. A load into registers would have the consumers wait for L2 in each block.
template <class Y, class Tiles>
__device__ void load_scales(BlockedShared<Y>& shared, Tiles tiles, const BlockedArguments<Y>& arguments) {
  using T = BlockedTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<kScaleBlocks> at;
  for (BlockedPart part; tiles.next(part);) {
    const float* scales = part.scales;
#pragma unroll 1
    for (int step = 0; step < part.steps; step += arguments.block_steps) {
      ptx::mbarrier_wait(shared.scales_empty[at.stage], at.parity ^ 1);
#pragma unroll
      for (int row = 0; row < T::rows; row += 32) {
        const bool inside = part.y.x + row + lane < part.end;
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
  __device__ void multiply_tile(State& state, Totals& totals, int left) const {
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

  template <class Tiles>
  __device__ void run(Tiles tiles, const CUtensorMap& y) const {
    using Store = typename BlockedShared<Y>::Store;
    State state;
    for (BlockedPart part; tiles.next(part);) {
      const int row = part.y.x + 64 * group + 16 * warp;
      Totals totals = {};
      if constexpr (Tiles::kExperts) {
        if (part.steps > 0) {
          multiply_tile(state, totals, part.steps);
        } else if (arguments.accumulate) {
          continue;
        }
      } else {
        multiply_tile(state, totals, part.steps);
      }
      // Rows that are not the part's are another's: 16 rows go by TMA only if all of them are.
      Destination<Y> to = arguments.y;
      to.rows = part.end;
      const bool whole = !Tiles::kExperts || row + Store::rows <= part.end;
      const StoreTarget<Y> target{y, to, whole ? arguments.tma_cols : 0, arguments.accumulate};
      store_tiles<Y, Store>(shared.store_buffers[4 * group + warp], 0, {row, part.y.y}, target, [&](int j) {
        return float4{totals[4 * j], totals[4 * j + 1], totals[4 * j + 2], totals[4 * j + 3]};
      });
    }
    if (lane == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }
};

template <class Y>
__device__ void begin_blocked(BlockedShared<Y>& shared, const CUtensorMap& a, const CUtensorMap& b,
                              const CUtensorMap& y) {
  gemm_prologue([&] {
    ptx::prefetch_tensormap(a);
    ptx::prefetch_tensormap(b);
    ptx::prefetch_tensormap(y);
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, kClusterSize * 4 * kConsumers);
    init_barriers(shared.scales_full, 32);
    init_barriers(shared.scales_empty, 32 * 4 * kConsumers);
  });
}

template <class Y, class Tiles>
__device__ void multiply_blocked(BlockedShared<Y>& shared, const Tiles& tiles, const CUtensorMap& a,
                                 const CUtensorMap& b, const CUtensorMap& y, const BlockedArguments<Y>& arguments) {
  const int warp = uniform_warp();
  if (warp >= 4) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    BlockedConsumer<Y>{shared, arguments, warp / 4 - 1, warp % 4}.run(tiles, y);
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands(shared, tiles, a, b);
    if (warp == 1) load_scales(shared, tiles, arguments);
    __syncwarp();
  }
  ptx::cluster_sync_relaxed();  // no block leaves while the other one still writes to its shared memory
}

template <class Y>
__global__ void __launch_bounds__(kGemmThreads, 1)
    w8a8_blocked_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                             const __grid_constant__ CUtensorMap y,
                             const __grid_constant__ BlockedArguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<BlockedShared<Y>*>(shared_bytes);
  begin_blocked(shared, a, b, y);
  multiply_blocked(shared, BlockedTiles<Y>{arguments}, a, b, y, arguments);
}

}  // namespace octile::cuda::w8a8
