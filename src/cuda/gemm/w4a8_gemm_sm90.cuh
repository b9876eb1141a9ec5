// w4a8_gemm_sm90, the kernel: y (m, n), over the groups g of k in order,
//
//   t = fma(f32(sum_c a[i, c] * (q[j, c] - z[j, g])), s[j, g], t), then y[i, j] = fma(t, a_scale[i], bias[j])
//
// The sums of a group are exact in s32, so the bits are those of every other backend.
//
// It computes y^T = weight * a^T: int8 WGMMA takes the weight from registers, where its nibbles have just become bytes,
// and a from shared memory. A persistent grid of clusters of two blocks, which are stacked and share a by multicast. In
// each block producer warps fill a ring of stages by TMA, scales and zero points of a packed weight included. Consumer
// warpgroups take 64 of the weight's rows each: while half of a stage is multiplied they convert the next half, and
// fold the sums of each finished group into t. With few rows of a, the time is that of a chain of waits from stage to
// stage. An SM then has two blocks of one consumer warpgroup; or, where there are not enough blocks for that, three
// helpers take the stages of the same 64 rows in turns, and pass the sums of their groups to a keeper, which folds them
// in the order of K, and stores a tile while the helpers are at the next one.
//
// With experts (packed weights only): the tiles of all of them, each of rows of one expert. Rows that are gathered come
// by cp.async, in both blocks of a cluster.
//
// Without zero points the bytes are 16 q (NibbleBytes), and t is 16 times too large: exactly so, since
// all its terms are multiples of the smallest f32, unless it exceeds 2^124. Columns of y where it does are recomputed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device/experts.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/nibble_bytes.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/tma_transpose.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/gemm/int4_maps.cuh"
#include "cuda/operands.h"

namespace octile::cuda::w4a8 {

constexpr int kTileK = 128;  // of a stage
constexpr int kChannels = static_cast<int>(kPanelChannels);
constexpr int kWide = 192;  // of a tile of a; rows of y
constexpr int kNarrow = 128;
constexpr int kFew = 64;
constexpr int kFewest = 32;
constexpr int kHelpers = 3;
constexpr int kConsumerBarriers = 1;  // named barriers: this and the next

// rows_a: of a tile of a, and of y. slices: of 32 in a group, 1, 2 or 4; 0: a group is a whole row. takes_turns:
// helpers and a keeper. experts: of each expert's rows.
template <int rows_a_, bool packed_, bool zero_points_, int slices_, bool takes_turns_, bool experts_ = false>
struct Form {
  static constexpr bool experts = experts_;
  static constexpr int rows_a = rows_a_;
  static constexpr bool takes_turns = takes_turns_;
  static constexpr int blocks = rows_a <= kFew && !takes_turns ? 2 : 1;  // of an SM
  static constexpr int helpers = takes_turns ? kHelpers : 0;             // warpgroups
  static constexpr int keepers = rows_a <= kFew ? 1 : 2;                 // warpgroups with 64 rows of y each
  static constexpr int consumers = keepers + helpers;
  static constexpr int rows_b = 64 * keepers;  // of a tile of the weight; columns of y
  static constexpr int threads = (1 + consumers) * kWarpgroup;
  static constexpr int producer_registers = takes_turns ? 32 : kProducerRegisters;
  static constexpr int consumer_registers = takes_turns ? 112 : blocks == 2 ? 200 : kConsumerRegisters;
  static constexpr bool packed = packed_;
  static constexpr bool zero_points = zero_points_;
  static constexpr int slices = slices_;
  static constexpr int groups = slices == 0 ? 1 : 4 / slices;            // of a stage
  using Zeros = std::conditional_t<packed, std::uint8_t, std::int32_t>;  // 8 + z; z

