// w8a8 with vpdpbusd on 64 bytes: 16 channels of 4 terms, u8 x s8, so a is kept with 128 added.
#include <immintrin.h>

#include "cpu/gemm/w8a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_AVX512VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

namespace octile::cpu {

namespace {

constexpr int kRows = 12;  // 12 x 2 vectors of sums leave 8 of 32 registers for operands

// (rows, panels) sums in registers, from panel `first` on.
template <int rows, int panels>
OCTILE_AVX512VNNI void multiply_tile(const TileRun& run, int first) {
  __m512i sum[rows][panels];
  std::int32_t* sums = run.sums + first * kPanelChannels;
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
      sum[i][j] =
          run.accumulate ? _mm512_loadu_si512(sums + i * run.sums_stride + j * kPanelChannels) : _mm512_setzero_si512();
    }
  }
  const std::uint8_t* b = run.b + first * run.b_stride;
  for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
    __m512i right[panels];
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
      const std::uint8_t* line = b + j * run.b_stride + c * kPanelChannels;
      if (rows <= kFewRows) _mm_prefetch(line + kAhead, _MM_HINT_T0);
      right[j] = _mm512_loadu_si512(line);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
      const __m512i left = _mm512_set1_epi32(*reinterpret_cast<const std::int32_t*>(run.a + i * run.a_stride + c));
#pragma GCC unroll 4
      for (int j = 0; j < panels; ++j) sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
      _mm512_storeu_si512(sums + i * run.sums_stride + j * kPanelChannels, sum[i][j]);
    }
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
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 4>,  multiply_rows<2, 4>,  multiply_rows<3, 4>,
                                         multiply_rows<4, 4>,  multiply_rows<5, 4>,  multiply_rows<6, 4>,
                                         multiply_rows<7, 2>,  multiply_rows<8, 2>,  multiply_rows<9, 2>,
                                         multiply_rows<10, 2>, multiply_rows<11, 2>, multiply_rows<12, 2>};
  kTiles[run.rows - 1](run);
}

constexpr PanelKernel kKernel = {LeftForm::offset, kRows, 1, 1024, multiply, nullptr, nullptr, nullptr};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

std::size_t workspace(const GemmProblem& problem) { return panels_workspace(kKernel, problem); }

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avx512vnni = {
    .name = "w8a8_gemm_avx512vnni",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::avx512vnni>,
    .cost = at_rate<700>,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
