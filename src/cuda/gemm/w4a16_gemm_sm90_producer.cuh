// Producer warpgroup of w4a16_gemm_sm90, and where the tiles of experts are. One thread issues TMA loads for a and the
// weight; two warps load the scales through their own ring of stages. Of experts, whose weights are packed, it loads
// the scales too.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/split_tiles.cuh"
#include "cuda/device/tma_transpose.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/gemm/int4_maps.cuh"
#include "cuda/gemm/w4a16_gemm_sm90_convert.cuh"

namespace octile::cuda::w4a16 {

constexpr int kTileK = 64;            // of a tile of K
constexpr int kRowsB = 128;           // of a tile of the weight; columns of y
constexpr int kNamedBarrier = 1;      // of both consumers
constexpr int kConsumerBarriers = 2;  // of each: this and the next
constexpr int kScales = 5;            // stages of the scales' ring

// rows_a: of a tile of a, and of y, `width` per WGMMA. k_tiles: of a stage. blocks: per SM; two hide each other's
// waits.
template <int width_, int products_, int stages_, int k_tiles_ = 1, int blocks_ = 1>
struct Tile {
  static constexpr int k_tiles = k_tiles_;
  static constexpr int step = kTileK * k_tiles;  // columns of a stage
  static constexpr int width = width_;
  static constexpr int products = products_;
  static constexpr int rows_a = width * products;
  static constexpr int stages = stages_;
  static constexpr int blocks = blocks_;
  static constexpr int producer_registers = blocks == 1 ? kProducerRegisters : 32;
  static constexpr int consumer_registers = blocks == 1 ? kConsumerRegisters : 104;
};

// experts: of each expert's rows.
template <class T_, class Tile_, bool packed_, bool experts_ = false>
struct Form : Tile_ {
  using T = T_;
  using Tile = Tile_;
  static constexpr bool packed = packed_;
  static constexpr bool experts = experts_;
  using Maps = std::conditional_t<experts, PanelMaps, GemmMaps>;
  static_assert(packed || !experts);
};

struct Nothing {};

template <class F>
struct Shared {
  struct Stage {
    std::uint8_t a[F::k_tiles][F::rows_a * kTileK * 2];
    std::uint8_t b[F::k_tiles][NibbleReader<typename F::T, F::packed>::kTileBytes];
  };
  Stage stages[F::stages];
  TransposeBuffer<F::width> lines[kConsumers];
  GroupScales scales[kScales];
  std::uint64_t full[F::stages];
  std::uint64_t empty[F::stages];
  std::uint64_t scales_full[kScales];
  std::uint64_t scales_empty[kScales];
  [[no_unique_address]] std::conditional_t<F::experts, ExpertTable, Nothing> experts;
};

struct Arguments {
  NibbleWeight weight;
  SplitTiles tiles;
  Bias bias;
  TransposeTarget y;
  Experts experts = {};
};

// In units of 128 columns: whole groups.
template <class F>
using WholePlace = SplitPlace<F::rows_a, kRowsB, 128 / F::step>;

// A share of an expert's tile: where its rows of y end, and whose it is.
struct ExpertTask : SplitTask {
  int end;
  int expert;
};

// Neither parts of K nor halves are for experts, whose last tiles of rows overlap those before.
template <class F>
struct ExpertPlace : WholePlace<F> {
  ExpertWalk walk;

  __device__ ExpertPlace(const Shared<F>& shared, const Arguments& arguments)
      : WholePlace<F>(arguments.tiles), walk{shared.experts, arguments.experts.count, arguments.tiles.order.rows} {}

  __device__ int tasks() const { return walk.count(); }
  __device__ bool is_halved(int) const { return false; }
  __device__ void join_adding() const {}

  // In rising order.
  __device__ ExpertTask operator[](int index) {
    const int2 at = walk[index];
    const int first = walk.first_row();
    ExpertTask task = {this->whole, walk.end_row(), walk.expert};
    task.origin = {(at.y * kClusterSize + this->rank) * kRowsB,
                   min(first + at.x * F::rows_a, max(task.end - F::rows_a, first))};
    return task;
  }
};

template <class F>
using Place = std::conditional_t<F::experts, ExpertPlace<F>, WholePlace<F>>;

template <class F>
__device__ Place<F> place_of(const Shared<F>& shared, const Arguments& arguments) {
  if constexpr (F::experts) {
    return Place<F>(shared, arguments);
  } else {
    return Place<F>(arguments.tiles);
  }
}

template <class F>
__device__ void init(Shared<F>& shared) {
  init_barriers(shared.full, 1);
  init_barriers(shared.empty, kClusterSize * 4 * kConsumers);
  init_barriers(shared.scales_full, F::experts ? 1 : kRowsB / 2);
  init_barriers(shared.scales_empty, kWarpgroup * kConsumers);
}

// One thread: the weight of an expert's tiles, with the scales and zero points.
template <class F>
struct ExpertWeight {
  Shared<F>& shared;
  const PanelMaps& maps;
  const NibbleWeight& weight;
  RingPosition<kScales> at = {};

