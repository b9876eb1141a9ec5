// w8a8 with smmla, the product of (2, 8) by (8, 2): two rows of a by two channels of b, s8 x s8, so a is taken as it
// is. Two lines of a panel, 8 terms, are zipped lane by lane, which makes of each channel its 8 terms in order.
#include <arm_neon.h>

#include "cpu/gemm/w8a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_I8MM __attribute__((target("arch=armv8.2-a+i8mm")))

namespace octile::cpu {

namespace {

constexpr int kRows = 8;      // 4 pairs of rows x 4 vectors of sums, 8 of a; of 3 x 8 gcc spills some
constexpr int kQuarter = 4;   // channels
constexpr int kVector = 16;   // bytes
constexpr int kQuarters = 4;  // of a panel
constexpr int kTerms = 8;

OCTILE_I8MM inline __attribute__((always_inline)) int32x4_t load(const std::uint8_t* bytes) {
  return vreinterpretq_s32_u8(vld1q_u8(bytes));
}

// (2 * pairs, 4 * quarters) sums in registers, from quarter `first` on.
template <int pairs, int quarters>
OCTILE_I8MM void multiply_tile(const TileRun& run, int first) {
  // Of each quarter the channels 0, 1 and the channels 2, 3: (row, channel) in order.
  int32x4_t sum[pairs][quarters][2];
  std::int32_t* sums = run.sums + first * kQuarter;
#pragma GCC unroll 8
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      if (run.accumulate) {
        const std::int32_t* at = sums + 2 * i * run.sums_stride + j * kQuarter;
        const int64x2_t upper = vreinterpretq_s64_s32(vld1q_s32(at));
        const int64x2_t lower = vreinterpretq_s64_s32(vld1q_s32(at + run.sums_stride));
        sum[i][j][0] = vreinterpretq_s32_s64(vzip1q_s64(upper, lower));
        sum[i][j][1] = vreinterpretq_s32_s64(vzip2q_s64(upper, lower));
      } else {
        sum[i][j][0] = sum[i][j][1] = vdupq_n_s32(0);
      }
    }
  }
  const std::uint8_t* b = run.b + first / kQuarters * run.b_stride + first % kQuarters * kVector;
  for (std::int64_t c = 0; c < run.depth; c += kTerms) {
    int8x16_t left[pairs];
#pragma GCC unroll 8
    for (int i = 0; i < pairs; ++i) {
      const std::uint8_t* rows = run.a + 2 * i * run.a_stride + c;
      left[i] = vreinterpretq_s8_u8(vcombine_u8(vld1_u8(rows), vld1_u8(rows + run.a_stride)));
    }
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      const std::uint8_t* lines = b + j / kQuarters * run.b_stride + c * kPanelChannels + j % kQuarters * kVector;
      const int32x4_t even = load(lines);
      const int32x4_t odd = load(lines + kPanelLine);
      const int8x16_t lower = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
      const int8x16_t upper = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
#pragma GCC unroll 8
      for (int i = 0; i < pairs; ++i) {
        sum[i][j][0] = vmmlaq_s32(sum[i][j][0], left[i], lower);
        sum[i][j][1] = vmmlaq_s32(sum[i][j][1], left[i], upper);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      std::int32_t* at = sums + 2 * i * run.sums_stride + j * kQuarter;
      const int64x2_t left_half = vreinterpretq_s64_s32(sum[i][j][0]);
      const int64x2_t right_half = vreinterpretq_s64_s32(sum[i][j][1]);
      vst1q_s32(at, vreinterpretq_s32_s64(vzip1q_s64(left_half, right_half)));
      vst1q_s32(at + run.sums_stride, vreinterpretq_s32_s64(vzip2q_s64(left_half, right_half)));
    }
  }
}

template <int pairs, int quarters>
void multiply_pairs(const TileRun& run) {
  const int end = run.panels * kQuarters;
  int j = 0;
  for (; j + quarters <= end; j += quarters) multiply_tile<pairs, quarters>(run, j);
  if constexpr (quarters > kQuarters) {
    for (; j < end; j += kQuarters) multiply_tile<pairs, kQuarters>(run, j);
  }
}

// An odd last row is multiplied beside the row below it, whose sums nobody reads.
void multiply(const TileRun& run) {
  using Pairs = void (*)(const TileRun&);
  static constexpr Pairs kTiles[kRows / 2] = {multiply_pairs<1, 8>, multiply_pairs<2, 4>, multiply_pairs<3, 2>,
                                              multiply_pairs<4, 2>};
  kTiles[(run.rows - 1) / 2](run);
}

constexpr PanelKernel kKernel = {LeftForm::plain, kRows, 2, 1024, multiply, nullptr, nullptr, nullptr};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

std::size_t workspace(const GemmProblem& problem) { return panels_workspace(kKernel, problem); }

}  // namespace

extern constinit const GemmKernel w8a8_gemm_i8mm = {
    .name = "w8a8_gemm_i8mm",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::i8mm>,
    .cost = at_rate<180>,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
