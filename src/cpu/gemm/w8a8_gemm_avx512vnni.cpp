// w8a8 with vpdpbusd on 64 bytes: 16 channels of 4 terms, u8 x s8, so a is kept with 128 added.
#define OCTILE_TILE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#include "cpu/gemm/dots.h"
#include "cpu/gemm/tile_avx512vnni.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = 1;
  // 12 x 2 vectors of sums leave 8 of 32 registers for operands.
  static constexpr int kSteps[] = {4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2};
  static constexpr Offset kOffset = Offset::channel_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int rows, int panels>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m512i (&sum)[rows][panels]) {
    for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
      if (rows >= 4 && panels == kMaxPanels && at.later != 0) {
        const std::uint8_t* later = at.b + c * kPanelChannels + at.later;
        _mm_prefetch(later, _MM_HINT_T1);
        if (run.later_panels > 1) _mm_prefetch(later + run.b_stride, _MM_HINT_T1);
      }
      const std::int64_t ahead = rows > 4 || c < at.near ? kAhead : at.far;
      __m512i right[panels];
#pragma GCC unroll 4
      for (int j = 0; j < panels; ++j) {
        const std::uint8_t* line = at.b + j * run.b_stride + c * kPanelChannels;
        _mm_prefetch(line + ahead, _MM_HINT_T0);
        right[j] = _mm512_loadu_si512(line);
      }
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        const __m512i left = broadcast(at.a + i * run.a_stride + c);
#pragma GCC unroll 4
        for (int j = 0; j < panels; ++j) sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], left, right[j]);
      }
    }
  }
};

// ---- Rows of b as they are ----

struct Dots {
  static constexpr int kRows = 4;

  // The sums of the lanes of four vectors.
  OCTILE_TILE_INLINE static __m128i sum_lanes(const __m512i (&v)[kDotChannels]) {
    const __m512i fours = sum_quarters(v);
    const __m256i half = _mm256_add_epi32(_mm512_maskz_extracti64x4_epi64(0xf, fours, 0),
                                          _mm512_maskz_extracti64x4_epi64(0xf, fours, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }

  template <int rows, bool first>
  OCTILE_TILE __attribute__((noinline)) static void tile(const DotRun& run, const DotPlace& at) {
    __m512i sum[rows + 1][kDotChannels];
#pragma GCC unroll 8
    for (int i = 0; i <= rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kDotChannels; ++j) sum[i][j] = _mm512_setzero_si512();
    }
    const std::uint8_t* right[kDotChannels];
#pragma GCC unroll 4
    for (int j = 0; j < kDotChannels; ++j) right[j] = at.right[j];
    const std::int64_t near = at.ahead(run, at.depth);
    const std::int64_t far = at.ahead(run, 0);
    const std::uint8_t* left_at = at.left;
    const std::int64_t a_stride = run.a_stride;
    const std::int64_t depth = at.depth;
    for (std::int64_t c = 0; c < depth; c += kPanelLine) {
      const std::int64_t rest = depth - c;
      const __mmask64 mask = rest >= kPanelLine ? ~std::uint64_t{0} : (std::uint64_t{1} << rest) - 1;
      const std::int64_t ahead = rest > kDotAhead ? near : far;
      __m512i left[rows];
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) left[i] = _mm512_loadu_si512(left_at + i * a_stride + c);
#pragma GCC unroll 4
      for (int j = 0; j < kDotChannels; ++j) {
        const __m512i line = _mm512_maskz_loadu_epi8(mask, right[j] + c);
        if constexpr (first) {
          _mm_prefetch(right[j] + c + ahead, _MM_HINT_T0);
          sum[rows][j] = _mm512_dpbusd_epi32(sum[rows][j], _mm512_set1_epi8(-128), line);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], left[i], line);
      }
    }
    // Without this GCC 12 keeps copies of the sums.
#pragma GCC unroll 8
    for (int i = 0; i <= rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kDotChannels; ++j) asm("" : "+v"(sum[i][j]));
    }
    store_dots<Dots, first>(run, at, sum);
  }
};

constexpr PanelKernel kKernel = [] {
  PanelKernel kernel = panel_kernel<Tile, Terms>(AForm::offset);
  kernel.stream_rows = 6;
  kernel.finishes = true;
  kernel.dot = dot<Dots>;
  kernel.dot_rows = 48;
  return kernel;
}();

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avx512vnni = panels_row<kKernel>(
    "w8a8_gemm_avx512vnni", {Operation::gemm, kW8A8}, needs<Isa::avx512vnni>, at_rate<700, kKernel.dot_rows>);

extern constinit const GemmKernel w8a8_blocked_gemm_avx512vnni = panels_row<kKernel>(
    "w8a8_blocked_gemm_avx512vnni", {Operation::blocked_gemm}, needs<Isa::avx512vnni>, at_rate<600>);

}  // namespace octile::cpu
