// w8a16_gemm_sm80, on the device. 16-bit floats: operands on their way from shared memory to registers, and mma.sync,
// for which the s8 operand is converted, exactly, and multiplied by the scales of its terms. f32 and f64: the ordinary
// arithmetic units.
//
// In a slice of 16 terms a lane has terms 4 t .. 4 t + 3, t = lane % 4, of each of its rows: one word of an s8 row. The
// mma instruction numbers them 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, in both operands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/operand_tiles.cuh"
#include "cuda/device/output_tiles.cuh"
#include "cuda/device/product_tiles.cuh"

namespace octile::cuda::w8a16_sm80 {

inline constexpr int kHalfSlice = 16;  // terms of one matrix instruction on 16-bit floats

// The 16-bit operand, right: 16 rows x 16 terms as multiply_add_16 takes its `b`, 8 rows after 8. It cannot be left:
// the parts of a row that one load brings would go to non-adjacent registers, 400 moves a step.
template <class Tile, int kRows, bool kOuter>
class HalfReader {
 public:
  // first_row: of the warp
  __device__ HalfReader(int first_row, int lane) {
    const int matrix = lane / 8;
    if constexpr (kOuter) {
      // Rows 0, 1, 2, 3, .. of the four matrices are terms 0, 1, 4, 5, .. or 2, 3, 6, 7, ..
      const int term = lane % 8 / 2 * 4 + matrix % 2 * 2 + lane % 2;
      const int chunk = first_row / 8 + matrix / 2;
      offset_ = term * kLineBytes + (chunk ^ twist<kLineBytes, true, 2>(term)) * kChunk;
    } else {
      const int row = first_row + lane / 4;
      offset_ = row * kLineBytes + (lane % 4 / 2 ^ twist<kLineBytes, false, 2>(row)) * kChunk + lane % 2 * 8;
    }
  }

  // Rows 16 * block .. of the warp, terms kHalfSlice * slice .. of the step.
  __device__ void load(std::uint32_t tile, int block, int slice, uint2 (&to)[2]) const {
    if constexpr (kOuter) {
      std::uint32_t pairs[4];
      load_matrices_transposed(tile + (offset_ ^ block * 2 * kChunk) + slice * kHalfSlice * kLineBytes, pairs);
      to[0] = {pairs[0], pairs[1]};
      to[1] = {pairs[2], pairs[3]};
    } else {
      const std::uint32_t at = tile + (offset_ ^ slice * 2 * kChunk) + block * 16 * kLineBytes;
      to[0] = load_shared_pair(at);
      to[1] = load_shared_pair(at + 8 * kLineBytes);
    }
  }

 private:
  static constexpr int kLineBytes = (kOuter ? kRows : Tile::kStep) * 2;
  std::uint32_t offset_;
};

// The s8 operand, left: 32 rows x 16 terms, a word for each 8 rows. Contraction-major: word i has four terms of row 8 i
// + lane / 4. Outer-major: of 16 rows, two words with two terms each of the rows 2 * (lane / 4) and the next.
template <class Tile, int kRows, bool kOuter>
class ByteReader {
 public:
  __device__ ByteReader(int first_row, int lane) {
    const int matrix = lane / 8;
    if constexpr (kOuter) {
      const int term = lane % 8 / 2 * 4 + matrix % 2 * 2 + lane % 2;
      const int chunk = first_row / kChunk + matrix / 2;
      offset_ = term * kLineBytes + (chunk ^ twist<kLineBytes, true>(term)) * kChunk;
    } else {
      const int row = first_row + lane;
      offset_ = row * kLineBytes + twist<kLineBytes, false>(row) * kChunk;
    }
  }

  // Rows 32 * block .. of the warp, terms kHalfSlice * slice .. of the step.
  __device__ void load(std::uint32_t tile, int block, int slice, std::uint32_t (&to)[4]) const {
    if constexpr (kOuter) {
      load_matrices_transposed(tile + (offset_ ^ block * 2 * kChunk) + slice * kHalfSlice * kLineBytes, to);
    } else {
      load_matrices(tile + (offset_ ^ slice * kChunk) + block * 32 * kLineBytes, to);
    }
  }

