// w8a16_gemm_sm80 of each expert: dX, whose rows are an expert's, or dW, whose terms are; on every GPU from Ampere on,
// for every stride and alignment.
//
//   y[i, j] = sum_c a[i, c] * (b[e, j, c] * b_scale[e, c])
//
// A block finds its tile among the experts' (grouped_gradient_sm80.cuh), and then is a block of the dense kernel.
#include <cstdint>
#include <string>

#include "cuda/device/grid.cuh"
#include "cuda/gemm/grouped_gradient_sm80.cuh"
#include "cuda/gemm/w8a16_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a16_sm80;

constexpr char kName[] = "w8a16_grouped_gradient_sm80";

using Tile = Large;
static_assert(Tile::kLeft == kWideTile && Tile::kRight == kWideTile, "one grid for all types");

struct Arguments {
  Product product;  // of expert 0
  ExpertGrid grid;
};

// By terms, those of both operands lie one line after the other.
template <class T, bool kByTerms>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    w8a16_grouped_gradient_kernel(const __grid_constant__ Arguments arguments) {
  using Work = Work<Tile, T, true, kByTerms>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  wait_for_previous();
  let_next_start();
  const ExpertGrid& grid = arguments.grid;
  const ExpertPart t = part_of_block(grid, Tile::kRight, Tile::kLeft);
  if (t.expert < 0) return;
  Product p = arguments.product;
  if constexpr (kByTerms) {
    p.tiling.left.data += t.first * p.tiling.left.pitch;
    p.tiling.right.data += t.first * p.tiling.right.pitch;
    p.tiling.k = t.end - t.first;
    p.c_scale = moved(p.c_scale, t.first * p.c_scale.stride * static_cast<std::int64_t>(sizeof(float)));
    p.output.y = static_cast<std::uint8_t*>(p.output.y) + t.expert * grid.y;
  } else {
    p.tiling.right.rows = t.end;
    p.tiling.left.data += t.expert * grid.experts.b;
    p.c_scale = moved(p.c_scale, t.expert * grid.experts.b_scale);
  }
  const int2 tile = {t.at.y, t.at.x};
  const int2 part = first_of_warp<Tile>();
  Work work(p, part, static_cast<int>(threadIdx.x) % 32);
  work.scales.read(0);
  multiply_tile<Tile, typename Work::Stage>(p.tiling, tile, shared_address(shared), work);
  store_any<Tile, T>(p, work, {tile.x + part.x, tile.y + part.y}, shared);
}

template <class T, bool kByTerms>
constexpr TileKernel<Arguments> kKernel = {w8a16_grouped_gradient_kernel<T, kByTerms>,
                                           Tile::kStages* HalfStage<Tile, T, true, kByTerms>::kBytes};

TileKernel<Arguments> kernel_for(const GemmProblem& p) {
  if (p.a == DType::f16) return p.by_terms ? kKernel<__half, true> : kKernel<__half, false>;
  return p.by_terms ? kKernel<__nv_bfloat16, true> : kKernel<__nv_bfloat16, false>;
}

// ---- f32 and f64.

template <class Real>
struct WideArguments {
  WideProduct<Real> product;  // of expert 0
  ExpertGrid grid;
};

template <class Real>
__global__ void __launch_bounds__(kWideThreads, sizeof(Real) == 4 ? 2 : 1)
    wide_grouped_gradient_kernel(const __grid_constant__ WideArguments<Real> arguments) {
  wait_for_previous();
  const ExpertGrid& grid = arguments.grid;
  const ExpertPart t = part_of_block(grid, kWideTile, kWideTile);
  if (t.expert < 0) return;
  WideProduct<Real> p = arguments.product;
  if (grid.by_terms) {
    p.a.data += t.first * p.a.col_stride;
    p.b.data += t.first * p.b.col_stride;
    p.k = t.end - t.first;
    p.c_scale = moved(p.c_scale, t.first * p.c_scale.stride * static_cast<std::int64_t>(sizeof(Real)));
    p.y.data += t.expert * (grid.y / static_cast<std::int64_t>(sizeof(Real)));
  } else {
    p.m = t.end;
    p.b.data += t.expert * grid.experts.b;
    p.c_scale = moved(p.c_scale, t.expert * grid.experts.b_scale);
  }
  wide_product<Real, kWideTile>(p, t.at.x, t.at.y);
}

template <class Real>
void launch_wide(const GemmProblem& problem, const GemmOperands& o, const ExpertGrid& grid, unsigned blocks,
                 Stream stream) {
  WideArguments<Real> p = {};
  p.product = wide_product_of<Real>(problem, o);
  p.product.n = static_cast<int>(problem.n);
  p.grid = grid;
  enqueue(kName, wide_grouped_gradient_kernel<Real>, LaunchShape{blocks, kWideThreads}, stream, p);
}

std::string supports(const GemmProblem& p) { return reason_against_gradient(p, Tile::kRight, Tile::kLeft); }

Cost cost(const GemmProblem& p) {
  const bool half = p.a == DType::f16 || p.a == DType::bf16;
  const TileCost wide = {600e-6, 600e-6, 7e-6};
  return gradient_cost<Tile>(p, half ? kLargeCost : wide);
}

void load(const GemmProblem& p) {
  if (p.a == DType::f32) return prepare(kName, wide_grouped_gradient_kernel<float>);
  if (p.a == DType::f64) return prepare(kName, wide_grouped_gradient_kernel<double>);
  const TileKernel<Arguments> kernel = kernel_for(p);
  prepare(kName, kernel.function, kernel.shared_bytes);
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const ExpertGrid grid = expert_grid(problem, o, Tile::kRight, Tile::kLeft);
  const unsigned blocks = blocks_of(problem, o, grid, Tile::kRight);
  if (blocks == 0) return;
  if (problem.a == DType::f32) return launch_wide<float>(problem, o, grid, blocks, launch.stream);
  if (problem.a == DType::f64) return launch_wide<double>(problem, o, grid, blocks, launch.stream);
  Arguments p = {};
  p.product.tiling = tiling_of<Tile>(operand_of(o.b, true), operand_of(o.a, problem.by_terms), problem.k);
  p.product.tiling.left.end += problem.by_terms ? 0 : (problem.experts - 1) * o.experts.b_stride;
  p.product.c_scale = factors_of(o.b_scale, problem.scale);
  p.product.output = output_of(problem, o.y, true);
  p.grid = grid;
  const TileKernel<Arguments> kernel = kernel_for(problem);
  enqueue(kName, kernel.function, LaunchShape{blocks, Tile::kThreads, kernel.shared_bytes}, launch.stream, p);
}

}  // namespace

extern constinit const GemmKernel w8a16_grouped_gradient_sm80 = {
    .name = kName,
    .task = {Operation::grouped_gradient, kW8A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .bound = Bound::rounded_scale,
};

}  // namespace octile::cuda
