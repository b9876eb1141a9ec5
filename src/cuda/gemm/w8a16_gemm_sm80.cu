// y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]); a (m, k) f16, bf16, f32 or f64, b (n, k) s8, on every GPU from
// Ampere on, for every stride and alignment.
//
// 16-bit floats: mma.sync with sums in f32. A block multiplies a tile (kLeft rows of b, kRight rows of a), kStep terms
// at a time, through a ring of operand tiles in shared memory (device/product_tiles.cuh). b is converted to 16-bit
// floats in registers, which is exact, and multiplied by the scales there, with a rounding to 16 bits of the scale and
// of the product. With u the unit roundoff of a's type, the sum before y's rounding is off by at most
//   sum_c |a b s| * (2 u + k 2^-23) + (f16) sum_c |a| (|b| + 1) * 2^-33 * max_c |s|,
// since the tensor core truncates where it adds. f32 and f64: the ordinary arithmetic units.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/device/grid.cuh"
#include "cuda/device/output_tiles.cuh"
#include "cuda/device/product_tiles.cuh"
#include "cuda/dispatch.h"
#include "cuda/gemm/w8a16_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "w8a16_gemm_sm80";

using namespace w8a16_sm80;

using Small = TileShape<64, 64, 64, 4, 2, 2, 3>;

// ---- The kernel.

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) w8a16_gemm_kernel(const __grid_constant__ Product p) {
  using Work = Work<Tile, T, kLeftOuter, kRightOuter>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int2 tile = first_of_tile<Tile>(p.tiling);
  const int2 part = first_of_warp<Tile>();
  Work work(p, part, static_cast<int>(threadIdx.x) % 32);
  wait_for_previous();
  let_next_start();
  work.scales.read(0);
  multiply_tile<Tile, typename Work::Stage>(p.tiling, tile, shared_address(shared), work);
  store_any<Tile, T>(p, work, {tile.x + part.x, tile.y + part.y}, shared);
}

// ---- The launch.

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
constexpr TileKernel<Product> kKernel = {w8a16_gemm_kernel<Tile, T, kLeftOuter, kRightOuter>,
                                         Tile::kStages* HalfStage<Tile, T, kLeftOuter, kRightOuter>::kBytes};

template <class Tile>
TileKernel<Product> kernel_for(const GemmProblem& problem) {
  const auto of = [&]<bool half, bool left_outer, bool right_outer>() {
    return kKernel<Tile, std::conditional_t<half, __half, __nv_bfloat16>, left_outer, right_outer>;
  };
  return with_flags(of, problem.a == DType::f16, problem.b_major == Major::outer, problem.a_major == Major::outer);
}

template <class Tile>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  Product p = {};
  p.tiling = tiling_of<Tile>(operand_of(o.b, problem.b_major == Major::outer),
                             operand_of(o.a, problem.a_major == Major::outer), o.a.cols());
  p.c_scale = factors_of(o.b_scale, problem.scale);
  p.output = output_of(problem, o.y, problem.y_major == Major::contraction);
  enqueue_tiles<Tile>(kName, kernel_for<Tile>(problem), p, launch.stream);
}

template <class Real>
void launch_wide(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const WideProduct<Real> p = wide_product_of<Real>(problem, o);
  const unsigned blocks = blocks_for(p.m, kWideTile) * blocks_for(p.n, kWideTile);
  enqueue(kName, wide_product_kernel<Real, kWideTile>, LaunchShape{blocks, kWideThreads}, launch.stream, p);
}

bool is_half(const GemmProblem& problem) { return problem.a == DType::f16 || problem.a == DType::bf16; }

constexpr TilePair<Large, Small> kTiles = {kLargeCost, {18e-6, 37e-6, 9e-6}};

double wide_seconds(const GemmProblem& problem) {
  const bool f64 = problem.a == DType::f64;
  constexpr double tile = kWideTile;
  const auto tiles = static_cast<double>(ceil_div(problem.m, kWideTile) * ceil_div(problem.n, kWideTile));
  const double rounds = std::ceil(tiles / properties(problem.device).sms);
  const double per_second = f64 ? 0.12e12 : 0.26e12;  // of an SM
  return 2 * tile * tile * static_cast<double>(problem.k) * rounds / per_second + 7e-6;
}

std::string supports(const GemmProblem& problem) {
  if (problem.grouped()) return "has no groups";
  return reason_against_product(problem);
}

Cost cost(const GemmProblem& problem) {
  if (is_half(problem)) return kTiles.cost(problem);
  Cost cost = gemm_work(problem);
  const double memory = cost.bytes / (kTileBytesPerSecond * properties(problem.device).sms);
  cost.seconds = std::max(wide_seconds(problem), memory);
  return cost;
}

void load(const GemmProblem& problem) {
  if (problem.a == DType::f32) return prepare(kName, wide_product_kernel<float, kWideTile>);
  if (problem.a == DType::f64) return prepare(kName, wide_product_kernel<double, kWideTile>);
  for (const TileKernel<Product>& kernel : {kernel_for<Large>(problem), kernel_for<Small>(problem)}) {
    prepare(kName, kernel.function, kernel.shared_bytes);
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  if (problem.a == DType::f32) return launch_wide<float>(problem, o, launch);
  if (problem.a == DType::f64) return launch_wide<double>(problem, o, launch);
  kTiles.with_best(problem, o.y, [&]<class Tile>() { launch_tile<Tile>(problem, o, launch); });
}

}  // namespace

extern constinit const GemmKernel w8a16_gemm_sm80 = {
    .name = "w8a16_gemm_sm80",
    .task = {Operation::gemm, kW8A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .bound = Bound::rounded_scale,
};

}  // namespace octile::cuda