 private:
  static constexpr int kLineBytes = kOuter ? kRows : Tile::kStep;
  std::uint32_t offset_;
};

// The scales of a step's terms as 16-bit floats in the ring, and on what they are scaled themselves. One warp writes.
//
// f16 has a small range: the scales are divided by a power of two such that the largest so far is in [256, 512), as
// f16 too, and with an s8 below 65504. It is kept with each stage as the exponent of a float; where it grows, the sums
// are scaled. Scales down to 2^-22 of the largest one keep their precision, and an error below 2^-33 of the largest one
// comes with each term. A scale that is not finite stays so.
template <class T, int kStep>
class TermScales {
 public:
  static constexpr bool kScaled = std::is_same_v<T, __half>;
  static constexpr int kBytes = 256;
  static_assert(kStep == 64, "two terms a lane");

  __device__ TermScales(const Factors& scales, int k) : scales_(scales), k_(k) {}

  // Reads ahead; not before wait_for_previous().
  __device__ void read(int step) {
    if (threadIdx.x >= 32) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int term = step * kStep + static_cast<int>(threadIdx.x) * 2 + e;
      next_[e] = term < k_ ? scales_.at<float>(term) : 0.0f;
    }
  }

  // Writes what was read.
  __device__ void write(std::uint32_t to) {
    if (threadIdx.x >= 32) return;
    if constexpr (kScaled) {
      const auto magnitude = [](float x) { return min(__float_as_uint(x) & 0x7fffffffu, 0x7f7fffffu); };
      const std::uint32_t largest = __reduce_max_sync(~0u, max(magnitude(next_[0]), magnitude(next_[1])));
      constexpr std::uint32_t kRoundsUp = 0x1000;  // what would become 512 as f16: 512 * -128 overflows
      exponent_ = max(exponent_, static_cast<int>(largest + kRoundsUp >> 23));
      const float down = __int_as_float(262 - exponent_ << 23);
      const __half2 pair = __floats2half2_rn(next_[0] * down, next_[1] * down);
      store_shared(to + threadIdx.x * 4, reinterpret_cast<const std::uint32_t&>(pair));
      if (threadIdx.x == 0) store_shared(to + kStep * 2, static_cast<std::uint32_t>(exponent_));
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(next_[0], next_[1]);
      store_shared(to + threadIdx.x * 4, reinterpret_cast<const std::uint32_t&>(pair));
    }
  }

  static constexpr int kMinExponent = 9;  // what it is divided by, and that by 1, are floats that are not subnormal
  __device__ static int exponent_at(std::uint32_t stage) {
    return static_cast<int>(load_shared_word(stage + kStep * 2));
  }
  // What sums must be multiplied by.
  __device__ static float scale_of(int exponent) { return __int_as_float(exponent - 8 << 23); }

 private:
  Factors scales_;
  int k_;
  float next_[2] = {};
  int exponent_ = kMinExponent;
};

// At 4096 cubed on an H200 this tile reaches 379 to 394 T/s, and 409 at 8192 cubed, whatever the operands'
// orientations. Warps of 64 x 64, each of which dequantizes twice as much, 336 to 383; a block of 8 warps alone on its
// SM, 256 x 128 or 128 x 256, 347 to 402, but with more shared memory than small GPUs have.
using Large = TileShape<128, 128, 64, 3, 4, 1, 2>;
inline constexpr TileCost kLargeCost = {44e-6, 59e-6, 10e-6};

struct Product {
  Tiling tiling;  // left is b, right is a
  Factors c_scale;
  TileOutput output;
};

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
using HalfStage = Stage<Tile, kLeftOuter, kRightOuter, 2, TermScales<T, Tile::kStep>::kBytes>;

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
struct Work {
  using Stage = HalfStage<Tile, T, kLeftOuter, kRightOuter>;
  using Scales = TermScales<T, Tile::kStep>;
  using Pair = typename FromBytes<T>::Pair;
  static constexpr int kLeftBlocks = Tile::kWarpLeft / 16;
  static constexpr int kRightBlocks = Tile::kWarpRight / 8;
  // More than 64 rows of right are read in parts, each for as many matrix instructions: they would take all registers.
  static constexpr int kParts = kRightBlocks > 8 ? kRightBlocks / 8 : 1;
  static constexpr int kPartBlocks = kRightBlocks / kParts;
  static constexpr int kSlices = Tile::kStep / kHalfSlice * kParts;
  static_assert(kParts <= 2, "two sets of registers");
  static constexpr int kSlabPitch = std::max(Tile::kWarpLeft, Tile::kWarpRight) + 4;

