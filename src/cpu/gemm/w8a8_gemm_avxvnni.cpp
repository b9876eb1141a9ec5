// w8a8 with vpdpbusd on 32 bytes: half a panel, 8 channels of 4 terms, u8 x s8, so a is kept with 128 added.
#include <immintrin.h>

#include "cpu/gemm/w8a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_AVXVNNI __attribute__((target("avx2,avxvnni")))

namespace octile::cpu {

namespace {

constexpr int kRows = 6;  // 6 x 2 vectors of sums leave 4 of 16 registers for operands
constexpr int kHalf = 8;  // channels

// (rows, 2 * panels) sums in registers, from panel `first` on.
template <int rows, int panels>
OCTILE_AVXVNNI void multiply_tile(const TileRun& run, int first) {
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
  for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
    __m256i right[vectors];
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
      const std::uint8_t* half = b + j / 2 * run.b_stride + c * kPanelChannels + j % 2 * kPanelLine / 2;
      if (rows <= kFewRows && j % 2 == 0) _mm_prefetch(half + kAhead, _MM_HINT_T0);
      right[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half));
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const __m256i left = _mm256_set1_epi32(*reinterpret_cast<const std::int32_t*>(run.a + i * run.a_stride + c));
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) sum[i][j] = _mm256_dpbusd_avx_epi32(sum[i][j], left, right[j]);
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
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 4>, multiply_rows<2, 2>, multiply_rows<3, 2>,
                                         multiply_rows<4, 1>, multiply_rows<5, 1>, multiply_rows<6, 1>};
  kTiles[run.rows - 1](run);
}

constexpr PanelKernel kKernel = {LeftForm::offset, kRows, 1, 1024, multiply, nullptr, nullptr, nullptr};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

std::size_t workspace(const GemmProblem& problem) { return panels_workspace(kKernel, problem); }

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avxvnni = {
    .name = "w8a8_gemm_avxvnni",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::avxvnni>,
    .cost = at_rate<350>,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
