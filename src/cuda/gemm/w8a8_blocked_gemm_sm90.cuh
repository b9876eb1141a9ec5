// w8a8_blocked_gemm_sm90, the kernel:
//
//   acc_g = sum_{c in block g} a[i, c] * b[j, c];  t = fma(f32(acc_g), a_scale[i, g], t), g ascending, from t = 0
//   y[i, j] = t, or added to y
//
//   a  (m, k) s8, rows contiguous    b  (n, k) s8, rows contiguous    a_scale  (blocks, m)    y  (m, n)
//
// The frame is that of w8a8_gemm_sm90. Each consumer warpgroup has 64 rows of the tile, its sums in s32 and their
// totals in f32. The two take turns at the tensor cores: while one multiplies, the other waits for its last sums, folds
// them into the totals, and stores these at the end of a tile, straight from registers, so that the stages have all of
// the shared memory.
// `Tiles` says which tiles a block has, of one product or, in w8a8_grouped_gradient_sm90, of each expert's.
#pragma once

#include "cuda/gemm/w8a8_gemm_sm90.cuh"

namespace octile::cuda::w8a8 {

// More than 208 columns do not fit the registers twice. The blocks of a cluster are stacked and share b, or lie side by
// side and share a.
template <int cols_, bool share_b_>
struct BlockedTile {
  static constexpr int rows = 64 * kConsumers;
  static constexpr int cols = cols_;
  static constexpr bool share_b = share_b_;
  static constexpr int stages = cols > 128 ? 5 : 6;
  static constexpr int cluster_rows = share_b ? kClusterSize : 1;
  static constexpr int cluster_cols = share_b ? 1 : kClusterSize;
  // Whether a warpgroup tests before folding if the next stages are full: 9 % faster here, and 10 % slower with more
  // columns.
  static constexpr bool asks_early = cols == 128;
};

struct BlockedMaps {
  CUtensorMap a, b;
};

inline constexpr int kScaleBlocks = 4;  // whose scales are in shared memory at a time

template <class T>
struct BlockedShared {
  struct Stage {
    std::uint8_t a[T::rows * kTileK];
    std::uint8_t b[T::cols * kTileK];
  };

  Stage stages[T::stages];
  float scales[kScaleBlocks][T::rows];
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
  std::uint64_t scales_full[kScaleBlocks];
  std::uint64_t scales_empty[kScaleBlocks];
};

template <class Y>
struct BlockedArguments {
  int steps = 0;        // of k, kTileK terms each
  int block_steps = 1;  // of a block
  TileOrder order;      // of the clusters' tiles
  const float* a_scale = nullptr;
  std::int64_t a_scale_pitch = 0;  // from one block to the next
  Destination<Y> y;
  bool accumulate = false;  // y += instead of y =; y is f32
  bool lines = false;       // y's rows can be stored eight bytes at a time, to their end
  // The last row and column at which a tile may begin.
  int2 last = {std::numeric_limits<int>::max(), std::numeric_limits<int>::max()};
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
template <class T, class Y>
struct BlockedTiles {
  static constexpr bool kExperts = false;  // whose parts may have no step

  const BlockedArguments<Y>& arguments;
  Place<T> place = {};
  int at = place.cluster;

