// w4a16_gemm_skinny_sm90, for up to 128 rows of a, tokens; up to 64 where the weight is not packed.
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16. The integers q - z are exact in either; their products with a are summed in f32, 128 columns or a
// group at a time, and scaled in f32. The kernel: w4a16_gemm_skinny_sm90.cuh.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/int4_maps.cuh"
#include "cuda/gemm/w4a16_gemm_skinny_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemm_skinny_sm90";
constexpr int kFewTokens = 32;
constexpr int kMoreTokens = 64;
constexpr int kMaxTokens = 128;
template <int tokens>
using AnyForm = SkinnyForm<__half, tokens, true, 1, false>;
constexpr int kTerms = AnyForm<kMaxTokens>::terms;

int form_tokens(std::int64_t tokens) {
  return tokens <= kFewTokens ? kFewTokens : tokens <= kMoreTokens ? kMoreTokens : kMaxTokens;
}

// Groups smaller than a step.
bool small_groups(const GemmProblem& p) { return p.b.group < kTerms && p.b.group < p.k; }

struct Choice {
  int rows = 0;   // of a tile
  int parts = 1;  // of K
  double seconds = std::numeric_limits<double>::infinity();
};

// Fitted to an H200, L2 flushed: seconds of a step, and a fixed part.
template <int tokens>
Choice choice_for(const GemmProblem& p) {
  struct Seconds {
    double fixed, packed, plain, small_groups;
  };
  constexpr Seconds kUpTo32 = {7.2e-6, 0.725e-6, 0.98e-6, 0.87e-6};
  constexpr Seconds kUpTo64 = {7.5e-6, 0.985e-6, 1.26e-6, 1.27e-6};
  constexpr Seconds kUpTo128 = {12.5e-6, 0.66e-6, 0.66e-6, 0.97e-6};
  constexpr double kSharingSeconds = 0.4e-6;
  constexpr double kWaveSeconds = 4e-6;
  using F = AnyForm<tokens>;
  constexpr Seconds each = tokens == kFewTokens ? kUpTo32 : tokens == kMoreTokens ? kUpTo64 : kUpTo128;
  const double step_seconds = small_groups(p) ? each.small_groups : p.b_packed ? each.packed : each.plain;
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(p.n, F::rows), 1);
  const std::int64_t steps = ceil_div(p.k, F::terms);
  Choice best;
  for (int parts = 1; parts <= 8 && parts <= std::max<std::int64_t>(steps, 1); ++parts) {
    if (!w4a16_skinny::Exchange<F>::has_room(parts)) continue;
    const auto waves = static_cast<double>(ceil_div(tiles, max_active_clusters(p.device, parts)));
    double seconds = each.fixed + (parts - 1) * kSharingSeconds + (waves - 1) * kWaveSeconds +
                     waves * static_cast<double>(ceil_div(steps, parts)) * step_seconds;
    if (seconds < best.seconds) best = {F::rows, parts, seconds};
  }
  return best;
}

Choice best_choice(const GemmProblem& p, std::int64_t tokens) {
  switch (form_tokens(tokens)) {
    case kFewTokens:
      return choice_for<kFewTokens>(p);
    case kMoreTokens:
      return choice_for<kMoreTokens>(p);
    default:
      return choice_for<kMaxTokens>(p);
  }
}

