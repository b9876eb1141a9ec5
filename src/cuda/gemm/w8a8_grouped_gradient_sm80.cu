// w8a8_blocked_gemm_sm80 of each expert: dX, whose rows are an expert's, or dW, whose terms are; on every GPU from
// Ampere on, for every stride and alignment.
//
//   t = fma(f32(sum_{c in g} a[i, c] * b[e, j, c]), a_scale[i, g], t) over the blocks g of T terms, from t = 0; y = t
//
// A block finds its tile among the experts' (grouped_gradient_sm80.cuh), and then is a block of the dense kernel.
#include <cstdint>
#include <string>

#include "cuda/device/grid.cuh"
#include "cuda/gemm/grouped_gradient_sm80.cuh"
#include "cuda/gemm/w8a8_blocked_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8_blocked_sm80;

constexpr char kName[] = "w8a8_grouped_gradient_sm80";

using Tile = Large;
using Rows = Stage<Tile, false, true>;  // of a contiguous along terms, of b across them

struct Arguments {
  Product product;  // of expert 0
  ExpertGrid grid;
};

template <bool kShort>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    w8a8_grouped_gradient_kernel(const __grid_constant__ Arguments arguments) {
  using Work = BlockedWork<Tile, true, kShort>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  wait_for_previous();
  let_next_start();
  const ExpertGrid& grid = arguments.grid;
  const ExpertPart t = part_of_block(grid, Tile::kLeft, Tile::kRight);
  if (t.expert < 0) return;
  Product p = arguments.product;
  if (grid.by_terms) {
    const int before = tiles_before(grid.experts, t.expert, p.block);  // blocks
    p.tiling.left.data += std::int64_t{before} * p.block;
    p.tiling.right.data += t.first * p.tiling.right.pitch;
    p.tiling.k = t.end - t.first;
    p.scales.data += before * p.scales.block_stride;
    p.output.y = static_cast<std::uint8_t*>(p.output.y) + t.expert * grid.y;
  } else {
    p.tiling.left.rows = t.end;
    p.tiling.right.data += t.expert * grid.experts.b;
  }
  const int2 part = first_of_warp<Tile>();
  const int2 first = {t.at.x + part.x, t.at.y + part.y};
  Work work(p, first.x, part, static_cast<int>(threadIdx.x) % 32);
  multiply_tile<Tile, typename Work::Stage>(p.tiling, t.at, shared_address(shared), work);
  work.fold_last();
  store_any<Tile>(p, work, first, shared);
}

constexpr unsigned kSharedBytes = Tile::kStages * Rows::kBytes;

auto kernel_for(const GemmProblem& p) {
  return p.a_block <= kShortBlock ? w8a8_grouped_gradient_kernel<true> : w8a8_grouped_gradient_kernel<false>;
}

std::string supports(const GemmProblem& p) {
  if (p.scale != DType::f32) return "has no f64";
  if (p.a_block == 0) return "needs dY in blocks";
  return reason_against_gradient(p, Tile::kLeft, Tile::kRight);
}

Cost cost(const GemmProblem& p) { return gradient_cost<Tile>(p, kLargeCost); }

void load(const GemmProblem& p) { prepare(kName, kernel_for(p), kSharedBytes); }

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  Arguments p = {};
  p.product.tiling = tiling_of<Tile>(operand_of(o.a, false), operand_of(o.b, true), problem.k);
  p.product.tiling.right.end += problem.by_terms ? 0 : (problem.experts - 1) * o.experts.b_stride;
  p.product.scales = {static_cast<const float*>(o.a_scale.data), o.a_scale.strides[0], o.a_scale.strides[1]};
  p.product.block = static_cast<int>(problem.a_block);
  p.product.output = output_of(problem, o.y, false);
  p.grid = expert_grid(problem, o, Tile::kLeft, Tile::kRight);
  const unsigned blocks = blocks_of(problem, o, p.grid, Tile::kLeft);
  if (blocks == 0) return;
  enqueue(kName, kernel_for(problem), LaunchShape{blocks, Tile::kThreads, kSharedBytes}, launch.stream, p);
}

}  // namespace

extern constinit const GemmKernel w8a8_grouped_gradient_sm80 = {
    .name = kName,
    .task = {Operation::grouped_gradient, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
