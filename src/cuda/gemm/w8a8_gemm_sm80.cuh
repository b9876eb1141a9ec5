// w8a8_gemm_sm80, on the device: a tile of exact sums (device/product_tiles.cuh, device/byte_work.cuh), and its way to
// y.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/byte_work.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/operand_tiles.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/product_tiles.cuh"
#include "plan/kernel.h"

namespace octile::cuda::w8a8_sm80 {

struct Product {
  Tiling tiling;
  Factors left_scale, right_scale;
  Factors bias;  // data is null: none
  bool bias_of_left;
  void* y;  // (rows, cols), contiguous along a row
  std::int64_t y_pitch;
  DType y_type;
  bool y_aligned;   // to 4 elements
  bool accumulate;  // y is of the scales' type
  // Where several blocks share a tile, each multiplies `part_terms` of its terms, and its sums go to
  // sums[part][row][col]; sum_parts_kernel does the rest.
  int parts, part_terms;
  std::int32_t* sums;
  std::int64_t sums_pitch;  // a multiple of 4

  template <class Real>
  __device__ Real left_scale_of(int row) const {
    return left_scale.at<Real>(row);
  }
  __device__ DType bias_type() const { return y_type; }
};

__device__ inline float to_real(int sum, float) { return __int2float_rn(sum); }
__device__ inline double to_real(int sum, double) { return __int2double_rn(sum); }

// Where there is no bias, it is -0: adding that changes no product.
template <class Real>
__device__ Real finished(int sum, Real factor, Real bias) {
  return fma(to_real(sum, Real{}), factor, bias);
}

// Of a tile, f32: they come while the first terms do. f64 is read when it is needed.
template <class Tile>
struct alignas(16) TileFactors {
  static constexpr int kLonger = Tile::kLeft > Tile::kRight ? Tile::kLeft : Tile::kRight;
  float left[Tile::kLeft], right[Tile::kRight];
  float bias[kLonger];

  // tile: its first row of left and of right. All loads are under way before the first store.
  template <class Product>
  __device__ void read(const Product& p, int2 tile) {
    const auto& t = p.tiling;
    const int first_bias = p.bias_of_left ? tile.x : tile.y;
    const int bias_rows = p.bias.data == nullptr ? 0 : p.bias_of_left ? t.left.rows : t.right.rows;
    float of_left[kTurns<Tile::kLeft>], of_right[kTurns<Tile::kRight>], of_bias[kTurns<kLonger>];
    load(of_left, [&](int i) { return tile.x + i < t.left.rows ? p.template left_scale_of<float>(tile.x + i) : 0; });
    load(of_right, [&](int i) { return tile.y + i < t.right.rows ? p.right_scale.template at<float>(tile.y + i) : 0; });
    load(of_bias, [&](int i) {
      const int row = first_bias + i;
      return row < bias_rows ? load_float(p.bias.data, row * p.bias.stride, p.bias_type()) : -0.0f;
    });
    store(of_left, left);
    store(of_right, right);
    store(of_bias, bias);
  }

 private:
  template <int kCount>
  static constexpr int kTurns = (kCount + Tile::kThreads - 1) / Tile::kThreads;

  template <int kEach, class Value>
  __device__ static void load(float (&to)[kEach], const Value& value) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) to[e] = value(e * Tile::kThreads + static_cast<int>(threadIdx.x));
  }
  template <int kEach, int kCount>
  __device__ static void store(const float (&from)[kEach], float (&to)[kCount]) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = e * Tile::kThreads + static_cast<int>(threadIdx.x);
      if (i < kCount) to[i] = from[e];
    }
  }
};

template <class Tile, bool kLeftOuter, bool kRightOuter, class Product>
struct Work : ByteWork<Tile, kLeftOuter, kRightOuter> {
  // tile: its first row of left and of right; part: those of this warp in it
  __device__ Work(const Product& product, int2 first_of_tile, int2 part, int depth, TileFactors<Tile>& shared)
      : ByteWork<Tile, kLeftOuter, kRightOuter>(part, static_cast<int>(threadIdx.x) % 32, depth),
        p(product),
        tile(first_of_tile),
        factors(shared) {}

