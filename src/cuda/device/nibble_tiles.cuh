// The product of 16-bit rows by a 4-bit weight on Hopper's matrix unit, as the blocks of w4a16_gemm_sm90 do it: one
// thread that has the copy engine fill a ring of stages, two warps that bring the scales by a ring of their own, and
// two warpgroups that convert, multiply and store.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/nibble_rows.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/register_products.cuh"
#include "cuda/device/transposed_boxes.cuh"
#include "cuda/nibble_weight.h"

namespace octile::cuda::nibble_tiles {

constexpr int kStep = 64;    // terms of a stage
constexpr int kRowsB = 128;  // of a tile of the weight: y's columns
constexpr int kPair = 2;     // blocks that share a
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kMeetBarrier = 1;       // of threads
constexpr int kConsumerBarriers = 2;  // and the next
constexpr int kMostParts = 4;
constexpr int kScales = 4;       // stages of their own ring
constexpr int kScalesAhead = 2;  // on their way

// A tile's rows of a, and so of y, `width` to a product, and the blocks of a multiprocessor: two fill each other's
// waits.
template <int width_, int products_, int stages_, int blocks_ = 1>
struct Tile {
  static constexpr int width = width_;
  static constexpr int products = products_;
  static constexpr int rows_a = width * products;
  static constexpr int stages = stages_;
  static constexpr int blocks = blocks_;
  static constexpr int producer_registers = blocks == 1 ? 40 : 32;
  static constexpr int consumer_registers = blocks == 1 ? 232 : 104;
};

template <class T_, class Tile_, bool packed_>
struct Form : Tile_ {
  using T = T_;
  using Tile = Tile_;
  static constexpr bool packed = packed_;
};

template <class F>
struct Shared {
  struct Stage {
    std::uint8_t a[F::rows_a * kStep * 2];
    std::uint8_t b[NibbleReader<typename F::T, F::packed>::kTileBytes];
  };
  Stage stages[F::stages];
  TransposedBoxes<F::width> boxes[kConsumers];
  GroupScales scales[kScales];
  std::uint64_t full[F::stages];
  std::uint64_t empty[F::stages];
  std::uint64_t scales_full[kScales];
  std::uint64_t scales_empty[kScales];
};

struct Arguments {
  NibbleWeight weight;
  int steps = 0;    // of k
  int parts = 1;    // of k
  TileOrder order;  // of the clusters' tiles: rows of the weight down, rows of a across
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  BoxTarget y;
};

struct Maps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap b_odd;  // b has the even rows
  CUtensorMap y;
};

// Where a block is, and its terms.
template <class F>
struct Place {
  int clusters;
  int cluster;
  int rank;  // in its pair
  int part;
  int first_step;
  int steps;

  __device__ explicit Place(const Arguments& p) {
    const int blocks = kPair * p.parts;
    clusters = static_cast<int>(gridDim.x) / blocks;
    cluster = static_cast<int>(blockIdx.x) / blocks;
    const int in_cluster = static_cast<int>(blockIdx.x) % blocks;
    rank = in_cluster % kPair;
    part = in_cluster / kPair;
    // Two steps are a whole group, or several.
    const int twos = (p.steps + 1) / 2;
    first_step = twos * part / p.parts * 2;
    steps = min(twos * (part + 1) / p.parts * 2, p.steps) - first_step;
  }

  // Of a tile: its first row of b, and of a.
  __device__ int2 origin(int2 tile) const { return {(tile.x * kPair + rank) * kRowsB, tile.y * F::rows_a}; }
};

template <class F>
__device__ void init(Shared<F>& shared) {
  for (auto& barrier : shared.full) ptx::barrier_init(ptx::shared_address(&barrier), 1);
  for (auto& barrier : shared.empty) ptx::barrier_init(ptx::shared_address(&barrier), kPair * 4 * kConsumers);
  for (auto& barrier : shared.scales_full) ptx::barrier_init(ptx::shared_address(&barrier), kRowsB / 2);
  for (auto& barrier : shared.scales_empty) {
    ptx::barrier_init(ptx::shared_address(&barrier), kWarpgroup * kConsumers);
  }
  ptx::barrier_init_done();
}

// One thread: a's and b's tiles, stage by stage. Of a each block of a pair loads half, for both.
template <class F>
__device__ void load_operands(Shared<F>& shared, const Place<F>& place, const Maps& maps, const Arguments& arguments) {
  constexpr int kHalf = F::rows_a / kPair;
  const auto both = static_cast<std::uint16_t>(3u << kPair * place.part);
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int2 origin = place.origin(arguments.order[t]);
    for (int step = 0; step < place.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const std::uint32_t a = ptx::shared_address(stage.a + place.rank * kHalf * kStep * 2);
      const std::uint32_t b = ptx::shared_address(stage.b);
      const int term = (place.first_step + step) * kStep;
      ptx::wait(ptx::shared_address(&shared.empty[at.stage]), at.parity ^ 1);
      ptx::arrive_and_expect(full, sizeof(stage));
      ptx::load_box_to(both, a, maps.a, {term, origin.y + place.rank * kHalf}, full);
      if constexpr (F::packed) {
        ptx::load_box(b, maps.b, term * 2, origin.x / 16, full);
      } else {
        ptx::load_box(b, maps.b, term / 2, origin.x / 2, full);
        ptx::load_box(b + sizeof(stage.b) / 2, maps.b_odd, term / 2, origin.x / 2, full);
      }
      at.next();
    }
  }
}

