// w4a16_grouped_gemm_skinny_sm90, the kernel: w4a16_gemm_skinny_sm90 for the rows of experts, whose weights are packed.
//
// A persistent grid, a block for each SM, goes over all tiles of all experts: up to F::tokens tokens of an expert by
// F::rows rows of its weight, by all of K. The rings of the dense kernel go on from one tile into the next, so that
// memory does not wait while consumers store a tile. Tokens are in the order of the experts.
#pragma once

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/gemm/w4a16_gemm_skinny_sm90.cuh"

namespace octile::cuda::w4a16_skinny {

template <class T, int tokens, int folds, bool zeros>
using ExpertsForm = SkinnyForm<T, tokens, true, folds, zeros, true>;

constexpr int kBoxTokens = 16;  // that TMA loads at a time

template <class F>
struct ExpertsShared : Shared<F> {
  ExpertTable experts;
};

struct ExpertsArguments : SkinnyArguments {
  Experts experts;
  int row_tiles = 0;  // of an expert's weight
};

// A tile: rows of y, and rows of an expert's weight.
struct ExpertsTile {
  int expert, first_token, end_token, first_row;

  __device__ int tokens() const { return end_token - first_token; }
};

// The block's tiles, as a role walks them.
template <class F>
class TileWalk {
 public:
  __device__ TileWalk(const ExpertsShared<F>& shared, const ExpertsArguments& p)
      : walk_{shared.experts, p.experts.count, p.row_tiles}, at_(static_cast<int>(blockIdx.x)) {}

  // How many the block has. Uniform, as the compiler can see.
  __device__ int count() const {
    const int left = walk_.count() - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1;
    return __shfl_sync(0xffffffff, left / static_cast<int>(gridDim.x), 0);
  }

  __device__ ExpertsTile next() {
    const int2 place = walk_[at_];
    at_ += static_cast<int>(gridDim.x);
    const int first = walk_.first_row() + place.x * F::tokens;
    return {walk_.expert, first, min(first + F::tokens, walk_.end_row()), place.y * F::rows};
  }

 private:
  ExpertWalk walk_;
  int at_;
};

// ---- Producers.

// The steps of all tiles, one after another.
template <class F>
struct StepWalk {
  TileWalk<F> tiles;
  int steps;
  ExpertsTile tile = {};
  int left = 0;  // steps of the tile

  // Of the next one, its number within the tile.
  __device__ int next() {
    if (left == 0) tile = tiles.next(), left = steps;
    return steps - left--;
  }
};

// Two threads of different warps ask for the weight and for the tokens: one took 10 to 16 % longer.
template <class F>
struct ExpertsProducer {
  static_assert(!F::in_order);
  using Dense = Producer<F>;

  ExpertsShared<F>& shared;
  const SkinnyMaps& maps;
  const ExpertsArguments& p;
  StepWalk<F> weights = {TileWalk<F>(shared, p), p.steps};
  StepWalk<F> tokens = weights;
  RingPosition<F::weight_stages> weight_at = {};
  RingPosition<F::token_stages> token_at = {};

  // One thread: the next step of the weight, with scales and zero points.
  __device__ void fetch_weight() {
    const int step = weights.next();
    const int panel = weights.tile.first_row / 16, expert = weights.tile.expert;
    const std::uint32_t full = ptx::shared_address(&shared.weight_full[weight_at.stage]);
    ptx::mbarrier_arrive_expect_tx(full, F::stage_bytes);
    ptx::tma_load(ptx::shared_address(shared.weight[weight_at.stage]), maps.weight,
                  int4{0, step * (F::terms / 8), panel, expert}, full, ptx::evict_first());
#pragma unroll
    for (int fold = 0; fold < F::folds; ++fold) {
      const int group = p.group_of(F::folds, step, fold);
      ptx::tma_load(ptx::shared_address(shared.scales[weight_at.stage][fold]), maps.scales,
                    int3{group * 16, panel, expert}, full);
      if constexpr (F::zeros) {
        ptx::tma_load(ptx::shared_address(shared.zeros[weight_at.stage][fold]), maps.zeros,
                      int3{group * 16, panel, expert}, full);
      }
    }
    weight_at.next();
  }

  // One thread: the next step of the tokens. Rows of the experts behind this one fill up the last 16.
  __device__ void fetch_tokens() {
    const int term = tokens.next() * F::terms;
    const int boxes = (tokens.tile.tokens() + kBoxTokens - 1) / kBoxTokens;
    const std::uint32_t full = ptx::shared_address(&shared.tokens_raw[token_at.stage]);
    const std::uint32_t to = ptx::shared_address(shared.tokens[token_at.stage]);
    ptx::mbarrier_arrive_expect_tx(full, static_cast<std::uint32_t>(boxes * kBoxTokens * F::terms * 2));
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      const int first = box * kBoxTokens;
      ptx::tma_load(to + first * 128, maps.tokens, term, tokens.tile.first_token + first, full);
      ptx::tma_load(to + F::tokens * 128 + first * 128, maps.tokens, term + 64, tokens.tile.first_token + first, full);
    }
    token_at.next();
  }