  __device__ bool next(BlockedPart& part) {
    if (at >= arguments.order.count()) return false;
    const int2 origin = place.origin(at, arguments);
    part = {{0, origin.x}, {0, origin.y}, arguments.steps, arguments.a_scale + origin.x, origin, arguments.y.rows};
    at += place.clusters;
    return true;
  }
};

// One thread: tiles of a and b, stage by stage. Each block loads half of the shared operand for both.
template <class T, class Tiles>
__device__ void load_operands(BlockedShared<T>& shared, Tiles tiles, const BlockedMaps& maps) {
  constexpr int kSharedRows = (T::share_b ? T::cols : T::rows) / kClusterSize;
  const int half = tiles.place.rank * kSharedRows;
  RingPosition<T::stages> at;
  for (BlockedPart part; tiles.next(part);) {
#pragma unroll 1
    for (int step = 0; step < part.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const int a_col = part.a.x + step * kTileK, b_col = part.b.x + step * kTileK;
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      if constexpr (T::share_b) {
        ptx::tma_load(ptx::shared_address(stage.a), maps.a, a_col, part.a.y, full);
        ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(stage.b + half * kTileK), maps.b,
                                {b_col, part.b.y + half}, full);
      } else {
        ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(stage.a + half * kTileK), maps.a,
                                {a_col, part.a.y + half}, full);
        ptx::tma_load(ptx::shared_address(stage.b), maps.b, b_col, part.b.y, full);
      }
      at.next();
    }
  }
}

