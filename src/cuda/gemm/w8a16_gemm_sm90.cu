// w8a16_gemm_sm90: y (m, n) = sum_c a[i, c] * (b[j, c] * c_scale[c]), of 16-bit a in either orientation, on Hopper.
#include <string>
#include <string_view>

#include "cuda/dispatch.h"
#include "cuda/gemm/w8a16_gemm_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace w8a16;

constexpr std::string_view kName = "w8a16_gemm_sm90";

std::string supports(const GemmProblem& p) { return p.grouped() ? "has no groups" : reason_against_problem(p); }

// For load() and launch().
auto forms(const GemmProblem& p) {
  return [&p]<class Tile, class Body>(Tile, const Body& body) {
    const auto with = [&]<bool half, bool a_outer, bool b_outer>() {
      body(Form<std::conditional_t<half, __half, __nv_bfloat16>, Tile, a_outer, b_outer>());
    };
    with_flags(with, p.a == DType::f16, p.a_major == Major::outer, p.b_major == Major::outer);
  };
}

}  // namespace

extern constinit const GemmKernel w8a16_gemm_sm90 = {
    .name = kName,
    .task = {Operation::gemm, kW8A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost<false>,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& at) { w8a16::launch<false>(kName, p, o, at, forms(p)); },
    .prepare = [](const GemmProblem& p) { load<false>(kName, forms(p)); },
    .detail = detail<false>,
    .aligned = aligned,
    .bound = Bound::rounded_scale,
};

}  // namespace octile::cuda