  static constexpr int slots = rows_a == kFewest ? 2 : 1;  // of a helper: sums of a group
  static constexpr int kSlotBytes = rows_a * 64 * 4 + kWarpgroup * 8 + 16;
  static constexpr int group_values = groups * rows_b;  // scales of a stage, or zero points
  // TMA writes to multiples of 128 bytes.
  static constexpr int zero_values = zero_points ? std::max(group_values, 128) : 0;
  static constexpr int kGroupBytes =
      group_values * static_cast<int>(sizeof(float)) + zero_values * static_cast<int>(sizeof(Zeros));
  static constexpr int kStageBytes = rows_a * kTileK + rows_b * kTileK / 2 + kGroupBytes + 24;
  static constexpr int kSharedBytes = (kMaxSharedBytes + 1024) / blocks - 1024;
  static constexpr int kTableBytes = experts ? sizeof(ExpertTable) : 0;
  static constexpr int stages =
      (kSharedBytes - keepers * rows_a * (128 + 4) - helpers * slots * kSlotBytes - kTableBytes - 128) / kStageBytes;
  // A stage that a warpgroup waits for has been filled the last time: parities are valid. A helper's last group but one
  // has been passed on, so that all stages before those that fill its slots have been read.
  static_assert(stages >= (ceil_div(slots, groups) + 2) * helpers);
  static_assert(packed || !experts);
};

// What helpers pass on: of each thread, the sums of a group and its two scales.
template <class F, bool exists = (F::helpers > 0)>
struct Passed {};
template <class F>
struct Passed<F, true> {
  float4 sums[F::helpers][F::slots][F::rows_a / 8][kWarpgroup];
  float2 scales[F::helpers][F::slots][kWarpgroup];
  std::uint64_t full[F::helpers][F::slots];
  std::uint64_t empty[F::helpers][F::slots];
};

struct Nothing {};

template <class F>
struct Shared {
  std::uint8_t a[F::stages][F::rows_a * kTileK];
  std::uint8_t b[F::stages][F::rows_b * kTileK / 2];
  TransposeBuffer<F::rows_a> buffers[F::keepers];
  Passed<F> passed;
  alignas(16) float a_scales[F::keepers][F::rows_a];  // of the tile's rows of a
  alignas(128) float scales[F::stages][F::group_values];
  alignas(128) typename F::Zeros zeros[F::zero_points ? F::stages : 1][F::zero_points ? F::zero_values : 1];
  std::uint64_t full[F::stages];
  std::uint64_t empty[F::stages];
  std::uint64_t groups_empty[F::stages];  // of a weight that is not packed
  [[no_unique_address]] std::conditional_t<F::experts, ExpertTable, Nothing> experts;

  // Where the i-th group of a row of the tile has its scale and zero point in a stage.
  __device__ static int place(int row, int i) {
    return F::packed ? (row / kChannels * F::groups + i) * kChannels + row % kChannels : i * F::rows_b + row;
  }
};

struct Arguments {
  NibbleWeight weight;
  int steps = 0;      // of k
  TileOrder order;    // of the clusters' tiles: rows of the weight down, rows of a across
  int half_rows = 0;  // of a tile of a that each block loads
  int last_row = 0;   // of a at which a tile may begin
  const std::int8_t* a = nullptr;
  std::int64_t a_pitch = 0;
  RowScale<float> a_scale;
  Bias bias;
  TransposeTarget y;
  DType y_type;
  Experts experts = {};
};

// A tile: its first row of b and of a, and the rows of y and the weight that it is of.
struct Spot {
  int2 origin;
  int end;  // of the rows
  int expert;
};

// The tiles, as a role walks them in rising order. The last tiles of a, or of an expert's rows, overlap those before:
// TMA takes long over rows out of bounds, and does not store a tile that has another expert's rows.
template <class F>
class Place : public TransposedPlace<F::rows_a, F::rows_b> {
  using Base = TransposedPlace<F::rows_a, F::rows_b>;

 public:
  __device__ Place(const Shared<F>& shared, const Arguments& arguments)
      : arguments_(arguments), walk_(walk_of(shared, arguments)) {}

