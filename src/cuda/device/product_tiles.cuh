// Tiles of a matrix product by mma.sync: their shapes, their order over a grid, and the main loop, which feeds tiles of
// both operands (operand_tiles.cuh) through a ring of stages in shared memory to the arithmetic of one kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/device/bands.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/operand_tiles.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

inline constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;  // of an operand: they are counted in 32 bits

template <int kLeft_, int kRight_, int kStep_, int kStages_, int kLeftWarps_, int kRightWarps_, int kBlocks_,
          int kDepth_ = 1, bool kShifts_ = true>
struct TileShape {
  static constexpr int kLeft = kLeft_;    // rows of left
  static constexpr int kRight = kRight_;  // rows of right
  static constexpr int kStep = kStep_;    // terms
  static constexpr int kStages = kStages_;
  static constexpr int kRightWarps = kRightWarps_;
  static constexpr int kDepth = kDepth_;     // warps that share a part of the tile: each multiplies its terms of a step
  static constexpr bool kShifts = kShifts_;  // whether lines may begin between aligned units
  static constexpr int kWarps = kLeftWarps_ * kRightWarps_ * kDepth;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kBlocks_;  // on an SM, which bounds the registers
  static constexpr int kWarpLeft = kLeft / kLeftWarps_;
  static constexpr int kWarpRight = kRight / kRightWarps_;
};

// Elements of y's bias or of a scale.
struct Factors {
  const void* data;  // null: `value`
  std::int64_t stride;
  double value;

  template <class Real>
  __device__ Real at(int i) const {
    return data ? __ldcg(static_cast<const Real*>(data) + i * stride) : static_cast<Real>(value);
  }
};

__device__ inline Factors moved(const Factors& f, std::int64_t bytes) {
  return {f.data ? static_cast<const std::uint8_t*>(f.data) + bytes : nullptr, f.stride, f.value};
}

// What is multiplied: left (rows, k) by right (cols, k).
struct Tiling {
  Operand left, right;
  int k;
  int left_tiles, right_tiles;
};

// The first row of left and of right of this block's tile.
template <class Tile>
__device__ int2 first_of_tile(const Tiling& t) {
  const int2 tile = tile_in_bands(static_cast<int>(blockIdx.x), t.left_tiles, t.right_tiles);
  return {tile.x * Tile::kLeft, tile.y * Tile::kRight};
}

// The part of a warp within its tile.
template <class Tile>
__device__ int2 first_of_warp() {
  const int warp = static_cast<int>(threadIdx.x) / 32 % (Tile::kWarps / Tile::kDepth);
  return {warp / Tile::kRightWarps * Tile::kWarpLeft, warp % Tile::kRightWarps * Tile::kWarpRight};
}

// A stage of the ring: left's tile, right's tile, and kBeside bytes for what a kernel keeps beside them.
template <class Tile, bool kLeftOuter, bool kRightOuter, int kRightElement = 1, int kBeside = 0, bool kGathered = false>
struct Stage {
  using LeftFiller = Filler<Tile, Tile::kLeft, kLeftOuter, 1, kGathered>;
  using RightFiller = Filler<Tile, Tile::kRight, kRightOuter, kRightElement>;
  static constexpr int kRightTile = LeftFiller::kBytes;
  static constexpr int kBesideTiles = kRightTile + RightFiller::kBytes;
  static constexpr int kBytes = kBesideTiles + kBeside;
  static_assert(kRightTile % 128 == 0 && kBesideTiles % 128 == 0 && kBytes % 128 == 0);
};

// How a step of the main loop fills the ring: with whole tiles of operands that are not shifted; with whole units of
// such operands, of the rows that there are; with anything; or, at the end, with nothing. One loop for all would cost
// the first a fifth of its speed.
enum class Filling { whole, units, any, none };

// Some terms of a product, in a row.
struct Terms {
  int first, count;
};

