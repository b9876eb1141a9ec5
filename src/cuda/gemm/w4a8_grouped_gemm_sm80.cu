// w4a8_gemm_sm80 of each expert's rows: row() of grouped_weight_gemm_sm80_launch.cuh. The bits of an expert's
// rows are its dense plan's.
#include "cuda/gemm/w4a8_gemm_sm80.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW4A8GroupedGemmSm80 = "w4a8_grouped_gemm_sm80";
}

extern constinit const GemmKernel w4a8_grouped_gemm_sm80 =
    grouped_weight_sm80::row<w4a8_sm80::Format, kW4A8GroupedGemmSm80, true>();

}  // namespace octile::cuda
