// w4a16 on any CPU: y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, g]) * b_scale[j, g]) + bias[j]; b s4.
#include "cpu/gemm/weight_gemm.h"

namespace octile::cpu {

void w4a16_gemm_portable(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  multiply_weight<NibbleVectors>(p, o, launch);
}

std::size_t w4a16_gemm_portable_workspace(const GemmProblem& p) { return weight_workspace<NibbleVectors>(p); }

}  // namespace octile::cpu
