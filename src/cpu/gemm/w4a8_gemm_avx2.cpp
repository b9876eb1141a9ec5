// w4a8 with vpmaddubsw on 32 bytes: half a panel, 8 channels of 4 terms, twice a line. b lies in 0..15, so two products
// of 128 add up to 3,840 at most, and those of four lines still fit 16 bits: exact without the detour that w8a8 takes.
#define OCTILE_TILE __attribute__((target("avx2,fma,f16c")))
#include <algorithm>

#include "cpu/gemm/tile_avx2.h"

namespace octile::cpu {

namespace {

constexpr int kChunk = 32;  // terms whose sums fit 16 bits: 2 * 15 * 128 * 8 = 30,720

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kHalves;
  // 4 x 2 vectors of pairs, 4 of b and 2 of a; the sums go to memory.
  static constexpr int kSteps[] = {2, 2, 2, 2};
  static constexpr Offset kOffset = Offset::row_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels / 2;

  template <int rows, int halves>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m256i (&sum)[rows][halves]) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    for (std::int64_t c = 0; c < run.depth; c += kChunk) {
      const std::int64_t end = std::min<std::int64_t>(c + kChunk, run.depth);
      __m256i pairs[rows][halves];
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) pairs[i][0] = pairs[i][1] = _mm256_setzero_si256();
      for (std::int64_t t = c; t < end; t += kS4Depth) {
        const auto* line = at.b + t / kS4Depth * kPanelLine;
        _mm_prefetch(line + kAhead, _MM_HINT_T0);
        __m256i lower[halves];
        __m256i upper[halves];
#pragma GCC unroll 2
        for (int j = 0; j < halves; ++j) {
          const __m256i nibbles = load(line + j * kPanelLine / 2);
          lower[j] = _mm256_and_si256(nibbles, low);
          upper[j] = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
          const __m256i left = broadcast(at.a + i * run.a_stride + t);
          const __m256i left_upper = broadcast(at.a + i * run.a_stride + t + kLaneBytes);
#pragma GCC unroll 2
          for (int j = 0; j < halves; ++j) {
            pairs[i][j] = _mm256_add_epi16(pairs[i][j], _mm256_maddubs_epi16(lower[j], left));
            pairs[i][j] = _mm256_add_epi16(pairs[i][j], _mm256_maddubs_epi16(upper[j], left_upper));
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < halves; ++j) sum[i][j] = _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(pairs[i][j], ones));
      }
    }
  }
};

constexpr PanelKernel kKernel = panel_kernel<Tile, Terms>(AForm::plain);

}  // namespace

extern constinit const GemmKernel w4a8_gemm_avx2 =
    panels_row<kKernel>("w4a8_gemm_avx2", {Operation::gemm, kW4A8}, needs<Isa::avx2>, at_rate<300>);

}  // namespace octile::cpu
