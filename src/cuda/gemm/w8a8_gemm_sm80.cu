// y[i, j] = fma(Real(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8, on every
// GPU from Ampere on, for every stride and alignment.
//
// A block multiplies a tile (kLeft rows of the left operand, kRight rows of the right one), kStep terms at a time,
// through a ring of kStages pairs of operand tiles in shared memory (device/product_tiles.cuh), in the orientations of
// the operands in global memory. At 4096 cubed on an H200 an outer-major operand costs 6 % of the speed, two cost 14 %,
// and lines that cp.async cannot copy as they are cost half of it.
//
// y is written along its contiguous dimension. Where that is i, the operands are swapped: left is b and right is a.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/byte_work.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/operand_tiles.cuh"
#include "cuda/device/product_tiles.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "w8a8_gemm_sm80";
constexpr double kBytesPerSecond = 25e9;  // of memory, and SM

// At 4096 cubed on an H200, everything aligned and along k, 128 x 128 by 4 warps, two blocks at a time, reaches 805
// T/s, with three stages 721; 128 x 256 by 8 warps 757; 256 x 128 no more than that.
using Large = TileShape<128, 128, 64, 4, 2, 2, 2>;
using Small = TileShape<64, 64, 128, 4, 2, 2, 3>;
static_assert(Large::kLeft == Large::kRight && Small::kLeft == Small::kRight, "seconds() need not know which is m");

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
  const int cols = min(p.tiling.right.rows - col, 4);
  const bool bias = p.bias.data != nullptr;
  Real scale[4], bias_of_col[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    scale[e] = e < cols ? p.right_scale.at<Real>(col + e) : Real{};
    bias_of_col[e] = e < cols && bias && !p.bias_of_left ? widen(p.bias.at<Y>(col + e)) : Real{};
  }
  with_accumulate<std::is_same_v<Y, Real>>(p.accumulate, [&](auto accumulate) {
#pragma unroll 2
    for (int i = lane / kLanes; i < kSlab; i += 32 / kLanes) {
      const int row = first_row + i;
      if (row >= p.tiling.left.rows || cols <= 0) break;
      const int4 sum = *reinterpret_cast<const int4*>(sums + i * kPitch + col_in_slab);
      const int acc[4] = {sum.x, sum.y, sum.z, sum.w};
      const Real row_scale = p.left_scale.at<Real>(row);
      const Real bias_of_row = bias && p.bias_of_left ? widen(p.bias.at<Y>(row)) : Real{};
      Y out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Real factor = row_scale * scale[e];
        const Real value = to_real(acc[e], Real{});
        out[e] = narrow<Y>(bias ? fma(value, factor, p.bias_of_left ? bias_of_row : bias_of_col[e]) : value * factor);
      }
      store_four<decltype(accumulate)::value>(static_cast<Y*>(p.y) + row * p.y_pitch + col, out, cols, p.y_aligned);
    }
  });
}

// ---- The kernel.

template <class Tile, bool kLeftOuter, bool kRightOuter>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) w8a8_gemm_kernel(const __grid_constant__ Product p) {
  using Stage = Stage<Tile, kLeftOuter, kRightOuter>;
  using Work = ByteWork<Tile, kLeftOuter, kRightOuter>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int2 tile = first_of_tile<Tile>(p.tiling);
  const int2 part = first_of_warp<Tile>();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Work work(part, lane);
  wait_for_previous();
  let_next_start();
  multiply_tile<Tile, Stage>(p.tiling, tile, shared_address(shared), work);

  // Each warp passes its sums through its own slab of shared memory, kSlab rows at a time, to store y along rows. The
  // pitch makes that free of bank conflicts.
  constexpr int kPitch = Tile::kWarpRight + (kRightOuter ? 16 : 8) / (kLeftOuter ? 2 : 1);
  constexpr int kSlab = Tile::kThreads / 32 * 32 * kPitch * 4 <= Tile::kStages * Stage::kBytes ? 32 : 16;
  std::int32_t* const slab = reinterpret_cast<std::int32_t*>(shared) + warp * kSlab * kPitch;
#pragma unroll
  for (int first = 0; first < Work::kLeftBlocks; first += kSlab / 16) {
#pragma unroll
    for (int i = 0; i < kSlab / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Work::kRightBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          slab[(i * 16 + Work::row_of(lane, e)) * kPitch + Work::column_of(lane, j, e)] = work.sums[first + i][j][e];
        }
      }
    }
    __syncwarp();
    const int row = tile.x + part.x + first * 16;
    const int col = tile.y + part.y;
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

