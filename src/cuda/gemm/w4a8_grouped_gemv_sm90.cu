// w4a8_gemv_sm90.cuh on experts with few tokens each. The bits of an expert's rows are its dense plan's.
#include <algorithm>
#include <string>
#include <string_view>

#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/w4a8_gemv_sm90.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a8_gemv;

constexpr std::string_view kName = "w4a8_grouped_gemv_sm90";
constexpr int kMaxRows = 16;
constexpr double kPhaseTime = 1.25;  // times as long where the sums of all tiles do not fit shared memory at once

// Calls body(form) with the problem's form.
template <class Body>
void with_form(const GemmProblem& p, const Body& body) {
  with_flags([&]<bool zeros>() { with_few_tokens<true, zeros, true>(p, body); }, p.b.zero_point);
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  const int units = static_cast<int>(ceil_div(problem.k, kUnitTerms));
  const ExpertGrid grid = expert_grid(problem, o.y.rows(), F::max_warps / warps<F>(units));
  const int room = static_cast<int>(std::min<std::int64_t>(grid.most, F::max_tiles));
  KernelLaunch<F> launched(problem, o, room);
  Arguments& p = launched.arguments;
  p.bias.type = o.bias.dtype;
  p.experts = experts_of(problem, o);
  p.row_tiles = static_cast<int>(grid.row_tiles);
  p.room = room;
  enqueue(kName, w4a8_experts_gemv_kernel<F>,
          LaunchShape{static_cast<unsigned>(grid.blocks), launched.threads, launched.shared_bytes}, stream, p);
}

std::string supports(const GemmProblem& p) { return reason_against_experts(p, kMaxRows); }

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  const double tiles = expected_row_tiles(p), k = static_cast<double>(p.k);
  const double sum_bytes = tiles * k / kUnitTerms * kTileRows * kExpertTokens * 4;
  const double term = kExpertsTermSeconds * (sum_bytes > kMaxShared ? kPhaseTime : 1);
  cost.seconds = kExpertsSeconds + tiles * kTileRows * k * term;
  return cost;
}

std::string detail(const GemmProblem& p) {
  int warps = 0;
  with_form(p, [&]<class F>(F) { warps = F::max_warps; });
  return message("tiles of ", kTileRows, " rows, up to ", warps, " warps");
}

void load(const GemmProblem& p) {
  with_form(p, []<class F>(F) { prepare(kName, w4a8_experts_gemv_kernel<F>, kMaxShared); });
}

void launch(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.a.rows() == 0 || p.n == 0 || p.experts == 0) return;
  with_form(p, [&]<class F>(F) { launch_form<F>(p, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a8_grouped_gemv_sm90 = {
    .name = "w4a8_grouped_gemv_sm90",
    .task = {Operation::grouped_gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = units_aligned,
    .reads_b_early = true,
};

}  // namespace octile::cuda
