// w4a16 on Hopper's matrix unit: y (m, n) = sum_c a[i, c] * ((q[j, c] - z[j, g]) * s[j, g]) + bias[j], a (m, k) of f16
// or bf16, sums in f32.
//
// It computes y^T, the weight by a^T: the matrix unit takes the weight from registers, where it has just become 16 bits
// wide, and a from shared memory. A persistent grid of clusters; in a cluster two blocks lie below each other and share
// a, and where there are few tiles further such pairs have other terms of the same tile; where the last tiles would
// leave half of the grid idle, the two blocks of a pair share the terms of one. In each block one thread has the copy
// engine fill a ring of stages with tiles of a and of the weight, and two warps bring the scales
// (device/nibble_stages.cuh). Two warpgroups have half of the weight's rows each: while the matrix unit works on 32
// terms they convert the next 32 (device/nibble_tiles.cuh).
//
// With u the unit roundoff of a's type a result is within
//   sum |a (q - z) s| ((2 + u) u + (k + 3) 2^-24) + sum |a| S 2^-26 (f16: S the largest scale of the row)
// of the exact one, and half a unit in the last place of y; with one scale a row the first and the third term are none.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "base/message.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/nibble_stages.cuh"
#include "cuda/device/nibble_tiles.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/transposed_boxes.cuh"
#include "cuda/gemm/nibble_maps.h"
#include "cuda/gemm/nibble_weight.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace nibble_tiles;

constexpr std::string_view kName = "w4a16_gemm_sm90";

template <class F>
__global__ void __launch_bounds__(kThreads, F::blocks)
    w4a16_gemm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const Place<F> place(arguments);
  if (threadIdx.x == 0) {
    ptx::prefetch_map(maps.a);
    ptx::prefetch_map(maps.b);
    ptx::prefetch_map(maps.b_odd);
    ptx::prefetch_map(maps.y);
    init(shared);
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  wait_for_previous();
  let_next_start();
  if (warp < 4) {
    ptx::give_registers<F::producer_registers>();
    if (threadIdx.x == 0) load_operands(shared, place, maps);
    if (warp == 1 || warp == 2) load_scales(shared, place);
    __syncwarp();
    if (place.adds()) {  // add_parts
      ptx::cluster_arrive_released();
      ptx::cluster_wait();
    }
  } else {
    ptx::take_registers<F::consumer_registers>();
    Consumer<F>{shared, arguments, place, warp / 4 - 1, warp % 4}.run(maps.y);
  }
  ptx::cluster_arrive();  // no block leaves while another one still reads its shared memory, or writes to it
  ptx::cluster_wait();
}

// ---- Launching.

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Rows of a to a product, products, stages, boxes of terms in a stage, blocks of a multiprocessor.
using Tiles = std::tuple<Tile<160, 2, 4>, Tile<256, 1, 4>, Tile<192, 1, 3, 2>, Tile<160, 1, 3, 2>, Tile<128, 1, 8>,
                         Tile<96, 1, 4, 2>, Tile<64, 1, 6, 1, 2>>;

template <class Body>
void with_each_tile(const Body& body) {
  std::apply([&](auto... tile) { (body(tile), ...); }, Tiles());
}

// Measured on an H200: the clock that the power limit leaves, the cycles of 64 terms, which the products bound in the
// wide tiles and the conversions in the narrow ones, and those of a tile, of a halved one, and of a grid besides.
template <class T>
double box_cycles(bool alone) {
  if (T::blocks == 2) return alone ? 717 : 1120;
  switch (T::rows_a) {
    case 320:
      return 1323;
    case 256:
      return 1036;
    case 192:
      return 886;
    case 160:
      return 813;
    case 128:
      return 782;
    default:
      return 727;
  }
}
constexpr double kTileCycles = 2300;
constexpr double kHalvedCycles = 2000;
constexpr double kGridCycles = 8700;
constexpr double kGigahertz = 1.62;
constexpr double kHalvedGigahertz = 1.51;  // fewer blocks wait in the end
constexpr double kLaunchSeconds = 0.5e-6;
constexpr double kBytesPerSecond = 3.5e12;
constexpr int kBand = 11;  // pairs of tiles of b: with six tiles of a, of two bytes, 66 clusters

struct Size {
  std::int64_t m, n, k;
};

template <class T>
TileOrder order_of(const Size& size) {
  return {static_cast<int>(ceil_div(size.n, kRowsB * kPair)), static_cast<int>(ceil_div(size.m, T::rows_a)), kBand,
          true};
}

template <class T>
int steps_of(std::int64_t k) {
  return static_cast<int>(ceil_div(k, T::step));
}

// Clusters at one time: of one pair, two, and four, on an H200.
template <class T>
int clusters_at_once(int parts, int multiprocessors) {
  const int at_once = parts == 1 ? 66 : parts == 2 ? 30 : 15;
  return std::max(T::blocks * at_once * multiprocessors / 132, 1);
}

struct Choice {
  int rows_a = 0;
  int parts = 1;
  int halved = 0;  // tiles, the last ones
  double seconds = std::numeric_limits<double>::infinity();
};

