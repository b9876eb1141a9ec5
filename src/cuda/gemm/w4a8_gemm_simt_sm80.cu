// w4a8 for every GPU from Ampere on, every type, stride and alignment, weights packed or not: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kName = "w4a8_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a8_gemm_simt_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = simt_supports,
    .cost = simt_cost,
    .launch = launch_byte_product<NibbleCodec, kName>,
    .prepare = load_byte_product<NibbleCodec, kName>,
};

}  // namespace octile::cuda
