// Floats in a vector rounded to 16 bits: the bits of Half and BFloat16, those of a NaN included.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#define OCTILE_TARGET_F16C __attribute__((target("avx2,f16c")))
#define OCTILE_INLINE_F16C __attribute__((target("avx2,f16c"), always_inline)) inline
#define OCTILE_INLINE_AVX512 __attribute__((target("avx512f"), always_inline)) inline

namespace octile::cpu {

// F16C keeps more of a NaN.
OCTILE_INLINE_F16C __m128i to_halves(__m256 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 quiet = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
  const __m256 nan = _mm256_or_ps(_mm256_and_ps(x, sign), quiet);
  const __m256 same_nan = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_cvtps_ph(same_nan, _MM_FROUND_TO_NEAREST_INT);
}

OCTILE_INLINE_AVX512 __m256i to_halves(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN));
  const __m512i same_nan = _mm512_mask_or_epi32(bits, nan, sign, _mm512_set1_epi32(0x7fc00000));
  // Without a mask g++ 12 warns, here and below.
  return _mm512_maskz_cvtps_ph(0xffff, _mm512_castsi512_ps(same_nan), _MM_FROUND_TO_NEAREST_INT);
}

// In 32 bits each. AVX-512 BF16 takes subnormal numbers for zero, so it is not used.
OCTILE_INLINE_F16C __m256i to_wide_bfloats(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 all = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
  return _mm256_srli_epi32(_mm256_castps_si256(all), 16);
}

OCTILE_INLINE_F16C __m128i to_bfloats(__m256 x) {
  const __m256i wide = to_wide_bfloats(x);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

OCTILE_INLINE_AVX512 __m256i to_bfloats(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i all = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_srli_epi32(0xffff, all, 16));
}

}  // namespace octile::cpu