  // A tile of 64 columns, for `full` of its stage, and the groups that begin in it, if any do.
  __device__ void load(void* to, const ExpertTask& task, int k_tile, std::uint32_t full) {
    load_int4_panels(ptx::shared_address(to), maps, k_tile * kTileK, task.origin.x, task.expert, full);
    const bool whole = weight.groups == 1;
    if (whole ? k_tile == 0 : weight.group != 128 || k_tile % 2 == 0) {
      load_groups(task, whole ? 0 : k_tile * kTileK / weight.group, weight.group == 32 && !whole ? 2 : 1);
    }
  }

 private:
  __device__ void load_groups(const ExpertTask& task, int first, int count) {
    GroupScales& to = shared.scales[at.stage];
    const std::uint32_t full = ptx::shared_address(&shared.scales_full[at.stage]);
    const int bytes = kRowsB * (weight.zeros ? 5 : 4);
    ptx::mbarrier_wait(shared.scales_empty[at.stage], at.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, static_cast<std::uint32_t>(count * bytes));
    for (int i = 0; i < count; ++i) {
      load_panels(to.scale[i], maps.scales, first + i, task.origin.x, task.expert, full);
      if (weight.zeros) load_panels(to.zero[i], maps.zeros, first + i, task.origin.x, task.expert, full);
    }
    at.next();
  }
};

// One thread: tiles of a and b, stage by stage. Each block of a pair loads half of a for both, unless they split K.
template <class F>
__device__ void load_operands(Shared<F>& shared, Place<F> place, const typename F::Maps& maps,
                              const NibbleWeight& weights) {
  constexpr int kHalf = F::rows_a / kClusterSize;
  constexpr int kHalfBytes = kHalf * kTileK * 2;
  RingPosition<F::stages> at;
  [[maybe_unused]] auto weight = [&] {
    if constexpr (F::experts) {
      return ExpertWeight<F>{shared, maps, weights};
    } else {
      return Nothing{};
    }
  }();
  for (int t = place.cluster; t < place.tasks(); t += place.clusters) {
    const auto task = place[t];
    const bool halved = place.is_halved(t);
    for (int step = 0; step < task.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
#pragma unroll
      for (int k_tile = 0; k_tile < F::k_tiles; ++k_tile) {
        const std::uint32_t a = ptx::shared_address(stage.a[k_tile]);
        const std::uint32_t b = ptx::shared_address(stage.b[k_tile]);
        const int term = (task.first_step + step) * F::step + k_tile * kTileK;
        if (halved) {
          ptx::tma_load(a, maps.a, term, task.origin.y, full);
          ptx::tma_load(a + kHalfBytes, maps.a, term, task.origin.y + kHalf, full);
        } else {
          ptx::tma_load_multicast(place.pair(), a + place.rank * kHalfBytes, maps.a,
                                  {term, task.origin.y + place.rank * kHalf}, full);
        }
        if constexpr (F::experts) {
          weight.load(stage.b[k_tile], task, step * F::k_tiles + k_tile, full);
        } else {
          load_int4_tile<F::packed>(b, sizeof(stage.b[k_tile]), maps, term, task.origin.x, full);
        }
      }
      at.next();
    }
  }
}

// Two warps: the scales. Each lane's copies arrive when they have landed.
template <class F>
__device__ void load_scales(Shared<F>& shared, Place<F> place, const NibbleWeight& weight) {
  ScaleFetcher<F::packed> fetcher(weight, static_cast<int>(threadIdx.x) - 32);
  RingPosition<kScales> at;
  for (int t = place.cluster; t < place.tasks(); t += place.clusters) {
    const auto task = place[t];
    const int steps = steps_of_group(weight, task.steps * F::k_tiles);
    fetcher.start_tile(task.origin.x, weight.groups == 1 ? 0 : task.first_step * F::step);
    for (int step = 0; step < task.steps * F::k_tiles; step += steps) {
      ptx::mbarrier_wait(shared.scales_empty[at.stage], at.parity ^ 1);
      fetcher.fetch(shared.scales[at.stage]);
      ptx::cp_async_mbarrier_arrive(ptx::shared_address(&shared.scales_full[at.stage]));
      at.next();
    }
  }
}

}  // namespace octile::cuda::w4a16
