// w4a16_gemm_sm80, on every GPU from Ampere on:
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16. The integers q - z are exact in either; their products with a are summed in f32, 128 terms at a
// time, or 32 where groups are shorter, and scaled in f32: grouped_weight_gemm_sm80.cuh. The order of the terms does
// not depend on m.
#include "cuda/gemm/w4a16_gemm_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW4A16GemmSm80 = "w4a16_gemm_sm80";
}

extern constinit const GemmKernel w4a16_gemm_sm80 = grouped_weight_sm80::row<w4a16_sm80::Format, kW4A16GemmSm80>();

}  // namespace octile::cuda
