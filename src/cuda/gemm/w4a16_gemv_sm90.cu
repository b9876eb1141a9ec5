// w4a16_gemv_sm90.cuh on one weight.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/w4a16_gemv_sm90.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a16_gemv;

constexpr std::string_view kName = "w4a16_gemv_sm90";
constexpr int kMaxTokens = 16;

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  Arguments p = arguments_of(problem, o);
  set_tokens<F>(p, static_cast<int>(o.a.rows()));
  // Adjacent units of a row-major weight share cache lines: warps take them at the same time, where they divide evenly.
  if (!F::Unit::kPacked && p.units % F::warps == 0) p.places = unit_places(p.weight, F::warps);
  // One block per SM, or several waves where there is too little room for the sums.
  const std::int64_t tiles = ceil_div(problem.n, kTileRows);
  const std::int64_t room = std::min(kMaxShared / (p.tile_bytes + kTileRows * 4), F::threads / kTileRows);
  const std::int64_t sms = properties(problem.device).sms;
  const std::int64_t waves = ceil_div(tiles, sms * room);
  const std::int64_t blocks = std::min(tiles, sms * waves);
  p.tiles = static_cast<int>(tiles / blocks);
  p.more_tiles = static_cast<int>(tiles % blocks);
  const int max_tiles = p.tiles + (p.more_tiles > 0 ? 1 : 0);
  p.biases_at = max_tiles * p.tile_bytes;
  const auto bytes = static_cast<unsigned>(p.biases_at + max_tiles * kTileRows * 4);
  const unsigned grid = static_cast<unsigned>(blocks);
  enqueue(kName, w4a16_gemv_kernel<F>, LaunchShape{grid, F::threads, bytes}, stream, p);
}

// Calls body(form) with the problem's form for this many tokens.
template <class Body>
void with_form(const GemmProblem& p, std::int64_t tokens, const Body& body) {
  const auto with = [&]<bool half, bool packed, bool small, bool zeros>() {
    using T = std::conditional_t<half, __half, __nv_bfloat16>;
    using U = Unit<packed, small, zeros>;
    if (tokens <= 8) return body(typename FewTokens<T, U>::Form());
    body(Form < T, 2, small ? 8 : 16, small || packed ? 2 : 1, U > ());
  };
  with_flags(with, p.a == DType::f16, p.b_packed, small_groups(p), p.b.zero_point);
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.scale != DType::f32) return "has no f64";
  if (p.m > kMaxTokens) return message("is for up to ", kMaxTokens, " rows of a");
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (std::max(p.n, p.k) > std::int64_t{1} << 23) return "takes at most 2^23 rows or columns";
  return {};
}

Cost cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const double bytes =
      n * k / 2 + n * k / static_cast<double>(std::max<std::int64_t>(p.b.group, 1)) * (p.b.zero_point ? 8 : 4);
  const std::int64_t rounds = ceil_div(ceil_div(p.n, kTileRows), properties(p.device).sms);
  const double slower = p.m > 8 ? 7.0 / 6 : 1;
  const double tile = tile_seconds(p) * slower * (p.b_packed ? 1 : p.m > 8 ? 1.25 : 1.1);
  return {2 * m * n * k, m * k * 2 + bytes + m * n * bits(p.y) / 8, 5e-6 + static_cast<double>(rounds) * tile};
}

std::string detail(const GemmProblem& p) {
  int warps = 0;
  with_form(p, p.m, [&]<class F>(F) { warps = F::warps; });
  return message("tiles of ", kTileRows, " rows, ", warps, " warps");
}

void load(const GemmProblem& problem) {
  for (const std::int64_t tokens : {8, 16}) {
    with_form(problem, tokens, []<class F>(F) { prepare(kName, w4a16_gemv_kernel<F>, kMaxShared); });
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  with_form(problem, o.a.rows(), [&]<class F>(F) { launch_form<F>(problem, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemv_sm90 = {
    .name = "w4a16_gemv_sm90",
    .task = {Operation::gemm, kW4A16},
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
