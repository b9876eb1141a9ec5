// w4a8 with smmla, the product of (2, 8) by (8, 2): two rows of a by two channels of b, which lies in 0..15, and so is
// s8. A line of a panel has 8 terms of each channel: its low and high nibbles, zipped lane by lane, have them in order.
#include <arm_neon.h>

#include <cstring>

#include "cpu/gemm/w4a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_I8MM __attribute__((target("arch=armv8.2-a+i8mm")))

namespace octile::cpu {

namespace {

constexpr int kRows = 8;      // 4 pairs of rows x 4 vectors of sums, 4 of a, 4 for the nibbles
constexpr int kQuarter = 4;   // channels
constexpr int kVector = 16;   // bytes
constexpr int kQuarters = 4;  // of a panel

// A row and the one below it; the last of an odd number of rows stands for both.
template <int rows>
constexpr int below(int i) {
  return 2 * i + 1 < rows ? 2 * i + 1 : 2 * i;
}

// The 8 + z of 4 channels.
OCTILE_I8MM inline int32x4_t zero_points_at(const std::uint8_t* four) {
  std::uint32_t bytes;
  std::memcpy(&bytes, four, sizeof bytes);
  const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words)));
}

OCTILE_I8MM inline __attribute__((always_inline)) void add_scaled(float* totals, int32x4_t sum, float32x4_t scale) {
  vst1q_f32(totals, vfmaq_f32(vld1q_f32(totals), vcvtq_f32_s32(sum), scale));
}

// One group of (rows, 4 * quarters), from quarter `first` of its panels on.
template <int rows, int quarters>
OCTILE_I8MM void multiply_group(const GroupsRun& run, std::int64_t g, int first) {
  constexpr int pairs = (rows + 1) / 2;
  // Of each quarter the channels 0, 1 and the channels 2, 3: (row, channel) in order.
  int32x4_t sum[pairs][quarters][2];
#pragma GCC unroll 8
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) sum[i][j][0] = sum[i][j][1] = vdupq_n_s32(0);
  }
  const std::int8_t* a = run.a + g * run.depth;
  const std::uint8_t* b =
      run.b + first / kQuarters * run.b_stride + g * (run.depth / kS4Depth) * kPanelLine + first % kQuarters * kVector;
  for (std::int64_t c = 0; c < run.depth; c += kS4Depth) {
    int8x16_t left[pairs];
#pragma GCC unroll 8
    for (int i = 0; i < pairs; ++i) {
      left[i] = vcombine_s8(vld1_s8(a + 2 * i * run.a_stride + c), vld1_s8(a + below<rows>(i) * run.a_stride + c));
    }
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      const uint8x16_t line = vld1q_u8(b + j / kQuarters * run.b_stride + j % kQuarters * kVector);
      const uint32x4_t low = vreinterpretq_u32_u8(vandq_u8(line, vdupq_n_u8(15)));
      const uint32x4_t high = vreinterpretq_u32_u8(vshrq_n_u8(line, 4));
      const int8x16_t lower = vreinterpretq_s8_u32(vzip1q_u32(low, high));
      const int8x16_t upper = vreinterpretq_s8_u32(vzip2q_u32(low, high));
#pragma GCC unroll 8
      for (int i = 0; i < pairs; ++i) {
        sum[i][j][0] = vmmlaq_s32(sum[i][j][0], left[i], lower);
        sum[i][j][1] = vmmlaq_s32(sum[i][j][1], left[i], upper);
      }
    }
    b += kPanelLine;
  }
#pragma GCC unroll 16
  for (int j = 0; j < quarters; ++j) {
    const int at = first + j;
    const std::int64_t segment = at / kQuarters * run.segments_stride + g * kPanelChannels + at % kQuarters * kQuarter;
    const int32x4_t offset = run.zero_points ? zero_points_at(run.zero_points + segment) : vdupq_n_s32(8);
    const float32x4_t scale =
        vreinterpretq_f32_u8(vld1q_u8(run.scales + segment * static_cast<std::int64_t>(sizeof(float))));
#pragma GCC unroll 8
    for (int i = 0; i < pairs; ++i) {
      const int64x2_t left_half = vreinterpretq_s64_s32(sum[i][j][0]);
      const int64x2_t right_half = vreinterpretq_s64_s32(sum[i][j][1]);
      const int32x4_t row = vreinterpretq_s32_s64(vzip1q_s64(left_half, right_half));
      const std::int32_t* a_sum = run.a_sums + 2 * i * run.a_sums_stride + g;
      float* totals = run.totals + 2 * i * kTotalsStride + at * kQuarter;
      add_scaled(totals, vmlsq_n_s32(row, offset, *a_sum), scale);
      if (2 * i + 1 == rows) continue;
      const int32x4_t next = vreinterpretq_s32_s64(vzip2q_s64(left_half, right_half));
      add_scaled(totals + kTotalsStride, vmlsq_n_s32(next, offset, a_sum[run.a_sums_stride]), scale);
    }
  }
}

template <int rows, int quarters>
void multiply_rows(const GroupsRun& run) {
  const int end = run.panels * kQuarters;
  int j = 0;
  for (; j + quarters <= end; j += quarters) {
    for (std::int64_t g = 0; g < run.groups; ++g) multiply_group<rows, quarters>(run, g, j);
  }
  if constexpr (quarters > kQuarters) {
    for (; j < end; j += kQuarters) {
      for (std::int64_t g = 0; g < run.groups; ++g) multiply_group<rows, kQuarters>(run, g, j);
    }
  }
}

void multiply(const GroupsRun& run) {
  using Rows = void (*)(const GroupsRun&);
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 8>, multiply_rows<2, 8>, multiply_rows<3, 4>,
                                         multiply_rows<4, 4>, multiply_rows<5, 2>, multiply_rows<6, 2>,
                                         multiply_rows<7, 2>, multiply_rows<8, 2>};
  kTiles[run.rows - 1](run);
}

constexpr GroupKernel kKernel = {kRows, multiply};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_groups(kKernel, problem, operands, launch);
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_i8mm = {
    .name = "w4a8_gemm_i8mm",
    .task = {Operation::gemm, kW4A8},
    .supports = needs_f32<Isa::i8mm>,
    .cost = at_rate<160>,
    .workspace = groups_workspace,
    .launch = launch,
};

}  // namespace octile::cpu
