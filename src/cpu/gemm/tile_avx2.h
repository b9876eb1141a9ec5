// Vectors of 32 bytes, which hold 8 channels of a row, half a panel. The file that includes this says OCTILE_TILE, the
// target of its functions.
#pragma once

#include <immintrin.h>

#define OCTILE_TILE_INLINE OCTILE_TILE inline __attribute__((always_inline))

namespace octile::cpu {

namespace {

using Integers = __m256i;
using Floats = __m256;

OCTILE_TILE_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace

}  // namespace octile::cpu

#include "cpu/gemm/tile_x86.h"
