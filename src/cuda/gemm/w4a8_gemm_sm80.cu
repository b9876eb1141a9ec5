// w4a8_gemm_sm80, on every GPU from Ampere on: y (m, n), over the groups g of k in order,
//
//   t = fma(f32(sum_c a[i, c] * (q[j, c] - z[j, g])), s[j, g], t), then y[i, j] = fma(t, a_scale[i], bias[j])
//
// a s8. The sums of a group are exact in s32, so the bits are those of every other backend. A warp has whole groups of
// its part of a tile, in order: w4_gemm_sm80.cuh.
//
// Without zero points the bytes are 16 q. A sum of 128 products then is below 2^22 and starts at the bits of the float
// 1.5 * 2^23, so that one exact fma makes the float that f32 of the group's sum is.
#include "cuda/gemm/w4a8_gemm_sm80.cuh"

namespace octile::cuda {

namespace {

using namespace w4a8_sm80;

constexpr std::string_view kName = "w4a8_gemm_sm80";

}  // namespace

extern constinit const GemmKernel w4a8_gemm_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = reason_against_problem,
    .cost = cost<Tiles>,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& launch) { w4_sm80::launch<Tiles, kName>(p, o, launch, kWithArithmetic); },
    .prepare = [](const GemmProblem& p) { load<Tiles, kName>(p, kWithArithmetic); },
    .detail = detail<Tiles>,
    .aligned = aligned,
};

}  // namespace octile::cuda
