// Of the product of a 4-bit weight with few tokens (skinny_nibbles.cuh): what a launch is told, a block's shared
// memory, and how the weight, its scales and the tokens come there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device/mma.cuh"
#include "cuda/device/nibbles.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/nibble_weight.h"

namespace octile::cuda {

// ---- What a launch is told.

struct SkinnyNibbles {
  NibbleWeight weight;  // scale.col and zero.col are 0 where a row has one group
  const uint4* x = nullptr;
  std::int64_t x_pitch = 0;  // of eight terms
  int tokens = 0;
  int steps = 0;
  int parts = 1;        // of the terms: blocks of a cluster
  int group_folds = 1;  // groups of 64 are two folds
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
  bool y_aligned = false;  // four neighbours at a time
};

// tokens: at most. folds: how often in a step products are scaled; a group is one or two of them.
template <class T_, int tokens_, bool packed_, int folds_, bool zeros_>
struct SkinnyForm {
  using T = T_;
  static constexpr int tokens = tokens_;
  static constexpr bool packed = packed_;
  static constexpr int folds = folds_;
  static constexpr bool zeros = zeros_;

  static constexpr int rows = 256;   // of the weight
  static constexpr int terms = 128;  // of a step
  static constexpr int sets = terms / 32;
  static constexpr int token_stages = 4;
  static constexpr int stage_bytes = rows * terms / 2 + rows * folds * (zeros ? packed ? 5 : 8 : 4);  // of the weight
  static constexpr int weight_stages = std::min(10, (224 * 1024 - token_stages * tokens * terms * 2) / stage_bytes);
  static_assert(weight_stages > token_stages);
  static constexpr int sum_pitch = rows + 4;
};

namespace skinny_nibbles {

constexpr int kMultipliers = 256;
constexpr int kBringers = 128;
constexpr int kThreads = kMultipliers + kBringers;
constexpr int kMeetBarrier = 1;
constexpr int kMultiplierRegisters = 208;
constexpr int kBringerRegisters = 88;

template <class F>
struct Shared {
  using Zero = std::conditional_t<F::packed, std::uint8_t, std::int32_t>;  // 8 + z; z
  std::uint8_t weight[F::weight_stages][F::rows * F::terms / 2];
  std::uint8_t tokens[F::token_stages][F::tokens * F::terms * 2];
  float scales[F::weight_stages][F::rows / 16][F::folds][16];
  Zero zeros[F::zeros ? F::weight_stages : 1][F::zeros ? F::rows / 16 : 1][F::folds][16];
  float biases[F::rows];
  std::uint64_t weight_full[F::weight_stages];
  std::uint64_t tokens_full[F::token_stages];
  std::uint64_t tokens_empty[F::token_stages];
  std::uint64_t sums_kept;  // and the biases
};

template <class F>
struct Place {
  int part;
  int first_row;
  int first_step;
  int steps;

  __device__ explicit Place(const SkinnyNibbles& p) {
    const int cluster = static_cast<int>(blockIdx.x) / p.parts;
    part = static_cast<int>(blockIdx.x) % p.parts;
    first_row = cluster * F::rows;
    first_step = p.steps * part / p.parts;
    steps = p.steps * (part + 1) / p.parts - first_step;
  }
};

template <class F>
__device__ void init(Shared<F>& shared) {
  for (auto& barrier : shared.weight_full) ptx::barrier_init(ptx::shared_address(&barrier), 1 + kBringers);
  for (auto& barrier : shared.tokens_full) ptx::barrier_init(ptx::shared_address(&barrier), kBringers);
  for (auto& barrier : shared.tokens_empty) ptx::barrier_init(ptx::shared_address(&barrier), kMultipliers / 32);
  ptx::barrier_init(ptx::shared_address(&shared.sums_kept), kThreads);
  ptx::barrier_init_done();
}

// Into the second-level cache, before the weight is on its way: the tokens, of which each block asks for a part, and
// the scales of the block's rows.
template <class F>
__device__ void prefetch_small(const SkinnyNibbles& p, const Place<F>& place) {
  const auto prefetch = [](const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); };
  const int tiles = (p.weight.rows + F::rows - 1) / F::rows;
  const int lines = min(place.steps * 2, (p.weight.terms - place.first_step * F::terms + 63) / 64);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * tiles + place.first_row / F::rows; i < p.tokens * lines;
       i += kThreads * tiles) {
    prefetch(p.x + i / lines * p.x_pitch + (place.first_step * 2 + i % lines) * 8);
  }
  // A line has two groups of a packed panel, or 32 of a row.
  constexpr int kGroups = F::packed ? 2 : 32;
  const int first = p.weight.groups == 1 ? 0 : place.first_step * F::folds / p.group_folds;
  const int end = min(p.weight.groups, first + place.steps * F::folds);
  const int scale_lines = (end - first + kGroups - 1) / kGroups;
  const int rows = min(F::rows, p.weight.rows - place.first_row);
  const int owners = F::packed ? (rows + 15) / 16 : rows;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < owners * scale_lines; i += kThreads) {
    const int row = place.first_row + i / scale_lines * (F::packed ? 16 : 1);
    prefetch(static_cast<const float*>(p.weight.scales) + p.weight.scale.at(row, first + i % scale_lines * kGroups));
  }
}

