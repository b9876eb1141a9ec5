// Vectors of AVX-512 VNNI, which hold 16 channels of a row, a panel.
#pragma once

#include <immintrin.h>

#define OCTILE_TILE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define OCTILE_TILE_INLINE OCTILE_TILE inline __attribute__((always_inline))

namespace octile::cpu {

namespace {

using Integers = __m512i;
using Floats = __m512;

OCTILE_TILE_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

}  // namespace

}  // namespace octile::cpu

#include "cpu/gemm/tile_x86.h"
