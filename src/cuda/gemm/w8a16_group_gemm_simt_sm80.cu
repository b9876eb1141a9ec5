// w8a16 forward, with a scale per group, channel or tensor, for every GPU from Ampere on, every type, stride and
// alignment, in f32 or f64: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kW8A16GroupGemmSimtSm80 = "w8a16_group_gemm_simt_sm80";
}

extern constinit const GemmKernel w8a16_group_gemm_simt_sm80 = simt_row<ByteCodec, kW8A16, kW8A16GroupGemmSimtSm80>();

}  // namespace octile::cuda