  __device__ void filled() {
    if (p.parts == 1 && p.y_type != DType::f64) factors.read(p, tile);
  }

  const Product& p;
  const int2 tile;
  TileFactors<Tile>& factors;
};

// ---- From registers to y.

// Sums of kSlab rows of y and kWarpRight columns, kPitch apart, of each warp that has multiplied some terms of them,
// kDepthPitch apart; in_tile is the first row and column.
template <class Tile, int kSlab, int kPitch, class Product>
struct Slab {
  static constexpr int kDepthPitch = Tile::kWarps / Tile::kDepth * kSlab * kPitch;
  static constexpr int kCols = Tile::kWarpRight;
  static constexpr int kLanes = kCols / 4;  // of a row
  static constexpr int kRowsAtOnce = 32 / kLanes;

  const Product& p;
  const std::int32_t* sums;
  const TileFactors<Tile>& factors;
  int2 tile, in_tile;
  int depth;  // of this warp: which rows it stores

  __device__ int4 four(int row, int col) const {
    const std::int32_t* const from = sums + row * kPitch + col;
    int4 sum = *reinterpret_cast<const int4*>(from);
#pragma unroll
    for (int d = 1; d < Tile::kDepth; ++d) {
      const int4 more = *reinterpret_cast<const int4*>(from + d * kDepthPitch);
      sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
    return sum;
  }
  __device__ int one(int row, int col) const {
    int sum = 0;
#pragma unroll
    for (int d = 0; d < Tile::kDepth; ++d) sum += sums[d * kDepthPitch + row * kPitch + col];
    return sum;
  }

  __device__ void store(int part) const {
    const bool fours = p.y_aligned && p.tiling.right.rows % 4 == 0 && !p.accumulate;
    if (p.parts > 1) {
      std::int32_t* const sums_of_part = p.sums + std::int64_t{part} * p.tiling.left.rows * p.sums_pitch;
      for_each_four(sums_of_part, p.sums_pitch, [](int, int4 sum) { return sum; });
    } else if (p.y_type == DType::f64) {
      store_ones<double>();
    } else if (!fours) {
      store_ones<float>();
    } else if (p.y_type == DType::f16) {
      store_fours<__half>();
    } else if (p.y_type == DType::bf16) {
      store_fours<__nv_bfloat16>();
    } else {
      store_fours<float>();
    }
  }

 private:
  __device__ int row() const { return tile.x + in_tile.x; }
  __device__ int column() const { return tile.y + in_tile.y; }

  // Stores body(row, sums of four columns), a vector, for all of the slab that lies in (rows, pitch) elements from `to`
  // on, of which columns are counted in fours. Several rows are ready before the first of them is stored.
  template <class Element, class Body>
  __device__ void for_each_four(Element* to, std::int64_t pitch, const Body& body) const {
    constexpr int kRowsOfAll = kRowsAtOnce * Tile::kDepth;
    constexpr int kTurns = kSlab > kRowsOfAll ? kSlab / kRowsOfAll : 1;
    constexpr int kBatch = kTurns > 4 ? 4 : kTurns;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int col = lane % kLanes * 4;
    const int rows = column() + col < p.tiling.right.rows ? min(p.tiling.left.rows - row(), kSlab) : 0;
    int i = lane / kLanes + depth * kRowsAtOnce;
    to += (row() + i) * pitch + column() + col;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn += kBatch) {
      decltype(body(0, int4{})) values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int at = kSlab < kRowsOfAll ? min(i, kSlab - 1) : i + b * kRowsOfAll;
        values[b] = body(at, four(at, col));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b, i += kRowsOfAll, to += kRowsOfAll * pitch) {
        if (i < rows) *reinterpret_cast<decltype(body(0, int4{}))*>(to) = values[b];
      }
    }
  }

  template <class Y>
  __device__ void store_fours() const {
    const int lane_col = in_tile.y + static_cast<int>(threadIdx.x) % 32 % kLanes * 4;
    const float4 scale = *reinterpret_cast<const float4*>(factors.right + lane_col);
    const float4 bias_of_cols = *reinterpret_cast<const float4*>(factors.bias + (p.bias_of_left ? 0 : lane_col));
    for_each_four(static_cast<Y*>(p.y), p.y_pitch, [&](int i, int4 sum) {
      const float row_scale = factors.left[in_tile.x + i];
      float4 bias = bias_of_cols;
      if (p.bias_of_left) bias.x = bias.y = bias.z = bias.w = factors.bias[in_tile.x + i];
      const float4 v = {finished(sum.x, row_scale * scale.x, bias.x), finished(sum.y, row_scale * scale.y, bias.y),
                        finished(sum.z, row_scale * scale.z, bias.z), finished(sum.w, row_scale * scale.w, bias.w)};
      if constexpr (std::is_same_v<Y, float>) {
        return v;
      } else {
        return uint2{pack<Y>(v.x, v.y), pack<Y>(v.z, v.w)};
      }
    });
  }

  // Any type and alignment, y added to or not. Neighbouring lanes have neighbouring elements.
  template <class Real>
  __device__ void store_ones() const {
    const int rows = min(p.tiling.left.rows - row(), kSlab);
    const int cols = min(p.tiling.right.rows - column(), kCols);
#pragma unroll 1
    for (int col = static_cast<int>(threadIdx.x) % 32; col < cols; col += 32) {
#pragma unroll 4
      for (int i = depth; i < rows; i += Tile::kDepth) {
        Real factor, bias;
        const int at_bias = p.bias_of_left ? in_tile.x + i : in_tile.y + col;
        if constexpr (std::is_same_v<Real, float>) {
          factor = factors.left[in_tile.x + i] * factors.right[in_tile.y + col];
          bias = factors.bias[at_bias];
        } else {
          factor = p.template left_scale_of<Real>(row() + i) * p.right_scale.template at<Real>(column() + col);
          bias = p.bias.data ? p.bias.template at<Real>((p.bias_of_left ? tile.x : tile.y) + at_bias) : -Real{};
        }
        Real value = finished(one(i, col), factor, bias);
        const std::int64_t to = (row() + i) * p.y_pitch + column() + col;
        if (p.accumulate) value = __ldcg(static_cast<const Real*>(p.y) + to) + value;
        if constexpr (std::is_same_v<Real, float>) {
          store_float(p.y, to, p.y_type, value);
        } else {
          static_cast<Real*>(p.y)[to] = value;
        }
      }
    }
  }
};