// ---- The weight's way.

__device__ inline std::uint64_t read_once_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One thread. Packed: lines of 64 bytes, eight terms of 16 rows, of 16 panels. Otherwise 64 bytes of 256 rows.
template <class F>
__device__ void fetch_weight(Shared<F>& shared, const Place<F>& place, const CUtensorMap& map, int step) {
  const std::uint64_t policy = read_once_policy();
  const int stage = step % F::weight_stages;
  const std::uint32_t full = ptx::shared_address(&shared.weight_full[stage]);
  const std::uint32_t to = ptx::shared_address(shared.weight[stage]);
  step += place.first_step;
  ptx::arrive_and_expect(full, sizeof(shared.weight[0]));
  if constexpr (F::packed) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(0), "r"(step * (F::terms / 8)), "r"(place.first_row / 16),
        "r"(full), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(step * (F::terms / 2)), "r"(place.first_row), "r"(full),
        "l"(policy)
        : "memory");
  }
}

// Four bytes, or zeros.
__device__ inline void copy_4(std::uint32_t to, const void* from, bool really) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(really ? 4 : 0) : "memory");
}

// All threads that bring tokens: a step's scales and zero points. Groups beyond the terms have zeros, since 0 times
// what lay there before might be a NaN; rows beyond the weight are nobody's.
template <class F>
__device__ void fetch_scales(Shared<F>& shared, const Place<F>& place, const SkinnyNibbles& p, int step) {
  const NibbleWeight& w = p.weight;
  const int stage = step % F::weight_stages;
  const int first_fold = (place.first_step + step) * F::folds;
  const auto group = [&](int fold) { return F::folds == 1 ? first_fold : (first_fold + fold) / p.group_folds; };
  const int thread = static_cast<int>(threadIdx.x) - kMultipliers;
  const auto inside = [&](int fold) { return w.groups == 1 || group(fold) < w.groups; };
  const std::uint32_t scales = ptx::shared_address(shared.scales[stage]);
  const std::uint32_t zeros = ptx::shared_address(shared.zeros[F::zeros ? stage : 0]);
  if constexpr (F::packed) {
#pragma unroll
    for (int i = thread; i < F::rows / 4 * F::folds; i += kBringers) {
      const int fold = i / 4 % F::folds;
      const int row = place.first_row + i / (4 * F::folds) * 16 + i % 4 * 4;
      if (row >= w.rows) continue;
      const bool really = inside(fold);
      const auto* const from = static_cast<const float*>(w.scales) + (really ? w.scale.at(row, group(fold)) : 0);
      copy_async(scales + i * 16, from, really ? 16 : 0);
      if (F::zeros && i % 4 == 0) {
        const auto* const zero = static_cast<const std::uint8_t*>(w.zeros) + (really ? w.zero.at(row, group(fold)) : 0);
        copy_async(zeros + i / 4 * 16, zero, really ? 16 : 0);
      }
    }
  } else {
#pragma unroll
    for (int i = thread; i < F::rows * F::folds; i += kBringers) {
      const int fold = i % F::folds;
      const int in_tile = i / F::folds;
      const int row = place.first_row + in_tile;
      if (row >= w.rows) continue;
      const std::uint32_t at = ((in_tile / 16 * F::folds + fold) * 16 + in_tile % 16) * 4;
      const bool really = inside(fold);
      copy_4(scales + at, static_cast<const float*>(w.scales) + (really ? w.scale.at(row, group(fold)) : 0), really);
      if constexpr (F::zeros) {
        copy_4(zeros + at, static_cast<const std::int32_t*>(w.zeros) + (really ? w.zero.at(row, group(fold)) : 0),
               really);
      }
    }
  }
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ptx::shared_address(&shared.weight_full[stage]))
      : "memory");
}

