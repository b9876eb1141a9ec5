// y[i, j] = fma(Real(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8, on every
// GPU from Ampere on, for every stride and alignment.
//
// A block multiplies a tile (kLeft rows of the left operand, kRight rows of the right one), kStep terms at a time,
// through a ring of kStages pairs of pieces in shared memory (device/pieces.cuh), which have the orientations that the
// operands have in global memory. At 4096 cubed on an H200 an outer-major operand costs 6 % of the speed, two cost 14
// %, and lines that cp.async cannot copy as they are cost half of it.
//
// y is written along its contiguous dimension: where that is i, the operands change places, left is b and right is a.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/pieces.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "kernels.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "w8a8_gemm_sm80";
constexpr double kBytesPerSecond = 25e9;                  // of memory, and multiprocessor
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;  // counted in 32 bits
constexpr int kBand = 8;  // tiles of left that are visited together, so that right's tiles are found in L2

template <int kLeft_, int kRight_, int kStep_, int kStages_, int kLeftWarps_, int kRightWarps_, int kBlocks_>
struct TileShape {
  static constexpr int kLeft = kLeft_;    // rows of left
  static constexpr int kRight = kRight_;  // rows of right
  static constexpr int kStep = kStep_;    // terms
  static constexpr int kStages = kStages_;
  static constexpr int kRightWarps = kRightWarps_;
  static constexpr int kThreads = 32 * kLeftWarps_ * kRightWarps_;
  static constexpr int kBlocks = kBlocks_;  // on a multiprocessor, which bounds the registers
  static constexpr int kWarpLeft = kLeft / kLeftWarps_;
  static constexpr int kWarpRight = kRight / kRightWarps_;
};

// At 4096 cubed on an H200, everything aligned and along k, 128 x 128 by 4 warps, two blocks at a time, reaches 805
// T/s, with three stages 721; 128 x 256 by 8 warps 757; 256 x 128 no more than that.
using Large = TileShape<128, 128, 64, 4, 2, 2, 2>;
using Small = TileShape<64, 64, 128, 4, 2, 2, 3>;
static_assert(Large::kLeft == Large::kRight && Small::kLeft == Small::kRight, "seconds() need not know which is m");

// Elements of y's bias or of a scale.
struct Factors {
  const void* data;  // null: `value`
  std::int64_t stride;
  double value;

  template <class Real>
  __device__ Real at(int i) const {
    return data ? __ldcg(static_cast<const Real*>(data) + i * stride) : static_cast<Real>(value);
  }
};

struct Product {
  Operand left, right;  // (rows, k), (cols, k)
  int k, steps;
  int left_tiles, right_tiles;
  Factors left_scale, right_scale;
  Factors bias;  // data is null: none
  bool bias_of_left;
  void* y;  // (rows, cols), contiguous along a row
  std::int64_t y_pitch;
  DType y_type;
  bool y_aligned;  // to 4 elements
};

// ---- From registers to y.

__device__ inline float to_real(int sum, float) { return __int2float_rn(sum); }
__device__ inline double to_real(int sum, double) { return __int2double_rn(sum); }