  __device__ Work(const Product& p, int2 first, int lane)
      : left_reader(first.x, lane), right_reader(first.y, lane), term(lane % 4 * 4), scales(p.c_scale, p.tiling.k) {}

  __device__ void fill(int step, std::uint32_t stage) {
    scales.write(stage + Stage::kBesideTiles);
    scales.read(step + 1);
  }

  // A loop, since the compiler would make predicated instructions of a branch, which wait for all sums in every step.
  __device__ void begin() {
    if constexpr (Scales::kScaled) {
#pragma unroll 1
      while (exponent < coming_exponent) {
        const int by = min(coming_exponent - exponent, 126);
        exponent += by;
        const float down = __int_as_float(127 - by << 23);
#pragma unroll
        for (auto& row : sums) {
#pragma unroll
          for (auto& block : row) {
#pragma unroll
            for (float& sum : block) sum *= down;
          }
        }
      }
    }
  }

  __device__ void read(int to, std::uint32_t stage, int part) {
    const int slice = part / kParts;
    if (part % kParts == 0) {
#pragma unroll
      for (int i = 0; i < kLeftBlocks / 2; ++i) left_reader.load(stage, i, slice, left[to][i]);
      scale[to] = load_shared_pair(stage + Stage::kBesideTiles + (slice * kHalfSlice + term) * 2);
    }
    const int first = part % kParts * kPartBlocks / 2;
#pragma unroll
    for (int j = 0; j < kPartBlocks / 2; ++j) {
      right_reader.load(stage + Stage::kRightTile, first + j, slice, right[to][j]);
    }
    if (Scales::kScaled && part == 0) coming_exponent = Scales::exponent_at(stage + Stage::kBesideTiles);
  }

  __device__ void multiply(int from, int part) {
    const int first = part % kParts * kPartBlocks;
#pragma unroll
    for (int i = 0; i < kLeftBlocks; ++i) {
      if (first == 0) dequantize(from, i);
#pragma unroll
      for (int j = 0; j < kPartBlocks; ++j)
        multiply_add_16(T(), sums[i][first + j], terms[i], right[from][j / 2][j % 2]);
    }
  }

  // 16 rows of left to 16-bit floats.
  __device__ void dequantize(int from, int block) {
    const FromBytes<T> one(left[from][block / 2][block % 2 * 2]);
    const FromBytes<T> other(left[from][block / 2][block % 2 * 2 + 1]);
    Pair pairs[4];
    if constexpr (kLeftOuter) {
      pairs[0] = one.template pair<0, 2>(), pairs[1] = one.template pair<1, 3>();
      pairs[2] = other.template pair<0, 2>(), pairs[3] = other.template pair<1, 3>();
    } else {
      pairs[0] = one.template pair<0, 1>(), pairs[1] = other.template pair<0, 1>();
      pairs[2] = one.template pair<2, 3>(), pairs[3] = other.template pair<2, 3>();
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Pair scaled = __hmul2(pairs[e], reinterpret_cast<const Pair&>(e < 2 ? scale[from].x : scale[from].y));
      terms[block][e] = reinterpret_cast<const std::uint32_t&>(scaled);
    }
  }

  // Of 16 rows of sums a lane has two: of the two halves, or outer-major neighbours.
  __device__ static int row_of(int lane, int e) { return kLeftOuter ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8; }
  __device__ static int column_of(int lane, int block, int e) { return block * 8 + lane % 4 * 2 + e % 2; }
  __device__ float result(int i, int j, int e) const { return sums[i][j][e]; }
  __device__ float result_scale() const { return Scales::kScaled ? Scales::scale_of(exponent) : 1.0f; }

