// w4a8 for every GPU from Ampere on, every type, stride and alignment, weights packed or not: device/simt_gemm.cuh.
#include "cuda/device/simt_gemm.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a8_gemm_sm80";

template <class Real>
using Product = ByteProduct<Real, NibbleCodec>;

void load(const GemmProblem& p) {
  p.scale == DType::f64 ? prepare(kName, simt_gemm_kernel<Product<double>>)
                        : prepare(kName, simt_gemm_kernel<Product<float>>);
}

void launch(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  p.scale == DType::f64 ? enqueue_simt<Product<double>>(kName, p, o, launch.stream)
                        : enqueue_simt<Product<float>>(kName, p, o, launch.stream);
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = simt_supports,
    .cost = simt_cost,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