// ---- The kernels.

template <class Tile, bool kLeftOuter, bool kRightOuter>
constexpr int kRingBytes = Tile::kStages* Stage<Tile, kLeftOuter, kRightOuter>::kBytes;

// A tile, from its first row of left and of right on; of its terms those of one part.
template <class Tile, bool kLeftOuter, bool kRightOuter, bool kGathered, class Product>
__device__ void multiply_and_store(const Product& p, int2 tile, int part, std::uint8_t* shared) {
  using Stage = Stage<Tile, kLeftOuter, kRightOuter, 1, 0, kGathered>;
  using Work = Work<Tile, kLeftOuter, kRightOuter, Product>;
  constexpr int kRing = kRingBytes<Tile, kLeftOuter, kRightOuter>;
  auto& factors = *reinterpret_cast<TileFactors<Tile>*>(shared + kRing);
  const int2 in_tile = first_of_warp<Tile>();
  constexpr int kPlaces = Tile::kWarps / Tile::kDepth;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int depth = warp / kPlaces;
  wait_for_previous();
  let_next_start();
  Work work(p, tile, in_tile, depth, factors);
  const int first_term = part * p.part_terms;
  multiply_terms<Tile, Stage>(p.tiling, tile, shared_address(shared), work,
                              {first_term, min(p.tiling.k - first_term, p.part_terms)});

  // Each warp passes its sums through its own slab of shared memory, kSlab rows at a time, to store y along rows. The
  // pitch makes that free of bank conflicts.
  constexpr int kPitch = Tile::kWarpRight + (kRightOuter ? 16 : 8) / (kLeftOuter ? 2 : 1);
  constexpr int kSlab = Work::kLeftBlocks % 2 == 0 && Tile::kWarps * 32 * kPitch * 4 <= kRing ? 32 : 16;
  static_assert(Tile::kWarps * kSlab * kPitch * 4 <= kRing);
  const auto meet = [] {
    if constexpr (Tile::kDepth == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  std::int32_t* const slabs = reinterpret_cast<std::int32_t*>(shared) + warp % kPlaces * kSlab * kPitch;
  std::int32_t* const own = slabs + depth * kPlaces * kSlab * kPitch;
#pragma unroll
  for (int first = 0; first < Work::kLeftBlocks; first += kSlab / 16) {
    if (first > 0) meet();
#pragma unroll
    for (int i = 0; i < kSlab / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Work::kRightBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          own[(i * 16 + Work::row_of(lane, e)) * kPitch + Work::column_of(lane, j, e)] = work.sums[first + i][j][e];
        }
      }
    }
    meet();
    const Slab<Tile, kSlab, kPitch, Product> slab = {p,    slabs, factors, tile, {in_tile.x + first * 16, in_tile.y},
                                                     depth};
    slab.store(part);
  }
}

