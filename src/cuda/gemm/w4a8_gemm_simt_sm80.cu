// w4a8 for every GPU from Ampere on, every type, stride and alignment, weights packed or not: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW4A8GemmSimtSm80 = "w4a8_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a8_gemm_simt_sm80 = simt_row<NibbleCodec, kW4A8, kW4A8GemmSimtSm80>();

}  // namespace octile::cuda
