// w8a16_group_gemm_sm90, forward with a scale per channel or tensor, on Hopper:
//
//   y (m, n) = round_to_y(s[j] * sum_c a[i, c] * q[j, c] + bias[j])
//
// a f16 or bf16, q s8. The kernel is w8a16_gemm_sm90's; nothing is rounded before the sums in f32, and the scale and
// the bias take one fma at the end.
#include <string>
#include <string_view>

#include "cuda/dispatch.h"
#include "cuda/gemm/w8a16_gemm_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace w8a16;

constexpr std::string_view kName = "w8a16_group_gemm_sm90";

std::string supports(const GemmProblem& p) {
  if (!p.grouped() || p.b.group != p.k) return "takes a scale per channel or tensor";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  return reason_against_problem(p);
}

// For load() and launch().
auto forms(const GemmProblem& p) {
  return [&p]<class Tile, class Body>(Tile, const Body& body) {
    const auto with = [&]<bool half>() {
      body(Form<std::conditional_t<half, __half, __nv_bfloat16>, Tile, false, false, true>());
    };
    with_flags(with, p.a == DType::f16);
  };
}

// Operands have their terms along rows; strided ones are another row's.
bool along_rows(const GemmProblem& p, const GemmOperands& o) {
  return o.a.strides[1] == 1 && o.b.strides[1] == 1 && o.y.strides[1] == 1 && aligned(p, o);
}

}  // namespace

extern constinit const GemmKernel w8a16_group_gemm_sm90 = {
    .name = kName,
    .task = {Operation::gemm, kW8A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost<true>,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& at) { w8a16::launch<true>(kName, p, o, at, forms(p)); },
    .prepare = [](const GemmProblem& p) { load<true>(kName, forms(p)); },
    .detail = detail<true>,
    .aligned = along_rows,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