// Rows first_row .. of kSlab, columns first_col .. of kWarpRight: sums (kSlab, kWarpRight) lie in shared memory, kPitch
// apart.
template <class Y, int kSlab, int kCols, int kPitch>
__device__ void store_slab(const Product& p, const std::int32_t* sums, int first_row, int first_col) {
  using Real = RealOf<Y>;
  constexpr int kLanes = kCols / 4;  // of a row
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int col_in_slab = lane % kLanes * 4;
  const int col = first_col + col_in_slab;
  const int cols = min(p.right.rows - col, 4);
  const bool bias = p.bias.data != nullptr;
  Real scale[4], bias_of_col[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    scale[e] = e < cols ? p.right_scale.at<Real>(col + e) : Real{};
    bias_of_col[e] = e < cols && bias && !p.bias_of_left ? widen(p.bias.at<Y>(col + e)) : Real{};
  }
#pragma unroll 2
  for (int i = lane / kLanes; i < kSlab; i += 32 / kLanes) {
    const int row = first_row + i;
    if (row >= p.left.rows || cols <= 0) break;
    const int4 sum = *reinterpret_cast<const int4*>(sums + i * kPitch + col_in_slab);
    const int acc[4] = {sum.x, sum.y, sum.z, sum.w};
    const Real row_scale = p.left_scale.at<Real>(row);
    const Real bias_of_row = bias && p.bias_of_left ? widen(p.bias.at<Y>(row)) : Real{};
    alignas(4 * sizeof(Y) > 16 ? 16 : 4 * sizeof(Y)) Y out[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Real factor = row_scale * scale[e];
      const Real value = to_real(acc[e], Real{});
      out[e] = narrow<Y>(bias ? fma(value, factor, p.bias_of_left ? bias_of_row : bias_of_col[e]) : value * factor);
    }
    Y* const to = static_cast<Y*>(p.y) + row * p.y_pitch + col;
    if (p.y_aligned && cols == 4) {
      if constexpr (sizeof(Y) == 8) {
        reinterpret_cast<double2*>(to)[0] = {out[0], out[1]};
        reinterpret_cast<double2*>(to)[1] = {out[2], out[3]};
      } else {
        using Four = std::conditional_t<sizeof(Y) == 2, uint2, uint4>;
        *reinterpret_cast<Four*>(to) = *reinterpret_cast<const Four*>(out);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < cols) to[e] = out[e];
      }
    }
  }
}

// ---- The kernel.

// How a step of the main loop fills the ring: with whole pieces of operands that are not shifted, with any, or, at the
// end, no more. In one loop for all, what the others need would cost the first a fifth of its speed.
enum class Filling { whole, any, none };

