// Tiles of floats that become levels in both orientations, as the kernels for gradients and columns walk them.
//
// A tile is 8 warp tiles of 16 rows by 32 vectors of 16 bytes, below one another or side by side. A lane has one vector
// of each row. A lane reads what it has copied itself, so the copies need no barrier: while it works on one tile, the
// next one arrives in the places that become free. Levels leave as rows at once, and as columns from shared memory,
// while the next tile is worked on.
#pragma once

#include <cstdint>

#include "cuda/device/elementwise.cuh"
#include "cuda/device/mma.cuh"

namespace octile::cuda::tiles {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpRows = 16;
constexpr int kBatch = 4;  // rows that are read together
constexpr int kBatches = kWarpRows / kBatch;
constexpr int kBlocks = 2;  // on an SM
constexpr unsigned kTileBytes = kWarps * kWarpRows * 32 * 16;

template <class T>
constexpr int kWarpCols = 32 * kVectorSize<T>;
template <class T>
constexpr unsigned kSharedBytes = kTileBytes + kWarps* kWarpRows* kWarpCols<T>;  // x, and columns of levels

// What the elements of a segment are rounded with: s, NaN in a bad segment, and 1 / s with one or two units in the last
// place less and more, so that the IEEE quotient lies between x low and x high. If both round to one integer, so does
// it; each is one fma. Where products cannot stand for quotients `high` is NaN, and all is divided.
//
// The IEEE quotient is within 2^-24 of x / s, which is m / 2 units of 1 / s = m 2^e, 1 <= m < 2. The rounded 1 / s is
// m |1 - s (1 / s)| 2^23 units off, an fma tells exactly. If both together, m (1/2 + |1 - s (1 / s)| 2^23), are at most
// 1, one unit is enough, unless m is 1, where the unit below is half as large; two always are. All 2^23 significands of
// s were tried.
struct LevelRule {
  float s, low, high;

  // 1 / s, rounded.
  __device__ float inverse() const {
    const int first = __float_as_int(low);
    return __int_as_float(first + (__float_as_int(high) - first) / 2);
  }

  // A bit where the segment is bad: an infinite x would make both products NaN.
  __device__ static std::uint32_t bad(float s) { return __float_as_uint(s) & 0x80000000u; }
};

// `largest`: the largest magnitude, as bits.
__device__ inline LevelRule level_rule(std::uint32_t max_bits, float q_max, float min_scale) {
  const float largest = __uint_as_float(max_bits);
  const float s = fmaxf(__fdiv_rn(largest, q_max), min_scale);
  constexpr float kLargest = 0x1.fffffep127f;
  const float nan = __uint_as_float(0xffc00000);
  if (!(largest <= kLargest && s <= kLargest)) return {nan, 0.0f, nan};
  if (s >= 0x1p100f) return {s, 0.0f, nan};
  const float inverse = __fdiv_rn(1.0f, s);
  const int bits = __float_as_int(inverse);
  const float m = __int_as_float((bits & 0x007fffff) | 0x3f800000);
  const float off = fabsf(__fmaf_rn(-s, inverse, 1.0f));
  const int units = m > 1.0f && m * __fmaf_rn(off, 0x1p23f, 0.5f) < 0.999f ? 1 : 2;
  return {s, __int_as_float(bits - units), __int_as_float(bits + units)};
}

constexpr float kRounder = 0x1.8p23f;  // x + kRounder has an integer's bits, ties to even, in its low ones

// The level as the low byte; `differ` gets a bit if it has to be divided.
__device__ inline std::uint32_t product_level(float x, float low, float high, std::uint32_t& differ) {
  const std::uint32_t level = __float_as_uint(__fmaf_rn(x, low, kRounder));
  differ |= level ^ __float_as_uint(__fmaf_rn(x, high, kRounder));
  return level;
}

// The same by division; 0 in a bad segment.
__device__ __noinline__ inline std::uint32_t divided_level(float x, float s) {
  return s == s ? __float_as_uint(__fdiv_rn(x, s) + kRounder) & 0xff : 0;
}
// By whichever it takes.
__device__ inline std::uint32_t settled_level(float x, const LevelRule& rule) {
  std::uint32_t differ = LevelRule::bad(rule.s);
  const std::uint32_t level = product_level(x, rule.low, rule.high, differ);
  return differ == 0 ? level & 0xff : divided_level(x, rule.s);
}

// Levels of the batch's row k into words of four rows, one word a column.
template <int n>
__device__ void pack_columns(int k, const std::uint32_t (&levels)[n], std::uint32_t (&before)[n],
                             std::uint32_t (&words)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (k % 2 == 0) before[i] = levels[i];
    if (k == 1) words[i] = __byte_perm(before[i], levels[i], 0x0040);
    if (k == 3) words[i] = __byte_perm(words[i], __byte_perm(before[i], levels[i], 0x0040), 0x5410);
  }
}