template <class Tile, bool kLeftOuter, bool kRightOuter>
constexpr TileKernel<Product> kKernel = {w8a8_gemm_kernel<Tile, kLeftOuter, kRightOuter>,
                                         Tile::kStages* Stage<Tile, kLeftOuter, kRightOuter>::kBytes};

template <class Tile>
TileKernel<Product> kernel_for(const GemmProblem& problem) {
  const bool swapped = problem.y_major == Major::outer;
  const bool left_outer = (swapped ? problem.b_major : problem.a_major) == Major::outer;
  const bool right_outer = (swapped ? problem.a_major : problem.b_major) == Major::outer;
  if (left_outer) return right_outer ? kKernel<Tile, true, true> : kKernel<Tile, true, false>;
  return right_outer ? kKernel<Tile, false, true> : kKernel<Tile, false, false>;
}

template <class Tile>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const bool swapped = problem.y_major == Major::outer;
  Product p = {};
  const Operand a = operand_of(o.a, problem.a_major == Major::outer);
  const Operand b = operand_of(o.b, problem.b_major == Major::outer);
  p.tiling = tiling_of<Tile>(swapped ? b : a, swapped ? a : b, o.a.cols());
  p.left_scale = factors_of(swapped ? o.b_scale : o.a_scale, problem.scale);
  p.right_scale = factors_of(swapped ? o.a_scale : o.b_scale, problem.scale);
  if (problem.bias) p.bias = {o.bias.data, o.bias.strides[0], 0};
  p.bias_of_left = swapped;
  p.y = o.y.data;
  p.y_pitch = o.y.strides[swapped ? 1 : 0];
  p.y_type = problem.y;
  p.accumulate = problem.accumulate;
  const std::int64_t element = bits(problem.y) / 8;
  p.y_aligned = aligned_rows(p.y, p.y_pitch * element, std::min<std::int64_t>(4 * element, 16));
  const unsigned blocks = static_cast<unsigned>(p.tiling.left_tiles) * static_cast<unsigned>(p.tiling.right_tiles);
  const TileKernel<Product> kernel = kernel_for<Tile>(problem);
  enqueue(kName, kernel.function, LaunchShape{blocks, Tile::kThreads, kernel.shared_bytes}, launch.stream, p);
}

// The smaller tile serves products of few large ones.
template <class Tile>
constexpr TileCost kCost =
    Tile::kLeft == Large::kLeft ? TileCost{21.5e-6, 36e-6, 9e-6} : TileCost{7.4e-6, 18.5e-6, 7e-6};

template <class Tile>
double seconds(double m, double n, const GemmProblem& problem) {
  return seconds_of<Tile>(kCost<Tile>, m, n, problem);
}

std::string supports(const GemmProblem& problem) {
  if (problem.grouped()) return "has no groups";
  return reason_against_product(problem);
}

Cost cost(const GemmProblem& problem) {
  const auto m = static_cast<double>(problem.m);
  const auto n = static_cast<double>(problem.n);
  const auto k = static_cast<double>(problem.k);
  const double bytes = (m + n) * k + m * n * bits(problem.y) / 8;
  const double arithmetic = std::min(seconds<Large>(m, n, problem), seconds<Small>(m, n, problem));
  const double memory = bytes / (kBytesPerSecond * properties(problem.device).sms);
  return {2 * m * n * k, bytes, std::max(arithmetic, memory)};
}

void load(const GemmProblem& problem) {
  for (const TileKernel<Product>& kernel : {kernel_for<Large>(problem), kernel_for<Small>(problem)}) {
    prepare(kName, kernel.function, kernel.shared_bytes);
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  const auto m = static_cast<double>(o.y.rows());
  const auto n = static_cast<double>(o.y.cols());
  const bool large = seconds<Large>(m, n, problem) < seconds<Small>(m, n, problem);
  (large ? launch_tile<Large> : launch_tile<Small>)(problem, o, launch);
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_sm80 = {
    .name = "w8a8_gemm_sm80",
    .task = {Operation::gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
