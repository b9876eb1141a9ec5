// Epilogue of the kernels that compute y^T: a warpgroup's sums (64, 64 to 256) to y through shared memory. TMA stores a
// tile while the next one is multiplied. Rows g and g + 8 of a thread's sums are rows 2g and 2g + 1 of y^T.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>

#include "cuda/device/output.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/tensor_map.h"

namespace octile::cuda {

// y as lines of memory: its rows, or its columns (along_a).
struct TransposeTarget {
  void* data = nullptr;
  std::int64_t pitch = 0;
  int rows = 0;
  int cols = 0;
  int tma_cols = 0;         // TMA may store tiles that end here or before
  bool along_a = false;     // lines run along the columns of the sums
  bool wide = false;        // f32
  bool accumulate = false;  // wide only
  static constexpr bool kClips = false;
};

// The rows of one of y's experts: those from `rows` on are another's, so TMA must not store tiles that reach there.
struct ExpertTarget : TransposeTarget {
  static constexpr bool kClips = true;

  __device__ ExpertTarget(const TransposeTarget& all, int end) : TransposeTarget(all) { rows = end; }
};

// Lines of 128 bytes with TMA's swizzle of 128 bytes. Of 256 columns:
//            16 bits                              32 bits, for each half of the columns
// along b    256 columns, 64 rows each            twice 128 columns, 32 rows each
// along a    four times 64 rows, 64 columns each  four times 64 rows, 32 columns each
template <int cols>
struct alignas(1024) TransposeBuffer {
  static constexpr int kLine = 128;
  std::uint8_t lines[cols * kLine];

  static TmaTile tile(bool wide, bool along_a) { return {along_a ? 64 : wide ? cols / 2 : cols, wide ? 32 : 64, true}; }
};

// Of y, and its tensor map; `map` is left alone where TMA cannot store y.
template <int cols>
TransposeTarget transpose_target(std::string_view kernel, const Tensor& y, bool along_a, CUtensorMap& map) {
  TransposeTarget target = {y.data, y.strides[0], static_cast<int>(y.rows()), static_cast<int>(y.cols())};
  target.along_a = along_a;
  target.wide = y.dtype == DType::f32;
  if (!mappable(y)) return target;
  map = tensor_map(kernel, y, TransposeBuffer<cols>::tile(target.wide, along_a));
  // TMA writes 16 bytes at a time: where a row ends within them, the last column of tiles is left to
  // store_transposed_edge.
  const bool whole = y.cols() * (bits(y.dtype) / 8) % 16 == 0;
  target.tma_cols = whole ? std::numeric_limits<int>::max() : target.cols;
  return target;
}

// `cols` columns of the sums to shared memory. finish(x, h): y for a sum x of the thread's row h.
template <class Y, bool along_a, unsigned cols, class Finish>
__device__ void write_tiles(const float* sums, const Finish& finish, std::uint32_t lines) {
  constexpr unsigned kSize = sizeof(Y);
  constexpr unsigned kEights = cols / 8;
  constexpr unsigned kLineEights = kSize == 2 ? 8 : 4;  // along_a: groups of eight columns in a line
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32 % 4;
  const unsigned g = lane / 4;
  const unsigned c = lane % 4;
  const auto put = [](std::uint32_t to, float x, float y) {
    if constexpr (kSize == 2) {
      ptx::store_shared(to, pack<Y>(x, y));
    } else {
      ptx::store_shared_v2(to, __float_as_uint(x), __float_as_uint(y));
    }
  };
  if constexpr (along_a) {
    // Lanes 16 and up begin with their second row, so that a warp touches eight lines of different swizzle.
    const unsigned second = lane / 16;
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
      const unsigned row = 16 * warp + 2 * g + (h ^ second);
      const std::uint32_t line = lines + row * 128;
      const unsigned twist = row % 8 * 16 ^ 2 * c * kSize;
#pragma unroll
      for (unsigned j = 0; j < kEights; ++j) {
        const std::uint32_t to = line + j / kLineEights * 64 * 128 + (twist ^ j % kLineEights * 8 * kSize);
        const float x = second ? sums[4 * j + 2 * (h ^ 1)] : sums[4 * j + 2 * h];
        const float y = second ? sums[4 * j + 2 * (h ^ 1) + 1] : sums[4 * j + 2 * h + 1];
        put(to, finish(x, h ^ second), finish(y, h ^ second));
      }
    }
  } else {
    const unsigned row = 16 * warp + 2 * g;
    const unsigned tile = kSize == 2 ? 0 : row / 32 * cols;
#pragma unroll
    for (unsigned e = 0; e < 2; ++e) {
      const std::uint32_t first = lines + (tile + 2 * c + e) * 128 + (row * kSize % 128 ^ (2 * c + e) * 16);
#pragma unroll
      for (unsigned j = 0; j < kEights; ++j) {
        put(first + j * 8 * 128, finish(sums[4 * j + e], 0), finish(sums[4 * j + 2 + e], 1));
      }
    }
  }
}