// Two warps: the scales. Every lane reports its own copies.
template <class F>
__device__ void load_scales(Shared<F>& shared, const Place<F>& place, const Arguments& arguments) {
  ScaleFetcher<F::packed> fetcher(arguments.weight, static_cast<int>(threadIdx.x) - 32);
  const int steps = steps_of_group(arguments.weight, place.steps);
  RingPosition<kScales> to;
  RingPosition<kScales> here;
  int ahead = 0;
  const auto report = [&] {
    ptx::arrive(ptx::shared_address(&shared.scales_full[here.stage]));
    here.next();
  };
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    fetcher.turn_to(place.origin(arguments.order[t]).x, arguments.weight.groups == 1 ? 0 : place.first_step * kStep);
    for (int step = 0; step < place.steps; step += steps) {
      ptx::wait(ptx::shared_address(&shared.scales_empty[to.stage]), to.parity ^ 1);
      fetcher.fetch(shared.scales[to.stage]);
      to.next();
      if (ahead++ < kScalesAhead) continue;
      asm volatile("cp.async.wait_group %0;" ::"n"(kScalesAhead) : "memory");
      report();
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  for (int i = 0; i < min(ahead, kScalesAhead); ++i) report();
}

// ---- Products.

// A warp of a consumer: its warpgroup, itself in that, and the barriers of the blocks that fill its stages, one a lane.
template <class F>
struct Consumer {
  using T = typename F::T;
  using Scales = RowScales<T, F::packed>;
  using Half = Fragment[2];  // 32 terms
  using Sums = float[F::products][F::width / 2];
  Shared<F>& shared;
  const Arguments& arguments;
  const Place<F>& place;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty =
      ptx::in_block(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(kPair* place.part + lane % kPair));
  RingPosition<kScales> scales_at = {};
  NibbleReader<T, F::packed> reader = NibbleReader<T, F::packed>(static_cast<unsigned>(4 * group + warp));

  __device__ void release(int stage) const { ptx::arrive_in_cluster(empty + 8 * stage, lane < kPair); }

  __device__ void wait_full(const RingPosition<F::stages>& at) const {
    ptx::wait(ptx::shared_address(&shared.full[at.stage]), at.parity);
  }

  template <int half>
  __device__ void fetch(int stage, Scales& scales) {
    reader.template fetch<half>(shared.stages[stage].b);
    if (half == 1 || !scales.begins()) return;
    ptx::wait(ptx::shared_address(&shared.scales_full[scales_at.stage]), scales_at.parity);
    scales.fetch(shared.scales[scales_at.stage]);
    ptx::arrive(ptx::shared_address(&shared.scales_empty[scales_at.stage]));
    scales_at.next();
  }

  template <int half>
  __device__ void convert(Half& b, Scales& scales) const {
    if constexpr (half == 0) {
      scales.begin_step();
    } else {
      scales.begin_half();
    }
    reader.convert(b[0], scales, 0);
    reader.convert(b[1], scales, 1);
  }

  // The products of half a stage, whose rows of a begin at `a`, are enqueued; those of the half before are done.
  __device__ void enqueue(Sums& sums, const Half& b, std::uint32_t a, bool accumulate) const {
    ptx::begin_products();
#pragma unroll
    for (int i = 0; i < 2 * F::products; ++i) {
      constexpr int kNextProduct = F::width * kStep * 2 / 16;
      const int slice = i / F::products, product = i % F::products;
      multiply_16<T, false>(sums[product], b[slice], a + slice * kNextTerms<false> + product * kNextProduct,
                            accumulate || slice > 0);
    }
    ptx::commit_products();
    ptx::wait_products<1>();
  }

  __device__ static void hold_all(Sums& sums) {
#pragma unroll
    for (int i = 0; i < F::products; ++i) hold(sums[i]);
  }

  // sums = sums * by, rows g and g + 8
  __device__ static void scale_rows(Sums& sums, const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < F::rows_a / 2; ++i) sums[i / (F::width / 2)][i % (F::width / 2)] *= by[i / 2 % 2];
  }

  // A loop, since the compiler would make predicated instructions of a branch, which wait for all sums in every step.
  __device__ void scale_down(Sums& sums, Scales& scales) const {
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll 1
      while (scales.grown) {
        ptx::wait_products<0>();
        hold_all(sums);
        scale_rows(sums, scales.factor);
        scales.grown = false;
      }
    }
  }

  // The first half of a tile's first stage.
  __device__ void begin(Half (&b)[2], const RingPosition<F::stages>& at, Scales& scales) {
    wait_full(at);
    fetch<0>(at.stage, scales);
    convert<0>(b[0], scales);
    fetch<1>(at.stage, scales);
  }

  // sums (64, rows of a) = b's rows by a, over all steps. b[0]: the first half of the stage `at`, whose second half has
  // been fetched, and in the end that of the next tile, if there is one. While the products of one half are done the
  // next one is converted, and the one after that fetched.
  __device__ void multiply(Sums& sums, Half (&b)[2], RingPosition<F::stages>& at, bool more, Scales& scales) {
    int last = 0;
    for (int step = 0; step < place.steps; ++step) {
      const int stage = at.stage;
      const std::uint32_t a = operand_descriptor<false>(ptx::shared_address(shared.stages[stage].a));
      const bool next = more || step + 1 < place.steps;
      at.next();
      scale_down(sums, scales);
      enqueue(sums, b[0], a, step > 0);
      if (step > 0) release(last);
      convert<1>(b[1], scales);
      if (next) {
        wait_full(at);
        fetch<0>(at.stage, scales);
      }
      enqueue(sums, b[1], a + 2 * kNextTerms<false>, true);
      convert<0>(b[0], scales);
      if (next) fetch<1>(at.stage, scales);
      last = stage;
    }
    ptx::wait_products<0>();
    release(last);
    hold_all(sums);
  }

  __device__ float bias_of(int row) const {
    if (arguments.bias == nullptr || row >= arguments.weight.rows) return 0;
    const std::int64_t at = row * arguments.bias_stride;
    return arguments.y.wide ? __ldcg(static_cast<const float*>(arguments.bias) + at)
                            : widen(__ldcg(static_cast<const T*>(arguments.bias) + at));
  }

  // The parts' sums, in order, in the first one, by way of the stages, which nobody fills any more.
  __device__ void add_parts(Sums& all) {
    constexpr int kFours = F::rows_a / 8;
    constexpr int kBetween = kConsumers * kWarpgroup * 16;
    static_assert(kFours * kBetween <= sizeof(shared.stages));
    auto& sums = reinterpret_cast<float(&)[F::rows_a / 2]>(all);
    const std::uint32_t mine = ptx::shared_address(shared.stages) + (threadIdx.x - kWarpgroup) * 16;
    asm volatile("bar.sync %0, %1;" ::"n"(kMeetBarrier),
                 "n"(kConsumers * kWarpgroup) : "memory");  // all are read
    if (place.part > 0) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * kBetween), "f"(sums[4 * i]),
                     "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3])
                     : "memory");
      }
    }
    ptx::cluster_arrive_released();
    ptx::cluster_wait();
    if (place.part > 0) return;
    for (int part = 1; part < arguments.parts; ++part) {
      const std::uint32_t from = ptx::in_block(mine, static_cast<std::uint32_t>(kPair * part + place.rank));
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        float four[4];
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                     : "r"(from + i * kBetween)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
      }
    }
  }

  template <class Y, class Finish>
  __device__ void store(const Sums& sums, const Finish& finish, int2 at, const CUtensorMap& y) const {
#pragma unroll
    for (int i = 0; i < F::products; ++i) {
      store_boxes<Y, false, F::width>(sums[i], finish, shared.boxes[group], {at.x, at.y + i * F::width}, y, arguments.y,
                                      kConsumerBarriers + group);
    }
  }

  __device__ void run(const CUtensorMap& y) {
    const int first_row = 64 * group + 16 * warp + lane / 4 * 2;
    Scales scales(arguments.weight, first_row, place.steps);
    RingPosition<F::stages> at;
    Half b[2];
    Sums sums;
    if (place.cluster < arguments.order.count()) begin(b, at, scales);
    for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
      const int2 origin = place.origin(arguments.order[t]);
      const float bias[2] = {bias_of(origin.x + first_row), bias_of(origin.x + first_row + 1)};
      multiply(sums, b, at, t + place.clusters < arguments.order.count(), scales);
      float after[2] = {scales.after(0), scales.after(1)};
      if (arguments.parts > 1) {
        scale_rows(sums, after);
        after[0] = after[1] = 1;
        add_parts(sums);
        if (place.part > 0) continue;
      }
      const auto finish = [&](float x, unsigned h) { return __fmaf_rn(x, after[h], bias[h]); };
      const int2 corner = {origin.x + 64 * group, origin.y};
      if (arguments.y.wide) {
        store<float>(sums, finish, corner, y);
      } else {
        store<T>(sums, finish, corner, y);
      }
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::wait_stores_read<0>();
    __syncwarp();
  }
};

}  // namespace octile::cuda::nibble_tiles