// ---- The tokens' way: a warpgroup.

// A warp has every fourth eight of tokens; in it four lanes a token. Of a step's 16 units of eight terms a lane has
// every fourth, one of each set of 32 terms. A unit becomes four pairs, in the order of a word's nibbles: pairs 0 and 1
// belong to the step's first half in shared memory, lines of 128 bytes as the matrix unit reads them, 2 and 3 to the
// second; a set has two sixteens of a line, and four units lie side by side in each.
template <class F>
struct Bringer {
  static constexpr int kOwn = F::tokens / 32;  // eights

  const SkinnyNibbles& p;
  const Place<F>& place;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = (static_cast<int>(threadIdx.x) - kMultipliers) / 32;
  const std::uint32_t line = static_cast<std::uint32_t>((8 * warp + lane / 4) * 128 + lane % 4 * 4);
  const uint4* from =
      p.x + (8 * warp + lane / 4) * p.x_pitch + lane % 4 + std::int64_t{place.first_step} * (F::terms / 8);

  __device__ void read(uint4 (&units)[kOwn][F::sets], int step) const {
    const int unit = (place.first_step + step) * (F::terms / 8) + lane % 4;
    const uint4* const at = from + step * (F::terms / 8);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool inside = 32 * i + 8 * warp + lane / 4 < p.tokens;
#pragma unroll
      for (int set = 0; set < F::sets; ++set) {
        const bool really = inside && (unit + 4 * set) * 8 < p.weight.terms;
        units[i][set] = load_unit(at + 32 * i * p.x_pitch + 4 * set, really);
      }
    }
  }

  // Or zeros; without a branch.
  __device__ static uint4 load_unit(const uint4* at, bool really) {
    uint4 v;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at), "r"(static_cast<int>(really))
        : "memory");
    return v;
  }

  __device__ void write(const uint4 (&units)[kOwn][F::sets], std::uint32_t stage) const {
    const auto put = [](std::uint32_t to, std::uint32_t value) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
    };
    const std::uint32_t twist = static_cast<std::uint32_t>(lane / 4) * 16;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int set = 0; set < F::sets; ++set) {
        const uint4 pairs = as_nibbles_lie<F::packed>(units[i][set]);
        const std::uint32_t to = stage + line + 32 * i * 128;
        const std::uint32_t first = to + (static_cast<std::uint32_t>(2 * set) * 16 ^ twist);
        const std::uint32_t second = to + (static_cast<std::uint32_t>(2 * set + 1) * 16 ^ twist);
        put(first, pairs.x);
        put(second, pairs.y);
        put(first + F::tokens * 128, pairs.z);
        put(second + F::tokens * 128, pairs.w);
      }
    }
  }

  // When a stage of the tokens' ring is free again, so is the one of the weight's that was read beside it.
  __device__ void run(Shared<F>& shared, const CUtensorMap& weight) const {
    constexpr int kAhead = kOwn == 1 ? 2 : 1;  // steps
    const bool fetches = threadIdx.x == kMultipliers;
    uint4 units[kAhead][kOwn][F::sets];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < place.steps) read(units[i], i);
    }
    constexpr int kFirst = F::weight_stages - F::token_stages;  // steps
#pragma unroll 1
    for (int step = 0; step < min(place.steps, kFirst); ++step) {
      fetch_scales(shared, place, p, step);
      if (fetches) fetch_weight(shared, place, weight, step);
    }
    RingPosition<F::token_stages> at;
#pragma unroll 1
    for (int first = 0; first < place.steps; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int step = first + i;
        if (step >= place.steps) break;
        ptx::wait(ptx::shared_address(&shared.tokens_empty[at.stage]), at.parity ^ 1);
        if (step + kFirst < place.steps) {
          fetch_scales(shared, place, p, step + kFirst);
          if (fetches) fetch_weight(shared, place, weight, step + kFirst);
        }
        write(units[i], ptx::shared_address(shared.tokens[at.stage]));
        ptx::publish_to_engines();
        ptx::arrive(ptx::shared_address(&shared.tokens_full[at.stage]));
        if (step + kAhead < place.steps) read(units[i], step + kAhead);
        at.next();
      }
    }
  }
};

}  // namespace skinny_nibbles

}  // namespace octile::cuda
