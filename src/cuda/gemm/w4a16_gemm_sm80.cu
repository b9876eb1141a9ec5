// w4a16_gemm_sm80, on every GPU from Ampere on:
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16. The integers q - z are exact in either; their products with a are summed in f32, 64 terms or a group
// of 32 at a time, and scaled in f32: w4_gemm_sm80.cuh. The order of the terms does not depend on m.
#include "cuda/gemm/w4a16_gemm_sm80.cuh"

namespace octile::cuda {

namespace {

using namespace w4a16_sm80;

constexpr std::string_view kName = "w4a16_gemm_sm80";

}  // namespace

extern constinit const GemmKernel w4a16_gemm_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost<Tiles>,
    .workspace = workspace<Tiles>,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& launch) { w4_sm80::launch<Tiles, kName>(p, o, launch, kWithArithmetic); },
    .prepare = [](const GemmProblem& p) { load<Tiles, kName>(p, kWithArithmetic); },
    .detail = detail<Tiles>,
    .aligned = aligned,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
