// The arithmetic of a tile of s8 products (product_tiles.cuh): fragments from shared memory, and exact sums in
// registers.
#pragma once

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/device/operand_tiles.cuh"
#include "cuda/device/product_tiles.cuh"

namespace octile::cuda {

template <class Tile, bool kLeftOuter, bool kRightOuter>
struct ByteWork {
  static constexpr int kLeftBlocks = Tile::kWarpLeft / 16;
  static constexpr int kRightBlocks = Tile::kWarpRight / 16;
  static constexpr int kSlices = Tile::kStep / kSlice / Tile::kDepth;  // of a warp
  static_assert(kSlices % 2 == 0, "two sets of fragments, in turns");
  static constexpr int kRightTile = Stage<Tile, kLeftOuter, kRightOuter>::kRightTile;

  // depth: which of the warps that share this part of the tile
  __device__ ByteWork(int2 first, int lane, int depth = 0)
      : left_reader(first.x, lane, depth * kSlices), right_reader(first.y, lane, depth * kSlices) {}
  __device__ void fill(int, std::uint32_t) {}
  __device__ void begin() {}

  __device__ void read(int to, std::uint32_t stage, int slice) {
#pragma unroll
    for (int i = 0; i < kLeftBlocks; ++i) left[to][i] = left_reader.load(stage, i, slice);
#pragma unroll
    for (int j = 0; j < kRightBlocks; ++j) right[to][j] = right_reader.load(stage + kRightTile, j, slice);
  }

  __device__ void multiply(int from, int) {
#pragma unroll
    for (int i = 0; i < kLeftBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kRightBlocks; ++j) {
        const Fragment& b = right[from][j / 2];
        multiply_add_s8(sums[i][j], left[from][i].part, b.part[j % 2 * 2], b.part[j % 2 * 2 + 1]);
      }
    }
  }

  // Where a lane's element e of a block of sums lies: of 16 rows, and of all columns of the warp.
  __device__ static int row_of(int lane, int e) {
    const int half = e / 2;
    return kLeftOuter ? lane / 4 * 2 + half : lane / 4 + half * 8;
  }
  __device__ static int column_of(int lane, int block, int e) {
    const int col = lane % 4 * 2 + e % 2;
    return block / 2 * 16 + (kRightOuter ? col * 2 + block % 2 : col + block % 2 * 8);
  }

  const Reader<Tile, Tile::kLeft, kLeftOuter, false> left_reader;
  const Reader<Tile, Tile::kRight, kRightOuter, true> right_reader;
  std::int32_t sums[kLeftBlocks][2 * kRightBlocks][4] = {};
  Fragment left[2][kLeftBlocks], right[2][kRightBlocks];
};

}  // namespace octile::cuda