template <class Tile, bool kLeftOuter, bool kRightOuter>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) w8a8_gemm_kernel(const __grid_constant__ Product p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  multiply_and_store<Tile, kLeftOuter, kRightOuter, false>(p, first_of_tile<Tile>(p.tiling),
                                                           static_cast<int>(blockIdx.y), shared);
}

inline constexpr int kSumThreads = 128;

// Adds up the parts of the sums, for y: four columns a thread.
template <class Y>
__global__ void __launch_bounds__(kSumThreads) sum_parts_kernel(const __grid_constant__ Product p) {
  using Real = RealOf<Y>;
  wait_for_previous();
  let_next_start();
  const int col = (static_cast<int>(blockIdx.x) * kSumThreads + static_cast<int>(threadIdx.x)) * 4;
  const int cols = min(p.tiling.right.rows - col, 4);
  if (cols <= 0) return;
  const auto bias_at = [&](int row) { return p.bias.data ? widen(p.bias.at<Y>(row)) : -Real{}; };
  Real scale[4], bias[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    scale[e] = e < cols ? p.right_scale.at<Real>(col + e) : Real{};
    bias[e] = e < cols && !p.bias_of_left ? bias_at(col + e) : Real{};
  }
  with_accumulate<std::is_same_v<Y, Real>>(p.accumulate, [&](auto accumulate) {
    for (int row = static_cast<int>(blockIdx.y); row < p.tiling.left.rows; row += static_cast<int>(gridDim.y)) {
      int acc[4] = {};
      const std::int32_t* from = p.sums + row * p.sums_pitch + col;
#pragma unroll 4
      for (int part = 0; part < p.parts; ++part, from += p.tiling.left.rows * p.sums_pitch) {
        const int4 sum = __ldcg(reinterpret_cast<const int4*>(from));
        acc[0] += sum.x;
        acc[1] += sum.y;
        acc[2] += sum.z;
        acc[3] += sum.w;
      }
      const Real row_scale = p.left_scale.at<Real>(row);
      const Real bias_of_row = p.bias_of_left ? bias_at(row) : Real{};
      Y out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out[e] = narrow<Y>(finished(acc[e], row_scale * scale[e], p.bias_of_left ? bias_of_row : bias[e]));
      }
      store_four<decltype(accumulate)::value>(static_cast<Y*>(p.y) + row * p.y_pitch + col, out, cols, p.y_aligned);
    }
  });
}

// ---- The host's side.

// Seconds on an SM of an H200. Fitted to one run; see docs/notes/gpu.md.
struct TileTimes {
  double each;   // 4096 terms of a tile, of many at a time
  double end;    // what each of them takes besides
  double alone;  // 4096 terms of a block that has its SM for itself
};

// kOuter: compiled for outer-major operands too.
template <class Tile, bool kOuter>
struct Candidate {
  TileTimes times;
};