template <class Tile, bool kLeftOuter, bool kRightOuter>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) w8a8_gemm_kernel(const __grid_constant__ Product p) {
  constexpr int kLeftBlocks = Tile::kWarpLeft / 16;
  constexpr int kRightBlocks = Tile::kWarpRight / 16;
  constexpr int kSlices = Tile::kStep / kSlice;
  using LeftFiller = Filler<Tile, Tile::kLeft, kLeftOuter>;
  using RightFiller = Filler<Tile, Tile::kRight, kRightOuter>;
  constexpr int kRightPiece = LeftFiller::kBytes;  // its offset in a stage
  constexpr int kStageBytes = LeftFiller::kBytes + RightFiller::kBytes;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const std::uint32_t ring = shared_address(shared);

  // Bands of kBand tiles of left; along a band, column of tiles by column.
  const int band = static_cast<int>(blockIdx.x) / (kBand * p.right_tiles);
  const int in_band = static_cast<int>(blockIdx.x) % (kBand * p.right_tiles);
  const int band_tiles = min(kBand, p.left_tiles - band * kBand);
  const int first_row = (band * kBand + in_band % band_tiles) * Tile::kLeft;
  const int first_col = in_band / band_tiles * Tile::kRight;

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp / Tile::kRightWarps * Tile::kWarpLeft;
  const int warp_col = warp % Tile::kRightWarps * Tile::kWarpRight;

  LeftFiller left_filler(p.left, first_row);
  RightFiller right_filler(p.right, first_col);
  const Reader<Tile, Tile::kLeft, kLeftOuter, false> left_reader(warp_row, lane);
  const Reader<Tile, Tile::kRight, kRightOuter, true> right_reader(warp_col, lane);
  std::int32_t sums[kLeftBlocks][2 * kRightBlocks][4] = {};
  Fragment left[2][kLeftBlocks], right[2][kRightBlocks];

  const bool shifted = p.left.shifted || p.right.shifted;
  const bool by_units = LeftFiller::by_units(p.left, first_row) && RightFiller::by_units(p.right, first_col);
  const int unit_steps = by_units ? (shifted ? max(p.k - kChunk, 0) : p.k) / Tile::kStep : 0;
  const bool whole = first_row + Tile::kLeft <= p.left.rows && first_col + Tile::kRight <= p.right.rows && !shifted;
  const auto fill = [&]<Filling kFilling>(std::integral_constant<Filling, kFilling>, int step, std::uint32_t stage) {
    if (kFilling == Filling::whole || (kFilling == Filling::any && step < unit_steps)) {
      left_filler.template copy<kFilling == Filling::whole>(p.left, stage);
      right_filler.template copy<kFilling == Filling::whole>(p.right, stage + kRightPiece);
    } else if (kFilling == Filling::any && step < p.steps) {
      left_filler.copy_ragged(p.left, p.k, step, stage);
      right_filler.copy_ragged(p.right, p.k, step, stage + kRightPiece);
    }
    commit_copies();
  };
  // The oldest stage under way has arrived as far as this warp copies it; the barrier then makes that true of all
  // warps, and that nobody reads the stage before it any more.
  const auto arrive = [&]<Filling kFilling>(std::integral_constant<Filling, kFilling>, std::uint32_t stage) {
    wait_for_copies<Tile::kStages - 2>();
    if (kFilling == Filling::any && p.left.shifted) left_filler.straighten_lines(stage);
    if (kFilling == Filling::any && p.right.shifted) right_filler.straighten_lines(stage + kRightPiece);
    __syncthreads();
  };
  const auto read = [&](int to, std::uint32_t stage, int slice) {
#pragma unroll
    for (int i = 0; i < kLeftBlocks; ++i) left[to][i] = left_reader.load(stage, i, slice);
#pragma unroll
    for (int j = 0; j < kRightBlocks; ++j) right[to][j] = right_reader.load(stage + kRightPiece, j, slice);
  };
  const auto multiply = [&](int from) {
#pragma unroll
    for (int i = 0; i < kLeftBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kRightBlocks; ++j) {
        const Fragment& b = right[from][j / 2];
        multiply_add_s8(sums[i][j], left[from][i].part, b.part[j % 2 * 2], b.part[j % 2 * 2 + 1]);
      }
    }
  };
  wait_for_previous();
  let_next_start();
  constexpr std::integral_constant<Filling, Filling::whole> kWhole;
  constexpr std::integral_constant<Filling, Filling::any> kAny;
  constexpr std::integral_constant<Filling, Filling::none> kNone;
#pragma unroll 1
  for (int step = 0; step < Tile::kStages - 1; ++step) fill(kAny, step, ring + step * kStageBytes);
  arrive(kAny, ring);
  read(0, ring, 0);

  // Fragments are read one slice ahead of their multiplication, across the steps too.
  const auto following = [&](std::uint32_t stage) {
    return stage == ring + (Tile::kStages - 1) * kStageBytes ? ring : stage + kStageBytes;
  };
  std::uint32_t reading = ring;
  std::uint32_t filling = ring + (Tile::kStages - 1) * kStageBytes;
  const auto multiply_step = [&](auto filling_kind, int step) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice == kSlices - 1) {
        reading = following(reading);
        arrive(filling_kind, reading);
      }
      read((slice + 1) % 2, reading, (slice + 1) % kSlices);
      if (slice == 0) {
        fill(filling_kind, step + Tile::kStages - 1, filling);
        filling = following(filling);
      }
      multiply(slice % 2);
    }
  };
  int step = 0;
#pragma unroll 1
  for (; whole && step + Tile::kStages - 1 < unit_steps; ++step) multiply_step(kWhole, step);
#pragma unroll 1
  for (; step < (shifted ? p.steps : p.steps - Tile::kStages + 1); ++step) multiply_step(kAny, step);
