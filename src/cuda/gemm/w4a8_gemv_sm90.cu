// w4a8_gemv_sm90.cuh on one weight.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/w4a8_gemv_sm90.cuh"
#include "cuda/launch.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a8_gemv;

constexpr std::string_view kName = "w4a8_gemv_sm90";
constexpr int kMaxTokens = 32;
constexpr int kMaxTokensSmallGroups = 16;

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  const std::int64_t tiles = ceil_div(problem.n, kTileRows);
  const std::int64_t sms = properties(problem.device).sms;
  const std::int64_t blocks = std::min(tiles, sms * ceil_div(tiles, sms * F::max_tiles));
  KernelLaunch<F> launched(problem, o, static_cast<int>(ceil_div(tiles, blocks)));
  Arguments& p = launched.arguments;
  p.tokens = static_cast<int>(o.a.rows());
  p.tiles = static_cast<int>(tiles / blocks);
  p.more_tiles = static_cast<int>(tiles % blocks);
  enqueue(kName, w4a8_gemv_kernel<F>,
          LaunchShape{static_cast<unsigned>(blocks), launched.threads, launched.shared_bytes}, stream, p);
}

// Calls body(form) with the problem's form for this many tokens.
template <class Body>
void with_form(const GemmProblem& p, std::int64_t tokens, const Body& body) {
  const auto with = [&]<bool packed, bool zeros>() {
    if (tokens <= 8) return with_few_tokens<packed, zeros, false>(p, body);
    const auto with_blocks = [&]<int blocks, int ahead>() {
      using Whole = Unit<packed, false, zeros>;
      if (p.b.group == p.k) return body(Form<blocks, 16, ahead, true, Whole>());
      if (p.b.group == 128) return body(Form<blocks, 16, ahead, false, Whole>());
      if constexpr (blocks * 8 <= kMaxTokensSmallGroups) body(Form<blocks, 8, 2, false, Unit<packed, true, zeros>>());
    };
    if (tokens <= 16) return with_blocks.template operator()<2, 2>();
    with_blocks.template operator()<4, 1>();
  };
  with_flags(with, p.b_packed, p.b.zero_point);
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  const int tokens = small_groups(p) ? kMaxTokensSmallGroups : kMaxTokens;
  if (p.m > tokens) return message("is for up to ", tokens, " rows of a", small_groups(p) ? " and small groups" : "");
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (std::max(p.n, p.k) > std::int64_t{1} << 23) return "takes at most 2^23 rows or columns";
  return {};
}

// Fitted to an H200, L2 flushed; small groups are a guess.
Cost cost(const GemmProblem& p) {
  struct Speed {
    double fixed, bytes_per_second;
  };
  const Speed speed = p.m <= 8 ? Speed{9.1e-6, 3.9e12} : p.m <= 16 ? Speed{10.2e-6, 2.55e12} : Speed{11e-6, 1.72e12};
  Cost cost = gemm_work(p);
  const double groups = static_cast<double>(p.n) * static_cast<double>(ceil_div(p.k, p.b.group));
  const double bytes = static_cast<double>(p.n) * static_cast<double>(p.k) / 2 + groups * (p.b.zero_point ? 8 : 4);
  cost.seconds = speed.fixed + (small_groups(p) ? 1.5 : 1.0) * bytes / speed.bytes_per_second;
  return cost;
}

std::string detail(const GemmProblem& p) {
  int warps = 0;
  with_form(p, p.m, [&]<class F>(F) { warps = F::max_warps; });
  return message("tiles of ", kTileRows, " rows, up to ", warps, " warps");
}

void load(const GemmProblem& problem) {
  for (const std::int64_t tokens : {8, 16, 32}) {
    with_form(problem, tokens, []<class F>(F) { prepare(kName, w4a8_gemv_kernel<F>, 227 * 1024); });
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  with_form(problem, o.a.rows(), [&]<class F>(F) { launch_form<F>(problem, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a8_gemv_sm90 = {
    .name = "w4a8_gemv_sm90",
    .task = {Operation::gemm, kW4A8},
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
