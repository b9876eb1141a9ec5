// w4a16 for every GPU from Ampere on, every type, stride and alignment, in f32 or f64, weights packed or not:
// device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW4A16GemmSimtSm80 = "w4a16_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a16_gemm_simt_sm80 = simt_row<NibbleCodec, kW4A16, kW4A16GemmSimtSm80>();

}  // namespace octile::cuda
