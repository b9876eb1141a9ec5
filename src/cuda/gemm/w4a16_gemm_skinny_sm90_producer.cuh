// w4a16_gemm_skinny_sm90: launch arguments, shared memory, and the producer warpgroup, which loads the weight, its
// scales and the tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device/int4.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/token_order.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/gemm/grouped_weight.h"

namespace octile::cuda {

// ---- Arguments.

struct SkinnyArguments {
  NibbleWeight weight;  // of the dense row scale.col and zero.col are 0 where a row has one group
  int tokens = 0;
  int token_rows = 0;  // of a stage that are loaded: TMA takes long over rows out of bounds
  int steps = 0;
  int parts = 1;        // of K: blocks of a cluster
  int group_folds = 1;  // groups of 64 are two folds
  int step_groups = 1;  // whose scales a step loads
  Bias bias;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
  bool y_aligned = false;  // for two elements at a time

  // The first group of a step.
  __device__ int group_of(int step) const { return weight.groups == 1 ? 0 : step * step_groups; }
};

struct SkinnyMaps {
  CUtensorMap weight, tokens;
  CUtensorMap scales, zeros;  // of a packed weight
};

constexpr int kUnits = 2;

// tokens: at most. folds: how often in a step products are scaled; a group is one or two folds.
template <class T_, int tokens_, bool packed_, int folds_, bool zeros_>
struct SkinnyForm {
  using T = T_;
  static constexpr int tokens = tokens_;
  static constexpr bool packed = packed_;
  static constexpr int folds = folds_;
  static constexpr bool zeros = zeros_;

  // A consumer warpgroup has two units of sums: two tiles of 64 rows of the weight, or two halves of the tokens.
  static constexpr int row_tiles = tokens > 64 ? 1 : 2;
  static constexpr int token_parts = kUnits / row_tiles;
  static constexpr int unit_tokens = tokens / token_parts;

  // Whether the tokens stay in the order of K: then each pair of the weight's columns is taken out of its word. Else
  // the tokens are put into the order of a word's nibbles, which moves twice their bytes through shared memory.
  static constexpr bool in_order = tokens > 64;

  static constexpr int rows = 2 * 64 * row_tiles;  // of the weight
  static constexpr int terms = 128;                // of a step
  static constexpr int sets = terms / 32;
  static constexpr int token_stages = tokens > 64 ? 4 : 5;
  static constexpr int stage_bytes = rows * terms / 2 + rows * folds * (zeros ? packed ? 5 : 8 : 4);  // of the weight
  static constexpr int weight_stages = std::min(10, (224 * 1024 - token_stages * tokens * terms * 2) / stage_bytes);
  static_assert(weight_stages > token_stages);
};

namespace w4a16_skinny {

constexpr int kConsumerThreads = 256;
constexpr int kProducerThreads = 128;
constexpr int kThreads = kConsumerThreads + kProducerThreads;
constexpr int kConsumerRegisters = 208;
constexpr int kProducerRegisters = 88;

template <class F>
struct Shared {
  using Zero = std::conditional_t<F::packed, std::uint8_t, std::int32_t>;  // 8 + z; z
  std::uint8_t weight[F::weight_stages][F::rows * F::terms / 2];
  std::uint8_t tokens[F::token_stages][F::tokens * F::terms * 2];
  // [stage][panel of 16 rows][group of the step][row]; the groups are SkinnyArguments::step_groups, F::folds at most.
  float scales[F::weight_stages][F::rows * F::folds];
  Zero zeros[F::zeros ? F::weight_stages : 1][F::zeros ? F::rows * F::folds : 1];
  float biases[F::rows];
  std::uint64_t weight_full[F::weight_stages];
  std::uint64_t tokens_raw[F::token_stages];  // not yet permuted
  std::uint64_t tokens_full[F::token_stages];
  std::uint64_t tokens_empty[F::token_stages];
};

template <class F>
struct Place {
  int part;
  int first_row;
  int first_step;
  int steps;