// A tile directly to y, by the threads of a warpgroup: any alignment, nothing out of bounds.
template <class Y>
__device__ void store_transposed_edge(const std::uint8_t* lines, int2 at, int rows, const TransposeTarget& y) {
  constexpr int kCols = 128 / static_cast<int>(sizeof(Y));
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int col = thread % kCols;
  if (at.y + col >= y.cols) return;
  for (int row = thread / kCols; row < min(rows, y.rows - at.x); row += 128 / kCols) {
    const int byte = col * static_cast<int>(sizeof(Y)) ^ row % 8 * 16;
    const Y value = *reinterpret_cast<const Y*>(lines + row * 128 + byte);
    Y* const to = static_cast<Y*>(y.data) + (at.x + row) * y.pitch + at.y + col;
    if constexpr (std::is_same_v<Y, float>) {
      *to = y.accumulate ? __fadd_rn(__ldcg(to), value) : value;
    } else {
      *to = value;
    }
  }
}

// The same for the first rows of a tile that TMA could store whole.
template <class Y>
__device__ void store_transposed_rows(const std::uint8_t* lines, int2 at, int rows, const TransposeTarget& y) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int unit = thread % 8;
  const int col = at.y + unit * (16 / static_cast<int>(sizeof(Y)));
  if (col >= y.cols) return;
  auto* const to = reinterpret_cast<uint4*>(static_cast<Y*>(y.data) + at.x * y.pitch + col);
  const std::int64_t pitch = y.pitch * static_cast<int>(sizeof(Y)) / 16;
  for (int row = thread / 8; row < min(rows, y.rows - at.x); row += 16) {
    to[row * pitch] = *reinterpret_cast<const uint4*>(lines + row * 128 + (unit ^ row % 8) * 16);
  }
}

template <class Y, bool along_a, int cols, class Finish, class Target>
__device__ void store_tiles(const float (&sums)[cols / 2], const Finish& finish, TransposeBuffer<cols>& buffer, int2 at,
                            const CUtensorMap& map, const Target& y, int barrier) {
  constexpr int kRounds = sizeof(Y) / 2;
  constexpr int kRoundCols = cols / kRounds;
  constexpr int kTileCols = 128 / static_cast<int>(sizeof(Y));
  constexpr int kTileRows = along_a ? 64 : kRoundCols;
  constexpr int kTiles = cols / kTileRows;
  const bool leads = threadIdx.x % 128 == 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (leads) ptx::tma_store_wait_read<0>();
    ptx::bar_sync<128>(barrier);
    write_tiles<Y, along_a, kRoundCols>(sums + round * (kRoundCols / 2), finish, ptx::shared_address(buffer.lines));
    ptx::fence_proxy_async();
    ptx::bar_sync<128>(barrier);
    const int2 origin = along_a ? int2{at.x, at.y + round * kRoundCols} : int2{at.y + round * kRoundCols, at.x};
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      const int2 corner = {origin.x, origin.y + tile * kTileCols};
      const std::uint8_t* const lines = buffer.lines + tile * kTileRows * 128;
      if (corner.x >= y.rows || corner.y >= y.cols) continue;
      if (corner.y + kTileCols > y.tma_cols) {
        store_transposed_edge<Y>(lines, corner, kTileRows, y);
      } else if (Target::kClips && corner.x + kTileRows > y.rows) {
        store_transposed_rows<Y>(lines, corner, kTileRows, y);
      } else if (leads && y.accumulate) {
        ptx::tma_reduce_add(map, corner.y, corner.x, ptx::shared_address(lines));
      } else if (leads) {
        ptx::tma_store(map, corner.y, corner.x, ptx::shared_address(lines));
      }
    }
    if (leads) ptx::tma_store_commit();
    __syncwarp();
  }
}

template <class Y, bool along_a, int cols, class Target>
__device__ void store_tiles(const float (&sums)[cols / 2], float scale, TransposeBuffer<cols>& buffer, int2 at,
                            const CUtensorMap& map, const Target& y, int barrier) {
  const auto scaled = [scale](float x, unsigned) { return __fmul_rn(x, scale); };
  store_tiles<Y, along_a, cols>(sums, scaled, buffer, at, map, y, barrier);
}

// at: the first row and column of the sums in y^T. T: y's type unless y is f32.
template <class T, int cols>
__device__ void store_transposed(const float (&sums)[cols / 2], float scale, TransposeBuffer<cols>& buffer, int2 at,
                                 const CUtensorMap& map, const TransposeTarget& y, int barrier) {
  if (y.wide) {
    if (y.along_a) return store_tiles<float, true, cols>(sums, scale, buffer, at, map, y, barrier);
    return store_tiles<float, false, cols>(sums, scale, buffer, at, map, y, barrier);
  }
  if (y.along_a) return store_tiles<T, true, cols>(sums, scale, buffer, at, map, y, barrier);
  store_tiles<T, false, cols>(sums, scale, buffer, at, map, y, barrier);
}

}  // namespace octile::cuda
