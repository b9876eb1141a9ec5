// w8a8_grouped_gradient_sm90, the kernel: that of w8a8_blocked_gemm_sm90 over the tiles of all experts.
//
//   dX  rows of a and y are an expert's, and b has its terms behind those of the experts before it: where the last step
//       reaches the next expert's, TMA fills a with zeros
//   dW  terms are an expert's, in both operands from its first block on, with zeros up to the end of the last step
#pragma once

#include "cuda/device/bands.cuh"
#include "cuda/device/experts.cuh"
#include "cuda/gemm/w8a8_blocked_gemm_sm90.cuh"

namespace octile::cuda::w8a8 {

template <class T>
struct GradientShared : BlockedShared<T> {
  ExpertTable experts;  // tiles: of rows, or by_terms blocks
};

template <class Y>
struct GradientArguments : BlockedArguments<Y> {
  Experts experts;
  bool by_terms = false;
  int row_tiles = 0;  // by_terms, of an expert
  int col_tiles = 0;  // of a cluster
  int size = 0;       // from an expert's first line of b to the next one's; by_terms, of y
};

template <class T, class Y>
struct ExpertTiles {
  static constexpr bool kExperts = true;

  const GradientArguments<Y>& arguments;
  const ExpertTable& table;
  ClusterPlace place = {};
  int at = place.cluster;
  int expert = 0;

  __device__ bool next(BlockedPart& part) {
    const GradientArguments<Y>& p = arguments;
    const int column_of = place.rank * T::cols;
    const auto column = [&](int tile) { return min(tile * kClusterSize * T::cols + column_of, p.last.y); };
    if (p.by_terms) {
      const int tiles = p.row_tiles * p.col_tiles;
      expert = at / tiles;
      if (expert >= p.experts.count) return false;
      const int2 tile = tile_in_bands(at % tiles, p.row_tiles, p.col_tiles);
      const int count = table.first_row[expert + 1] - table.first_row[expert];
      const int block = table.first_tile[expert];
      const int row = tile.x * T::rows, col = column(tile.y);
      part.a = {block * p.block_steps * kTileK, row};
      part.b = {part.a.x, col};
      part.steps = (count + kTileK - 1) / kTileK;
      part.scales = p.a_scale + block * p.a_scale_pitch + row;
      part.y = {expert * p.size + row, col};
      part.end = (expert + 1) * p.size;
    } else {
      if (at >= table.first_tile[p.experts.count] * p.col_tiles) return false;
      while (table.first_tile[expert + 1] <= at / p.col_tiles) ++expert;
      const int before = table.first_tile[expert];
      const int2 tile = tile_in_bands(at - before * p.col_tiles, table.first_tile[expert + 1] - before, p.col_tiles);
      const int row = table.first_row[expert] + tile.x * T::rows, col = column(tile.y);
      part.a = {0, row};
      part.b = {expert * p.size, col};
      part.steps = p.steps;
      part.scales = p.a_scale + row;
      part.y = {row, col};
      part.end = table.first_row[expert + 1];
    }
    at += place.clusters;
    return true;
  }
};

template <class T, class Y>
__global__ void __launch_bounds__(kGemmThreads, 1)
    w8a8_grouped_gradient_kernel(const __grid_constant__ BlockedMaps maps,
                                 const __grid_constant__ GradientArguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<GradientShared<T>*>(shared_bytes);
  begin_blocked<T>(shared, maps);
  const int rows = arguments.by_terms ? arguments.block_steps * kTileK : T::rows;
  fill_table(shared.experts, arguments.experts, rows);
  multiply_blocked<T, Y>(shared, ExpertTiles<T, Y>{arguments, shared.experts}, maps, arguments);
}

}  // namespace octile::cuda::w8a8
