// A whole W8A8 layer in one launch, for up to 16 tokens: X is quantized by every block, in the time its first weights
// take to arrive. device/skinny.cuh has the kernel.
//
//   s[i] = max(max_c |a[i, c] * multiplier[c]| / 127, 1e-8), or given
//   q[i, c] = clamp(rint(a[i, c] * multiplier[c] / s[i]), -127, 127)
//   y[i, j] = round_to_y(fma(f32(sum_c q[i, c] * b[j, c]), s[i] * b_scale[j], bias[j]))
#include <algorithm>
#include <string>

#include "base/message.h"
#include "cuda/device/skinny.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w8a8_linear_sm90";
constexpr int kMostTokens = 16;

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a == DType::s8) return "quantizes a, which is s8 already";
  if (p.scale != DType::f32) return "has no f64";
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.a_major != Major::contraction || p.b_major != Major::contraction || p.y_major != Major::contraction) {
    return "wants rows of a, b and y contiguous";
  }
  if (p.m > kMostTokens) return message("is for up to ", kMostTokens, " rows of a");
  if (p.n > kMostRows) return "takes at most 2^30 rows of b";
  if (!(p.m <= 8 ? fits_skinny<1>(p.m, p.k) : fits_skinny<2>(p.m, p.k))) {
    return message("has no room for ", p.m, " rows of ", p.k, " in shared memory");
  }
  return {};
}

// Fitted to an H200 whose second-level cache had been filled by reading.
Cost cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const double bytes = n * k;
  // Each block quantizes all of X, or from 9 tokens on two blocks half each, while the first weights are on their way;
  // what that does not hide is waited for (8 x 14336: 10 us).
  const double quantized = m > 8 ? m * k / 2 : m * k;
  const double waited_for = std::max(quantized - 40e3, 0.0) * 1.4e-10;
  return {2 * m * n * k, m * k * bits(p.a) / 8 + bytes + m * n * bits(p.y) / 8,
          7.6e-6 + bytes / 4.7e12 + m * 1.7e-7 + waited_for};
}

std::size_t workspace(const GemmProblem&) { return 0; }

void load(const GemmProblem& p) {
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
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
