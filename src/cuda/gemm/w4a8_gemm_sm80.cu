// w4a8_gemm_sm80, on every GPU from Ampere on: y (m, n), over the groups g of k in order,
//
//   t = fma(f32(sum_c a[i, c] * (q[j, c] - z[j, g])), s[j, g], t), then y[i, j] = fma(t, a_scale[i], bias[j])
//
// a s8. The sums of a group are exact in s32, so the bits are those of every other backend. A warp has whole groups of
// its part of a tile, in order: grouped_weight_gemm_sm80.cuh.
#include "cuda/gemm/w4a8_gemm_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW4A8GemmSm80 = "w4a8_gemm_sm80";
}

extern constinit const GemmKernel w4a8_gemm_sm80 = grouped_weight_sm80::row<w4a8_sm80::Format, kW4A8GemmSm80>();

}  // namespace octile::cuda