// One warp: the scales of each block's rows. With loads into registers, the consumers would wait for L2 in each block.
template <class T, class Y, class Tiles>
__device__ void load_scales(BlockedShared<T>& shared, Tiles tiles, const BlockedArguments<Y>& arguments) {
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
template <class T, class Y>
struct BlockedConsumer {
  BlockedShared<T>& shared;
  const BlockedArguments<Y>& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  // One per lane, the empty barriers of the blocks that fill this one's stages.
  std::uint32_t empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kClusterSize));

  using Sums = int[T::cols / 2];
  using Totals = float[T::cols / 2];

  struct State {
    RingPosition<T::stages> at;
    RingPosition<kScaleBlocks> scales;
    bool ready = false;  // the next turn's stages are full
    float scale[2];      // the next block's, of this thread's two rows
  };

  __device__ void wait_for_turn() const { ptx::bar_sync<kConsumers * kWarpgroup>(1 + group); }
  __device__ void end_turn() const { ptx::bar_arrive<kConsumers * kWarpgroup>(2 - group); }

  __device__ void wait_for(const RingPosition<T::stages>& at) const {
    ptx::mbarrier_wait(shared.full[at.stage], at.parity);
  }
  __device__ bool has_arrived(const RingPosition<T::stages>& at) const {
    return ptx::mbarrier_test(shared.full[at.stage], at.parity);
  }
  __device__ void release(int stage) const { ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < kClusterSize); }

  __device__ void read_scale(State& state) const {
    ptx::mbarrier_wait(shared.scales_full[state.scales.stage], state.scales.parity);
    const float* const scales = shared.scales[state.scales.stage] + group * 64 + 16 * warp + lane / 4;
    state.scale[0] = scales[0];
    state.scale[1] = scales[8];
    ptx::mbarrier_arrive(shared.scales_empty[state.scales.stage]);  // every lane: racecheck cannot follow __syncwarp()
    state.scales.next();
  }

  // Begins a step, in two groups, of which the second has the last kLeft WGMMAs. The first WGMMA of a block overwrites
  // its sums: with one that adds, and a false predicate, 8192 cubed in blocks of 256 took 1.1 times as long.
  static constexpr int kLeft = 3;
  template <bool first>
  __device__ void multiply(Sums& sums, const RingPosition<T::stages>& at) const {
    const auto& stage = shared.stages[at.stage];
    const std::uint32_t a = smem_descriptor(ptx::shared_address(stage.a + group * 64 * kTileK));
    const std::uint32_t b = smem_descriptor(ptx::shared_address(stage.b));
    constexpr int kParts = kTileK / 32;
    ptx::wgmma_fence();
    if constexpr (first) wgmma_s8_of_zero<kTileK>(sums, a, b);
#pragma unroll
    for (int part = first; part < kParts; ++part) {
      if (part + kLeft == kParts) ptx::wgmma_commit();
      wgmma_s8<kTileK>(sums, a + 2 * part, b + 2 * part, true);
    }
    ptx::wgmma_commit();
  }

  // One or two steps of a block, and the sums up to them. The other warpgroup may begin once all but the last WGMMAs
  // are done: if it began when all are queued, the tensor cores would serve both by turns, and both would fold at the
  // same time. Whoever has the turn uses stages that the other one has still to read, so that more steps would take
  // more stages. meanwhile(): while the last WGMMAs run.
  template <bool first, class Meanwhile>
  __device__ void take_turn(Sums& sums, bool two, State& state, const Meanwhile& meanwhile) const {
    const RingPosition<T::stages> one = state.at;
    state.at.next();
    const RingPosition<T::stages> other = state.at;
    if (two) state.at.next();
    if (!state.ready) {
      wait_for(one);
      if (two) wait_for(other);
    }
    state.ready = false;
    wait_for_turn();
    multiply<first>(sums, one);
    if (two) multiply<false>(sums, other);
    ptx::wgmma_wait<1>();
    end_turn();
    if (two) release(one.stage);
    meanwhile();
    ptx::wgmma_wait<0>();
    release(two ? other.stage : one.stage);
  }

  // All blocks of a tile.
  __device__ void multiply_tile(State& state, Totals& totals, int left) const {
    if (left > 0) read_scale(state);
#pragma unroll 1
    while (left > 0) {
      int steps = min(left, arguments.block_steps);
      left -= steps;
      const float scale[2] = {state.scale[0], state.scale[1]};
      Sums sums;
      const auto turn = [&]<bool first>(std::bool_constant<first>) {
        const bool two = steps > 1;
        steps -= two ? 2 : 1;
        take_turn<first>(sums, two, state, [&] {
          if (steps > 0 || left == 0) return;
          read_scale(state);
          if constexpr (T::asks_early) {
            RingPosition<T::stages> second = state.at;
            second.next();
            state.ready = has_arrived(state.at) & (has_arrived(second) | (min(left, arguments.block_steps) == 1));
          }
        });
      };
      turn(std::true_type{});
#pragma unroll 1
      while (steps > 0) turn(std::false_type{});
      wgmma_fence_operand(sums);
#pragma unroll
      for (int i = 0; i < T::cols / 2; ++i) {
        totals[i] = __fmaf_rn(static_cast<float>(sums[i]), scale[i / 2 % 2], totals[i]);
      }
    }
  }

  // Eight bytes of a row of y: two totals, or four in 16 bits, those of this lane and of the one beside it. Four lanes
  // have 32 bytes of a row, and a warp those of eight rows.
  static constexpr int kEights = sizeof(Y) == 2 ? 2 : 1;  // of columns, in the 32 bytes
  static constexpr int kNeighbours = 8 / sizeof(Y);

  __device__ uint2 line_of(const float* totals) const {
    if constexpr (std::is_same_v<Y, float>) {
      return {__float_as_uint(totals[0]), __float_as_uint(totals[1])};
    } else {
      const std::uint32_t left = pack<Y>(totals[0], totals[1]), right = pack<Y>(totals[4], totals[5]);
      const bool odd = lane % 2 != 0;  // keeps the right ones
      const std::uint32_t other = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
      return odd ? uint2{other, right} : uint2{left, other};
    }
  }

  // The totals, to y, or added to it. whole: a line exists whole or not at all, and can be stored at once.
  template <bool whole>
  __device__ void store_lines(const Totals& totals, Y* to, int rows, int cols) const {
    constexpr int kAtOnce = 4;  // that wait for memory together
    const std::int64_t lower = 8 * arguments.y.pitch;
#pragma unroll
    for (int first = 0; first < T::cols / 8; first += kAtOnce) {
      uint2 lines[kAtOnce / kEights][2];
      const auto each = [&](const auto& body) {
#pragma unroll
        for (int i = 0; i < kAtOnce / kEights; ++i) {
          const int j = first + i * kEights;
          if (j >= T::cols / 8) break;
#pragma unroll
          for (int h = 0; h < 2; ++h) body(lines[i][h], j, h, to + h * lower + 8 * j, 8 * h < rows ? cols - 8 * j : 0);
        }
      };
      each([&](uint2& line, int j, int h, const Y*, int) { line = line_of(totals + 4 * j + 2 * h); });
      if constexpr (std::is_same_v<Y, float>) {
        if (arguments.accumulate) {
          float2 before[kAtOnce][2];
          each([&](const uint2&, int j, int h, const float* y, int count) {
            float2& two = before[j - first][h];
            two = {};
            if constexpr (whole) {
              if (count > 0) two = __ldcg(reinterpret_cast<const float2*>(y));
            } else {
              if (count > 0) two.x = __ldcg(y);
              if (count > 1) two.y = __ldcg(y + 1);
            }
          });
          each([&](uint2& line, int j, int h, const float*, int) {
            const float2& two = before[j - first][h];
            line = {__float_as_uint(__fadd_rn(two.x, __uint_as_float(line.x))),
                    __float_as_uint(__fadd_rn(two.y, __uint_as_float(line.y)))};
          });
        }
      }
      each([&](const uint2& line, int, int, Y* y, int count) {
        if constexpr (whole) {
          if (count > 0) *reinterpret_cast<uint2*>(y) = line;
        } else {
#pragma unroll
          for (int i = 0; i < kNeighbours; ++i) {
            if (i < count) y[i] = reinterpret_cast<const Y*>(&line)[i];
          }
        }
      });
    }
  }

  __device__ void store(const Totals& totals, const BlockedPart& part) const {
    const int row = part.y.x + 64 * group + 16 * warp + lane / 4;
    const int col = part.y.y + (kEights == 2 ? lane % 2 * 8 + lane % 4 / 2 * 4 : lane % 4 * 2);
    Y* const to = arguments.y.data + row * arguments.y.pitch + col;
    if (arguments.lines && part.y.y % kNeighbours == 0) {
      store_lines<true>(totals, to, part.end - row, arguments.y.cols - col);
    } else {
      store_lines<false>(totals, to, part.end - row, arguments.y.cols - col);
    }
  }

  template <class Tiles>
  __device__ void run(Tiles tiles) const {
    State state;
    if (group == 1) end_turn();
    for (BlockedPart part; tiles.next(part);) {
      if (Tiles::kExperts && part.steps == 0 && arguments.accumulate) continue;
      Totals totals = {};
      multiply_tile(state, totals, part.steps);
      store(totals, part);
    }
  }
};

