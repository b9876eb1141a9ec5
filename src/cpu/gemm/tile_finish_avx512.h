// The end of a tile's sums in vectors of 16 channels, as FinishRows does it. The file that includes this says
// OCTILE_TILE, the target of its functions: AVX-512 F, BW and VL at least.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/gemm/integer_panels.h"
#include "cpu/support/narrow_x86.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr __mmask16 kAllLanes = 0xffff;

OCTILE_TILE_INLINE void store_y(const TileFinish& f, std::int64_t at, __mmask16 mask, __m512 y) {
  if (f.y_type == DType::f32) return _mm512_mask_storeu_ps(static_cast<float*>(f.y) + at, mask, y);
  const __m256i narrow = f.y_type == DType::f16 ? to_halves(y) : to_bfloats(y);
  _mm256_mask_storeu_epi16(static_cast<std::uint16_t*>(f.y) + at, mask, narrow);
}

// Rows of y from `row` of the part on, from panel `first` on.
template <int j = 0, int rows, int panels>
OCTILE_TILE_INLINE void finish_sums(const TileFinish& f, std::int64_t row, int first, __m512i (&sum)[rows][panels]) {
  const std::int64_t at = (first + j) * kPanelChannels;
  const auto mask =
      static_cast<__mmask16>(f.channels - at >= kPanelChannels ? kAllLanes : (1 << (f.channels - at)) - 1);
  const __m512i correction = _mm512_maskz_loadu_epi32(mask, f.correction + at);
  const __m512 right_scale = _mm512_maskz_loadu_ps(mask, f.right_scale + at);
  // To add -0 changes nothing.
  const __m512 bias = f.bias ? _mm512_maskz_loadu_ps(mask, f.bias + at) : _mm512_set1_ps(-0.0f);
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
    asm("" : "+v"(sum[i][j]));
    const __m512 acc = _mm512_maskz_cvtepi32_ps(kAllLanes, _mm512_sub_epi32(sum[i][j], correction));
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(f.left_scale[row + i]), right_scale);
    store_y(f, (row + i) * f.y_stride + at, mask, _mm512_fmadd_ps(acc, scale, bias));
  }
  if constexpr (j + 1 < panels) finish_sums<j + 1>(f, row, first, sum);
}

}  // namespace

}  // namespace octile::cpu
