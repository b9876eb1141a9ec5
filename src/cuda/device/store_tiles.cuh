// The end of Hopper's int8 GEMMs: sums in the order of WGMMA, converted, through tiles of shared memory that TMA
// stores.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/output.cuh"
#include "cuda/device/ptx.cuh"

namespace octile::cuda {

// What a warp stores at a time: 16 rows of a part of the tile's columns. Rows of 128 bytes are swizzled, 16-byte chunk
// i of row r at chunk i ^ (r % 8); with an odd number of chunks per row there are no bank conflicts anyway.
template <class Y, int tile_cols>
struct StoreTile {
  static constexpr bool swizzled = tile_cols * sizeof(Y) % 128 == 0;
  static constexpr int cols = swizzled ? 128 / sizeof(Y) : sizeof(Y) == 2 ? tile_cols / 2 : 16;
  static constexpr int row_bytes = cols * static_cast<int>(sizeof(Y));
  static constexpr int rows = 16;
  static constexpr int bytes = rows * row_bytes;
  static constexpr int eights = cols / 8;
  static constexpr int count = tile_cols / cols;
  static_assert(tile_cols % cols == 0 && cols % 8 == 0 && bytes % 128 == 0);

  // The offset of a byte of a row.
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

// A thread's elements of a store tile.
template <class Y, class Store>
struct StoreValues {
  std::uint32_t values[Store::eights][sizeof(Y) == 2 ? 2 : 4];

  // four(j): columns 8j + 2c and 8j + 2c + 1 of the thread's upper row, then of its lower row.
  template <class Four>
  __device__ void compute(const Four& four) {
#pragma unroll
    for (int j = 0; j < Store::eights; ++j) {
      const float4 y = four(j);
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

  __device__ void write(std::uint32_t buffer) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(Y) == 2) {
#pragma unroll
      for (int j = 0; j + 1 < Store::eights; j += 2) {
        const std::uint32_t four[4] = {values[j][0], values[j][1], values[j + 1][0], values[j + 1][1]};
        ptx::stmatrix(buffer + Store::offset(lane % 16, (j + lane / 16) * 16), four);
      }
      if constexpr (Store::eights % 2 == 1) {
        constexpr int kLast = Store::eights - 1;
        ptx::stmatrix(buffer + Store::offset(lane % 16, kLast * 16), values[kLast]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < Store::eights; ++j) {
        const int byte = 32 * j + lane % 4 * 8;
        ptx::store_shared_v2(buffer + Store::offset(lane / 4, byte), values[j][0], values[j][1]);
        ptx::store_shared_v2(buffer + Store::offset(lane / 4 + 8, byte), values[j][2], values[j][3]);
      }
    }
  }
};

// Adds what y of f32 holds to a store tile that this warp has written.
template <class Store>
__device__ void add_to_tile(std::uint8_t* buffer, int2 at, const Destination<float>& y) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int c = 0; c < Store::cols; c += 32) {
    const bool inside = c + lane < Store::cols && at.y + c + lane < y.cols;
    const float* const from = y.data + at.x * y.pitch + at.y + c + lane;
    float before[Store::rows];
#pragma unroll
    for (int r = 0; r < Store::rows; ++r) before[r] = inside && at.x + r < y.rows ? __ldcg(from + r * y.pitch) : 0.0f;
#pragma unroll
    for (int r = 0; r < Store::rows; ++r) {
      if (!inside) continue;
      auto* const sum = reinterpret_cast<float*>(buffer + Store::offset(r, (c + lane) * 4));
      *sum = __fadd_rn(before[r], *sum);
    }
  }
}

// A store tile directly to y at row and column `at`: any alignment, nothing out of bounds.
template <class Y, class Store>
__device__ void store_edge(const std::uint8_t* buffer, int2 at, const Destination<Y>& y) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = min(Store::rows, y.rows - at.x);
  const int cols = min(Store::cols, y.cols - at.y);
#pragma unroll 1  // keeps the code small: every launch fetches it again
  for (int r = 0; r < rows; ++r) {
    Y* const row = y.data + (at.x + r) * y.pitch + at.y;
#pragma unroll
    for (int c = 0; c < Store::cols; c += 32) {
      if (c + lane < cols) {
        row[c + lane] =
            *reinterpret_cast<const Y*>(buffer + Store::offset(r, (c + lane) * static_cast<int>(sizeof(Y))));
      }
    }
  }
}

