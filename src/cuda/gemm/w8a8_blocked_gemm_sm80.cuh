// w8a8_blocked_gemm_sm80, on the device: the arithmetic of a tile, and its way to y.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/byte_work.cuh"
#include "cuda/device/output_tiles.cuh"
#include "cuda/device/product_tiles.cuh"
#include "plan/kernel.h"

namespace octile::cuda::w8a8_blocked_sm80 {

using Large = TileShape<128, 128, 64, 4, 4, 2, 1>;
inline constexpr TileCost kLargeCost = {27e-6, 30e-6, 9e-6};

struct BlockScales {
  const float* data;
  std::int64_t row_stride, block_stride;
};

struct Product {
  Tiling tiling;  // left is a, right is b
  BlockScales scales;
  int block;  // terms
  TileOutput output;
};

// Exact. kShort: of a block of at most kShortBlock terms, |sum| <= 2^22, so that 1.5 * 2^23 + sum has the exponent of
// 1.5 * 2^23, whose last bit counts ones. A100 converts 16 integers per clock and SM, and adds 64 of them, and as many
// floats.
constexpr std::int64_t kShortBlock = 256;
template <bool kShort>
__device__ float to_float(std::int32_t sum) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr float kOne = 0x1.8p23f;
  if constexpr (kShort) return __int_as_float(sum + __float_as_int(kOne)) - kOne;
#endif
  return __int2float_rn(sum);
}

template <class Tile, bool kRightOuter, bool kShort>
struct BlockedWork : ByteWork<Tile, false, kRightOuter> {
  using Base = ByteWork<Tile, false, kRightOuter>;
  using Stage = Stage<Tile, false, kRightOuter>;
  // No bank conflicts along right.
  static constexpr int kSlabPitch = std::max(Tile::kWarpLeft, Tile::kWarpRight) + (kRightOuter ? 16 : 8);
  static_assert(kMinGradientBlock % Tile::kStep == 0, "a block is a number of steps");

  // first_row: of the warp
  __device__ BlockedWork(const Product& p, int first_row, int2 part, int lane)
      : Base(part, lane),
        product(p),
        rows(p.tiling.left.rows - first_row - lane / 4),
        next_scales(p.scales.data + (first_row + lane / 4) * p.scales.row_stride) {}

  __device__ void multiply(int from, int slice) {
    if (slice == 0 && steps_of_block-- == 0) {
      multiply_first(from);
      steps_of_block = product.block / Tile::kStep - 1;
      read_scales();
    } else {
      Base::multiply(from, slice);
    }
  }

  // The first terms of a block. Before the first block, this folds sums of 0 with scales of 0.
  __device__ void multiply_first(int from) {
#pragma unroll
    for (int i = 0; i < Base::kLeftBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Base::kRightBlocks; ++j) {
        fold(i, j);
        const Fragment& b = this->right[from][j / 2];
        multiply_s8(this->sums[i][j], this->left[from][i].part, b.part[j % 2 * 2], b.part[j % 2 * 2 + 1]);
      }
    }
  }

  __device__ void fold(int i, int j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      totals[i][j][e] = __fmaf_rn(to_float<kShort>(this->sums[i][j][e]), scale[i][e / 2], totals[i][j][e]);
    }
  }
  __device__ void fold_last() {
#pragma unroll
    for (int i = 0; i < Base::kLeftBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Base::kRightBlocks; ++j) fold(i, j);
    }
  }

  // Of the block that begins: they are wanted where it ends. Past the L1: the grid may have started early.
  __device__ void read_scales() {
#pragma unroll
    for (int i = 0; i < Base::kLeftBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i * 16 + half * 8;
        if (row < rows) scale[i][half] = __ldcg(next_scales + row * product.scales.row_stride);
      }
    }
    next_scales += product.scales.block_stride;
  }

  __device__ float result(int i, int j, int e) const { return totals[i][j][e]; }
  __device__ static float result_scale() { return 1.0f; }

  const Product& product;
  const int rows;  // from this lane's first on
  const float* next_scales;
  int steps_of_block = 0;  // that are to come
  float scale[Base::kLeftBlocks][2] = {};
  float totals[Base::kLeftBlocks][2 * Base::kRightBlocks][4] = {};
};

template <class Tile, class Work>
__device__ void store_any(const Product& p, const Work& work, int2 first, std::uint8_t* shared) {
  float* const slabs = reinterpret_cast<float*>(shared);
  switch (p.output.type) {
    case DType::f16:
      store_tile<__half, Tile>(p.output, p.tiling, work, first, slabs);
      break;
    case DType::bf16:
      store_tile<__nv_bfloat16, Tile>(p.output, p.tiling, work, first, slabs);
      break;
    default:
      store_tile<float, Tile>(p.output, p.tiling, work, first, slabs);
  }
}

}  // namespace octile::cuda::w8a8_blocked_sm80
