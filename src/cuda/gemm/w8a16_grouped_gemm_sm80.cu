// w8a16_group_gemm_sm80 of each expert's rows: row() of grouped_weight_gemm_sm80_launch.cuh. The order of the
// terms does not depend on m.
#include "cuda/gemm/w8a16_group_gemm_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW8A16GroupedGemmSm80 = "w8a16_grouped_gemm_sm80";
}

extern constinit const GemmKernel w8a16_grouped_gemm_sm80 =
    grouped_weight_sm80::row<w8a16_sm80::Format, kW8A16GroupedGemmSm80, true>();

}  // namespace octile::cuda
