// The same product in f32 and f64, on the ordinary arithmetic units: y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]),
// b s8, every stride. A block of 16 x 16 threads multiplies kTile rows by kTile rows; its pieces lie in shared memory
// along the rows, so that a thread reads 16 bytes of them at a time, and the next ones are on their way in registers.
#pragma once

#include <cstdint>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/product_tiles.cuh"

namespace octile::cuda {

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

// One thread's part of a piece (kTile rows, kWideStep terms). Neighbouring threads take neighbours in memory.
template <int kTile, class T>
class PieceWalk {
 public:
  static constexpr int kCount = kTile * kWideStep / kWideThreads;

  __device__ PieceWalk(const Strided<const T>& m, int first_row, int rows) {
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
  int row_, term_;        // of the first element, in the piece
  int row_by_, term_by_;  // from one to the next
  int rows_;              // from the first on
  const T* from_;
  std::int64_t by_, step_;
};

template <class Real, int kTile>
__global__ void __launch_bounds__(kWideThreads, sizeof(Real) == 4 ? 2 : 1)
    wide_product_kernel(const __grid_constant__ WideProduct<Real> p) {
  // A thread has every kWideSide'th vector of the tile's rows and columns.
  constexpr int kSize = kVectorSize<Real>;
  constexpr int kVectors = kTile / kWideSide / kSize;
  constexpr int kPitch = kTile + kSize;
  __shared__ __align__(16) Real a_piece[kWideStep][kPitch];
  __shared__ __align__(16) Real b_piece[kWideStep][kPitch];
  const int column_tiles = (p.n + kTile - 1) / kTile;
  const int first_row = static_cast<int>(blockIdx.x) / column_tiles * kTile;
  const int first_col = static_cast<int>(blockIdx.x) % column_tiles * kTile;
  const int across = static_cast<int>(threadIdx.x) % kWideSide * kSize;
  const int down = static_cast<int>(threadIdx.x) / kWideSide * kSize;
  PieceWalk<kTile, Real> a_walk(p.a, first_row, p.m);
  PieceWalk<kTile, std::int8_t> b_walk(p.b, first_col, p.n);
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
    for (int i = 0; i < a_walk.kCount; ++i) a_piece[a_walk.term(i)][a_walk.row(i)] = a_next[i];
#pragma unroll
    for (int i = 0; i < b_walk.kCount; ++i) b_piece[b_walk.term(i)][b_walk.row(i)] = b_next[i];
    __syncthreads();
    if (term + kWideStep < p.k) read(term + kWideStep);
#pragma unroll
    for (int c = 0; c < kWideStep; ++c) {
      Vector<Real> a[kVectors], b[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        a[i] = *reinterpret_cast<const Vector<Real>*>(&a_piece[c][down + i * kSize * kWideSide]);
        b[i] = *reinterpret_cast<const Vector<Real>*>(&b_piece[c][across + i * kSize * kWideSide]);
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

}  // namespace octile::cuda
