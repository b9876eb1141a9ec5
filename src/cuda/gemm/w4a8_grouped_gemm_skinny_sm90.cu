// experts_skinny_sm90.cuh with int8 tokens. The bits of an expert's rows are its dense plan's.
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/gemm/experts_skinny_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace experts_skinny;

constexpr std::string_view kName = "w4a8_grouped_gemm_skinny_sm90";

// Calls body(form) with the problem's form.
constexpr auto with_form = [](const GemmProblem& p, const auto& body) {
  const auto with = [&]<bool zeros>() {
    using X = std::int8_t;
    if (p.b.group == 32) return body(Form<X, 4, zeros>());
    if (p.b.group == 64) return body(Form<X, 2, zeros>());
    if (p.b.group == 128) return body(Form<X, 1, zeros>());
    body(Form<X, kWholeRow, zeros>());
  };
  with_flags(with, p.b.zero_point);
};

Times times(const GemmProblem& p) {
  const double folds = p.b.group == p.k ? 0 : 128.0 / static_cast<double>(p.b.group);
  return {0.55e-6 + 0.08e-6 * folds, 0.55e-6 + 0.15e-6 * folds, 0.9e-6};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = expected_seconds(p, times(p));
  return cost;
}

}  // namespace

extern constinit const GemmKernel w4a8_grouped_gemm_skinny_sm90 = {
    .name = "w4a8_grouped_gemm_skinny_sm90",
    .task = {Operation::grouped_gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = reason_against_problem,
    .cost = cost,
    .workspace = gathered_size,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& launch) { experts_skinny::launch(kName, p, o, launch, with_form); },
    .prepare = [](const GemmProblem& p) { experts_skinny::load(kName, p, with_form); },
    .detail = experts_skinny::detail,
    .aligned = experts_skinny::aligned,
};

}  // namespace octile::cuda
