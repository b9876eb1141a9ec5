// w4a8 with vpdpbusd on 64 bytes: 16 channels of 4 terms, twice a line, b as the u8 operand and a as the s8 one.
#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/w4a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_AVX512VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

namespace octile::cpu {

namespace {

constexpr int kRows = 8;  // 8 x 2 vectors of sums; the low and high nibbles of two panels; a comes from memory

OCTILE_AVX512VNNI inline __attribute__((always_inline)) __m512i broadcast(const std::int8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm512_set1_epi32(lane);
}

// All groups of (rows, panels), from panel `first` on.
template <int rows, int panels>
OCTILE_AVX512VNNI void multiply_tile(const GroupsRun& run, int first) {
  const __m512i low = _mm512_set1_epi8(15);
  const std::uint8_t* b = run.b + first * run.b_stride;
  for (std::int64_t g = 0; g < run.groups; ++g) {
    __m512i sum[rows][panels];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const __m512i less = _mm512_set1_epi32(-run.a_sums[i * run.a_sums_stride + g]);
#pragma GCC unroll 8
      for (int j = 0; j < panels; ++j) {
        if (run.zero_points) {
          const std::uint8_t* z = run.zero_points + (first + j) * run.segments_stride + g * kPanelChannels;
          const __m128i offset = _mm_loadu_si128(reinterpret_cast<const __m128i*>(z));
          sum[i][j] = _mm512_mullo_epi32(less, _mm512_maskz_cvtepu8_epi32(0xffff, offset));
        } else {
          sum[i][j] = _mm512_maskz_slli_epi32(0xffff, less, 3);
        }
      }
    }
    const std::int8_t* a = run.a + g * run.depth;
    for (std::int64_t c = 0; c < run.depth; c += kS4Depth) {
      __m512i lower[panels];
      __m512i upper[panels];
#pragma GCC unroll 8
      for (int j = 0; j < panels; ++j) {
        const std::uint8_t* at = b + j * run.b_stride + c / kS4Depth * kPanelLine;
        if (rows <= kFewRows) _mm_prefetch(at + kAhead, _MM_HINT_T0);
        const __m512i line = _mm512_loadu_si512(at);
        lower[j] = _mm512_and_si512(line, low);
        upper[j] = _mm512_and_si512(line >> 4, low);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m512i left = broadcast(a + i * run.a_stride + c);
        const __m512i left_upper = broadcast(a + i * run.a_stride + c + kLaneBytes);
#pragma GCC unroll 8
        for (int j = 0; j < panels; ++j) {
          sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], lower[j], left);
          sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], upper[j], left_upper);
        }
      }
    }
    b += run.depth / kS4Depth * kPanelLine;
#pragma GCC unroll 8
    for (int j = 0; j < panels; ++j) {
      const std::uint8_t* scales = run.scales + ((first + j) * run.segments_stride + g * kPanelChannels) *
                                                    static_cast<std::int64_t>(sizeof(float));
      const __m512 scale = _mm512_loadu_ps(scales);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        float* totals = run.totals + i * kTotalsStride + (first + j) * kPanelChannels;
        _mm512_storeu_ps(totals,
                         _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sum[i][j]), scale, _mm512_loadu_ps(totals)));
      }
    }
  }
}

template <int rows, int panels>
void multiply_rows(const GroupsRun& run) {
  int j = 0;
  for (; j + panels <= run.panels; j += panels) multiply_tile<rows, panels>(run, j);
  for (; j < run.panels; ++j) multiply_tile<rows, 1>(run, j);
}

void multiply(const GroupsRun& run) {
  using Rows = void (*)(const GroupsRun&);
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 4>, multiply_rows<2, 4>, multiply_rows<3, 4>,
                                         multiply_rows<4, 4>, multiply_rows<5, 2>, multiply_rows<6, 2>,
                                         multiply_rows<7, 2>, multiply_rows<8, 2>};
  kTiles[run.rows - 1](run);
}

constexpr GroupKernel kKernel = {kRows, multiply};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_groups(kKernel, problem, operands, launch);
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_avx512vnni = {
    .name = "w4a8_gemm_avx512vnni",
    .task = {Operation::gemm, kW4A8},
    .supports = needs_f32<Isa::avx512vnni>,
    .cost = at_rate<600>,
    .workspace = groups_workspace,
    .launch = launch,
};

}  // namespace octile::cpu