// 16 bytes, or zeros.
__device__ inline void copy_or_clear(void* shared, const void* global, bool inside) {
  const std::uint32_t to = shared_address(shared);
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// The matrices of a quantizer that writes both orientations.
template <class T>
struct Matrices {
  const T* x;
  std::uint8_t* q;             // (rows, cols); null for a row quantizer that does not write it
  std::uint8_t* q_transposed;  // (cols, rows)
  std::int64_t x_stride, q_stride, q_transposed_stride;
  int rows, cols;
};

template <class T>
Matrices<T> matrices(const QuantizeOperands& o) {
  Matrices<T> m = {};
  m.x = static_cast<const T*>(o.x.data);
  m.q = static_cast<std::uint8_t*>(o.q.data);
  m.q_transposed = static_cast<std::uint8_t*>(o.q_transposed.data);
  m.x_stride = o.x.strides[0];
  m.q_stride = o.q.strides[0];
  m.q_transposed_stride = o.q_transposed.strides[0];
  m.rows = static_cast<int>(o.x.rows());
  m.cols = static_cast<int>(o.x.cols());
  return m;
}

// Whether all three can be moved in whole vectors.
template <class T>
bool moves_whole(const QuantizeOperands& o) {
  return o.x.cols() % kVectorSize<T> == 0 && rows_of<T>(o.x).aligned &&
         (!o.q.present() || integer_rows(o.q, kVectorSize<T>).aligned) &&
         (!o.q_transposed.present() || aligned_rows(o.q_transposed.data, o.q_transposed.strides[0], 16));
}

// This lane's part of a tile: `rows` of 16 rows of one vector are inside the matrix, none where that is not above 0.
template <class T>
struct Spot {
  int row, column;  // the first
  int rows;
  const T* x;       // of the next row to be fetched
  std::uint8_t* q;  // of the next row to be written
};

// A tile in shared memory, and its columns of levels. kHigh: how many warp tiles are below one another. kWhole: x, q
// and q_transposed are moved in whole vectors.
template <class T, int kHigh, bool kWhole>
struct Tile {
  static constexpr int n = kVectorSize<T>;
  static constexpr int kRows = kHigh * kWarpRows;
  static constexpr int kCols = kWarps / kHigh * kWarpCols<T>;

  const Matrices<T>& m;
  Vector<T>* vectors;        // [kWarps][kWarpRows][32]
  std::uint8_t* transposed;  // [kCols][kHigh] of 16 bytes
  int thread, warp, lane;

  __device__ Tile(const Matrices<T>& matrices, unsigned char* memory)
      : m(matrices),
        vectors(reinterpret_cast<Vector<T>*>(memory)),
        transposed(memory + kTileBytes),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / 32),
        lane(thread % 32) {}

  // Of the tile that begins at (row, column).
  __device__ Spot<T> spot(int tile_row, int tile_column) const {
    const int row = tile_row + warp % kHigh * kWarpRows;
    const int column = tile_column + warp / kHigh * kWarpCols<T> + lane * n;
    const int rows = column < m.cols ? min(m.rows - row, kWarpRows) : 0;
    return {row, column, rows, m.x + row * m.x_stride + column, m.q + row * m.q_stride + column};
  }
  __device__ int valid(int column) const { return min(n, m.cols - column); }

  __device__ Vector<T>* at(int r) const { return vectors + (warp * kWarpRows + r) * 32 + lane; }
  __device__ Vector<T> get(int r) const {
    const uint4 v = *reinterpret_cast<const uint4*>(at(r));  // as one load
    return *reinterpret_cast<const Vector<T>*>(&v);
  }

  // Begins to bring one batch: always a group of copies, an empty one if there is nothing to bring.
  __device__ void fetch(Spot<T>& s, int batch, bool really) const {
    if (really) {
      if (kWhole && s.rows == kWarpRows) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k, s.x += m.x_stride) copy_or_clear(at(batch * kBatch + k), s.x, true);
      } else {
        for (int k = 0; k < kBatch; ++k, s.x += m.x_stride) {
          const bool inside = batch * kBatch + k < s.rows;
          Vector<T>* const to = at(batch * kBatch + k);
          if constexpr (kWhole) {
            copy_or_clear(to, inside ? s.x : m.x, inside);
          } else {
            *to = load_vector(s.x, inside ? valid(s.column) : 0, false);
          }
        }
      }
    }
    commit_copies();
  }

  // A vector of levels to q.
  __device__ void put_row(std::uint8_t* q, const std::uint32_t (&bytes)[2], int column) const {
    if constexpr (kWhole && n == 8) {
      *reinterpret_cast<uint2*>(q) = {bytes[0], bytes[1]};
    } else if constexpr (kWhole) {
      *reinterpret_cast<std::uint32_t*>(q) = bytes[0];
    } else {
      const int count = valid(column);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (i < count) q[i] = static_cast<std::uint8_t>(bytes[i / 4] >> i % 4 * 8);
      }
    }
  }

  // Where 16 levels of a column lie. Eight lanes that store one column each, or load the chunks of one or more columns,
  // meet 8 different places of 128 bytes.
  __device__ std::uint8_t* chunk(int column, int high) const {
    return transposed + ((column * kHigh + high) ^ column / n % 8) * 16;
  }
  // The words of this lane's columns.
  __device__ void transpose(const std::uint32_t (&words)[kBatches][n]) const {
    const int first = warp / kHigh * kWarpCols<T> + lane * n;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      *reinterpret_cast<uint4*>(chunk(first + i, warp % kHigh)) = {words[0][i], words[1][i], words[2][i], words[3][i]};
    }
  }
  // One level of this lane's.
  __device__ void transpose_one(int i, int r, std::uint32_t level) const {
    chunk(warp / kHigh * kWarpCols<T> + lane * n + i, warp % kHigh)[r] = static_cast<std::uint8_t>(level);
  }

  // The tile's rows of q_transposed: kHigh lanes have 16 bytes each of a column.
  __device__ void put_columns(int tile_row, int tile_column) const {
    const int high = thread % kHigh;
    const int first = thread / kHigh;
    const int row = tile_row + high * 16;
    // Not clamped here: of "clamped == 16" nvcc 13.0 makes a min with a predicate, and takes that the wrong way.
    const int left = m.rows - row;
    const int columns = min(m.cols - tile_column, kCols);
    std::uint8_t* to = m.q_transposed + (tile_column + first) * m.q_transposed_stride + row;
    constexpr int kStep = kThreads / kHigh;
    const std::int64_t step = kStep * m.q_transposed_stride;
    if (kWhole && left >= 16) {
#pragma unroll
      for (int c = 0; c < kCols; c += kStep, to += step) {
        if (c + first < columns) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk(c + first, high));
        }
      }
      return;
    }
#pragma unroll 1
    for (int c = first; c < columns; c += kStep, to += step) {
#pragma unroll 1
      for (int i = 0; i < min(left, 16); ++i) to[i] = chunk(c, high)[i];
    }
  }
};

}  // namespace octile::cuda::tiles
