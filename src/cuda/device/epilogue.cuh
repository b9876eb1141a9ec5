// From the sums in a warpgroup's registers to y: scales, bias, conversion, and boxes of y in shared memory that the
// copy engine stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx.cuh"

namespace octile::cuda {

// Two neighbours in 32 bits.
template <class Y>
__device__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Y, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

__device__ inline float scaled(int sum, float a_scale, float b_scale, float bias) {
  return __fmaf_rn(static_cast<float>(sum), __fmul_rn(a_scale, b_scale), bias);
}

// Sums 4j .. 4j + 3 of a thread, scaled: columns 8j + 2c, 8j + 2c + 1 of its upper row, then of its lower row. col is
// {scale, scale, bias, bias}.
__device__ inline float4 scaled_four(const int* sums, float upper, float lower, const float4& col) {
  return {scaled(sums[0], upper, col.x, col.z), scaled(sums[1], upper, col.y, col.w),
          scaled(sums[2], lower, col.x, col.z), scaled(sums[3], lower, col.y, col.w)};
}

// The boxes that a tile of `cols` columns of y is cut into: sixteen rows a warp. Rows of 128 bytes are swizzled, chunk
// i of sixteen bytes of row r at chunk i ^ (r % 8); an odd number of chunks a row keeps the banks apart by itself.
template <class Y, int tile_cols>
struct Box {
  static constexpr bool swizzled = tile_cols * sizeof(Y) % 128 == 0;
  static constexpr int cols = swizzled ? 128 / sizeof(Y) : sizeof(Y) == 2 ? tile_cols / 2 : 16;
  static constexpr int row_bytes = cols * static_cast<int>(sizeof(Y));
  static constexpr int rows = 16;
  static constexpr int bytes = rows * row_bytes;
  static constexpr int eights = cols / 8;
  static constexpr int count = tile_cols / cols;
  static_assert(tile_cols % cols == 0 && cols % 8 == 0 && bytes % 128 == 0);

  // Where byte `byte` of row `row` lies.
  __device__ static std::uint32_t offset(int row, int byte) {
    return static_cast<std::uint32_t>(row * row_bytes + (swizzled ? byte ^ row % 8 * 16 : byte));
  }
};

// A matrix in global memory.
template <class Y>
struct Destination {
  Y* data = nullptr;
  std::int64_t pitch = 0;
  int rows = 0;
  int cols = 0;
};

// What a thread has of a box.
template <class Y, class Box>
struct BoxValues {
  std::uint32_t values[Box::eights][sizeof(Y) == 2 ? 2 : 4];

  // col(j): the scales and the bias of columns 8j + 2c and 8j + 2c + 1.
  template <class Col>
  __device__ void compute(const int* sums, float upper, float lower, Col col) {
#pragma unroll
    for (int j = 0; j < Box::eights; ++j) {
      const float4 y = scaled_four(sums + 4 * j, upper, lower, col(j));
      if constexpr (sizeof(Y) == 2) {
        values[j][0] = pack<Y>(y.x, y.y);
        values[j][1] = pack<Y>(y.z, y.w);
      } else {
        values[j][0] = __float_as_uint(y.x);
        values[j][1] = __float_as_uint(y.y);
        values[j][2] = __float_as_uint(y.z);
        values[j][3] = __float_as_uint(y.w);
      }
    }
  }

  __device__ void write(std::uint32_t box) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(Y) == 2) {
#pragma unroll
      for (int j = 0; j + 1 < Box::eights; j += 2) {
        const std::uint32_t four[4] = {values[j][0], values[j][1], values[j + 1][0], values[j + 1][1]};
        ptx::store_matrices(box + Box::offset(lane % 16, (j + lane / 16) * 16), four);
      }
      if constexpr (Box::eights % 2 == 1) {
        constexpr int kLast = Box::eights - 1;
        ptx::store_matrices(box + Box::offset(lane % 16, kLast * 16), values[kLast]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < Box::eights; ++j) {
        const int byte = 32 * j + lane % 4 * 8;
        ptx::store_pair(box + Box::offset(lane / 4, byte), values[j][0], values[j][1]);
        ptx::store_pair(box + Box::offset(lane / 4 + 8, byte), values[j][2], values[j][3]);
      }
    }
  }
};

// What y of f32 holds, added to a warp's box that the warp has written.
template <class Box>
__device__ void add_to_box(std::uint8_t* box, int2 at, const Destination<float>& y) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int c = 0; c < Box::cols; c += 32) {
    const bool inside = c + lane < Box::cols && at.y + c + lane < y.cols;
    const float* const from = y.data + at.x * y.pitch + at.y + c + lane;
    float before[Box::rows];
#pragma unroll
    for (int r = 0; r < Box::rows; ++r) before[r] = inside && at.x + r < y.rows ? __ldcg(from + r * y.pitch) : 0.0f;
#pragma unroll
    for (int r = 0; r < Box::rows; ++r) {
      if (!inside) continue;
      auto* const sum = reinterpret_cast<float*>(box + Box::offset(r, (c + lane) * 4));
      *sum = __fadd_rn(before[r], *sum);
    }
  }
}

// A warp's box straight to y, from row and column `at` on: any alignment, and nothing beyond y.
template <class Y, class Box>
__device__ void store_edge(const std::uint8_t* box, int2 at, const Destination<Y>& y) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = min(Box::rows, y.rows - at.x);
  const int cols = min(Box::cols, y.cols - at.y);
#pragma unroll 1  // the code of all boxes is to stay small: it is fetched anew by every launch
  for (int r = 0; r < rows; ++r) {
    Y* const row = y.data + (at.x + r) * y.pitch + at.y;
#pragma unroll
    for (int c = 0; c < Box::cols; c += 32) {
      if (c + lane < cols) {
        row[c + lane] = *reinterpret_cast<const Y*>(box + Box::offset(r, (c + lane) * static_cast<int>(sizeof(Y))));
      }
    }
  }
}

}  // namespace octile::cuda
