// w4a8 with vpmaddubsw on 32 bytes: half a panel, 8 channels of 4 terms, twice a line. b lies in 0..15, so two products
// of 128 add up to 3,840 at most, and those of four lines still fit 16 bits: exact without the detour that w8a8 takes.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu/gemm/w4a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_AVX2 __attribute__((target("avx2,fma")))

namespace octile::cpu {

namespace {

constexpr int kRows = 4;    // 4 x 2 vectors of pairs, 4 of b and 2 of a; the sums go to memory
constexpr int kHalf = 8;    // channels
constexpr int kChunk = 32;  // terms whose sums fit 16 bits: 2 * 15 * 128 * 8 = 30,720

OCTILE_AVX2 inline __attribute__((always_inline)) __m256i broadcast(const std::int8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm256_set1_epi32(lane);
}

// One group of a panel.
struct GroupRun {
  const std::int8_t* a;
  const std::int32_t* a_sums;
  const std::uint8_t* b;
  const std::uint8_t* zero_points;
  const std::uint8_t* scales;
  float* totals;
};

// -(8 + z) * sum a, for both halves of the panel.
template <int rows>
OCTILE_AVX2 inline __attribute__((always_inline)) void begin_sums(const GroupsRun& run, const GroupRun& group,
                                                                  __m256i (&sum)[rows][2]) {
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
    const __m256i less = _mm256_set1_epi32(-group.a_sums[i * run.a_sums_stride]);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      if (group.zero_points) {
        const auto* z = reinterpret_cast<const __m128i*>(group.zero_points + j * kHalf);
        sum[i][j] = _mm256_mullo_epi32(less, _mm256_cvtepu8_epi32(_mm_loadl_epi64(z)));
      } else {
        sum[i][j] = _mm256_slli_epi32(less, 3);
      }
    }
  }
}

template <int rows>
OCTILE_AVX2 void multiply_group(const GroupsRun& run, const GroupRun& group) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum[rows][2];
  begin_sums(run, group, sum);
  for (std::int64_t c = 0; c < run.depth; c += kChunk) {
    const std::int64_t end = std::min<std::int64_t>(c + kChunk, run.depth);
    __m256i pairs[rows][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) pairs[i][0] = pairs[i][1] = _mm256_setzero_si256();
    for (std::int64_t t = c; t < end; t += kS4Depth) {
      const auto* line = reinterpret_cast<const __m256i*>(group.b + t / kS4Depth * kPanelLine);
      if (rows < kFewRows) _mm_prefetch(line + kAhead / 32, _MM_HINT_T0);
      __m256i lower[2];
      __m256i upper[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m256i nibbles = _mm256_loadu_si256(line + j);
        lower[j] = _mm256_and_si256(nibbles, low);
        upper[j] = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m256i left = broadcast(group.a + i * run.a_stride + t);
        const __m256i left_upper = broadcast(group.a + i * run.a_stride + t + kLaneBytes);
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          pairs[i][j] = _mm256_add_epi16(pairs[i][j], _mm256_maddubs_epi16(lower[j], left));
          pairs[i][j] = _mm256_add_epi16(pairs[i][j], _mm256_maddubs_epi16(upper[j], left_upper));
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) sum[i][j] = _mm256_add_epi32(sum[i][j], _mm256_madd_epi16(pairs[i][j], ones));
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(group.scales) + j * kHalf);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      float* totals = group.totals + i * kTotalsStride + j * kHalf;
      _mm256_storeu_ps(totals, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][j]), scale, _mm256_loadu_ps(totals)));
    }
  }
}

template <int rows>
void multiply_rows(const GroupsRun& run) {
  const std::int64_t group_bytes = run.depth / kS4Depth * kPanelLine;
  for (int j = 0; j < run.panels; ++j) {
    for (std::int64_t g = 0; g < run.groups; ++g) {
      const std::int64_t segment = j * run.segments_stride + g * kPanelChannels;
      multiply_group<rows>(
          run, {run.a + g * run.depth, run.a_sums + g, run.b + j * run.b_stride + g * group_bytes,
                run.zero_points ? run.zero_points + segment : nullptr,
                run.scales + segment * static_cast<std::int64_t>(sizeof(float)), run.totals + j * kPanelChannels});
    }
  }
}

void multiply(const GroupsRun& run) {
  using Rows = void (*)(const GroupsRun&);
  static constexpr Rows kTiles[kRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>};
  kTiles[run.rows - 1](run);
}

constexpr GroupKernel kKernel = {kRows, multiply};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_groups(kKernel, problem, operands, launch);
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_avx2 = {
    .name = "w4a8_gemm_avx2",
    .task = {Operation::gemm, kW4A8},
    .supports = needs_f32<Isa::avx2>,
    .cost = at_rate<300>,
    .workspace = groups_workspace,
    .launch = launch,
};

}  // namespace octile::cpu
