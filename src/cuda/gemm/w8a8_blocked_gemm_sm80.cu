// t = fma(f32(sum_{c in g} a[i, c] * b[j, c]), a_scale[i, g], t) over the blocks g of T terms in order, from t = 0
// y[i, j] = round_to_y(t)
//
// a (m, k) s8, K-major, and b (n, k) s8 of either major, on every GPU from Ampere on, for every stride and alignment.
//
// The tiles and the main loop are w8a8_gemm_sm80's (device/product_tiles.cuh, device/byte_work.cuh). Left is a, so that
// a lane needs two scales for 16 rows. The sums of a block and the totals are live together, twice w8a8_gemm_sm80's
// accumulators, so a warp has half its tile. A block's first matrix instructions start from 0; the sums of the block
// before are folded into the totals just before that.
#include <cstdint>
#include <string>

#include "cuda/device/grid.cuh"
#include "cuda/dispatch.h"
#include "cuda/gemm/w8a8_blocked_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8_blocked_sm80;

constexpr char kName[] = "w8a8_blocked_gemm_sm80";

using Small = TileShape<64, 64, 64, 6, 2, 2, 3>;

// ---- The kernel.

template <class Tile, bool kRightOuter, bool kShort>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    w8a8_blocked_gemm_kernel(const __grid_constant__ Product p) {
  using Work = BlockedWork<Tile, kRightOuter, kShort>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int2 tile = first_of_tile<Tile>(p.tiling);
  const int2 part = first_of_warp<Tile>();
  const int2 first = {tile.x + part.x, tile.y + part.y};
  Work work(p, first.x, part, static_cast<int>(threadIdx.x) % 32);
  wait_for_previous();
  let_next_start();
  multiply_tile<Tile, typename Work::Stage>(p.tiling, tile, shared_address(shared), work);
  work.fold_last();
  store_any<Tile>(p, work, first, shared);
}

// ---- The launch.

template <class Tile, bool kRightOuter, bool kShort>
constexpr TileKernel<Product> kKernel = {w8a8_blocked_gemm_kernel<Tile, kRightOuter, kShort>,
                                         Tile::kStages* Stage<Tile, false, kRightOuter>::kBytes};

template <class Tile>
TileKernel<Product> kernel_for(const GemmProblem& problem) {
  return with_flags([&]<bool right_outer, bool is_short>() { return kKernel<Tile, right_outer, is_short>; },
                    problem.b_major == Major::outer, problem.a_block <= kShortBlock);
}

template <class Tile>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  Product p = {};
  p.tiling = tiling_of<Tile>(operand_of(o.a, false), operand_of(o.b, problem.b_major == Major::outer), o.a.cols());
  p.scales = {static_cast<const float*>(o.a_scale.data), o.a_scale.strides[0], o.a_scale.strides[1]};
  p.block = static_cast<int>(problem.a_block);
  p.output = output_of(problem, o.y, problem.y_major == Major::outer);
  enqueue_tiles<Tile>(kName, kernel_for<Tile>(problem), p, launch.stream);
}

// By estimate: w8a8_gemm_sm80's, a fifth slower.
constexpr TilePair<Large, Small> kTiles = {kLargeCost, {9.3e-6, 22e-6, 7e-6}};

std::string supports(const GemmProblem& problem) {
  if (problem.scale != DType::f32) return "has no f64";
  return reason_against_product(problem);
}

Cost cost(const GemmProblem& problem) { return kTiles.cost(problem); }

void load(const GemmProblem& problem) {
  for (const TileKernel<Product>& kernel : {kernel_for<Large>(problem), kernel_for<Small>(problem)}) {
    prepare(kName, kernel.function, kernel.shared_bytes);
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  kTiles.with_best(problem, o.y, [&]<class Tile>() { launch_tile<Tile>(problem, o, launch); });
}

}  // namespace

extern constinit const GemmKernel w8a8_blocked_gemm_sm80 = {
    .name = "w8a8_blocked_gemm_sm80",
    .task = {Operation::blocked_gemm},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
