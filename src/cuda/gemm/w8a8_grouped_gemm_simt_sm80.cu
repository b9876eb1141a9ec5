// w8a8_gemm of each expert's rows, with a scale per group of the weight, for every GPU from Ampere on, every type,
// stride and alignment: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kName = "w8a8_grouped_gemm_simt_sm80";
}

extern constinit const GemmKernel w8a8_grouped_gemm_simt_sm80 = simt_row<ByteCodec, kW8A8, kName, true>();

}  // namespace octile::cuda
