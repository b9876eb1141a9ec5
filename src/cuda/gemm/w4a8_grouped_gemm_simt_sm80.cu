// w4a8_gemm of each expert's rows, weights packed or not, for every GPU from Ampere on, every type, stride and
// alignment: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kName = "w4a8_grouped_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a8_grouped_gemm_simt_sm80 = {
    .name = kName,
    .task = {Operation::grouped_gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = simt_supports,
    .cost = simt_cost,
    .launch = launch_expert_byte_product<NibbleCodec, kName>,
    .prepare = load_expert_byte_product<NibbleCodec, kName>,
};

}  // namespace octile::cuda
