// w4a16_gemm of each expert's rows, weights packed or not, for every GPU from Ampere on, every type, stride and
// alignment, in f32 or f64: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW4A16GroupedGemmSimtSm80 = "w4a16_grouped_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a16_grouped_gemm_simt_sm80 =
    simt_row<NibbleCodec, kW4A16, kW4A16GroupedGemmSimtSm80, true>();

}  // namespace octile::cuda
