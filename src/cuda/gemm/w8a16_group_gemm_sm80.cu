// w8a16_group_gemm_sm80, on every GPU from Ampere on:
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * q[j, c]) + bias[j])
//
// a f16 or bf16, q s8, a scale per group, channel or tensor. Products are exact; they are summed in f32, a row's all
// at once, of groups 128 at a time, or 32 where they are shorter, and scaled in f32: grouped_weight_gemm_sm80.cuh. The
// order of the terms does not depend on m.
#include "cuda/gemm/w8a16_group_gemm_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW8A16GroupGemmSm80 = "w8a16_group_gemm_sm80";
}

extern constinit const GemmKernel w8a16_group_gemm_sm80 =
    grouped_weight_sm80::row<w8a16_sm80::Format, kW8A16GroupGemmSm80>();

}  // namespace octile::cuda
