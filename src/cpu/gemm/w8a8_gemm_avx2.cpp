// w8a8 with vpmaddubsw on 32 bytes: half a panel, 8 channels of 4 terms. The instruction multiplies u8 by s8 and adds
// neighbours in 16 bits with saturation, so |b| (at most 128) is multiplied by a with the sign of b (at most 127, which
// is why a must not hold -128): 2 * 128 * 127 fits 16 bits, and every sum is exact. Where b is small enough, the sums
// of two lines fit 16 bits too, which saves a quarter of the multiplications: 176 becomes 220 GOPS (one thread, Zen 5).
#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/w8a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_AVX2 __attribute__((target("avx2")))

namespace octile::cpu {

namespace {

constexpr int kRows = 4;  // 4 x 2 sums, b, |b|, a and the ones fill 16 registers, with two for products
constexpr int kHalf = 8;  // channels

OCTILE_AVX2 inline __attribute__((always_inline)) __m256i load(const std::uint8_t* half) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half));
}

// 16-bit sums of neighbouring products of four terms of a row, for half a panel.
OCTILE_AVX2 inline __attribute__((always_inline)) __m256i pairs_of(const std::uint8_t* left, __m256i right,
                                                                   __m256i magnitude) {
  std::int32_t lane;
  std::memcpy(&lane, left, sizeof lane);
  return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(_mm256_set1_epi32(lane), right));
}

// (rows, 2 * panels) sums in registers, from panel `first` on, over terms begin .. end - 1. With `narrow`, the pairs of
// eight terms fit 16 bits together: one addition to 32 bits serves both lines.
template <int rows, int panels, bool narrow>
OCTILE_AVX2 inline __attribute__((always_inline)) void multiply_terms(const TileRun& run, const std::uint8_t* b,
                                                                      std::int64_t begin, std::int64_t end,
                                                                      __m256i (&sum)[rows][2 * panels]) {
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr std::int64_t kStep = narrow ? 2 * kLaneBytes : kLaneBytes;
  for (std::int64_t c = begin; c < end; c += kStep) {
#pragma GCC unroll 8
    for (int j = 0; j < 2 * panels; ++j) {
      const std::uint8_t* half = b + j / 2 * run.b_stride + c * kPanelChannels + j % 2 * kPanelLine / 2;
      if (rows < kFewRows && j % 2 == 0) _mm_prefetch(half + kAhead, _MM_HINT_T0);
      const __m256i right = load(half);
      const __m256i magnitude = _mm256_abs_epi8(right);
      [[maybe_unused]] __m256i next, next_magnitude;
      if constexpr (narrow) {
        next = load(half + kPanelLine);
        next_magnitude = _mm256_abs_epi8(next);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const std::uint8_t* left = run.a + i * run.a_stride + c;
        __m256i pairs = pairs_of(left, right, magnitude);
        if constexpr (narrow) pairs = _mm256_add_epi16(pairs, pairs_of(left + kLaneBytes, next, next_magnitude));
        sum[i][j] = _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
}

template <int rows, int panels>
OCTILE_AVX2 void multiply_tile(const TileRun& run, int first) {
  constexpr int vectors = 2 * panels;
  __m256i sum[rows][vectors];
  auto* sums = reinterpret_cast<__m256i*>(run.sums + first * kPanelChannels);
  const std::int64_t stride = run.sums_stride / kHalf;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
      sum[i][j] = run.accumulate ? _mm256_loadu_si256(sums + i * stride + j) : _mm256_setzero_si256();
    }
  }
  const std::uint8_t* b = run.b + first * run.b_stride;
  if (panels == 1 && run.marks) {
    const std::uint8_t* marks = run.marks + first * kMostMarks;
    for (std::int64_t c = 0; c < run.depth; c += kMarkedDepth) {
      if (marks[c / kMarkedDepth]) {
        multiply_terms<rows, panels, true>(run, b, c, c + kMarkedDepth, sum);
      } else {
        multiply_terms<rows, panels, false>(run, b, c, c + kMarkedDepth, sum);
      }
    }
  } else {
    multiply_terms<rows, panels, false>(run, b, 0, run.depth, sum);
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) _mm256_storeu_si256(sums + i * stride + j, sum[i][j]);
  }
}

// Marks 64 terms whose four magnitudes that meet in 16 bits add up to at most 258 in every lane: 127 * 258 = 32,766.
// Weights in a bell curve pass nearly always.
OCTILE_AVX2 void mark(const std::uint8_t* panel, std::int64_t depth, std::uint8_t* marks) {
  const __m256i ones = _mm256_set1_epi8(1);
  const __m256i most = _mm256_set1_epi16(258);
  for (std::int64_t c = 0; c < depth; c += kMarkedDepth) {
    __m256i beyond = _mm256_setzero_si256();
    for (std::int64_t t = c; t < c + kMarkedDepth; t += 2 * kLaneBytes) {
      for (int j = 0; j < 2; ++j) {
        const std::uint8_t* half = panel + t * kPanelChannels + j * kPanelLine / 2;
        const __m256i first = _mm256_maddubs_epi16(_mm256_abs_epi8(load(half)), ones);
        const __m256i second = _mm256_maddubs_epi16(_mm256_abs_epi8(load(half + kPanelLine)), ones);
        beyond = _mm256_or_si256(beyond, _mm256_cmpgt_epi16(_mm256_add_epi16(first, second), most));
      }
    }
    marks[c / kMarkedDepth] = _mm256_testz_si256(beyond, beyond) ? 1 : 0;
  }
}

template <int rows, int panels>
void multiply_rows(const TileRun& run) {
  int j = 0;
  for (; j + panels <= run.panels; j += panels) multiply_tile<rows, panels>(run, j);
  for (; j < run.panels; ++j) multiply_tile<rows, 1>(run, j);
}

void multiply(const TileRun& run) {
  using Rows = void (*)(const TileRun&);
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 4>, multiply_rows<2, 2>, multiply_rows<3, 1>,
                                         multiply_rows<4, 1>};
  kTiles[run.rows - 1](run);
}

constexpr PanelKernel kKernel = {LeftForm::symmetric, kRows, 1, 1024, multiply, mark, nullptr, nullptr};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

std::size_t workspace(const GemmProblem& problem) { return panels_workspace(kKernel, problem); }

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avx2 = {
    .name = "w8a8_gemm_avx2",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::avx2>,
    .cost = at_rate<180>,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
