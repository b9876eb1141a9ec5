// w4a16 of bf16 with vdpbf16ps: y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, g]) * b_scale[j, g]) + bias[j]; b s4. Any
// number of rows: a row has the same bits among few and many.
#include "cpu/gemm/bf16_pairs.h"

namespace octile::cpu {

extern constinit const GemmKernel w4a16_gemm_avx512bf16 = {
    .name = "w4a16_gemm_avx512bf16",
    .task = {Operation::gemm, kW4A16},
    .supports = needs_bf16<Isa::avx512bf16>,
    .cost = bf16_cost<330>,
    .workspace = weight_workspace<NibblePairs>,
    .launch = multiply_weight<NibblePairs>,
    .bound = Bound::flushed_sum,
};

}  // namespace octile::cpu
