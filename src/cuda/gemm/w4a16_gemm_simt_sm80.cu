// w4a16 for every GPU from Ampere on, every type, stride and alignment, in f32 or f64, weights packed or not:
// device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kName = "w4a16_gemm_simt_sm80";
}

extern constinit const GemmKernel w4a16_gemm_simt_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = simt_supports,
    .cost = simt_cost,
    .launch = launch_float_product<NibbleCodec, kName>,
    .prepare = load_float_product<NibbleCodec, kName>,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
