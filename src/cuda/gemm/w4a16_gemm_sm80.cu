// w4a16 for every GPU from Ampere on, every type, stride and alignment, in f32 or f64, weights packed or not:
// device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemm_sm80";

template <class T>
using Product = FloatProduct<T, NibbleCodec>;

void load(const GemmProblem& p) {
  with_float_type(p.a, []<class T>(T) { prepare(kName, simt_gemm_kernel<Product<T>>); });
}

void launch(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  with_float_type(p.a, [&]<class T>(T) { enqueue_simt<Product<T>>(kName, p, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = simt_supports,
    .cost = simt_cost,
    .launch = launch,
    .prepare = load,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