  const ByteReader<Tile, Tile::kLeft, kLeftOuter> left_reader;
  const HalfReader<Tile, Tile::kRight, kRightOuter> right_reader;
  const int term;
  Scales scales;
  int exponent = Scales::kMinExponent, coming_exponent;
  float sums[kLeftBlocks][kRightBlocks][4] = {};
  std::uint32_t left[2][kLeftBlocks / 2][4];
  std::uint32_t terms[kLeftBlocks][4];
  uint2 right[2][kPartBlocks / 2][2];
  uint2 scale[2];
};

// y has a's type, or f32.
template <class Tile, class T, class Work>
__device__ void store_any(const Product& p, const Work& work, int2 first, std::uint8_t* shared) {
  float* const slabs = reinterpret_cast<float*>(shared);
  if (p.output.type == DType::f32) {
    store_tile<float, Tile>(p.output, p.tiling, work, first, slabs);
  } else {
    store_tile<T, Tile>(p.output, p.tiling, work, first, slabs);
  }
}

// ---- f32 and f64.
//
// y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]), b s8, any stride. A block of 16 x 16 threads multiplies kTile rows
// by kTile rows. Its operand tiles are in shared memory with their rows contiguous, so that a thread reads 16 bytes at
// a time; the next ones are on their way in registers.

// Element (r, c) lies at data[r * row_stride + c * col_stride].
template <class T>
struct Strided {
  T* data;
  std::int64_t row_stride, col_stride;

  __device__ T* at(std::int64_t r, std::int64_t c) const { return data + r * row_stride + c * col_stride; }
};

template <class Real>
struct WideProduct {
  Strided<const Real> a;         // (m, k)
  Strided<const std::int8_t> b;  // (n, k)
  Strided<Real> y;               // (m, n)
  Factors c_scale;
  int m, n, k;
  bool accumulate;
};

constexpr int kWideSide = 16;  // threads of a block, in both directions
constexpr int kWideThreads = kWideSide * kWideSide;
constexpr int kWideStep = 16;  // terms

// One thread's part of an operand tile (kTile rows, kWideStep terms). Neighbouring threads take neighbours in memory.
template <int kTile, class T>
class TileLoader {
 public:
  static constexpr int kCount = kTile * kWideStep / kWideThreads;

  __device__ TileLoader(const Strided<const T>& m, int first_row, int rows) {
    const int thread = static_cast<int>(threadIdx.x);
    const bool along_rows = m.row_stride == 1;
    row_ = along_rows ? thread % kTile : thread / kWideStep;
    term_ = along_rows ? thread / kTile : thread % kWideStep;
    row_by_ = along_rows ? 0 : kWideThreads / kWideStep;
    term_by_ = along_rows ? kWideThreads / kTile : 0;
    rows_ = rows - first_row - row_;
    from_ = m.at(first_row + row_, term_);
    by_ = row_by_ * m.row_stride + term_by_ * m.col_stride;
    step_ = kWideStep * m.col_stride;
  }

  __device__ int row(int i) const { return row_ + i * row_by_; }
  __device__ int term(int i) const { return term_ + i * term_by_; }
  // `terms` are left. Nothing beyond the edges is read; it is zero.
  __device__ T load(int i, int terms) const {
    return i * row_by_ < rows_ && term(i) < terms ? __ldcg(from_ + i * by_) : T(0);
  }
  __device__ void advance() { from_ += step_; }

 private:
  int row_, term_;        // of the first element, in the operand tile
  int row_by_, term_by_;  // from one to the next
  int rows_;              // from the first on
  const T* from_;
  std::int64_t by_, step_;
};

constexpr int kWideTile = 128;

