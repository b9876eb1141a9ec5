// Launches of w8a16_gemm_sm90 and w8a16_group_gemm_sm90: tiles, cost model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/w8a16_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda::w8a16 {

// Measured on an H200: the clock that the power limit leaves, the cycles of a step (a narrow tile is bound by its
// conversions) and the overhead of a tile.
template <class T>
constexpr double kCyclesOfStep = T::rows_a == 256 ? 1024 : 700;
constexpr double kTileCycles = 1200;
constexpr double kGigahertz = 1.44;
constexpr double kGridCycles = 5000;
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 2.9e12;  // a few tiles wait for memory; a guess

struct Size {
  std::int64_t m, n, k;
};

template <class T>
TileOrder order_of(const Size& size) {
  return transposed_order(size.m, size.n, T::rows_a, kRowsB);
}

inline int steps_of(std::int64_t k) { return static_cast<int>(ceil_div(k, kTileK)); }

template <class T>
double expected_seconds(const Size& size, int clusters) {
  const auto waves = static_cast<double>(ceil_div(order_of<T>(size).count(), clusters));
  return (waves * (steps_of(size.k) * kCyclesOfStep<T> + kTileCycles) + kGridCycles) / (kGigahertz * 1e9) +
         kLaunchSeconds;
}

// Calls body(tile) with the tile that is expected to be faster.
template <class Body>
auto with_best_tile(const Size& size, int clusters, const Body& body) {
  const bool narrow = expected_seconds<NarrowTile>(size, clusters) < expected_seconds<WideTile>(size, clusters);
  return narrow ? body(NarrowTile()) : body(WideTile());
}

// The matrix, or its transpose, whose rows are contiguous.
template <class Tensor>
Tensor lines_of(const Tensor& t, bool outer) {
  if (!outer) return t;
  Tensor transposed = t;
  std::swap(transposed.shape[0], transposed.shape[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  return transposed;
}

template <class F>
void launch_form(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  using T = typename F::T;
  static_assert(sizeof(Shared<F>) <= kMaxSharedBytes);
  const ConstTensor a = lines_of(o.a, F::a_outer);
  const ConstTensor b = lines_of(o.b, F::b_outer);
  const bool y_along_a = problem.y_major == Major::outer;
  const Tensor y = lines_of(o.y, y_along_a);

  GemmMaps maps;
  Arguments arguments;
  constexpr int kHalf = F::rows_a / kClusterSize;
  if (F::a_outer) {
    maps.a = tensor_map(kernel, a, {kTileK, 64, true});
  } else {
    if (o.a.rows() <= kHalf) arguments.few_rows = static_cast<int>(o.a.rows());
    maps.a = tensor_map(kernel, a, {arguments.few_rows > 0 ? arguments.few_rows : kHalf, kTileK, true});
  }
  if (F::b_outer) {
    maps.b = maps.b_odd = tensor_map(kernel, b, {kTileK, kRowsB, true});
  } else {
    maps.b = tensor_map(kernel, every_second_row(b, 0), {kRowsB / 2, kTileK, true});
    maps.b_odd = tensor_map(kernel, every_second_row(b, 1), {kRowsB / 2, kTileK, true});
  }
  maps.y = maps.a;

  arguments.steps = steps_of(o.a.cols());
  arguments.order = order_of<typename F::Tile>({o.a.rows(), o.b.rows(), o.a.cols()});
  arguments.k = o.a.cols();
  if constexpr (F::channels) {
    arguments.scale.value = 1;
    arguments.channel_scale = row_scale<float>(o.b_scale);
    arguments.bias = bias_of(problem, o);
    arguments.channels = static_cast<int>(problem.n);
  } else {
    arguments.scale = row_scale<float>(o.b_scale);
  }
  arguments.y = transpose_target<F::rows_a>(kernel, y, y_along_a, maps.y);
  arguments.y.accumulate = problem.accumulate;

  const int clusters = std::min(max_active_clusters(problem.device, kClusterSize), arguments.order.count());
  enqueue(kernel, w8a16_gemm_kernel<F>,
          LaunchShape{static_cast<unsigned>(clusters * kClusterSize), kGemmThreads, sizeof(Shared<F>), kClusterSize},
          stream, maps, arguments);
}

inline Size size_of(const GemmProblem& problem) { return {problem.m, problem.n, problem.k}; }

inline std::string reason_against_problem(const GemmProblem& problem) {
  if (std::string reason = reason_against(problem.device, 90, 91); !reason.empty()) return reason;
  if (problem.a != DType::f16 && problem.a != DType::bf16) return "takes f16 and bf16";
  if (problem.scale != DType::f32) return "has no f64";
  if (problem.b_packed) return "takes the weight as it is, not packed";
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max({problem.m, problem.n, problem.k}) > kMax) return "takes at most 2^30 rows or columns";
  return {};
}

inline Cost cost(const GemmProblem& problem) {
  const Size size = size_of(problem);
  const int clusters = max_active_clusters(problem.device, kClusterSize);
  const double seconds =
      std::min(expected_seconds<WideTile>(size, clusters), expected_seconds<NarrowTile>(size, clusters));
  Cost cost = gemm_work(problem);
  cost.seconds = std::max(seconds, cost.bytes / kBytesPerSecond + kLaunchSeconds);
  return cost;
}

inline std::string detail(const GemmProblem& problem) {
  const Size size = size_of(problem);
  return with_best_tile(size, max_active_clusters(problem.device, kClusterSize), [&]<class T>(T) {
    const TileOrder order = order_of<T>(size);
    return message("tile ", T::rows_a, "x", kRowsB, ", clusters 1x", kClusterSize, ", ", T::stages,
                   " stages, bands of ", order.band, " columns of ", order.cols, "x", order.rows, " clusters");
  });
}

inline bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(lines_of(o.a, p.a_major == Major::outer)) && mappable(lines_of(o.b, p.b_major == Major::outer));
}

// with_form(tile, body) calls body(form) with the problem's form of this tile.
template <class WithForm>
void load(std::string_view kernel, const WithForm& with_form) {
  prepare_tensor_maps(kernel);
  const auto prepare_form = [&]<class F>(F) { prepare(kernel, w8a16_gemm_kernel<F>, sizeof(Shared<F>)); };
  with_form(WideTile(), prepare_form);
  with_form(NarrowTile(), prepare_form);
}

template <class WithForm>
void launch(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, const Launch& launch,
            const WithForm& with_form) {
  if (o.a.rows() == 0 || o.b.rows() == 0) return;
  const Size size = {o.a.rows(), o.b.rows(), o.a.cols()};
  with_best_tile(size, max_active_clusters(problem.device, kClusterSize), [&](auto tile) {
    with_form(tile, [&]<class F>(F) { launch_form<F>(kernel, problem, o, launch.stream); });
  });
}

}  // namespace octile::cuda::w8a16