#pragma unroll 1
  for (; step < p.steps; ++step) multiply_step(kNone, step);

  // Each warp passes its sums through its own slab of shared memory, kSlab rows at a time, to store y along rows. The
  // pitch makes that free of bank conflicts.
  constexpr int kPitch = Tile::kWarpRight + (kRightOuter ? 16 : 8) / (kLeftOuter ? 2 : 1);
  constexpr int kSlab = Tile::kThreads / 32 * 32 * kPitch * 4 <= Tile::kStages * kStageBytes ? 32 : 16;
  wait_for_copies<0>();
  __syncthreads();
  std::int32_t* const slab = reinterpret_cast<std::int32_t*>(shared) + warp * kSlab * kPitch;
#pragma unroll
  for (int first = 0; first < kLeftBlocks; first += kSlab / 16) {
#pragma unroll
    for (int i = 0; i < kSlab / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kRightBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int half = e / 2;
          const int col = lane % 4 * 2 + e % 2;
          slab[(i * 16 + (kLeftOuter ? lane / 4 * 2 + half : lane / 4 + half * 8)) * kPitch + j / 2 * 16 +
               (kRightOuter ? col * 2 + j % 2 : col + j % 2 * 8)] = sums[first + i][j][e];
        }
      }
    }
    __syncwarp();
    const int row = first_row + warp_row + first * 16;
    const int col = first_col + warp_col;
    switch (p.y_type) {
      case DType::f16:
        store_slab<__half, kSlab, Tile::kWarpRight, kPitch>(p, slab, row, col);
        break;
      case DType::bf16:
        store_slab<__nv_bfloat16, kSlab, Tile::kWarpRight, kPitch>(p, slab, row, col);
        break;
      case DType::f32:
        store_slab<float, kSlab, Tile::kWarpRight, kPitch>(p, slab, row, col);
        break;
      default:
        store_slab<double, kSlab, Tile::kWarpRight, kPitch>(p, slab, row, col);
    }
    __syncwarp();
  }
}

// ---- The launch.

struct KernelChoice {
  void (*function)(Product);
  unsigned shared_bytes;
};

template <class Tile, bool kLeftOuter, bool kRightOuter>
constexpr KernelChoice kKernel = {
    w8a8_gemm_kernel<Tile, kLeftOuter, kRightOuter>,
    Tile::kStages*(Filler<Tile, Tile::kLeft, kLeftOuter>::kBytes + Filler<Tile, Tile::kRight, kRightOuter>::kBytes)};

template <class Tile>
KernelChoice kernel_for(const GemmProblem& problem) {
  const bool turned = problem.y_major == Major::outer;
  const bool left_outer = (turned ? problem.b_major : problem.a_major) == Major::outer;
  const bool right_outer = (turned ? problem.a_major : problem.b_major) == Major::outer;
  if (left_outer) return right_outer ? kKernel<Tile, true, true> : kKernel<Tile, true, false>;
  return right_outer ? kKernel<Tile, false, true> : kKernel<Tile, false, false>;
}

bool aligned(const void* p, std::int64_t pitch, std::size_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) | static_cast<std::uintptr_t>(pitch)) % bytes == 0;
}

Operand operand(const ConstTensor& t, bool outer) {
  Operand o;
  o.data = static_cast<const std::int8_t*>(t.data);
  o.pitch = t.strides[outer ? 1 : 0];
  o.rows = static_cast<int>(t.rows());
  o.end = o.data + ((outer ? t.cols() : t.rows()) - 1) * o.pitch + (outer ? t.rows() : t.cols());
  o.shifted = !aligned(o.data, o.pitch, kChunk);
  return o;
}

Factors scale_of(const ConstTensor& t, DType type) {
  if (type == DType::f64) {
    const RowScale<double> s = row_scale<double>(t);
    return {s.data, s.stride, s.value};
  }
  const RowScale<float> s = row_scale<float>(t);
  return {s.data, s.stride, s.value};
}