template <class F>
SkinnyMaps maps_of(const GemmProblem& problem, const GemmOperands& o, const NibbleWeight& w, int token_rows,
                   int step_groups) {
  SkinnyMaps maps = {};
  maps.tokens = tensor_map(kName, o.a, {token_rows, F::terms / 2, true});
  const auto map_of = [&](const void* data, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t pitch,
                          TmaTile tile) {
    return tensor_map(kName, matrix(data, dtype, problem.device, rows, cols, pitch), tile);
  };
  if (!F::packed) {
    maps.weight = map_of(w.values, DType::u8, w.rows, w.terms / 2, w.pitch, {F::rows, F::terms / 2, true});
    return maps;
  }
  const std::int64_t panels = ceil_div(problem.n, kPanelChannels);
  const std::int64_t cols = std::int64_t{w.groups} * kPanelChannels;
  const TmaTile of_step = {F::rows / kPanelChannels, step_groups * static_cast<int>(kPanelChannels), false};
  maps.weight = tensor_map(kName, LinePanels{w.values, panels, problem.k / 8, of_step.rows, F::terms / 8});
  maps.scales = map_of(w.scales, DType::f32, panels, cols, cols, of_step);
  if (F::zeros) maps.zeros = map_of(w.zeros, DType::u8, panels, cols, cols, of_step);
  return maps;
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, int parts, Stream stream) {
  static_assert(sizeof(w4a16_skinny::Shared<F>) <= 227 * 1024);
  SkinnyArguments p;
  p.weight = nibble_weight(problem, o);
  p.token_rows = static_cast<int>(std::min<std::int64_t>(F::tokens, ceil_div(o.a.rows(), 8) * 8));
  p.group_folds = F::folds > 1 ? p.weight.group / 32 : 1;
  p.step_groups = F::folds / p.group_folds;
  const SkinnyMaps maps = maps_of<F>(problem, o, p.weight, p.token_rows, p.step_groups);
  if (p.weight.groups == 1) p.weight.scale.col = p.weight.zero.col = 0;
  p.tokens = static_cast<int>(o.a.rows());
  p.steps = static_cast<int>(ceil_div(problem.k, F::terms));
  p.parts = parts;
  p.bias = bias_of(problem, o);
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  p.y_aligned = aligned_for(o.y, 2);
  const auto blocks = static_cast<unsigned>(ceil_div(problem.n, F::rows) * parts);
  enqueue(
      kName, w4a16_skinny::w4a16_gemm_skinny_kernel<F>,
      LaunchShape{blocks, w4a16_skinny::kThreads, sizeof(w4a16_skinny::Shared<F>), dim3(static_cast<unsigned>(parts))},
      stream, maps, p);
}

// Calls body(form) with the problem's form for this many tokens.
template <class Body>
void with_form(const GemmProblem& p, std::int64_t tokens, const Body& body) {
  const auto with = [&]<bool half, bool packed, bool folds, bool zeros>() {
    using T = std::conditional_t<half, __half, __nv_bfloat16>;
    constexpr int kFolds = folds ? 4 : 1;
    if constexpr (packed || !folds) {
      if (tokens <= kFewTokens) return body(SkinnyForm<T, kFewTokens, packed, kFolds, zeros>());
      if (tokens <= kMoreTokens) return body(SkinnyForm<T, kMoreTokens, packed, kFolds, zeros>());
      if constexpr (packed) body(SkinnyForm<T, kMaxTokens, packed, kFolds, zeros>());
    }
  };
  with_flags(with, p.a == DType::f16, p.b_packed, p.b_packed && small_groups(p), p.b.zero_point);
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  if (p.scale != DType::f32) return "has no f64";
  const int max_tokens = p.b_packed ? kMaxTokens : kMoreTokens;
  if (p.m > max_tokens) return message("is for up to ", max_tokens, " rows of a");
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (small_groups(p) && !p.b_packed) return "needs a packed weight for groups smaller than 128";
  if (std::max(p.n, p.k) > std::int64_t{1} << 30) return "takes at most 2^30 rows or columns";
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = gemm_work(p);
  cost.seconds = best_choice(p, p.m).seconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const Choice choice = best_choice(p, p.m);
  return message("tiles of ", choice.rows, " rows, split-K ", choice.parts);
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  for (const int tokens : {kFewTokens, kMoreTokens, kMaxTokens}) {
    with_form(problem, tokens, []<class F>(F) {
      prepare(kName, w4a16_skinny::w4a16_gemm_skinny_kernel<F>, sizeof(w4a16_skinny::Shared<F>));
    });
  }
}

bool aligned(const GemmProblem& p, const GemmOperands& o) { return p.k > 0 && int4_mappable(p, o); }

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  const int parts = best_choice(problem, o.a.rows()).parts;
  with_form(problem, o.a.rows(), [&]<class F>(F) { launch_form<F>(problem, o, parts, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_skinny_sm90 = {
    .name = "w4a16_gemm_skinny_sm90",
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
