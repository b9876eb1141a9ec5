// What the products of experts' gradients share: which expert's tile a block has. dX: rows of a and y are an expert's.
// dW: terms are, and each expert has the same rows of y.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "base/ceil_div.h"
#include "cuda/device/bands.cuh"
#include "cuda/device/experts.cuh"
#include "cuda/device/product_tiles.cuh"
#include "plan/kernel.h"

namespace octile::cuda {

// How experts share a grid: tiles of a's rows (of an expert, by_terms) and of b's.
struct ExpertGrid {
  Experts experts;
  bool by_terms;
  bool accumulate;
  int a_tiles, b_tiles;
  std::int64_t y;  // bytes from an expert's y to the next one's, by_terms
};

struct ExpertPart {
  int expert;      // -1: nothing is to be done
  int first, end;  // the expert's rows, or terms
  int2 at;         // the tile's first row of a and of b
};

// Of this block; tiles are rows_of_a x rows_of_b. All lanes of a warp call it alike.
__device__ inline ExpertPart part_of_block(const ExpertGrid& g, int rows_of_a, int rows_of_b) {
  const int number = static_cast<int>(blockIdx.x);
  if (g.by_terms) {
    const int tiles = g.a_tiles * g.b_tiles;
    const int e = number / tiles;
    const int first = g.experts.offset(e), end = g.experts.offset(e + 1);
    const int2 tile = tile_in_bands(number % tiles, g.a_tiles, g.b_tiles);
    return {first == end && g.accumulate ? -1 : e, first, end, {tile.x * rows_of_a, tile.y * rows_of_b}};
  }
  const ExpertTile t = find_tile(g.experts, number / g.b_tiles, rows_of_a);
  const int2 tile = tile_in_bands(t.tile * g.b_tiles + number % g.b_tiles, t.tiles, g.b_tiles);
  return {t.expert, t.first, t.end, {t.first + tile.x * rows_of_a, tile.y * rows_of_b}};
}

// ---- The host's side.

inline ExpertGrid expert_grid(const GemmProblem& p, const GemmOperands& o, int rows_of_a, int rows_of_b) {
  ExpertGrid g = {};
  g.experts = experts_of(p, o);
  g.by_terms = p.by_terms;
  g.accumulate = p.accumulate;
  g.a_tiles = static_cast<int>(ceil_div(p.m, rows_of_a));
  g.b_tiles = static_cast<int>(ceil_div(p.n, rows_of_b));
  g.y = o.experts.y_stride * (bits(p.y) / 8);
  return g;
}

// The maximum number of tiles of a's rows, of all experts.
inline std::int64_t max_row_tiles(const GemmProblem& p, std::int64_t m, int rows_of_a) {
  return p.by_terms ? p.experts * ceil_div(m, rows_of_a) : max_tiles(p, m, rows_of_a);
}

inline unsigned blocks_of(const GemmProblem& p, const GemmOperands& o, const ExpertGrid& g, int rows_of_a) {
  return static_cast<unsigned>(max_row_tiles(p, p.by_terms ? p.m : o.y.rows(), rows_of_a) * g.b_tiles);
}

inline std::string reason_against_gradient(const GemmProblem& p, int rows_of_a, int rows_of_b) {
  if (std::string reason = reason_against_product(p); !reason.empty()) return reason;
  if (p.y_major == Major::outer) return "writes contiguous rows of y";
  if (max_row_tiles(p, p.m, rows_of_a) >
      (std::int64_t{1} << 30) / std::max<std::int64_t>(ceil_div(p.n, rows_of_b), 1)) {
    return "takes at most 2^30 tiles of y";
  }
  return {};
}

// The expected number, if rows are distributed over experts at random.
template <class Tile>
Cost gradient_cost(const GemmProblem& p, const TileCost& tile) {
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const auto experts = static_cast<double>(p.experts);
  const double all_rows = p.by_terms ? m * experts : m;
  const double of_b = p.by_terms ? n * k : n * k * experts_with_rows(p, p.m);
  Cost cost = {2 * m * n * k, m * k * bits(p.a) / 8 + of_b + all_rows * n * bits(p.y) / 8};
  const int gpu_sms = properties(p.device).sms;
  const double row_tiles = p.by_terms ? experts * std::ceil(m / Tile::kLeft) : expected_tiles(p, p.m, Tile::kLeft);
  const double rounds = std::ceil(row_tiles * std::ceil(n / Tile::kRight) / gpu_sms);
  const double depth = (p.by_terms ? k / std::max(experts, 1.0) : k) / 4096;
  const double arithmetic = std::max(tile.alone * depth, tile.each * depth * rounds + tile.grid);
  cost.seconds = std::max(arithmetic, cost.bytes / (kTileBytesPerSecond * gpu_sms));
  return cost;
}

}  // namespace octile::cuda