// The first rows of a store tile that TMA could store whole, to `to`; this many of its columns exist. Not inlined: its
// registers would be missed elsewhere.
template <class Y, class Store>
__device__ __noinline__ void store_rows(const std::uint8_t* buffer, Y* to, std::int64_t pitch, int rows, int cols) {
  constexpr int kUnits = Store::row_bytes / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane / kUnits, unit = lane % kUnits;
  const int col = unit * (16 / static_cast<int>(sizeof(Y)));
  static_assert(32 % kUnits == 0);
  if (col >= cols) return;
#pragma unroll 1
  for (int r = row; r < rows; r += 32 / kUnits) {
    *reinterpret_cast<uint4*>(to + r * pitch + col) =
        *reinterpret_cast<const uint4*>(buffer + Store::offset(r, unit * 16));
  }
}

// Where a GEMM's tiles go.
template <class Y>
struct StoreTarget {
  const CUtensorMap& map;
  const Destination<Y>& y;
  int tma_cols;     // TMA may store tiles that end here or before
  bool accumulate;  // y += instead of y =; y is f32
  static constexpr bool kClips = false;
};

// The rows of one of y's experts: those from y.rows on are another's, so TMA must not store tiles that reach there.
template <class Y>
struct ExpertStoreTarget : StoreTarget<Y> {
  static constexpr bool kClips = true;
};

// 16 rows of `count` store tiles, whose first row and column are at `at`, by one warp. four(j): as above, of all
// columns.
template <class Y, class Store, int buffers, class Target, class Four>
__device__ void store_tiles(std::uint8_t (&memory)[buffers][Store::bytes], int first_buffer, int2 at,
                            const Target& target, const Four& four) {
  const bool leader = threadIdx.x % 32 == 0;
  const bool whole_cols = at.y + Store::count * Store::cols <= target.tma_cols;
  const bool by_tma = whole_cols && (!Target::kClips || at.x + Store::rows <= target.y.rows);
#pragma unroll
  for (int part = 0; part < Store::count; ++part) {
    const int col = at.y + part * Store::cols;
    std::uint8_t* const buffer = memory[(first_buffer + part) % buffers];
    StoreValues<Y, Store> values;
    values.compute([&](int j) { return four(part * Store::eights + j); });
    if (leader) ptx::tma_store_wait_read<buffers - 1>();
    __syncwarp();
    values.write(ptx::shared_address(buffer));
    if constexpr (std::is_same_v<Y, float>) {
      if (target.accumulate) {
        __syncwarp();
        add_to_tile<Store>(buffer, {at.x, col}, target.y);
      }
    }
    if (by_tma) ptx::fence_proxy_async();
    __syncwarp();
    if constexpr (Target::kClips) {
      if (!by_tma && whole_cols) {
        Y* const to = target.y.data + at.x * target.y.pitch + col;
        store_rows<Y, Store>(buffer, to, target.y.pitch, target.y.rows - at.x, target.y.cols - col);
      }
    }
    if (!by_tma && !(Target::kClips && whole_cols)) store_edge<Y, Store>(buffer, {at.x, col}, target.y);
    if (leader) {
      if (by_tma) ptx::tma_store(target.map, col, at.x, ptx::shared_address(buffer));
      ptx::tma_store_commit();  // one group per tile, even if empty: the wait above counts them
    }
  }
}

}  // namespace octile::cuda