// Lines of 128 bytes cost fewer sectors of L2 than those of 64 where a pitch is no multiple of 64.
using Widest = TileShape<128, 256, 128, 3, 2, 4, 1, 1, false>;
using Wide = TileShape<128, 256, 64, 4, 2, 4, 1, 1, false>;
using Large = TileShape<128, 128, 128, 3, 2, 2, 2, 1, false>;
using Plain = TileShape<128, 128, 64, 4, 2, 2, 2, 1, false>;
using Half = TileShape<64, 128, 128, 4, 1, 2, 2, 2, false>;
using Deep = TileShape<64, 64, 128, 5, 1, 2, 2, 2, false>;
using Square = TileShape<64, 64, 128, 4, 2, 2, 2>;
using Low = TileShape<32, 64, 256, 4, 1, 2, 2, 4, false>;
using Lowest = TileShape<16, 64, 256, 4, 1, 2, 2, 4>;

template <class Body>
void for_each_tile(const Body& body) {
  body(Candidate<Widest, false>{{33.6e-6, 3.4e-6, 34.5e-6}});
  body(Candidate<Wide, false>{{34.9e-6, 3.4e-6, 35.7e-6}});
  body(Candidate<Large, false>{{17.0e-6, 1.9e-6, 22.5e-6}});
  body(Candidate<Plain, true>{{17.7e-6, 1.9e-6, 23.4e-6}});
  body(Candidate<Half, false>{{8.8e-6, 1.4e-6, 14.0e-6}});
  body(Candidate<Deep, false>{{5.2e-6, 1.0e-6, 12.0e-6}});
  body(Candidate<Square, true>{{5.7e-6, 0.8e-6, 13.5e-6}});
  body(Candidate<Low, false>{{3.4e-6, 0.9e-6, 8.2e-6}});
  body(Candidate<Lowest, false>{{2.6e-6, 0.7e-6, 5.9e-6}});
}

// Calls body.operator()<Tile, kOuter>() for the tile with this number.
template <class Body>
void with_tile(int number, const Body& body) {
  int i = 0;
  for_each_tile([&]<class Tile, bool kOuter>(const Candidate<Tile, kOuter>&) {
    if (i++ == number) body.template operator()<Tile, kOuter>();
  });
}

constexpr double kLaunchSeconds = 5e-6;
constexpr double kBlockSeconds = 2e-6;  // of a block that has its SM for itself, besides its terms
constexpr double kShiftedEach = 3.5;    // times as long with lines that are not aligned
constexpr double kShiftedAlone = 2.5;
constexpr double kHidden = 0.8;  // of the shorter one of arithmetic and memory

template <class Tile, bool kLeftOuter = false, bool kRightOuter = false>
constexpr unsigned kSharedBytes = kRingBytes<Tile, kLeftOuter, kRightOuter> + sizeof(TileFactors<Tile>);

template <class Tile>
bool fits(const CudaDevice& gpu) {
  return kSharedBytes<Tile> <= gpu.shared_memory;
}

// Of this many blocks, each of this many terms of a tile, alone. Blocks that share an SM hide each other's waits.
template <class Tile>
double block_seconds(TileTimes times, double blocks, std::int64_t terms, bool shifted, const CudaDevice& gpu) {
  if (shifted) {
    times.each *= kShiftedEach;
    times.alone *= kShiftedAlone;
  }
  const std::int64_t fit = static_cast<std::int64_t>(gpu.shared_memory + 1024) / (kSharedBytes<Tile> + 1024);
  const auto at_once = static_cast<double>(std::clamp<std::int64_t>(fit, 1, Tile::kBlocks));
  const double of_sm = std::ceil(blocks / gpu.sms);
  const double depth = static_cast<double>(terms) / 4096;
  return std::max(of_sm * (times.each * depth + times.end),
                  std::ceil(of_sm / at_once) * (times.alone * depth + kBlockSeconds));
}

// Both at a time.
inline double launch_seconds(double tiles, double memory) {
  return kLaunchSeconds + std::max(tiles, memory) + (1 - kHidden) * std::min(tiles, memory);
}

}  // namespace octile::cuda::w8a8_sm80
