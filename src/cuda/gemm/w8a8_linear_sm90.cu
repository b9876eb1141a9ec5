// w8a8_linear_sm90: a whole W8A8 layer in one launch, for up to 16 tokens. Each block quantizes X while its first
// weights are in flight.
//
//   s[i] = max(max_c |a[i, c] * multiplier[c]| / 127, 1e-8), or given
//   q[i, c] = clamp(rint(a[i, c] * multiplier[c] / s[i]), -127, 127)
//   y[i, j] = round_to_y(fma(f32(sum_c q[i, c] * b[j, c]), s[i] * b_scale[j], bias[j]))
#include <algorithm>
#include <string>

#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/gemm/w8a8_linear_sm90.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w8a8_linear_sm90";
constexpr int kMaxTokens = 16;

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a == DType::s8) return "quantizes a, which is s8 already";
  if (p.scale != DType::f32) return "has no f64";
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.a_major != Major::contraction || p.b_major != Major::contraction || p.y_major != Major::contraction) {
    return "needs contiguous rows of a, b and y";
  }
  if (p.m > kMaxTokens) return message("is for up to ", kMaxTokens, " rows of a");
  if (p.n > kMaxRows) return "takes at most 2^30 rows of b";
  if (!(p.m <= 8 ? fits_skinny<1>(p.m, p.k) : fits_skinny<2>(p.m, p.k))) {
    return message("has no room for ", p.m, " rows of ", p.k, " in shared memory");
  }
  return {};
}

// Fitted to an H200, L2 filled by reads.
Cost cost(const GemmProblem& p) {
  // Each block quantizes all of X, or from 9 tokens on two blocks half each, while the first weights are in flight;
  // this does not hide all of it (8 x 14336: 10 us, 4 x 8192: 3 us).
  const double m = static_cast<double>(p.m);
  const double k = static_cast<double>(p.k);
  const double quantized = m > 8 ? m * k / 2 : m * k;
  const double exposed = std::max(quantized - 10e3, 0.0) * 1.4e-10;
  Cost cost = gemm_work(p);
  cost.seconds = 7.6e-6 + static_cast<double>(p.n) * k / 4.7e12 + m * 1.7e-7 + exposed;
  return cost;
}

void load(const GemmProblem& p) {
  prepare_clusters(p.device);
  with_narrow_type(p.a, [&](auto source) {
    prepare_skinny<decltype(source), 1>(kName);
    prepare_skinny<decltype(source), 2>(kName);
  });
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  SkinnyProduct p = skinny_product(problem, o);
  if (p.x.count == 0 || p.rows == 0) return;
  with_narrow_type(problem.a, [&](auto source) {
    p.x.count <= 8 ? launch_skinny<decltype(source), 1>(kName, p, problem, launch.stream)
                   : launch_skinny<decltype(source), 2>(kName, p, problem, launch.stream);
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_linear_sm90 = {
    .name = "w8a8_linear_sm90",
    .task = {Operation::linear},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
