// w4a16_gemm_skinny_sm90 of each expert's rows, whose error bound is its dense plan's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/gather_rows.h"
#include "cuda/gemm/int4_maps.cuh"
#include "cuda/gemm/w4a16_grouped_gemm_skinny_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a16_skinny;

constexpr std::string_view kName = "w4a16_grouped_gemm_skinny_sm90";
constexpr int kFewTokens = 32;  // of a tile, at most
constexpr int kManyTokens = 64;
constexpr int kTerms = ExpertsForm<__half, kFewTokens, 1, false>::terms;

// Groups smaller than a step.
bool small_groups(const GemmProblem& p) { return p.b.group < kTerms && p.b.group < p.k; }

// A form and its times, on an H200 (bench/torch/moe.py): seconds of a step without tokens, the same with small groups,
// and of the rest of a tile.
template <class F_>
struct Timed {
  using F = F_;
  double step, small_groups, tile;
};
constexpr double kTokenSeconds = 6e-9;   // of a step, for each token that is loaded
constexpr double kAroundSeconds = 6e-6;  // launch, table of experts, and the first loads
constexpr double kBytesPerSecond = 3.6e12;
constexpr double kMargin = 1.08;  // what is expected of the other rows here is up to 15 % too slow

// Calls body with the problem's form for each number of tokens.
template <class Body>
void for_each_form(const GemmProblem& p, const Body& body) {
  const auto with = [&]<bool half, bool folds, bool zeros>() {
    using T = std::conditional_t<half, __half, __nv_bfloat16>;
    constexpr int kFolds = folds ? 4 : 1;
    body(Timed<ExpertsForm<T, kFewTokens, kFolds, zeros>>{0.66e-6, 1.26e-6, 2.2e-6});
    body(Timed<ExpertsForm<T, kManyTokens, kFolds, zeros>>{0.8e-6, 1.44e-6, 2.7e-6});
  };
  with_flags(with, p.a == DType::f16, small_groups(p), p.b.zero_point);
}

template <class F>
double expected_seconds(const GemmProblem& p, const Timed<F>& times) {
  const double token_tiles = std::max(expected_tiles(p, p.m, F::tokens), 1.0);
  const double tiles = token_tiles * static_cast<double>(ceil_div(p.n, F::rows));
  const double of_block = std::ceil(tiles / properties(p.device).sms);
  const double tokens = std::min<double>(F::tokens, static_cast<double>(p.m) / token_tiles + kBoxTokens / 2);
  const double step = (small_groups(p) ? times.small_groups : times.step) + tokens * kTokenSeconds;
  const double products = of_block * (static_cast<double>(ceil_div(p.k, F::terms)) * step + times.tile);
  return kMargin * (kAroundSeconds + std::max(products, grouped_work(p).bytes / kBytesPerSecond));
}

// Calls body(form, seconds) with the form that is expected to be the fastest for so many rows.
template <class Body>
void with_best_form(GemmProblem p, std::int64_t m, const Body& body) {
  p.m = m;
  with_cheapest([&](const auto& visit) { for_each_form(p, visit); },
                [&](const auto& form) { return expected_seconds(p, form); },
                [&]<class F>(const Timed<F>&, double seconds) { body(F(), seconds); });
}

template <class F>
SkinnyMaps maps_of(const GemmProblem& problem, const GemmOperands& o, const NibbleWeight& w) {
  const TmaStack stack = stack_of(problem, o);
  const auto panels = ceil_div(problem.n, kPanelChannels);
  const std::int64_t cols = std::int64_t{w.groups} * kPanelChannels;
  constexpr TmaTile kGroup = {F::rows / kPanelRows, kPanelRows, false};
  SkinnyMaps maps = {};
  maps.tokens = tensor_map(kName, o.a, {kBoxTokens, F::terms / 2, true});
  maps.weight = tensor_map(kName, LinePanels{w.values, panels, problem.k / 8, kGroup.rows, F::terms / 8}, stack);
  const auto map_of = [&](const void* data, DType dtype) {
    return tensor_map(kName, matrix(data, dtype, problem.device, panels, cols, cols), kGroup, stack);
  };
  maps.scales = map_of(w.scales, DType::f32);
  if (F::zeros) maps.zeros = map_of(w.zeros, DType::u8);
  return maps;
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  static_assert(sizeof(ExpertsShared<F>) <= kMaxSharedBytes);
  ExpertsArguments p;
  p.weight = nibble_weight(problem, o);
  const SkinnyMaps maps = maps_of<F>(problem, o, p.weight);
  p.group_folds = F::folds > 1 ? p.weight.group / 32 : 1;
  p.steps = static_cast<int>(ceil_div(problem.k, F::terms));
  p.bias = bias_of(problem, o);
  p.bias.type = o.bias.dtype;
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  p.y_aligned = aligned_for(o.y, 2);
  p.experts = experts_of(problem, o);
  p.row_tiles = static_cast<int>(ceil_div(problem.n, F::rows));
  const std::int64_t tiles = max_tiles(problem, o.y.rows(), F::tokens) * p.row_tiles;
  enqueue(kName, w4a16_grouped_gemm_skinny_kernel<F>,
          persistent_shape(tiles, properties(problem.device).sms, 1, kThreads, sizeof(ExpertsShared<F>)), stream, maps,
          p);
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  if (p.scale != DType::f32) return "has no f64";
  if (!p.b_packed) return "takes packed weights";
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or columns";
  if (max_tiles(p, p.m, kFewTokens) * ceil_div(p.n, 256) > std::int64_t{1} << 30) {
    return "takes at most 2^30 tiles of y";
  }
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  with_best_form(p, p.m, [&](auto, double seconds) { cost.seconds = seconds + gather_seconds(p); });
  return cost;
}

std::string detail(const GemmProblem& p) {
  std::string text;
  with_best_form(p, p.m, [&]<class F>(F, double) {
    text = message("tiles of up to ", F::tokens, " tokens by ", F::rows, p.gather ? ", rows of a gathered first" : "");
  });
  return text;
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  if (problem.gather) prepare_gather_rows();
  for_each_form(problem, []<class F>(const Timed<F>&) {
    prepare(kName, w4a16_grouped_gemm_skinny_kernel<F>, sizeof(ExpertsShared<F>));
  });
}

bool aligned(const GemmProblem& p, const GemmOperands& o) { return p.k > 0 && int4_mappable(p, o); }

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const std::int64_t m = o.y.rows();
  if (m == 0 || o.a.rows() == 0 || problem.n == 0 || problem.experts == 0) return;
  GemmOperands in_order = o;
  if (problem.gather) gather_rows(problem, in_order, launch);
  with_best_form(problem, m, [&]<class F>(F, double) { launch_form<F>(problem, in_order, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_grouped_gemm_skinny_sm90 = {
    .name = "w4a16_grouped_gemm_skinny_sm90",
    .task = {Operation::grouped_gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = gathered_size,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