template <class Tile>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const bool turned = problem.y_major == Major::outer;
  const bool a_outer = problem.a_major == Major::outer;
  const bool b_outer = problem.b_major == Major::outer;
  Product p = {};
  p.left = operand(turned ? o.b : o.a, turned ? b_outer : a_outer);
  p.right = operand(turned ? o.a : o.b, turned ? a_outer : b_outer);
  p.k = static_cast<int>(o.a.cols());
  p.steps = (p.k + Tile::kStep - 1) / Tile::kStep;
  p.left_tiles = (p.left.rows + Tile::kLeft - 1) / Tile::kLeft;
  p.right_tiles = (p.right.rows + Tile::kRight - 1) / Tile::kRight;
  p.left_scale = scale_of(turned ? o.b_scale : o.a_scale, problem.scale);
  p.right_scale = scale_of(turned ? o.a_scale : o.b_scale, problem.scale);
  if (problem.bias) p.bias = {o.bias.data, o.bias.strides[0], 0};
  p.bias_of_left = turned;
  p.y = o.y.data;
  p.y_pitch = o.y.strides[turned ? 1 : 0];
  p.y_type = problem.y;
  const std::size_t element = static_cast<std::size_t>(bits(problem.y)) / 8;
  p.y_aligned = aligned(p.y, p.y_pitch * static_cast<std::int64_t>(element), std::min<std::size_t>(4 * element, 16));
  const unsigned blocks = static_cast<unsigned>(p.left_tiles) * static_cast<unsigned>(p.right_tiles);
  const KernelChoice kernel = kernel_for<Tile>(problem);
  enqueue(kName, kernel.function, LaunchShape{blocks, Tile::kThreads, kernel.shared_bytes}, launch.stream, p);
}

// What a tile takes at K = 4096 on one multiprocessor of an H200: seconds for each of many, for one alone, and for a
// grid besides. The smaller tile serves products of few large ones.
struct TileCost {
  double each, alone, grid;
};
template <class Tile>
constexpr TileCost kCost =
    Tile::kLeft == Large::kLeft ? TileCost{21.5e-6, 36e-6, 9e-6} : TileCost{7.4e-6, 18.5e-6, 7e-6};

template <class Tile>
double seconds(double m, double n, const GemmProblem& problem) {
  const double tiles = std::ceil(m / Tile::kLeft) * std::ceil(n / Tile::kRight);
  const double rounds = std::ceil(tiles / properties(problem.device).multiprocessors);
  const double depth = static_cast<double>(problem.k) / 4096;
  return std::max(kCost<Tile>.alone * depth, kCost<Tile>.each * depth * rounds + kCost<Tile>.grid);
}

}  // namespace

std::string w8a8_gemm_sm80_supports(const GemmProblem& problem) {
  if (problem.b_packed) return "takes the weight as it is, not packed";
  if (std::max(problem.m, problem.n) > kMaxRows) return "takes at most 2^30 rows of an operand";
  return reason_against(problem.device, 80);
}

Cost w8a8_gemm_sm80_cost(const GemmProblem& problem) {
  const auto m = static_cast<double>(problem.m);
  const auto n = static_cast<double>(problem.n);
  const auto k = static_cast<double>(problem.k);
  const double bytes = (m + n) * k + m * n * bits(problem.y) / 8;
  const double arithmetic = std::min(seconds<Large>(m, n, problem), seconds<Small>(m, n, problem));
  const double memory = bytes / (kBytesPerSecond * properties(problem.device).multiprocessors);
  return {2 * m * n * k, bytes, std::max(arithmetic, memory)};
}

void w8a8_gemm_sm80_prepare(const GemmProblem& problem) {
  for (const KernelChoice& kernel : {kernel_for<Large>(problem), kernel_for<Small>(problem)}) {
    prepare(kName, kernel.function, kernel.shared_bytes);
  }
}

void w8a8_gemm_sm80(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  const auto m = static_cast<double>(o.y.rows());
  const auto n = static_cast<double>(o.y.cols());
  const bool large = seconds<Large>(m, n, problem) < seconds<Small>(m, n, problem);
  (large ? launch_tile<Large> : launch_tile<Small>)(problem, o, launch);
}

}  // namespace octile::cuda