  __device__ explicit Place(const SkinnyArguments& p) {
    const int cluster = static_cast<int>(blockIdx.x) / p.parts;
    part = static_cast<int>(blockIdx.x) % p.parts;
    first_row = cluster * F::rows;
    first_step = p.steps * part / p.parts;
    steps = p.steps * (part + 1) / p.parts - first_step;
  }
};

template <class F>
__device__ void init(Shared<F>& shared) {
  constexpr std::uint32_t kWeightArrivals = F::packed ? 1 : 1 + kProducerThreads;
  for (auto& barrier : shared.weight_full) ptx::mbarrier_init(barrier, kWeightArrivals);
  for (auto& barrier : shared.tokens_raw) ptx::mbarrier_init(barrier, 1);
  for (auto& barrier : shared.tokens_full) ptx::mbarrier_init(barrier, kProducerThreads);
  for (auto& barrier : shared.tokens_empty) ptx::mbarrier_init(barrier, kConsumerThreads / 32);
  ptx::fence_mbarrier_init();
}

// Prefetches the weight's first stage into L2 while TMA still reads its tensor maps: lines of 128 bytes of a panel, or
// 64 bytes of a row.
template <class F>
__device__ void prefetch_first(const SkinnyArguments& p, const Place<F>& place) {
  constexpr int kOwners = F::packed ? F::rows / 16 : F::rows;
  constexpr int kBytes = F::rows * F::terms / 2 / kOwners;
  constexpr int kLines = (kBytes + 127) / 128;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = place.first_row + thread / kLines * (F::rows / kOwners);
  const std::int64_t at = std::int64_t{place.first_step} * kBytes + thread % kLines * 128;
  if (thread >= kOwners * kLines || row >= p.weight.rows || at >= p.weight.pitch) return;
  const std::uint8_t* const owner = p.weight.values + row / (F::rows / kOwners) * p.weight.pitch;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(owner + at) : "memory");
}

// ---- The weight.

// One thread. Packed: of 16 panels, lines of 64 bytes (eight columns of 16 rows), and a line of scales and of zero
// points. Else 64 bytes of 256 rows.
template <class F>
__device__ void fetch_weight(Shared<F>& shared, const Place<F>& place, const SkinnyArguments& p, const SkinnyMaps& maps,
                             int step) {
  const std::uint64_t policy = ptx::evict_first();
  const int stage = step % F::weight_stages;
  const std::uint32_t full = ptx::shared_address(&shared.weight_full[stage]);
  const std::uint32_t to = ptx::shared_address(shared.weight[stage]);
  step += place.first_step;
  const int panel = place.first_row / 16;
  if constexpr (F::packed) {
    // Groups out of bounds are zeros; stale values might be NaN, and 0 times NaN is NaN.
    const int scale_bytes = F::rows * p.step_groups * (F::zeros ? 5 : 4);
    ptx::mbarrier_arrive_expect_tx(full, static_cast<std::uint32_t>(sizeof(shared.weight[0])) + scale_bytes);
    ptx::tma_load(to, maps.weight, int3{0, step * (F::terms / 8), panel}, full, policy);
    const int column = p.group_of(step) * 16;
    ptx::tma_load(ptx::shared_address(shared.scales[stage]), maps.scales, column, panel, full);
    if constexpr (F::zeros) ptx::tma_load(ptx::shared_address(shared.zeros[stage]), maps.zeros, column, panel, full);
  } else {
    ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.weight[0]));
    ptx::tma_load(to, maps.weight, int2{step * (F::terms / 2), place.first_row}, full, policy);
  }
}

// All producer threads: a step's scales and zero points of a row-major weight; zeros beyond K. Rows out of bounds are
// not used.
template <class F>
__device__ void fetch_scales(Shared<F>& shared, const Place<F>& place, const SkinnyArguments& p, int step) {
  static_assert(!F::packed && F::folds == 1);
  const NibbleWeight& w = p.weight;
  const int stage = step % F::weight_stages;
  const int group = place.first_step + step;
  const bool inside = w.groups == 1 || group < w.groups;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x) - kConsumerThreads; i < F::rows; i += kProducerThreads) {
    const int row = place.first_row + i;
    if (row >= w.rows) continue;
    ptx::cp_async_4(&shared.scales[stage][i],
                    static_cast<const float*>(w.scales) + (inside ? w.scale.at(row, group) : 0), inside);
    if constexpr (F::zeros) {
      ptx::cp_async_4(&shared.zeros[stage][i],
                      static_cast<const std::int32_t*>(w.zeros) + (inside ? w.zero.at(row, group) : 0), inside);
    }
  }
  ptx::cp_async_mbarrier_arrive(ptx::shared_address(&shared.weight_full[stage]));
}

