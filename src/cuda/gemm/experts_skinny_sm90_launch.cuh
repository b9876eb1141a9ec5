// Launch of experts_skinny_sm90.cuh, and what its rows share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/experts_skinny_sm90.cuh"
#include "cuda/gemm/gather_rows.h"
#include "cuda/gemm/int4_maps.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda::experts_skinny {

// Measured on an H200, layers of bench/torch/moe.py: seconds of a narrow tile's step, of a wide one's, and of a tile
// besides its steps.
struct Times {
  double few, many, tile;
};
constexpr double kAroundSeconds = 8.2e-6;  // launch, table of experts, and the first loads
constexpr double kBytesPerSecond = 3.3e12;

// Of an expert whose rows are Poisson distributed.
struct ExpectedTiles {
  double wide = 0, narrow = 0;
};

inline ExpectedTiles expected_tiles_of_expert(double mean) {
  if (mean > 256) return {mean / kTokens, 0.5};
  ExpectedTiles tiles;
  double share = std::exp(-mean);
  const int most = static_cast<int>(mean + 8 * std::sqrt(mean)) + 16;
  for (int rows = 1; rows <= most; ++rows) {
    share *= mean / rows;
    const int wide = (rows + kTokens - kFewer - 1) / kTokens;
    tiles.wide += share * wide;
    tiles.narrow += share * (ceil_div(rows, kTokens) - wide);
  }
  return tiles;
}

inline double expected_seconds(const GemmProblem& p, const Times& times) {
  const auto experts = static_cast<double>(p.experts);
  const auto [wide, narrow] = expected_tiles_of_expert(static_cast<double>(p.m) / std::max(experts, 1.0));
  const double all = std::max(wide + narrow, 1e-9);
  const double tiles = experts * all * static_cast<double>(ceil_div(p.n, kRows));
  const double of_block = std::max(std::ceil(tiles / properties(p.device).sms), 1.0);
  const double step = (wide * times.many + narrow * times.few) / all;
  const double products = of_block * (static_cast<double>(ceil_div(p.k, kTerms)) * step + times.tile);
  return kAroundSeconds + std::max(products, grouped_work(p).bytes / kBytesPerSecond) + gather_seconds(p);
}

inline std::string reason_against_problem(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (!p.b_packed) return "takes packed weights";
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or columns";
  if (max_tiles(p, p.m, kTokens) * ceil_div(p.n, kRows) > std::int64_t{1} << 30) {
    return "takes at most 2^30 tiles of y";
  }
  return {};
}

inline std::string detail(const GemmProblem& p) {
  return message("tiles of up to ", kTokens, " tokens by ", kRows, p.gather ? ", rows of a gathered first" : "");
}

template <class F>
Maps maps_of(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, const NibbleWeight& w) {
  const TmaStack stack = stack_of(problem, o);
  const auto panels = ceil_div(problem.n, kPanelChannels);
  Maps maps = {};
  maps.tokens = tensor_map(kernel, o.a, {kBoxTokens, 128 / static_cast<int>(sizeof(typename F::X)), true});
  if constexpr (F::exact) {
    const ConstTensor words = matrix(w.values, DType::f32, problem.device, panels, w.pitch / 4, w.pitch / 4);
    maps.weight = tensor_map(kernel, words, {kPanels, kTerms * 2, false}, stack);
  } else {
    maps.weight = tensor_map(kernel, LinePanels{w.values, panels, problem.k / 8, kPanels, kTerms / 8}, stack);
  }
  const auto map_of = [&](const void* data, DType dtype) {
    const std::int64_t cols = std::int64_t{w.groups} * kPanelChannels;
    return tensor_map(kernel, matrix(data, dtype, problem.device, panels, cols, cols), {kPanels, kPanelRows, false},
                      stack);
  };
  maps.scales = map_of(w.scales, DType::f32);
  if (F::zeros) maps.zeros = map_of(w.zeros, DType::u8);
  return maps;
}

template <class F>
void launch_form(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  static_assert(sizeof(Shared<F>) <= kMaxSharedBytes);
  Arguments p;
  p.weight = nibble_weight(problem, o);
  const Maps maps = maps_of<F>(kernel, problem, o, p.weight);
  if (F::exact) p.token_scale = row_scale<float>(o.a_scale);
  p.experts = experts_of(problem, o);
  p.steps = static_cast<int>(ceil_div(problem.k, kTerms));
  p.row_tiles = static_cast<int>(ceil_div(problem.n, kRows));
  // A group of 64 is two folds of 16-bit tokens.
  p.group_folds = F::folds == 1 ? 1 : p.weight.group / 32;
  p.bias = bias_of(problem, o);
  p.bias.type = o.bias.dtype;
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  p.y_aligned = aligned_for(o.y, 2);
  const std::int64_t tiles = max_tiles(problem, o.y.rows(), kTokens) * p.row_tiles;
  enqueue(kernel, experts_skinny_kernel<F>,
          persistent_shape(tiles, properties(problem.device).sms, 1, kThreads, sizeof(Shared<F>)), stream, maps, p);
}

// with_form(problem, body) calls body(form) with the problem's form.
template <class WithForm>
void load(std::string_view kernel, const GemmProblem& problem, const WithForm& with_form) {
  prepare_tensor_maps(kernel);
  if (problem.gather) prepare_gather_rows();
  with_form(problem, [&]<class F>(F) { prepare(kernel, experts_skinny_kernel<F>, sizeof(Shared<F>)); });
}

template <class WithForm>
void launch(std::string_view kernel, const GemmProblem& problem, const GemmOperands& o, const Launch& launch,
            const WithForm& with_form) {
  if (o.y.rows() == 0 || o.a.rows() == 0 || problem.n == 0 || problem.experts == 0) return;
  GemmOperands in_order = o;
  if (problem.gather) gather_rows(problem, in_order, launch);
  with_form(problem, [&]<class F>(F) { launch_form<F>(kernel, problem, in_order, launch.stream); });
}

inline bool aligned(const GemmProblem& p, const GemmOperands& o) { return p.k > 0 && int4_mappable(p, o); }

}  // namespace octile::cuda::experts_skinny
