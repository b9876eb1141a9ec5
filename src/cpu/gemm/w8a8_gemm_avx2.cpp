// w8a8 with vpmaddubsw on 32 bytes: half a panel, 8 channels of 4 terms. The instruction multiplies u8 by s8 and adds
// neighbours in 16 bits with saturation, so |b| (at most 128) is multiplied by a with the sign of b (at most 127, which
// is why a must not hold -128): 2 * 128 * 127 fits 16 bits, and every sum is exact. Where b is small enough, the sums
// of two lines fit 16 bits too, which saves a quarter of the multiplications: 176 becomes 220 GOPS (one thread, Zen 5).
#define OCTILE_TILE __attribute__((target("avx2,fma,f16c")))
#include "cpu/gemm/tile_avx2.h"

namespace octile::cpu {

namespace {

// 16-bit sums of neighbouring products of four terms of a row, for half a panel.
OCTILE_TILE_INLINE __m256i pairs_of(const std::uint8_t* left, __m256i right, __m256i magnitude) {
  return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(broadcast(left), right));
}

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kHalves;
  // 4 x 2 sums, b, |b|, a and the ones fill 16 registers, with two for products.
  static constexpr int kSteps[] = {8, 4, 2, 2};
  static constexpr Offset kOffset = Offset::none;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int rows, int halves>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m256i (&sum)[rows][halves]) {
    if (halves != kHalves || !at.narrow) return multiply_range<false>(run, at, {0, run.depth}, sum);
    for (std::int64_t c = 0; c < run.depth; c += kNarrowDepth) {
      if (at.narrow[c / kNarrowDepth]) {
        multiply_range<true>(run, at, {c, c + kNarrowDepth}, sum);
      } else {
        multiply_range<false>(run, at, {c, c + kNarrowDepth}, sum);
      }
    }
  }

 private:
  struct Range {
    std::int64_t first, end;
  };

  // With `narrow`, the pairs of eight terms fit 16 bits together: one addition to 32 bits serves both lines.
  template <bool narrow, int rows, int halves>
  OCTILE_TILE_INLINE static void multiply_range(const TileRun& run, const TileOperands& at, const Range& terms,
                                                __m256i (&sum)[rows][halves]) {
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr std::int64_t kStep = narrow ? 2 * kLaneBytes : kLaneBytes;
    for (std::int64_t c = terms.first; c < terms.end; c += kStep) {
      if (rows == 4 && at.later != 0) {
        _mm_prefetch(at.b + c * kPanelChannels + at.later, _MM_HINT_T1);
        if constexpr (narrow) _mm_prefetch(at.b + c * kPanelChannels + kPanelLine + at.later, _MM_HINT_T1);
      }
      const std::int64_t ahead = halves <= kHalves || c < at.near ? kAhead : at.far;
#pragma GCC unroll 8
      for (int j = 0; j < halves; ++j) {
        const std::uint8_t* half = at.b + j / 2 * run.b_stride + c * kPanelChannels + j % 2 * kPanelLine / 2;
        if (j % 2 == 0) _mm_prefetch(half + ahead, _MM_HINT_T0);
        const __m256i right = load(half);
        const __m256i magnitude = _mm256_abs_epi8(right);
        [[maybe_unused]] __m256i next, next_magnitude;
        if constexpr (narrow) {
          next = load(half + kPanelLine);
          next_magnitude = _mm256_abs_epi8(next);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
          const std::uint8_t* left = at.a + i * run.a_stride + c;
          __m256i pairs = pairs_of(left, right, magnitude);
          if constexpr (narrow) pairs = _mm256_add_epi16(pairs, pairs_of(left + kLaneBytes, next, next_magnitude));
          sum[i][j] = _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
  }
};

// Flags 64 terms whose four magnitudes that meet in 16 bits add up to at most 258 in every lane: 127 * 258 = 32,766.
// Weights in a bell curve pass nearly always.
OCTILE_TILE void find_narrow(const std::uint8_t* panel, std::int64_t depth, std::uint8_t* narrow) {
  const __m256i ones = _mm256_set1_epi8(1);
  const __m256i max = _mm256_set1_epi16(258);
  for (std::int64_t c = 0; c < depth; c += kNarrowDepth) {
    __m256i beyond = _mm256_setzero_si256();
    for (std::int64_t t = c; t < c + kNarrowDepth; t += 2 * kLaneBytes) {
      for (int j = 0; j < kHalves; ++j) {
        const std::uint8_t* half = panel + t * kPanelChannels + j * kPanelLine / 2;
        const __m256i first = _mm256_maddubs_epi16(_mm256_abs_epi8(load(half)), ones);
        const __m256i second = _mm256_maddubs_epi16(_mm256_abs_epi8(load(half + kPanelLine)), ones);
        beyond = _mm256_or_si256(beyond, _mm256_cmpgt_epi16(_mm256_add_epi16(first, second), max));
      }
    }
    narrow[c / kNarrowDepth] = _mm256_testz_si256(beyond, beyond) ? 1 : 0;
  }
}

constexpr PanelKernel kKernel = [] {
  PanelKernel kernel = panel_kernel<Tile, Terms>(AForm::symmetric);
  kernel.find_narrow = find_narrow;
  kernel.stream_rows = 4;
  kernel.finishes = true;
  return kernel;
}();

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avx2 =
    panels_row<kKernel>("w8a8_gemm_avx2", {Operation::gemm, kW8A8}, needs<Isa::avx2>, at_rate<180>);

extern constinit const GemmKernel w8a8_blocked_gemm_avx2 =
    panels_row<kKernel>("w8a8_blocked_gemm_avx2", {Operation::blocked_gemm}, needs<Isa::avx2>, at_rate<170>);

}  // namespace octile::cpu
