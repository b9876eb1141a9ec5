// w4a16_gemv_sm90.cuh on experts with few tokens each. Its error bound is that of the expert's dense plan.
#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/w4a16_gemv_sm90.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a16_gemv;

constexpr std::string_view kName = "w4a16_grouped_gemv_sm90";
constexpr int kMaxRows = 64;
constexpr int kFewRows = 32;        // up to here, finding shares of two tiles takes longer than it saves
constexpr double kMinTerms = 1152;  // with more rows, shorter rows of the weight take as long as these

bool evenly(const GemmProblem& p) { return p.m > kFewRows && expected_even_row_tiles(p) < expected_row_tiles(p); }

// Calls body(form, kernel) with the problem's form.
template <class Body>
void with_form(const GemmProblem& p, const Body& body) {
  const auto with = [&]<bool half, bool small, bool zeros, bool even>() {
    using T = std::conditional_t<half, __half, __nv_bfloat16>;
    using F = typename FewTokens<T, Unit<true, small, zeros>, true>::Form;
    body(F(), w4a16_experts_gemv_kernel<F, even>);
  };
  with_flags(with, p.a == DType::f16, small_groups(p), p.b.zero_point, evenly(p));
}

template <class F, class Kernel>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream, Kernel* kernel) {
  Arguments p = arguments_of(problem, o);
  set_tokens<F>(p, kExpertTokens);
  p.bias.type = o.bias.dtype;
  p.experts = experts_of(problem, o);
  const ExpertGrid grid = expert_grid(problem, o.y.rows(), 1);
  p.row_tiles = static_cast<int>(grid.row_tiles);
  const std::int64_t most = std::min<std::int64_t>(grid.most, F::threads / kTileRows);
  p.shared_bytes = static_cast<int>(std::min<std::int64_t>(kMaxShared, most * (p.tile_bytes + kTileRows * 4)));
  const auto bytes = static_cast<unsigned>(p.shared_bytes);
  const auto blocks = static_cast<unsigned>(grid.blocks);
  enqueue(kName, kernel, LaunchShape{blocks, F::threads, bytes}, stream, p);
}

std::string supports(const GemmProblem& p) {
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  return reason_against_experts(p, kMaxRows);
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  const double tiles = evenly(p) ? expected_even_row_tiles(p) : expected_row_tiles(p);
  const double terms = std::max(static_cast<double>(p.k), p.m > kFewRows ? kMinTerms : 0);
  cost.seconds = kExpertsSeconds + tiles * kTileRows * terms * kExpertsTermSeconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  int warps = 0;
  with_form(p, [&]<class F>(F, auto*) { warps = F::warps; });
  return message("tiles of ", kTileRows, " rows, ", warps, " warps", evenly(p) ? ", divided evenly" : "");
}

void load(const GemmProblem& p) {
  with_form(p, []<class F>(F, auto* kernel) { prepare(kName, kernel, kMaxShared); });
}

void launch(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.a.rows() == 0 || p.n == 0 || p.experts == 0) return;
  with_form(p, [&]<class F>(F, auto* kernel) { launch_form<F>(p, o, launch.stream, kernel); });
}

}  // namespace

extern constinit const GemmKernel w4a16_grouped_gemv_sm90 = {
    .name = "w4a16_grouped_gemv_sm90",
    .task = {Operation::grouped_gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = units_aligned,
    .bound = Bound::offset_weight,
};

}  // namespace octile::cuda