  __device__ int count() const {
    if constexpr (F::experts) {
      return walk_.count();
    } else {
      return arguments_.order.count();
    }
  }

  __device__ Spot operator[](int number) {
    if constexpr (F::experts) {
      const int2 tile = walk_[number];
      const int first = walk_.first_row(), end = walk_.end_row();
      const int row = min(first + tile.x * F::rows_a, max(end - F::rows_a, first));
      return {{Base::origin({tile.y, 0}).x, row}, end, walk_.expert};
    } else {
      const int2 at = Base::origin(arguments_.order[number]);
      return {{at.x, min(at.y, arguments_.last_row)}, arguments_.y.rows, 0};
    }
  }

 private:
  __device__ static auto walk_of(const Shared<F>& shared, const Arguments& arguments) {
    if constexpr (F::experts) {
      return ExpertWalk{shared.experts, arguments.experts.count, arguments.order.rows};
    } else {
      return Nothing{};
    }
  }

  const Arguments& arguments_;
  [[no_unique_address]] std::conditional_t<F::experts, ExpertWalk, Nothing> walk_;
};

// One thread: tiles of a, stage by stage. Each block loads half of them for both.
template <class F>
__device__ void load_a(Shared<F>& shared, Place<F> place, const PanelMaps& maps, const Arguments& arguments) {
  const int rows = arguments.half_rows;
  const int half = place.rank * rows;
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < place.count(); t += place.clusters) {
    const int row = place[t].origin.y + half;
    for (int step = 0; step < arguments.steps; ++step) {
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, static_cast<std::uint32_t>(kClusterSize * rows * kTileK));
      ptx::tma_load_multicast(kBothBlocks, ptx::shared_address(shared.a[at.stage] + half * kTileK), maps.a,
                              {step * kTileK, row}, full);
      at.next();
    }
  }
}

// A stage of b, with the scales and zero points of a packed weight.
template <class F>
__device__ void load_weight(Shared<F>& shared, const PanelMaps& maps, const Spot& spot, int step, int stage) {
  constexpr int kBytes = sizeof(shared.b[0]);
  constexpr int kScaleBytes = F::packed ? F::group_values * 4 : 0;
  constexpr int kZeroBytes = F::packed && F::zero_points ? F::group_values : 0;
  const std::uint32_t full = ptx::shared_address(&shared.full[stage]);
  const std::uint32_t to = ptx::shared_address(shared.b[stage]);
  const int row = spot.origin.x;
  const int group = F::slices == 0 ? 0 : step * F::groups;
  ptx::mbarrier_arrive_expect_tx(full, kBytes + kScaleBytes + kZeroBytes);
  if constexpr (F::experts) {
    load_int4_panels(to, maps, step * kTileK, row, spot.expert, full);
    load_panels(shared.scales[stage], maps.scales, group, row, spot.expert, full);
    if constexpr (kZeroBytes > 0) load_panels(shared.zeros[stage], maps.zeros, group, row, spot.expert, full);
  } else {
    load_int4_tile<F::packed>(to, kBytes, maps, step * kTileK, row, full);
    if constexpr (kScaleBytes > 0) load_panels(shared.scales[stage], maps.scales, group, row, full);
    if constexpr (kZeroBytes > 0) load_panels(shared.zeros[stage], maps.zeros, group, row, full);
  }
}

// Another one: the weight.
template <class F>
__device__ void load_b(Shared<F>& shared, Place<F> place, const PanelMaps& maps, const Arguments& arguments) {
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < place.count(); t += place.clusters) {
    const Spot spot = place[t];
    for (int step = 0; step < arguments.steps; ++step) {
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      load_weight(shared, maps, spot, step, at.stage);
      at.next();
    }
  }
}