// These terms of the tile. A kernel's `work` does, of a stage in shared memory,
//   fill(step, stage)        what else it wants there, before a barrier; once a step, in order
//   filled()                 once, while the first stages are on their way, before a barrier; may be missing
//   begin()                  whatever a step begins with, after its first fragments have been read
//   read(to, stage, slice)   fragments into one of two sets of registers
//   multiply(from, slice)    the set, into its sums
// Fragments are read one slice ahead of their multiplication, across the steps too.
template <class Tile, class Stage, class Tiling, class Work>
__device__ void multiply_terms(const Tiling& t, int2 first, std::uint32_t ring, Work& work, Terms terms) {
  using LeftFiller = typename Stage::LeftFiller;
  using RightFiller = typename Stage::RightFiller;
  LeftFiller left_filler(t.left, first.x, terms.first);
  RightFiller right_filler(t.right, first.y, terms.first);
  const bool shifted = Tile::kShifts && (t.left.shifted || t.right.shifted);
  const int steps = (terms.count + Tile::kStep - 1) / Tile::kStep;
  const bool by_units = LeftFiller::by_units(t.left, first.x) && RightFiller::by_units(t.right, first.y);
  const int unit_steps = by_units ? (shifted ? max(terms.count - kChunk, 0) : terms.count) / Tile::kStep : 0;
  const bool whole = first.x + Tile::kLeft <= t.left.rows && first.y + Tile::kRight <= t.right.rows && !shifted;
  const bool ends_by_units =
      by_units && !shifted && LeftFiller::ends_by_units(terms.count) && RightFiller::ends_by_units(terms.count);
  const auto fill = [&]<Filling kFilling>(std::integral_constant<Filling, kFilling>, int step, std::uint32_t stage) {
    constexpr bool kWhole = kFilling == Filling::whole;
    constexpr bool kAny = kFilling == Filling::any;
    if (kWhole || kFilling == Filling::units || (kAny && step < unit_steps)) {
      left_filler.template copy<kWhole, kAny>(t.left, stage);
      right_filler.template copy<kWhole, kAny>(t.right, stage + Stage::kRightTile);
      work.fill(step, stage);
    } else if (kAny && step < steps) {
      if (ends_by_units) {
        left_filler.copy_end(t.left, terms.count, step, stage);
        right_filler.copy_end(t.right, terms.count, step, stage + Stage::kRightTile);
      } else {
        left_filler.copy_ragged(t.left, terms.count, step, stage);
        right_filler.copy_ragged(t.right, terms.count, step, stage + Stage::kRightTile);
      }
      work.fill(step, stage);
    }
    commit_copies();
  };
  // This warp's part of the oldest stage in flight has arrived. The barrier then ensures that all warps' parts have,
  // and that no warp still reads the previous stage.
  const auto arrive = [&]<Filling kFilling>(std::integral_constant<Filling, kFilling>, std::uint32_t stage) {
    wait_for_copies<Tile::kStages - 2>();
    if constexpr (Tile::kShifts && kFilling == Filling::any) {
      if (t.left.shifted) left_filler.straighten_lines(stage);
      if (t.right.shifted) right_filler.straighten_lines(stage + Stage::kRightTile);
    }
    __syncthreads();
  };
  constexpr std::integral_constant<Filling, Filling::whole> kWhole;
  constexpr std::integral_constant<Filling, Filling::units> kUnits;
  constexpr std::integral_constant<Filling, Filling::any> kAny;
  constexpr std::integral_constant<Filling, Filling::none> kNone;
  constexpr int kAhead = Tile::kStages - 1;
  if (!shifted && unit_steps >= kAhead) {
#pragma unroll 1
    for (int step = 0; step < kAhead; ++step) fill(kUnits, step, ring + step * Stage::kBytes);
  } else {
#pragma unroll 1
    for (int step = 0; step < kAhead; ++step) fill(kAny, step, ring + step * Stage::kBytes);
  }
  if constexpr (requires { work.filled(); }) work.filled();
  arrive(kAny, ring);
  work.read(0, ring, 0);

  const auto following = [&](std::uint32_t stage) {
    return stage == ring + kAhead * Stage::kBytes ? ring : stage + Stage::kBytes;
  };
  std::uint32_t reading = ring;
  std::uint32_t filling = ring + kAhead * Stage::kBytes;
  const auto multiply_step = [&](auto filling_kind, int step) {
    work.begin();
#pragma unroll
    for (int slice = 0; slice < Work::kSlices; ++slice) {
      if (slice == Work::kSlices - 1) {
        reading = following(reading);
        arrive(filling_kind, reading);
      }
      work.read((slice + 1) % 2, reading, (slice + 1) % Work::kSlices);
      if (slice == 0) {
        fill(filling_kind, step + kAhead, filling);
        filling = following(filling);
      }
      work.multiply(slice % 2, slice);
    }
  };
  int step = 0;
#pragma unroll 1
  for (; whole && step + kAhead < unit_steps; ++step) multiply_step(kWhole, step);
#pragma unroll 1
  for (; !shifted && step + kAhead < unit_steps; ++step) multiply_step(kUnits, step);
#pragma unroll 1
  for (; step < (shifted ? steps : steps - kAhead); ++step) multiply_step(kAny, step);
#pragma unroll 1
  for (; step < steps; ++step) multiply_step(kNone, step);
  wait_for_copies<0>();
  __syncthreads();
}

// All terms of the tile.
template <class Tile, class Stage, class Work>
__device__ void multiply_tile(const Tiling& t, int2 first, std::uint32_t ring, Work& work) {
  multiply_terms<Tile, Stage>(t, first, ring, work, {0, t.k});
}

// Calls body(whether y is added to), a constant, which is true only where that is possible: two loops instead of a
// branch in one.
template <bool kPossible, class Body>
__device__ void with_accumulate(bool accumulate, const Body& body) {
  if constexpr (kPossible) {
    if (accumulate) return body(std::true_type());
  }
  body(std::false_type());
}

