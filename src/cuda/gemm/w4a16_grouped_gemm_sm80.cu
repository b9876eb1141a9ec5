// w4a16_gemm_sm80 of each expert's rows, on every GPU from Ampere on: a block finds its tile among the experts'
// (device/experts.cuh), and then is a block of the dense kernel. Rows of a are gathered on the way into shared memory.
// The order of the terms does not depend on m.
#include "cuda/gemm/w4a16_gemm_sm80.cuh"

namespace octile::cuda {

namespace {

using namespace w4a16_sm80;

constexpr std::string_view kName = "w4a16_grouped_gemm_sm80";

}  // namespace

extern constinit const GemmKernel w4a16_grouped_gemm_sm80 = {
    .name = kName,
    .task = {Operation::grouped_gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost<Tiles>,
    .launch = [](const GemmProblem& p, const GemmOperands& o,
                 const Launch& launch) { launch_grouped<Tiles, kName>(p, o, launch, kWithArithmetic); },
    .prepare = [](const GemmProblem& p) { load_grouped<Tiles, kName>(p, kWithArithmetic); },
    .detail = detail<Tiles>,
    .aligned = aligned,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
