// w4a8 with sdot on 16 bytes: a quarter of a panel, 4 channels of 4 terms, twice a line. b lies in 0..15, and so is s8.
#include <arm_neon.h>

#include <cstring>

#include "cpu/gemm/w4a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_NEON __attribute__((target("arch=armv8.2-a+dotprod")))

namespace octile::cpu {

namespace {

constexpr int kRows = 4;      // 4 x 4 vectors of sums; 6 would leave no registers for 6 of a beside the nibbles
constexpr int kQuarter = 4;   // channels
constexpr int kVector = 16;   // bytes
constexpr int kQuarters = 4;  // of a panel

// Where quarter `quarter` of a panel has its scales and zero points of group g.
std::int64_t segment_of(const GroupsRun& run, std::int64_t quarter, std::int64_t g) {
  return quarter / kQuarters * run.segments_stride + g * kPanelChannels + quarter % kQuarters * kQuarter;
}

// The 8 + z of 4 channels.
OCTILE_NEON inline int32x4_t zero_points_at(const std::uint8_t* four) {
  std::uint32_t bytes;
  std::memcpy(&bytes, four, sizeof bytes);
  const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words)));
}

// All groups of (rows, 4 * panels), from panel `first` on.
template <int rows, int panels>
OCTILE_NEON void multiply_tile(const GroupsRun& run, int first) {
  constexpr int vectors = kQuarters * panels;
  const uint8x16_t low = vdupq_n_u8(15);
  const std::uint8_t* b = run.b + first * run.b_stride;
  for (std::int64_t g = 0; g < run.groups; ++g) {
    int32x4_t sum[rows][vectors];
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) {
      const int32x4_t offset = run.zero_points
                                   ? zero_points_at(run.zero_points + segment_of(run, first * kQuarters + j, g))
                                   : vdupq_n_s32(8);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) sum[i][j] = vmulq_n_s32(offset, -run.a_sums[i * run.a_sums_stride + g]);
    }
    const std::int8_t* a = run.a + g * run.depth;
    for (std::int64_t c = 0; c < run.depth; c += kS4Depth) {
      int8x8_t left[rows];
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) left[i] = vld1_s8(a + i * run.a_stride + c);
#pragma GCC unroll 16
      for (int j = 0; j < vectors; ++j) {
        const uint8x16_t line = vld1q_u8(b + j / kQuarters * run.b_stride + j % kQuarters * kVector);
        const int8x16_t lower = vreinterpretq_s8_u8(vandq_u8(line, low));
        const int8x16_t upper = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
          sum[i][j] = vdotq_lane_s32(sum[i][j], lower, left[i], 0);
          sum[i][j] = vdotq_lane_s32(sum[i][j], upper, left[i], 1);
        }
      }
      b += kPanelLine;
    }
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) {
      const std::uint8_t* scales =
          run.scales + segment_of(run, first * kQuarters + j, g) * static_cast<std::int64_t>(sizeof(float));
      const float32x4_t scale = vreinterpretq_f32_u8(vld1q_u8(scales));
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        float* totals = run.totals + i * kTotalsStride + (first * kQuarters + j) * kQuarter;
        vst1q_f32(totals, vfmaq_f32(vld1q_f32(totals), vcvtq_f32_s32(sum[i][j]), scale));
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
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 4>, multiply_rows<2, 2>, multiply_rows<3, 1>,
                                         multiply_rows<4, 1>};
  kTiles[run.rows - 1](run);
}

constexpr GroupKernel kKernel = {kRows, multiply};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_groups(kKernel, problem, operands, launch);
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_neon = {
    .name = "w4a8_gemm_neon",
    .task = {Operation::gemm, kW4A8},
    .supports = needs_f32<Isa::neon>,
    .cost = at_rate<110>,
    .workspace = groups_workspace,
    .launch = launch,
};

}  // namespace octile::cpu