// Four neighbours of a line of y: stored, or added to what stands there.
template <bool kAccumulate, class Y>
__device__ void store_four(Y* to, Y (&values)[4], int count, bool aligned) {
  using Four = std::conditional_t<sizeof(Y) == 2, uint2, uint4>;
  constexpr int kFours = 4 * sizeof(Y) / sizeof(Four);
  if (aligned && count == 4) {
    Four four[kFours];
    if constexpr (kAccumulate) {
      Four before[kFours];
#pragma unroll
      for (int i = 0; i < kFours; ++i) before[i] = __ldcg(reinterpret_cast<const Four*>(to) + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = reinterpret_cast<const Y*>(before)[e] + values[e];
    }
    memcpy(four, values, sizeof(four));
#pragma unroll
    for (int i = 0; i < kFours; ++i) reinterpret_cast<Four*>(to)[i] = four[i];
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < count) to[e] = kAccumulate ? __ldcg(to + e) + values[e] : values[e];
  }
}

// ---- The host's side.

// A kernel and its shared memory.
template <class Product>
struct TileKernel {
  void (*function)(Product);
  unsigned shared_bytes;
};

// What a tile takes at K = 4096 on one SM of an H200: seconds for each of many, for one alone, and for a
// grid besides.
struct TileCost {
  double each, alone, grid;
};

template <class Tile>
double seconds_of(const TileCost& cost, double m, double n, const GemmProblem& problem) {
  const double tiles = std::ceil(m / Tile::kLeft) * std::ceil(n / Tile::kRight);
  const double rounds = std::ceil(tiles / properties(problem.device).sms);
  const double depth = static_cast<double>(problem.k) / 4096;
  return std::max(cost.alone * depth, cost.each * depth * rounds + cost.grid);
}

inline constexpr double kTileBytesPerSecond = 25e9;  // of memory, and SM

// A large tile, and a smaller one, which serves products of few large ones.
template <class Large, class Small>
struct TilePair {
  TileCost large, small;

  Cost cost(const GemmProblem& problem) const {
    const auto m = static_cast<double>(problem.m), n = static_cast<double>(problem.n);
    Cost cost = gemm_work(problem);
    const double memory = cost.bytes / (kTileBytesPerSecond * properties(problem.device).sms);
    const double of_large = seconds_of<Large>(large, m, n, problem), of_small = seconds_of<Small>(small, m, n, problem);
    cost.seconds = std::max(std::min(of_large, of_small), memory);
    return cost;
  }

  // Calls body.operator()<Tile>() with the one that is expected to take less time for y.
  template <class Body>
  void with_best(const GemmProblem& problem, const Tensor& y, const Body& body) const {
    const auto m = static_cast<double>(y.rows()), n = static_cast<double>(y.cols());
    if (seconds_of<Large>(large, m, n, problem) < seconds_of<Small>(small, m, n, problem)) {
      body.template operator()<Large>();
    } else {
      body.template operator()<Small>();
    }
  }
};

// Of each tile a block.
template <class Tile, class Product>
void enqueue_tiles(std::string_view name, const TileKernel<Product>& kernel, const Product& p, Stream stream) {
  const unsigned blocks = static_cast<unsigned>(p.tiling.left_tiles) * static_cast<unsigned>(p.tiling.right_tiles);
  enqueue(name, kernel.function, LaunchShape{blocks, Tile::kThreads, kernel.shared_bytes}, stream, p);
}

inline std::string reason_against_product(const GemmProblem& problem) {
  if (problem.b_packed) return "takes the weight as it is, not packed";
  if (std::max(problem.m, problem.n) > kMaxRows) return "takes at most 2^30 rows of an operand";
  if (problem.k > kMaxRows) return "takes at most 2^30 terms";
  return reason_against(problem.device, 80);
}

inline Operand operand_of(const ConstTensor& t, bool outer) {
  const std::int64_t element = bits(t.dtype) / 8;
  Operand o;
  o.data = static_cast<const std::int8_t*>(t.data);
  o.pitch = t.strides[outer ? 1 : 0] * element;
  o.rows = static_cast<int>(t.rows());
  o.end = o.data + ((outer ? t.cols() : t.rows()) - 1) * o.pitch + (outer ? t.rows() : t.cols()) * element;
  o.shifted = !aligned_rows(o.data, o.pitch, kChunk);
  return o;
}

template <class Tile>
Tiling tiling_of(const Operand& left, const Operand& right, std::int64_t k) {
  Tiling t = {};
  t.left = left;
  t.right = right;
  t.k = static_cast<int>(k);
  t.left_tiles = ceil_div(left.rows, Tile::kLeft);
  t.right_tiles = ceil_div(right.rows, Tile::kRight);
  return t;
}

inline Factors factors_of(const ConstTensor& t, DType type) {
  if (type == DType::f64) {
    const RowScale<double> s = row_scale<double>(t);
    return {s.data, s.stride, s.value};
  }
  const RowScale<float> s = row_scale<float>(t);
  return {s.data, s.stride, s.value};
}

}  // namespace octile::cuda