template <class T>
Choice choice_of(const Size& size, int parts, int multiprocessors) {
  const int steps = steps_of<T>(size.k);
  const int units = static_cast<int>(ceil_div(steps * T::step, 128));
  const int count = order_of<T>(size).count();
  const int clusters = clusters_at_once<T>(parts, multiprocessors);
  if (parts > 1 && (count > clusters || units < parts)) return {};
  const int rest = count % clusters;
  const bool halve = T::blocks == 1 && parts == 1 && rest > 0 && 2 * rest <= clusters && units > 1;
  // Blocks of a larger cluster lie two on a multiprocessor, though others are free.
  const bool alone = kPair * parts * count * (parts > 1 || halve ? 2 : 1) <= multiprocessors;
  const auto tile_cycles = [&](int part_units) {
    return std::min(part_units * 128 / kTerms, steps * T::boxes) * box_cycles<T>(alone) + kTileCycles;
  };
  const auto waves = static_cast<double>(halve ? count / clusters : ceil_div(count, clusters));
  double cycles = waves * tile_cycles(static_cast<int>(ceil_div(units, parts))) + kGridCycles;
  if (halve) cycles += tile_cycles((units + 1) / 2) + kHalvedCycles;
  if (parts > 1) cycles += 2500 + 500 * parts;
  const double gigahertz = halve && waves > 0 ? kHalvedGigahertz : kGigahertz;
  return {T::rows_a, parts, halve ? rest : 0, cycles / (gigahertz * 1e9) + kLaunchSeconds};
}

Choice best_choice(const Size& size, int multiprocessors) {
  Choice best;
  with_each_tile([&]<class T>(T) {
    for (int parts = 1; parts <= kMostParts; parts *= 2) {
      if (const Choice one = choice_of<T>(size, parts, multiprocessors); one.seconds < best.seconds) best = one;
    }
  });
  return best;
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, const Choice& choice, Stream stream) {
  static_assert(sizeof(Shared<F>) <= 227 * 1024);
  Arguments arguments;
  arguments.weight = nibble_weight(problem, o);
  Maps maps;
  maps.a = tensor_map(kName, o.a, {F::rows_a / kPair, kTerms, true});
  if (F::packed) {
    maps.b = maps.b_odd = tensor_map(kName, panels(arguments.weight, problem.device), {kRowsB / 16, kTerms * 2, false});
  } else {
    maps.b = tensor_map(kName, every_second_row(arguments.weight, 0, problem.device), {kRowsB / 2, kTerms / 2, true});
    maps.b_odd =
        tensor_map(kName, every_second_row(arguments.weight, 1, problem.device), {kRowsB / 2, kTerms / 2, true});
  }
  const bool by_engine = mappable(o.y);
  const bool wide = problem.y == DType::f32;
  maps.y = by_engine ? tensor_map(kName, o.y, TransposedBoxes<F::width>::box(wide, false)) : maps.a;

  arguments.steps = steps_of<typename F::Tile>(problem.k);
  const int parts = arguments.parts = choice.parts;
  arguments.order = order_of<typename F::Tile>({o.a.rows(), problem.n, problem.k});
  arguments.halved = choice.halved;
  if (problem.bias) {
    arguments.bias = o.bias.data;
    arguments.bias_stride = o.bias.strides[0];
  }
  arguments.y = {o.y.data, o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  arguments.y.wide = wide;
  const bool whole = o.y.cols() * (bits(o.y.dtype) / 8) % 16 == 0;
  arguments.y.engine_cols = !by_engine ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;

  const int clusters = std::min(clusters_at_once<typename F::Tile>(parts, properties(problem.device).multiprocessors),
                                arguments.order.count() + choice.halved);
  const auto blocks = static_cast<unsigned>(kPair * parts);
  enqueue(kName, w4a16_gemm_kernel<F>,
          LaunchShape{static_cast<unsigned>(clusters) * blocks, kThreads, sizeof(Shared<F>), dim3(blocks)}, stream,
          maps, arguments);
}

// Calls body(form) for the problem's, with so many rows of a to a tile.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, const Body& body) {
  const auto with_type = [&]<class T>(T) {
    with_each_tile([&]<class Tile>(Tile) {
      if (Tile::rows_a != rows_a) return;
      if (p.b_packed) return body(Form<T, Tile, true>());
      body(Form<T, Tile, false>());
    });
  };
  if (p.a == DType::f16) return with_type(__half());
  with_type(__nv_bfloat16());
}

Size size_of(const GemmProblem& problem) { return {problem.m, problem.n, problem.k}; }

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  if (p.scale != DType::f32) return "has no f64";
  if (p.k % 32 != 0) return "wants rows of a multiple of 32 terms";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  return {};
}

Cost cost(const GemmProblem& p) {
  const auto m = static_cast<double>(p.m);
  const auto n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k);
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = 2 * m * k + n * k / 2 + m * n * bits(p.y) / 8;
  cost.seconds = std::max(best_choice(size_of(p), properties(p.device).multiprocessors).seconds,
                          cost.bytes / kBytesPerSecond + kLaunchSeconds);
  return cost;
}

std::string detail(const GemmProblem& p) {
  const Choice choice = best_choice(size_of(p), properties(p.device).multiprocessors);
  return message("tile ", choice.rows_a, "x", kRowsB, ", clusters of ", kPair, "x", choice.parts, ", ", choice.halved,
                 " halved");
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  with_each_tile([&]<class T>(T) {
    with_form(problem, T::rows_a, []<class F>(F) { prepare(kName, w4a16_gemm_kernel<F>, sizeof(Shared<F>)); });
  });
}

bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && (p.b_packed || mappable_nibbles(o.b));
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  const Choice choice = best_choice({o.a.rows(), problem.n, problem.k}, properties(problem.device).multiprocessors);
  with_form(problem, choice.rows_a, [&]<class F>(F) { launch_form<F>(problem, o, choice, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_sm90 = {
    .name = "w4a16_gemm_sm90",
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
    .bound = Bound::rounded_weight,
};

}  // namespace octile::cuda
