// w4a16 on any CPU: y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, g]) * b_scale[j, g]) + bias[j]; b s4.
#include "cpu/gemm/weight_gemm.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

namespace {

Cost cost(const GemmProblem& p) {
  Cost cost = portable_float_cost(p);
  cost.seconds += packing_seconds(p, 30e9);
  return cost;
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_portable = {
    .name = "w4a16_gemm_portable",
    .task = {Operation::gemm, kW4A16},
    .cost = cost,
    .workspace = weight_workspace<NibbleVectors>,
    .launch = multiply_weight<NibbleVectors>,
    .bound = Bound::sum,
};

}  // namespace octile::cpu
