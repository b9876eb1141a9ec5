// Launches of w8a16_gemm_sm90 and w8a16_group_gemm_sm90: tiles, cost model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "cuda/clusters.h"
#include "cuda/gemm/w8a16_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda::w8a16 {

// Calls body(tile) for every tile. The middle one is compiled only for channels.
template <bool channels, class Body>
void with_each_tile(const Body& body) {
  body(WideTile());
  if constexpr (channels) body(MiddleTile());
  body(NarrowTile());
}

// Fitted to 80 timings on an H200 (3.7 % root mean square): a step of 64 terms, and how much longer it takes where the
// whole GPU works, which lowers the clock; a tile besides; the grid and its launch; a split in this many parts.
template <class T>
constexpr double kStepSeconds = T::rows_a == 256   ? 605e-9
                                : T::rows_a == 192 ? 510e-9
                                                   : 427e-9;
template <class T>
constexpr double kBusy = T::rows_a == 128 ? 1.06 : 1.14;
constexpr double kTileSeconds = 0.8e-6;
constexpr double kGridSeconds = 7.5e-6;
template <class T>
double split_seconds(int parts) {
  const int more = parts - 2;  // one block adds them all
  return (2400 - 1600 * more + T::rows_a * (7 + 26 * more)) * 1e-9;
}
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 2.9e12;  // a few tiles wait for memory; a guess

template <class T>
TileOrder order_of(const GemmSize& size) {
  return transposed_order(size.m, size.n, T::rows_a, kRowsB);
}

inline int steps_of(std::int64_t k) { return static_cast<int>(ceil_div(k, kTileK)); }

template <class T>
SplitChoice choice_of(const GemmSize& size, int parts, Device device) {
  const int steps = steps_of(size.k);
  const int count = order_of<T>(size).count();
  const int clusters = max_active_clusters(device, kClusterSize * parts);
  if (parts > 1 && (count > clusters || steps < parts)) return {};
  const int rest = count % clusters;
  const bool halve = parts == 1 && rest > 0 && 2 * rest <= clusters && steps > 1;
  const int waves = halve ? count / clusters : ceil_div(count, clusters);
  const int busy = kClusterSize * (waves > (halve ? 0 : 1) ? clusters : parts * (halve ? 2 * rest : count));
  const double step = kStepSeconds<T> * (5 * busy > 4 * properties(device).sms ? kBusy<T> : 1);
  double seconds = kGridSeconds + waves * (ceil_div(steps, parts) * step + kTileSeconds);
  if (halve) seconds += (steps + 1) / 2 * step + kTileSeconds;
  if (halve || parts > 1) seconds += split_seconds<T>(std::max(parts, 2));
  return {T::rows_a, parts, halve ? rest : 0, seconds};
}

template <bool channels>
SplitChoice best_choice(const GemmSize& size, Device device) {
  return best_split([](const auto& body) { with_each_tile<channels>(body); },
                    [&]<class T>(T, int parts) { return choice_of<T>(size, parts, device); });
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
void launch_form(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, const SplitChoice& choice,
                 Stream stream) {
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

  arguments.tiles = {steps_of(o.a.cols()), choice.parts, {}, choice.halved};
  arguments.tiles.order = order_of<typename F::Tile>(size_of(o));
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

  const int tiles = arguments.tiles.order.count() + choice.halved;
  const int cluster = kClusterSize * choice.parts;
  const int at_once = max_active_clusters(problem.device, cluster);
  enqueue(kernel, w8a16_gemm_kernel<F>, persistent_shape(tiles, at_once, cluster, kGemmThreads, sizeof(Shared<F>)),
          stream, maps, arguments);
}

inline std::string reason_against_problem(const GemmProblem& problem) {
  if (std::string reason = reason_against(problem.device, 90, 91); !reason.empty()) return reason;
  if (problem.a != DType::f16 && problem.a != DType::bf16) return "takes f16 and bf16";
  if (problem.scale != DType::f32) return "has no f64";
  if (problem.b_packed) return "takes the weight as it is, not packed";
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max({problem.m, problem.n, problem.k}) > kMax) return "takes at most 2^30 rows or columns";
  return {};
}

template <bool channels>
Cost cost(const GemmProblem& problem) {
  Cost cost = gemm_work(problem);
  cost.seconds = std::max(best_choice<channels>(size_of(problem), problem.device).seconds,
                          cost.bytes / kBytesPerSecond + kLaunchSeconds);
  return cost;
}

template <bool channels>
std::string detail(const GemmProblem& problem) {
  return split_detail(best_choice<channels>(size_of(problem), problem.device), kRowsB);
}

inline bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(lines_of(o.a, p.a_major == Major::outer)) && mappable(lines_of(o.b, p.b_major == Major::outer));
}

template <class Forms, const std::string_view& kName>
void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  with_each_tile<Forms::channels>([&](auto tile) {
    Forms::with_form(problem, tile, []<class F>(F) { prepare(kName, w8a16_gemm_kernel<F>, sizeof(Shared<F>)); });
  });
}

template <class Forms, const std::string_view& kName>
void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || o.b.rows() == 0) return;
  const SplitChoice choice = best_choice<Forms::channels>(size_of(o), problem.device);
  with_each_tile<Forms::channels>([&]<class T>(T tile) {
    if (T::rows_a != choice.rows_a) return;
    Forms::with_form(problem, tile, [&]<class F>(F) { launch_form<F>(kName, problem, o, choice, launch.stream); });
  });
}

// A row: Forms has
//   channels                        whether scales are of b's rows, not of the terms
//   supports, aligned               the row's
//   with_form(problem, tile, body)  calls body(form) with the problem's form of this tile
template <class Forms, const std::string_view& kName>
constexpr GemmKernel row() {
  return {.name = kName,
          .task = {Operation::gemm, kW8A16},
          .device = DeviceType::cuda,
          .supports = Forms::supports,
          .cost = cost<Forms::channels>,
          .launch = launch<Forms, kName>,
          .prepare = load<Forms, kName>,
          .detail = detail<Forms::channels>,
          .aligned = Forms::aligned,
          .bound = Forms::channels ? Bound::sum : Bound::rounded_scale};
}

}  // namespace octile::cuda::w8a16