  // All producer threads.
  __device__ void run() {
    const Place<F> nowhere(p);
    const Dense dense{p, nowhere};
    const int all = weights.tiles.count() * p.steps;
    const bool fetches_tokens = dense.thread == 0, fetches_weight = dense.thread == 32;
    int weights_fetched = 0;
    const auto fetch_until = [&](int end) {
      if (!fetches_weight) return;
#pragma unroll 1
      for (; weights_fetched < min(end, all); ++weights_fetched) fetch_weight();
    };
    fetch_until(Dense::kAtOnce);
    if (fetches_tokens) {
#pragma unroll 1
      for (int step = 0; step < min(F::token_stages, all); ++step) fetch_tokens();
    }
    RingPosition<F::token_stages> at;
    RingPosition<F::token_stages> freed;
#pragma unroll 1
    for (int step = 0; step < all; ++step) {
      ptx::mbarrier_wait(shared.tokens_raw[at.stage], at.parity);
      dense.put_in_order(ptx::shared_address(shared.tokens[at.stage]));
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(shared.tokens_full[at.stage]);
      at.next();
      int free_stages = 0;
      if (step >= Dense::kLag) {
        ptx::mbarrier_wait(shared.tokens_empty[freed.stage], freed.parity);
        freed.next();
        free_stages = step - Dense::kLag + 1;
        if (fetches_tokens && step - Dense::kLag + F::token_stages < all) fetch_tokens();
      }
      fetch_until(min(free_stages + F::weight_stages, Dense::kAtOnce + (step + 1) * Dense::kMore));
    }
  }
};

// ---- Consumers.

template <class F>
struct ExpertsConsumer {
  using Sums = float[kUnits][F::unit_tokens / 2];

  ExpertsShared<F>& shared;
  const ExpertsArguments& p;

  // A lane has two neighbouring rows of the weight in each unit, and two tokens of every eight.
  template <class Y, bool whole>
  __device__ void store(const Sums& sums, const ExpertsTile& tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Bias bias = p.bias;
    if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + tile.expert * p.experts.bias;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int sixteen = first_sixteen<F>() + unit / F::token_parts * 4;
      const int row = tile.first_row + sixteen * 16 + rows_of<true>(lane).x;
      const int rows_inside = p.weight.rows - row;
      const float of_row[2] = {bias.at(row, p.weight.rows, 0), bias.at(row + 1, p.weight.rows, 0)};
      const int token = unit % F::token_parts * F::unit_tokens + lane % 4 * 2;
      Y* const to = static_cast<Y*>(p.y) + (tile.first_token + token) * p.y_pitch + row;
#pragma unroll
      for (int i = 0; i < F::unit_tokens / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool inside = token + 8 * i + e < tile.tokens();
          const Y values[2] = {narrow<Y>(sums[unit][4 * i + e] + of_row[0]),
                               narrow<Y>(sums[unit][4 * i + 2 + e] + of_row[1])};
          put_pair<Y, whole>(to + (8 * i + e) * p.y_pitch, values, inside ? rows_inside : 0);
        }
      }
    }
  }

  __device__ void store(const Sums& sums, const ExpertsTile& tile) const {
    const bool whole = p.y_aligned && tile.first_row + F::rows <= p.weight.rows;
    if (p.y_type != DType::f32) {
      if (whole) return store<typename F::T, true>(sums, tile);
      return store<typename F::T, false>(sums, tile);
    }
    if (whole) return store<float, true>(sums, tile);
    store<float, false>(sums, tile);
  }

  __device__ void run() const {
    TileWalk<F> tiles(shared, p);
    const int count = tiles.count();
    RingPositions<F> position;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      Sums sums;
      multiply<F>(sums, shared, p.steps, position, [] {});
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.tokens_empty[position.tokens.stage]);
      position.weight.next();
      position.tokens.next();
      store(sums, tiles.next());
      __syncwarp();
    }
  }
};

template <class F>
__global__ void __launch_bounds__(kThreads, 1)
    w4a16_grouped_gemm_skinny_kernel(const __grid_constant__ SkinnyMaps maps,
                                     const __grid_constant__ ExpertsArguments p) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ExpertsShared<F>*>(shared_bytes);
  const int warp = uniform_warp();
  if (threadIdx.x == kConsumerThreads) {
    ptx::prefetch_tensormap(maps.tokens);
    ptx::prefetch_tensormap(maps.weight);
    ptx::prefetch_tensormap(maps.scales);
    if (F::zeros) ptx::prefetch_tensormap(maps.zeros);
    init(shared);
  }
  wait_for_previous();
  let_next_start();
  fill_table(shared.experts, p.experts, F::tokens);
  if (warp < kConsumerThreads / 32) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    ExpertsConsumer<F>{shared, p}.run();
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    ExpertsProducer<F>{shared, maps, p}.run();
  }
}

}  // namespace octile::cuda::w4a16_skinny
