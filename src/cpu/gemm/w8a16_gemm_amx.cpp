// w8a16 of bf16 on the tile registers: y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale[j, g]) + bias[j]; b s8. Any
// number of rows: a row has the same bits among few and many.
#include "cpu/gemm/bf16_tiles.h"

namespace octile::cpu {

extern constinit const GemmKernel w8a16_gemm_amx = {
    .name = "w8a16_gemm_amx",
    .task = {Operation::gemm, kW8A16},
    .supports = needs_bf16<Isa::amx>,
    .cost = bf16_cost<kTileGflops>,
    .workspace = weight_workspace<BytePairs, AmxTile<BytePairs>>,
    .launch = multiply_weight<BytePairs, AmxTile<BytePairs>>,
    .bound = Bound::flushed_sum,
};

}  // namespace octile::cpu