// One warp: scales and zero points of a weight that is not packed; zeros out of bounds. Each lane's copies arrive when
// they have landed.
template <class F>
__device__ void load_groups(Shared<F>& shared, Place<F> place, const Arguments& arguments) {
  const NibbleWeight& w = arguments.weight;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float* const scales = static_cast<const float*>(w.scales);
  const auto* const zeros = static_cast<const typename F::Zeros*>(w.zeros);
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < place.count(); t += place.clusters) {
    const int first = place[t].origin.x;
    for (int step = 0; step < arguments.steps; ++step) {
      ptx::mbarrier_wait(shared.groups_empty[at.stage], at.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < F::groups; ++i) {
        const int group = F::slices == 0 ? 0 : step * F::groups + i;
        const bool inside = group < w.groups;
#pragma unroll
        for (int row = lane; row < F::rows_b; row += 32) {
          const bool exists = inside && first + row < w.rows;
          const int to = shared.place(row, i);
          ptx::cp_async_4(&shared.scales[at.stage][to], exists ? scales + w.scale.at(first + row, group) : scales,
                          exists);
          if constexpr (F::zero_points) {
            ptx::cp_async_4(&shared.zeros[at.stage][to], exists ? zeros + w.zero.at(first + row, group) : zeros,
                            exists);
          }
        }
      }
      ptx::cp_async_mbarrier_arrive(ptx::shared_address(&shared.full[at.stage]));
      at.next();
    }
  }
}

// ---- Products.

constexpr float kNoBias = -0.0f;  // changes no sum, its sign included

// One element of y before a_scale, straight from memory.
__device__ inline float recompute_sum(const std::int8_t* a, const NibbleWeight& weight, int col) {
  float total = 0;
  for (int g = 0; g < weight.groups; ++g) {
    int sum = 0;
    const int first = g * weight.group;
    const int offset = weight.offset(col, g);
    for (int c = first; c < first + weight.group; ++c) {
      sum += a[c] * (weight.nibble(col, c) - offset);
    }
    const float scale = __ldcg(static_cast<const float*>(weight.scales) + weight.scale.at(col, g));
    total = __fmaf_rn(__int2float_rn(sum), scale, total);
  }
  return total;
}

// Which scale of a is that of a row of y.
template <class F>
__device__ int token_of(const Arguments& p, int row) {
  return F::experts ? p.experts.row_of_a(row) : row;
}

