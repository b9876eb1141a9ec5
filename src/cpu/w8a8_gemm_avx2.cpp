// w8a8 with vpmaddubsw on 32 bytes: half a panel, 8 channels of 4 terms. The instruction multiplies u8 by s8 and adds
// neighbours in 16 bits with saturation, so |b| (at most 128) is multiplied by a with the sign of b (at most 127, which
// is why a must not hold -128): 2 * 128 * 127 fits 16 bits, and every sum is exact.
#include <immintrin.h>

#include "cpu/w8a8_panels.h"
#include "packed_weight.h"

#define OCTILE_AVX2 __attribute__((target("avx2")))

namespace octile::cpu {

namespace {

constexpr int kRows = 4;  // 4 x 2 sums, b, |b|, a and the ones fill 16 registers, with two for products
constexpr int kHalf = 8;  // channels

// (rows, 2 * panels) sums in registers, from panel `first` on.
template <int rows, int panels>
OCTILE_AVX2 void multiply_tile(const TileRun& run, int first) {
  constexpr int vectors = 2 * panels;
  __m256i sum[rows][vectors];
  auto* sums = reinterpret_cast<__m256i*>(run.sums + first * kPanelChannels);
  constexpr int stride = kSumsStride / kHalf;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
      sum[i][j] = run.accumulate ? _mm256_loadu_si256(sums + i * stride + j) : _mm256_setzero_si256();
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  const std::uint8_t* b = run.b + first * run.b_stride;
  for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
      const std::uint8_t* half = b + j / 2 * run.b_stride + c * kPanelChannels + j % 2 * kPanelLine / 2;
      const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half));
      const __m256i magnitude = _mm256_abs_epi8(right);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m256i left = _mm256_set1_epi32(*reinterpret_cast<const std::int32_t*>(run.a + i * run.a_stride + c));
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(left, right));
        sum[i][j] = _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) _mm256_storeu_si256(sums + i * stride + j, sum[i][j]);
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

constexpr PanelKernel kKernel = {LeftForm::symmetric, kRows, 1, 4, 1024, multiply, nullptr, nullptr};

}  // namespace

void w8a8_gemm_avx2(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

std::size_t w8a8_gemm_avx2_workspace(const GemmProblem& problem) { return panels_workspace(kKernel, problem); }

}  // namespace octile::cpu
