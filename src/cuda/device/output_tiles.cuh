// Float sums of a tile (product_tiles.cuh), from registers to y, along whichever dimension of y is contiguous.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/product_tiles.cuh"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

// y, of left's rows by right's. A line is what is contiguous.
struct TileOutput {
  void* y;
  std::int64_t pitch;  // elements from a line to the next
  DType type;
  bool along_left;  // lines are along left's rows
  bool aligned;     // to 4 elements
  bool accumulate;  // y is f32
};

// Sums of kLines lines of y, kAlong of each, are in shared memory, kPitch apart; `first` is the line and the place in
// it of the first one. They are multiplied by `scale`.
template <class Y, int kLines, int kAlong, int kPitch>
__device__ void store_lines(const TileOutput& out, const Tiling& t, const float* sums, int2 first, float scale) {
  constexpr int kLanes = kAlong / 4;  // of a line
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int lines = out.along_left ? t.right.rows : t.left.rows;
  const int length = out.along_left ? t.left.rows : t.right.rows;
  const int at = lane % kLanes * 4;
  const int count = min(length - first.y - at, 4);
  if (count <= 0) return;
  with_accumulate<std::is_same_v<Y, float>>(out.accumulate, [&](auto accumulate) {
#pragma unroll 2
    for (int i = lane / kLanes; i < kLines; i += 32 / kLanes) {
      if (first.x + i >= lines) break;
      const float4 sum = *reinterpret_cast<const float4*>(sums + i * kPitch + at);
      Y values[4] = {narrow<Y>(sum.x * scale), narrow<Y>(sum.y * scale), narrow<Y>(sum.z * scale),
                     narrow<Y>(sum.w * scale)};
      Y* const to = static_cast<Y*>(out.y) + (first.x + i) * out.pitch + first.y + at;
      store_four<decltype(accumulate)::value>(to, values, count, out.aligned);
    }
  });
}

// Each warp passes its sums through its own slab of shared memory, kSlab lines of y at a time. `first` is the warp's
// first row of left and of right. Of a kernel's `work`:
//   result(i, j, e)                element e of a lane's block of sums
//   row_of(lane, e), column_of(lane, j, e)   where it lies: of 16 rows, and of all columns of the warp
//   result_scale()                 what all of them are multiplied by
//   kSlabPitch                     floats between lines in shared memory
template <class Y, class Tile, class Work>
__device__ void store_tile(const TileOutput& out, const Tiling& t, const Work& work, int2 first, float* slabs) {
  constexpr int kPitch = Work::kSlabPitch;
  constexpr int kLineBytes = Tile::kThreads / 32 * kPitch * 4;
  constexpr int kSlab = 32 * kLineBytes <= Tile::kStages * Work::Stage::kBytes ? 32 : 16;
  constexpr int kLeftBlocks = Tile::kWarpLeft / 16;
  constexpr int kRightBlocks = Tile::kWarpRight / 8;
  static_assert(kSlab * kLineBytes <= Tile::kStages * Work::Stage::kBytes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const slab = slabs + threadIdx.x / 32 * kSlab * kPitch;
  const float scale = work.result_scale();
  if (out.along_left) {
#pragma unroll
    for (int begin = 0; begin < kRightBlocks; begin += kSlab / 8) {
#pragma unroll
      for (int j = 0; j < kSlab / 8; ++j) {
#pragma unroll
        for (int i = 0; i < kLeftBlocks; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            slab[Work::column_of(lane, j, e) * kPitch + i * 16 + Work::row_of(lane, e)] = work.result(i, begin + j, e);
          }
        }
      }
      __syncwarp();
      store_lines<Y, kSlab, Tile::kWarpLeft, kPitch>(out, t, slab, {first.y + begin * 8, first.x}, scale);
      __syncwarp();
    }
    return;
  }
#pragma unroll
  for (int begin = 0; begin < kLeftBlocks; begin += kSlab / 16) {
#pragma unroll
    for (int i = 0; i < kSlab / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kRightBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          slab[(i * 16 + Work::row_of(lane, e)) * kPitch + Work::column_of(lane, j, e)] = work.result(begin + i, j, e);
        }
      }
    }
    __syncwarp();
    store_lines<Y, kSlab, Tile::kWarpRight, kPitch>(out, t, slab, {first.x + begin * 16, first.y}, scale);
    __syncwarp();
  }
}

// ---- The host's side.

inline TileOutput output_of(const GemmProblem& problem, const Tensor& y, bool along_left) {
  TileOutput out = {};
  out.y = y.data;
  out.pitch = y.strides[problem.y_major == Major::contraction ? 0 : 1];
  out.type = problem.y;
  out.along_left = along_left;
  const std::int64_t element = bits(problem.y) / 8;
  out.aligned = aligned_rows(out.y, out.pitch * element, 4 * element);
  out.accumulate = problem.accumulate;
  return out;
}

}  // namespace octile::cuda