// The bias of an expert.
template <class F>
__device__ Bias expert_bias(const Arguments& p, const Spot& spot) {
  Bias bias = p.bias;
  if (F::experts && bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + spot.expert * p.experts.bias;
  return bias;
}

// A column of y in a tile, by four threads.
template <class F>
__device__ __noinline__ void recompute_column(const Arguments& p, Spot spot, int col) {
  if (col >= p.weight.rows) return;
  NibbleWeight weight = p.weight;
  if constexpr (F::experts) move_to_expert(weight, p.experts, spot.expert);
  const float bias = expert_bias<F>(p, spot).at(col, p.weight.rows, kNoBias);
  const int first = spot.origin.y;
  for (int row = first + static_cast<int>(threadIdx.x) % 4; row < min(first + F::rows_a, spot.end); row += 4) {
    const float sum = recompute_sum(p.a + row * p.a_pitch, weight, col);
    const float value = __fmaf_rn(sum, p.a_scale[token_of<F>(p, row)], bias);
    store_float(p.y.data, row * p.y.pitch + col, p.y_type, value);
  }
}

// A warp's part of a tile of y: t, and its way to memory.
template <class F>
struct Result {
  static constexpr int kSums = F::rows_a / 2;  // of a thread

  Shared<F>& shared;
  const Arguments& arguments;
  int group;  // 64 rows of the tile
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int rows = 64 * group + 16 * warp + lane / 4 * 2;  // of the tile, the first of this thread's two

  float totals[kSums];

  // Starts copying the scales of a tile's rows of a to shared memory.
  __device__ void begin(const Spot& spot) {
#pragma unroll
    for (float& total : totals) total = 0;
    float* const to = shared.a_scales[group];
    const RowScale<float>& scale = arguments.a_scale;
    for (int row = static_cast<int>(threadIdx.x) % kWarpgroup; row < F::rows_a; row += kWarpgroup) {
      if (scale.data == nullptr) {
        to[row] = scale.value;
      } else {
        const int of_y = spot.origin.y + row;
        const bool exists = of_y < spot.end;
        const float* const from = exists ? scale.data + token_of<F>(arguments, of_y) * scale.stride : scale.data;
        ptx::cp_async_4(&to[row], from, exists);
      }
    }
  }

  // sum(i): the i-th sum of a group.
  template <class Sum>
  __device__ void fold(const Sum& sum, float2 scales) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[i] = __fmaf_rn(sum(i), i / 2 % 2 ? scales.y : scales.x, totals[i]);
  }

  __device__ void store(const Spot& spot, const CUtensorMap& y) {
    bool beyond[2];
    finish(spot, y, beyond);
    if constexpr (!F::zero_points) {
      const unsigned four = 0xfu << lane / 4 * 4;
      const unsigned first = __ballot_sync(~0u, beyond[0]) & four;
      const unsigned second = __ballot_sync(~0u, beyond[1]) & four;
      if (any_of_warpgroup((first | second) != 0)) {
        // After the TMA stores.
        if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait<0>();
        any_of_warpgroup(false);
        if (first != 0) recompute_column<F>(arguments, spot, spot.origin.x + rows);
        if (second != 0) recompute_column<F>(arguments, spot, spot.origin.x + rows + 1);
      }
    }
  }

  // After the last tile.
  __device__ void end() const {
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }

 private:
  // beyond: whether a total of each of the thread's two columns of y was out of range.
  __device__ void finish(const Spot& spot, const CUtensorMap& y, bool (&beyond)[2]) {
    const int col = spot.origin.x + rows;
    const Bias b = expert_bias<F>(arguments, spot);
    const float bias[2] = {b.at(col, arguments.weight.rows, kNoBias), b.at(col + 1, arguments.weight.rows, kNoBias)};
    float check[2] = {};
    asm volatile("cp.async.wait_all;" ::: "memory");
    ptx::bar_sync<kWarpgroup>(kConsumerBarriers + group);
    const float* const row_scales = shared.a_scales[group] + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const float2 both = *reinterpret_cast<const float2*>(row_scales + 8 * j);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scale = e == 0 ? both.x : both.y;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& total = totals[4 * j + 2 * h + e];
          if constexpr (!F::zero_points) {
            check[h] = __fmaf_rn(total, 0, check[h]);
            total = __fmul_rn(total, 0x1p-4f);
          }
          total = __fmaf_rn(total, scale, bias[h]);
        }
      }
    }
    beyond[0] = check[0] != 0;  // NaN
    beyond[1] = check[1] != 0;
    if constexpr (F::experts) {
      send(spot, y, ExpertTarget(arguments.y, spot.end));
    } else {
      send(spot, y, arguments.y);
    }
  }

  template <class Target>
  __device__ void send(const Spot& spot, const CUtensorMap& y, const Target& target) {
    TransposeBuffer<F::rows_a>& buffers = shared.buffers[group];
    const int2 at = {spot.origin.x + 64 * group, spot.origin.y};
    const int barrier = kConsumerBarriers + group;
    if (arguments.y_type == DType::f16) {
      store_tiles<__half, false, F::rows_a>(totals, 1.0f, buffers, at, y, target, barrier);
    } else if (arguments.y_type == DType::bf16) {
      store_tiles<__nv_bfloat16, false, F::rows_a>(totals, 1.0f, buffers, at, y, target, barrier);
    } else {
      store_tiles<float, false, F::rows_a>(totals, 1.0f, buffers, at, y, target, barrier);
    }
  }

  // A barrier of the warpgroup, which returns whether any thread passed true.
  __device__ bool any_of_warpgroup(bool mine) const {
    int any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, 128, p;\nselp.b32 %0, 1, 0, q;\n}\n"
        : "=r"(any)
        : "r"(static_cast<int>(mine)), "r"(kConsumerBarriers + group)
        : "memory");
    return any != 0;
  }
};