// ---- The tokens.

// TMA loads two tiles of 64 columns, in lines of 128 bytes. Unless F::in_order, they are then put into the order of the
// nibbles.
template <class F>
struct Producer {
  static constexpr int kLag = 2;     // steps from the one being permuted to the one whose stage is refilled
  static constexpr int kAtOnce = 2;  // stages of the weight requested at first
  static constexpr int kMore = 1;    // and after each step: requesting all stages at once is as fast

  const SkinnyArguments& p;
  const Place<F>& place;
  const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
  const bool fetches = thread == 0;

  __device__ void fetch_tokens(Shared<F>& shared, const CUtensorMap& map, int step) const {
    if (!fetches) return;
    const int stage = step % F::token_stages;
    const std::uint32_t full = ptx::shared_address(&shared.tokens_raw[stage]);
    const std::uint32_t to = ptx::shared_address(shared.tokens[stage]);
    const int term = (place.first_step + step) * F::terms;
    ptx::mbarrier_arrive_expect_tx(full, static_cast<std::uint32_t>(p.token_rows * F::terms * 2));
    ptx::tma_load(to, map, term, 0, full);
    ptx::tma_load(to + F::tokens * 128, map, term + 64, 0, full);
  }

  // The first requests; more would only queue up before the first.
  __device__ void begin(Shared<F>& shared, const SkinnyMaps& maps) const {
    if (!fetches) return;
    fetch_tokens(shared, maps.tokens, 0);
    fetch_weight(shared, place, p, maps, 0);
#pragma unroll 1
    for (int step = 1; step < min(F::token_stages, place.steps); ++step) {
      fetch_tokens(shared, maps.tokens, step);
      if (step < kAtOnce) fetch_weight(shared, place, p, maps, step);
    }
  }

  __device__ void run(Shared<F>& shared, const SkinnyMaps& maps) const {
    static_assert(kAtOnce <= F::token_stages);
    int weights = 0;  // steps requested
    const auto fetch_until = [&](int end) {
#pragma unroll 1
      for (; weights < min(end, place.steps); ++weights) {
        if constexpr (!F::packed) fetch_scales(shared, place, p, weights);
        if (fetches && weights >= kAtOnce) fetch_weight(shared, place, p, maps, weights);
      }
    };
    fetch_until(kAtOnce);
    RingPosition<F::token_stages> at;
    RingPosition<F::token_stages> freed;
#pragma unroll 1
    for (int step = 0; step < place.steps; ++step) {
      if (step + 1 == place.steps) {
#pragma unroll 1
        for (int i = thread; i < F::rows; i += kProducerThreads)
          shared.biases[i] = p.bias.at(place.first_row + i, p.weight.rows, 0);
      }
      ptx::mbarrier_wait(shared.tokens_raw[at.stage], at.parity);
      if constexpr (!F::in_order) {
        put_in_order<F::tokens, kProducerThreads, F::packed>(ptx::shared_address(shared.tokens[at.stage]), thread,
                                                             F::tokens);
        ptx::fence_proxy_async();
      }
      ptx::mbarrier_arrive(shared.tokens_full[at.stage]);
      at.next();
      int free_stages = 0;
      if (step >= kLag) {
        ptx::mbarrier_wait(shared.tokens_empty[freed.stage], freed.parity);
        freed.next();
        free_stages = step - kLag + 1;
        const int next = step - kLag + F::token_stages;
        if (next < place.steps) fetch_tokens(shared, maps.tokens, next);
      }
      fetch_until(min(free_stages + F::weight_stages, kAtOnce + (step + 1) * kMore));
    }
  }
};

}  // namespace w4a16_skinny

}  // namespace octile::cuda
