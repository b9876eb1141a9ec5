// w4a16 for every GPU from Ampere on, every type, stride and alignment, in f32 or f64, weights packed or not:
// device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kName = "w4a16_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a16_gemm_simt_sm80 = simt_row<NibbleCodec, kW4A16, kName>();

}  // namespace octile::cuda
