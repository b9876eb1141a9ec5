// w8a16 of bf16 with vdpbf16ps: y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale[j, g]) + bias[j]; b s8. Any number of
// rows: a row has the same bits among few and many.
#include "cpu/gemm/bf16_pairs.h"

namespace octile::cpu {

extern constinit const GemmKernel w8a16_gemm_avx512bf16 = {
    .name = "w8a16_gemm_avx512bf16",
    .task = {Operation::gemm, kW8A16},
    .supports = needs_bf16<Isa::avx512bf16>,
    .cost = bf16_cost<330>,
    .workspace = weight_workspace<BytePairs>,
    .launch = multiply_weight<BytePairs>,
    .bound = Bound::flushed_sum,
};

}  // namespace octile::cpu
