// Launch of w4a16_gemm_sm90.cuh, and what its rows' cost models share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>

#include "base/ceil_div.h"
#include "cuda/clusters.h"
#include "cuda/gemm/w4a16_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda::w4a16 {

// Measured on an H200: the clock that the power limit leaves; the cycles of 64 columns, bound by WGMMA in wide tiles
// and by conversions in narrow ones; the overhead of a tile, of a halved tile, and of the grid.
template <class T>
double k_tile_cycles(bool alone) {
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
constexpr double kHalvedGigahertz = 1.51;  // fewer blocks idle at the end
constexpr double kLaunchSeconds = 0.5e-6;
constexpr double kBytesPerSecond = 3.5e12;

// Calls body(tile) for each of a tuple of tiles.
template <class Tiles, class Body>
void with_each_tile(const Body& body) {
  std::apply([&](auto... tile) { (body(tile), ...); }, Tiles());
}

template <class T>
TileOrder order_of(const GemmSize& size) {
  return transposed_order(size.m, size.n, T::rows_a, kRowsB);
}

template <class T>
int steps_of(std::int64_t k) {
  return static_cast<int>(ceil_div(k, T::step));
}

template <class T>
int clusters_at_once(int parts, Device device) {
  return T::blocks * max_active_clusters(device, kClusterSize * parts);
}

inline std::string reason_against_problem(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  if (p.scale != DType::f32) return "has no f64";
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or columns";
  return {};
}

// choice: how K and the last tiles are divided.
template <class F>
void launch_form(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, const SplitChoice& choice,
                 Stream stream) {
  using Tile = typename F::Tile;
  static_assert(sizeof(Shared<F>) <= kMaxSharedBytes / F::blocks);
  const std::int64_t m = o.y.rows();
  const TmaStack stack = F::experts ? stack_of(problem, o) : TmaStack{};
  Arguments arguments;
  arguments.weight = nibble_weight(problem, o);
  typename F::Maps maps = {
      int4_maps(kernel, problem, o.a, arguments.weight, {F::rows_a / kClusterSize, kRowsB, kTileK}, stack)};
  arguments.tiles.steps = steps_of<Tile>(problem.k);
  arguments.tiles.parts = choice.parts;
  arguments.tiles.order = order_of<Tile>({m, problem.n, problem.k});
  arguments.tiles.halved = choice.halved;
  arguments.bias = bias_of(problem, o);
  arguments.y = transpose_target<F::width>(kernel, o.y, false, maps.y);
  std::int64_t tiles = arguments.tiles.order.count() + choice.halved;
  if constexpr (F::experts) {
    set_panel_maps(kernel, problem, arguments.weight, kRowsB, 1, stack, maps);
    arguments.bias.type = o.bias.dtype;
    arguments.experts = experts_of(problem, o);
    tiles = arguments.tiles.order.rows * max_tiles(problem, m, F::rows_a);
  }
  const int at_once = clusters_at_once<Tile>(choice.parts, problem.device);
  enqueue(kernel, w4a16_gemm_kernel<F>,
          persistent_shape(tiles, at_once, kClusterSize * choice.parts, kGemmThreads, sizeof(Shared<F>)), stream, maps,
          arguments);
}

}  // namespace octile::cuda::w4a16