// A warp that multiplies: its warpgroup (64 rows of the tile, or a helper), its number in that, and, one per lane, the
// empty barriers of the blocks that fill its stages.
template <class F>
struct Multiplier {
  static constexpr int kSums = F::rows_a / 2;  // of a thread
  static constexpr bool kRow = F::slices == 0;
  static constexpr int kUnit = F::slices == 1 ? 1 : 2;                // slices converted at a time
  static constexpr int kGroupUnits = F::slices == 4 || kRow ? 2 : 1;  // units of a stage that are summed together
  static constexpr int kUnits = 4 / kUnit;                            // of a stage
  static constexpr int kTurns = F::takes_turns ? F::helpers : 1;

  Shared<F>& shared;
  const Arguments& arguments;
  int warpgroup;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int turn = F::takes_turns ? warpgroup : 0;  // its first stage of each tile
  std::uint32_t empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kClusterSize));
  Result<F> result = {shared, arguments, F::takes_turns ? 0 : warpgroup, warp};
  using Reader = NibbleBytes<F::rows_b, F::packed, F::zero_points>;
  Reader reader = Reader(static_cast<unsigned>(4 * result.group + warp));

  int sums[kSums];  // of a group
  Fragment b[2][kUnit];
  RingPosition<F::slots> slot;  // of a helper

  // Each lane arrives for the scales and zero points that it has read.
  __device__ void release(int stage) const {
    ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < kClusterSize);
    if constexpr (!F::packed) ptx::mbarrier_arrive(shared.groups_empty[stage]);
  }

  __device__ void wait_full(const RingPosition<F::stages>& at) const {
    ptx::mbarrier_wait(shared.full[at.stage], at.parity);
  }

  // `next`: behind `at`, the stage before of this warpgroup. A helper that passes on nothing before the end may be any
  // number of stages ahead of the others, and waits for theirs too.
  __device__ void wait_full(RingPosition<F::stages> at, const RingPosition<F::stages>& next) const {
    if constexpr (F::takes_turns && kRow) {
      for (at.next(); at.stage != next.stage; at.next()) wait_full(at);
    }
    wait_full(next);
  }

  template <int unit>
  __device__ void convert(int stage) {
    std::uint32_t offsets[2] = {};
    if constexpr (F::zero_points) {
      const auto* const zeros = &shared.zeros[stage][shared.place(result.rows, unit / kGroupUnits)];
#pragma unroll
      for (int h = 0; h < 2; ++h) offsets[h] = (zeros[h] + (F::packed ? 0 : 8)) * 0x01010101u;
    }
    reader.convert(unit * kUnit, b[unit % 2][0], shared.b[stage], offsets);
    reader.convert(unit * kUnit + kUnit - 1, b[unit % 2][kUnit - 1], shared.b[stage], offsets);
  }

  template <int unit>
  __device__ void enqueue(int stage, bool accumulate) {
    const std::uint32_t a = smem_descriptor_in_cluster<false>(ptx::shared_address(shared.a[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      wgmma_s8(sums, b[unit % 2][i], a + 2 * (unit * kUnit + i), accumulate || i > 0);
    }
    ptx::wgmma_commit();
  }

  // The group's sums into t, or on to the keeper of t.
  __device__ void fold(float2 scales) {
    wgmma_fence_operand(sums);
    const auto sum = [&](int i) { return __int2float_rn(sums[i]); };
    if constexpr (F::takes_turns) {
      pass(sum, scales);
    } else {
      result.fold(sum, scales);
    }
  }

  // sum(i): the i-th sum, a float or an int's bits.
  template <class Sum>
  __device__ void pass(const Sum& sum, float2 scales) {
    auto& passed = shared.passed;
    const int to = slot.stage;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    ptx::mbarrier_wait(passed.empty[turn][to], slot.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      passed.sums[turn][to][i][thread] = {sum(4 * i), sum(4 * i + 1), sum(4 * i + 2), sum(4 * i + 3)};
    }
    passed.scales[turn][to][thread] = scales;
    ptx::mbarrier_arrive(passed.full[turn][to]);
    slot.next();
  }

  // Scales of the thread's two rows in the stage's i-th group.
  __device__ float2 scales_of(int stage, int i) const {
    return *reinterpret_cast<const float2*>(&shared.scales[stage][shared.place(result.rows, i)]);
  }

  // Multiplies a unit, and converts the next one meanwhile.
  template <int unit>
  __device__ void advance(const RingPosition<F::stages>& at, bool accumulate, const RingPosition<F::stages>& next,
                          bool more) {
    constexpr bool kEnds = (unit + 1) % kGroupUnits == 0;  // its group, or the part of it in this stage
    const int stage = at.stage;
    const float2 scales = scales_of(stage, unit / kGroupUnits);
    enqueue<unit>(stage, accumulate);
    ptx::wgmma_wait<1>();
    if constexpr (unit + 1 < kUnits) {
      convert<unit + 1>(stage);
    } else if (more) {
      wait_full(at, next);
      convert<0>(next.stage);
    }
    if constexpr (kEnds) {
      ptx::wgmma_wait<0>();
      if constexpr (unit + 1 == kUnits) release(stage);
      if constexpr (!kRow) fold(scales);
    }
  }

  // The main loop: all of a tile's stages of this warpgroup. The first unit has been converted; at the end, that of the
  // next tile has, if any.
  __device__ void multiply(RingPosition<F::stages>& at, bool more) {
    const int steps = arguments.steps;
    float2 scales = {};
    if (turn >= steps) at = at.ahead(steps);
    for (int step = turn; step < steps; step += kTurns) {
      const RingPosition<F::stages> here = at;
      const bool last = step + kTurns >= steps;
      if (kTurns > 1 && last) {
        at = at.ahead(steps - step + turn);
      } else {
        at.next(kTurns);
      }
      const bool next = more || !last;
      if constexpr (kRow) scales = scales_of(here.stage, 0);
      advance<0>(here, kRow && step > turn, at, next);
      advance<1>(here, kGroupUnits == 2, at, next);
      if constexpr (kUnits == 4) {
        advance<2>(here, false, at, next);
        advance<3>(here, false, at, next);
      }
    }
    if constexpr (kRow && F::takes_turns) {
      wgmma_fence_operand(sums);
      if (turn < steps) pass([&](int i) { return __int_as_float(sums[i]); }, scales);
    } else if constexpr (kRow) {
      fold(scales);
    }
  }

  __device__ void run(Place<F> place, const CUtensorMap& y) {
    RingPosition<F::stages> at = RingPosition<F::stages>().ahead(turn);
    if (place.cluster < place.count() && turn < arguments.steps) {
      wait_full(at);
      convert<0>(at.stage);
    }
    for (int t = place.cluster; t < place.count(); t += place.clusters) {
      const bool more = t + place.clusters < place.count();
      if constexpr (F::takes_turns) {
        multiply(at, more);
      } else {
        Spot spot = place[t];
        result.begin(spot);
        multiply(at, more);
        if constexpr (F::experts) spot = place[t];  // which then need not be kept in registers
        result.store(spot, y);
      }
    }
    if constexpr (!F::takes_turns) result.end();
  }
};

// A warp of the keeper.
template <class F>
struct Keeper {
  static constexpr int kFours = F::rows_a / 8;

  Shared<F>& shared;
  const Arguments& arguments;
  int warp;
  Result<F> result = {shared, arguments, 0, warp};
  RingPosition<F::slots> slot[kHelpers];  // of each helper

  // What a helper passes on next: take(i, four sums, scales).
  template <class Take>
  __device__ void collect(int helper, const Take& take) {
    auto& passed = shared.passed;
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int from = slot[helper].stage;
    ptx::mbarrier_wait(passed.full[helper][from], slot[helper].parity);
    const float2 scales = passed.scales[helper][from][thread];
    float4 sums[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) sums[i] = passed.sums[helper][from][i][thread];
    ptx::mbarrier_arrive(passed.empty[helper][from]);
    slot[helper].next();
    take(reinterpret_cast<const float(&)[4 * kFours]>(sums), scales);
  }

  __device__ void collect_tile() {
    if constexpr (F::slices == 0) {  // the only group, whose sums are exact in any order
      int sums[4 * kFours] = {};
      float2 scales = {};
#pragma unroll
      for (int helper = 0; helper < kHelpers; ++helper) {
        if (helper >= arguments.steps) break;
        collect(helper, [&](const float(&more)[4 * kFours], float2 of_group) {
          scales = of_group;
#pragma unroll
          for (int i = 0; i < 4 * kFours; ++i) sums[i] += __float_as_int(more[i]);
        });
      }
      result.fold([&](int i) { return __int2float_rn(sums[i]); }, scales);
    } else {
      for (int first = 0; first < arguments.steps; first += kHelpers) {
#pragma unroll
        for (int helper = 0; helper < kHelpers; ++helper) {
          if (first + helper >= arguments.steps) break;
#pragma unroll 1
          for (int g = 0; g < F::groups; ++g) {
            collect(helper, [&](const float(&sums)[4 * kFours], float2 scales) {
              result.fold([&](int i) { return sums[i]; }, scales);
            });
          }
        }
      }
    }
  }

  __device__ void run(Place<F> place, const CUtensorMap& y) {
    for (int t = place.cluster; t < place.count(); t += place.clusters) {
      const Spot spot = place[t];
      result.begin(spot);
      collect_tile();
      result.store(spot, y);
    }
    result.end();
  }
};

template <class F>
__global__ void __launch_bounds__(F::threads, F::blocks)
    w4a8_gemm_kernel(const __grid_constant__ PanelMaps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = uniform_warp();
  gemm_prologue([&] {
    maps.prefetch();
    if constexpr (F::packed) maps.prefetch_panels(F::zero_points);
    init_barriers(shared.full, F::packed ? 2 : 2 + 32);
    init_barriers(shared.empty, kClusterSize * 4 * F::keepers);
    init_barriers(shared.groups_empty, kWarpgroup * F::keepers);
    if constexpr (F::helpers > 0) {
      for (auto& barriers : shared.passed.full) init_barriers(barriers, kWarpgroup);
      for (auto& barriers : shared.passed.empty) init_barriers(barriers, kWarpgroup);
    }
  });
  if constexpr (F::experts) fill_table(shared.experts, arguments.experts, F::rows_a);
  const Place<F> place(shared, arguments);
  const auto produce = [&](int warp) {
    if (warp == 0 && ptx::elect_one()) load_a(shared, place, maps, arguments);
    if (warp == 1 && ptx::elect_one()) load_b(shared, place, maps, arguments);
    if constexpr (!F::packed) {
      if (warp == 2) load_groups(shared, place, arguments);
    }
  };
  const auto consume = [&](int warpgroup, int warp) {
    if constexpr (F::takes_turns) {
      if (warpgroup == F::helpers) return Keeper<F>{shared, arguments, warp}.run(place, maps.y);
    }
    Multiplier<F>{shared, arguments, warpgroup, warp}.run(place, maps.y);
  };
  produce_and_consume<F::producer_registers, F::consumer_registers>(warp, produce, consume);
}

}  // namespace octile::cuda::w4a8
