// w8a8_gemm of each expert's rows, with a scale per group of the weight, for every GPU from Ampere on, every type,
// stride and alignment: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW8A8GroupedGemmSimtSm80 = "w8a8_grouped_gemm_simt_sm80";
}

extern constinit const GemmKernel w8a8_grouped_gemm_simt_sm80 =
    simt_row<ByteCodec, kW8A8, kW8A8GroupedGemmSimtSm80, true>();

}  // namespace octile::cuda