template <class T>
__device__ void begin_blocked(BlockedShared<T>& shared, const BlockedMaps& maps) {
  gemm_prologue([&] {
    ptx::prefetch_tensormap(maps.a);
    ptx::prefetch_tensormap(maps.b);
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, kClusterSize * 4 * kConsumers);
    init_barriers(shared.scales_full, 32);
    init_barriers(shared.scales_empty, 32 * 4 * kConsumers);
  });
}

template <class T, class Y, class Tiles>
__device__ void multiply_blocked(BlockedShared<T>& shared, const Tiles& tiles, const BlockedMaps& maps,
                                 const BlockedArguments<Y>& arguments) {
  const int warp = uniform_warp();
  if (warp >= 4) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    BlockedConsumer<T, Y>{shared, arguments, warp / 4 - 1, warp % 4}.run(tiles);
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands(shared, tiles, maps);
    if (warp == 1) load_scales(shared, tiles, arguments);
    __syncwarp();
  }
  ptx::cluster_sync_relaxed();  // no block leaves while the other one still writes to its shared memory
}

template <class T, class Y>
__global__ void __launch_bounds__(kGemmThreads, 1)
    w8a8_blocked_gemm_kernel(const __grid_constant__ BlockedMaps maps,
                             const __grid_constant__ BlockedArguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<BlockedShared<T>*>(shared_bytes);
  begin_blocked(shared, maps);
  multiply_blocked(shared, BlockedTiles<T, Y>{arguments}, maps, arguments);
}

}  // namespace octile::cuda::w8a8