// The tile from this row of y and this column on.
template <class Real, int kTile>
__device__ void wide_product(const WideProduct<Real>& p, int first_row, int first_col) {
  // A thread has every kWideSide'th vector of the tile's rows and columns.
  constexpr int kSize = kVectorSize<Real>;
  constexpr int kVectors = kTile / kWideSide / kSize;
  constexpr int kPitch = kTile + kSize;
  __shared__ __align__(16) Real a_tile[kWideStep][kPitch];
  __shared__ __align__(16) Real b_tile[kWideStep][kPitch];
  const int across = static_cast<int>(threadIdx.x) % kWideSide * kSize;
  const int down = static_cast<int>(threadIdx.x) / kWideSide * kSize;
  TileLoader<kTile, Real> a_walk(p.a, first_row, p.m);
  TileLoader<kTile, std::int8_t> b_walk(p.b, first_col, p.n);
  Real a_next[a_walk.kCount], b_next[b_walk.kCount];
  Real sums[kVectors][kSize][kVectors][kSize] = {};

  wait_for_previous();
  let_next_start();
  const auto read = [&](int term) {
#pragma unroll
    for (int i = 0; i < a_walk.kCount; ++i) a_next[i] = a_walk.load(i, p.k - term);
#pragma unroll
    for (int i = 0; i < b_walk.kCount; ++i) {
      const int c = term + b_walk.term(i);
      b_next[i] = static_cast<Real>(b_walk.load(i, p.k - term)) * (c < p.k ? p.c_scale.template at<Real>(c) : Real(0));
    }
    a_walk.advance();
    b_walk.advance();
  };
  read(0);
#pragma unroll 1
  for (int term = 0; term < p.k; term += kWideStep) {
#pragma unroll
    for (int i = 0; i < a_walk.kCount; ++i) a_tile[a_walk.term(i)][a_walk.row(i)] = a_next[i];
#pragma unroll
    for (int i = 0; i < b_walk.kCount; ++i) b_tile[b_walk.term(i)][b_walk.row(i)] = b_next[i];
    __syncthreads();
    if (term + kWideStep < p.k) read(term + kWideStep);
#pragma unroll
    for (int c = 0; c < kWideStep; ++c) {
      Vector<Real> a[kVectors], b[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        a[i] = *reinterpret_cast<const Vector<Real>*>(&a_tile[c][down + i * kSize * kWideSide]);
        b[i] = *reinterpret_cast<const Vector<Real>*>(&b_tile[c][across + i * kSize * kWideSide]);
      }
#pragma unroll
      for (int i = 0; i < kVectors * kSize; ++i) {
#pragma unroll
        for (int j = 0; j < kVectors * kSize; ++j) {
          Real& sum = sums[i / kSize][i % kSize][j / kSize][j % kSize];
          sum = fma(a[i / kSize].at[i % kSize], b[j / kSize].at[j % kSize], sum);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kVectors * kSize; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors * kSize; ++j) {
      const int r = first_row + down + i / kSize * kSize * kWideSide + i % kSize;
      const int c = first_col + across + j / kSize * kSize * kWideSide + j % kSize;
      if (r >= p.m || c >= p.n) continue;
      Real* const to = p.y.at(r, c);
      const Real value = sums[i / kSize][i % kSize][j / kSize][j % kSize];
      *to = p.accumulate ? __ldcg(to) + value : value;
    }
  }
}

template <class Real, int kTile>
__global__ void __launch_bounds__(kWideThreads, sizeof(Real) == 4 ? 2 : 1)
    wide_product_kernel(const __grid_constant__ WideProduct<Real> p) {
  const int column_tiles = ceil_div(p.n, kTile);
  const int tile = static_cast<int>(blockIdx.x);
  wide_product<Real, kTile>(p, tile / column_tiles * kTile, tile % column_tiles * kTile);
}

// ---- The host's side.

template <class Real>
WideProduct<Real> wide_product_of(const GemmProblem& problem, const GemmOperands& o) {
  WideProduct<Real> p = {};
  p.a = {static_cast<const Real*>(o.a.data), o.a.strides[0], o.a.strides[1]};
  p.b = {static_cast<const std::int8_t*>(o.b.data), o.b.strides[0], o.b.strides[1]};
  p.y = {static_cast<Real*>(o.y.data), o.y.strides[0], o.y.strides[1]};
  p.c_scale = factors_of(o.b_scale, problem.scale);
  p.m = static_cast<int>(o.y.rows());
  p.n = static_cast<int>(o.y.cols());
  p.k = static_cast<int>(o.a.cols());
  p.accumulate = problem.accumulate;
  return p;
}

}  // namespace octile::cuda::w8a16_sm80
