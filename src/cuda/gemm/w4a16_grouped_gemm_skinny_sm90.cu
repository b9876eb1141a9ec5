// experts_skinny_sm90.cuh with 16-bit tokens. Its error bound is that of the expert's dense plan.
#include <string>
#include <string_view>
#include <type_traits>

#include "cuda/gemm/experts_skinny_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace experts_skinny;

constexpr std::string_view kName = "w4a16_grouped_gemm_skinny_sm90";
constexpr Times kTimes = {0.70e-6, 1.0e-6, 0.8e-6};
constexpr Times kSmallGroupTimes = {1.3e-6, 1.6e-6, 0.8e-6};

// Groups smaller than a step.
bool small_groups(const GemmProblem& p) { return p.b.group < kTerms && p.b.group < p.k; }

// Calls body(form) with the problem's form.
constexpr auto with_form = [](const GemmProblem& p, const auto& body) {
  const auto with = [&]<bool half, bool folds, bool zeros>() {
    using X = std::conditional_t<half, __half, __nv_bfloat16>;
    constexpr int kFolds = folds ? 4 : 1;
    body(Form<X, kFolds, zeros>());
  };
  with_flags(with, p.a == DType::f16, small_groups(p), p.b.zero_point);
};

std::string supports(const GemmProblem& p) {
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  return reason_against_problem(p);
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = expected_seconds(p, small_groups(p) ? kSmallGroupTimes : kTimes);
  return cost;
}

}  // namespace

extern constinit const GemmKernel w4a16_grouped_gemm_skinny_sm90 = {
    .name = "w4a16_grouped_gemm_skinny_sm90",
    .task = {Operation::grouped_gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = gathered_size,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& launch) { experts_skinny::launch(kName, p, o, launch, with_form); },
    .prepare = [](const GemmProblem& p) { experts_skinny::load(kName, p, with_form); },
    .detail = experts_skinny::detail,
    .aligned = experts_skinny::aligned,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
