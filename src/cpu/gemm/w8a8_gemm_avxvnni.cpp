// w8a8 with vpdpbusd on 32 bytes: half a panel, 8 channels of 4 terms, u8 x s8, so a is kept with 128 added.
#define OCTILE_TILE __attribute__((target("avx2,fma,f16c,avxvnni")))
#include "cpu/gemm/dots.h"
#include "cpu/gemm/tile_avx2.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kHalves;
  // 6 x 2 vectors of sums leave 4 of 16 registers for operands.
  static constexpr int kSteps[] = {8, 4, 4, 2, 2, 2};
  static constexpr Offset kOffset = Offset::channel_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int rows, int halves>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m256i (&sum)[rows][halves]) {
    for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
      if (rows >= 4 && at.later != 0) _mm_prefetch(at.b + c * kPanelChannels + at.later, _MM_HINT_T1);
      __m256i right[halves];
      const std::int64_t ahead = halves <= kHalves || c < at.near ? kAhead : at.far;
#pragma GCC unroll 8
      for (int j = 0; j < halves; ++j) {
        const std::uint8_t* half = at.b + j / 2 * run.b_stride + c * kPanelChannels + j % 2 * kPanelLine / 2;
        if (j % 2 == 0) _mm_prefetch(half + ahead, _MM_HINT_T0);
        right[j] = load(half);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m256i left = broadcast(at.a + i * run.a_stride + c);
#pragma GCC unroll 8
        for (int j = 0; j < halves; ++j) sum[i][j] = _mm256_dpbusd_avx_epi32(sum[i][j], left, right[j]);
      }
    }
  }
};

// ---- Rows of b as they are ----

struct Dots {
  static constexpr int kRows = 2;  // 3 x 4 sums with the correction, a and b fill 15 of 16 registers

  // The sums of the lanes of four vectors.
  OCTILE_TILE_INLINE static __m128i sum_lanes(const __m256i (&v)[kDotChannels]) {
    const __m256i fours = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  }

  template <int rows, bool first>
  OCTILE_TILE __attribute__((noinline)) static void tile(const DotRun& run, const DotPlace& at) {
    constexpr std::int64_t kStep = 32;
    __m256i sum[rows + 1][kDotChannels];
#pragma GCC unroll 4
    for (int i = 0; i <= rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kDotChannels; ++j) sum[i][j] = _mm256_setzero_si256();
    }
    const std::uint8_t* right[kDotChannels];
#pragma GCC unroll 4
    for (int j = 0; j < kDotChannels; ++j) right[j] = at.right[j];
    const std::uint8_t* left_at = at.left;
    const std::int64_t a_stride = run.a_stride;
    const std::int64_t depth = at.depth;
    const std::int64_t near = at.ahead(run, depth);
    const std::int64_t far = at.ahead(run, 0);
    const auto step = [&](std::int64_t c, std::int64_t ahead)
        __attribute__((always_inline, target("avx2,fma,f16c,avxvnni"))) {
      __m256i left[rows];
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) left[i] = load(left_at + i * a_stride + c);
#pragma GCC unroll 4
      for (int j = 0; j < kDotChannels; ++j) {
        const __m256i line = load(right[j] + c);
        if constexpr (first) {
          _mm_prefetch(right[j] + c + ahead, _MM_HINT_T0);
          sum[rows][j] = _mm256_dpbusd_avx_epi32(sum[rows][j], _mm256_set1_epi8(-128), line);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) sum[i][j] = _mm256_dpbusd_avx_epi32(sum[i][j], left[i], line);
      }
    };
    std::int64_t c = 0;
    for (; c + kStep <= depth; c += kStep) step(c, depth - c > kDotAhead ? near : far);
      // Without this GCC 12 keeps copies of the sums.
#pragma GCC unroll 4
    for (int i = 0; i <= rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kDotChannels; ++j) asm("" : "+x"(sum[i][j]));
    }
    alignas(32) std::uint8_t last[kDotChannels][kStep] = {};
    if (c < depth) {
      for (int j = 0; j < kDotChannels; ++j) {
        std::memcpy(last[j], right[j] + c, static_cast<std::size_t>(depth - c));
        right[j] = last[j];
      }
      left_at += c;
      step(0, 0);
    }
    store_dots<Dots, first>(run, at, sum);
  }
};

constexpr PanelKernel kKernel = [] {
  PanelKernel kernel = panel_kernel<Tile, Terms>(AForm::offset);
  kernel.stream_rows = 6;
  kernel.finishes = true;
  kernel.dot = dot<Dots>;
  kernel.dot_rows = 12;
  return kernel;
}();

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avxvnni = panels_row<kKernel>(
    "w8a8_gemm_avxvnni", {Operation::gemm, kW8A8}, needs<Isa::avxvnni>, at_rate<350, kKernel.dot_rows>);

extern constinit const GemmKernel w8a8_blocked_gemm_avxvnni =
    panels_row<kKernel>("w8a8_blocked_gemm_avxvnni", {Operation::blocked_gemm}, needs<Isa::avxvnni>, at_rate<320>);

}  // namespace octile::cpu
