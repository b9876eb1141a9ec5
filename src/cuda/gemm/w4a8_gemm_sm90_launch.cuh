// Launch of w4a8_gemm_sm90.cuh, and what its rows' cost models share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "cuda/clusters.h"
#include "cuda/gemm/w4a8_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda::w4a8 {

constexpr double kGigahertz = 1.77;
constexpr double kGridCycles = 8500;
constexpr double kTileCycles = 4500;
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 3.5e12;

constexpr int rows_b_of(int rows_a) { return rows_a <= kFew ? 64 : 128; }
inline int steps_of(std::int64_t k) { return static_cast<int>(ceil_div(k, kTileK)); }

// Of a step of tiles that are wider than kFew.
inline double wide_step_cycles(const GemmProblem& p, int rows_a) {
  const double folds = p.b.group == p.k ? 0 : 128.0 / static_cast<double>(p.b.group);
  return 250 + rows_a * (3.2 + 1.9 * folds);
}

inline std::string reason_against_problem(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or columns";
  return {};
}

template <class F>
void launch_form(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  static_assert(sizeof(Shared<F>) <= F::kSharedBytes);
  Arguments arguments;
  arguments.weight = nibble_weight(problem, o);
  const std::int64_t m = o.y.rows();
  const TmaStack stack = F::experts ? stack_of(problem, o) : TmaStack{};
  // Swizzled lines come in eights.
  arguments.half_rows = static_cast<int>(std::min<std::int64_t>(F::rows_a / 2, ceil_div(m, 16) * 8));
  arguments.last_row = static_cast<int>(std::max<std::int64_t>(m - F::rows_a, 0));
  PanelMaps maps = {int4_maps(kernel, problem, o.a, arguments.weight, {arguments.half_rows, F::rows_b, kTileK}, stack)};
  if constexpr (F::packed) set_panel_maps(kernel, problem, arguments.weight, F::rows_b, F::groups, stack, maps);
  arguments.steps = steps_of(problem.k);
  arguments.order = transposed_order(m, problem.n, F::rows_a, F::rows_b);
  arguments.a = static_cast<const std::int8_t*>(o.a.data);
  arguments.a_pitch = o.a.strides[0];
  arguments.a_scale = row_scale<float>(o.a_scale);
  arguments.bias = bias_of(problem, o);
  arguments.y = transpose_target<F::rows_a>(kernel, o.y, false, maps.y);
  arguments.y_type = problem.y;

  const int at_once = F::blocks * max_active_clusters(problem.device, kClusterSize);
  std::int64_t tiles = arguments.order.count();
  if constexpr (F::experts) {
    arguments.bias.type = o.bias.dtype;
    arguments.experts = experts_of(problem, o);
    tiles = arguments.order.rows * max_tiles(problem, m, F::rows_a);
  }
  enqueue(kernel, w4a8_gemm_kernel<F>, persistent_shape(tiles, at_once, kClusterSize, F::threads, sizeof(Shared<F>)),
          stream, maps, arguments);
}

}  // namespace octile::cuda::w4a8
