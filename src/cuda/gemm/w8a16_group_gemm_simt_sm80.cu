// w8a16 forward, with a scale per group, channel or tensor, for every GPU from Ampere on, every type, stride and
// alignment, in f32 or f64: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {
constexpr std::string_view kName = "w8a16_group_gemm_simt_sm80";
}

extern constinit const GemmKernel w8a16_group_gemm_simt_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW8A16},
    .device = DeviceType::cuda,
    .supports = simt_supports,
    .cost = simt_cost,
    .launch = launch_float_product<ByteCodec, kName>,
    .prepare = load_float_product<ByteCodec, kName>,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
