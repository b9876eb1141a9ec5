// w8a8 with sdot on 16 bytes: a quarter of a panel, 4 channels of 4 terms, s8 x s8, so a is taken as it is. One vector
// of a holds 16 terms of a row, which the instruction takes lane by lane.
#include <arm_neon.h>

#include "cpu/gemm/w8a8_panels.h"
#include "cpu/support/cost.h"
#include "plan/packed_weight.h"

#define OCTILE_NEON __attribute__((target("arch=armv8.2-a+dotprod")))

namespace octile::cpu {

namespace {

constexpr int kRows = 8;      // 8 x 2 vectors of sums, 8 of a and one of b; gcc spills sums of 6 x 4
constexpr int kQuarter = 4;   // channels
constexpr int kVector = 16;   // bytes
constexpr int kQuarters = 4;  // of a panel

// sums += 4 terms of b times lane `lane` of a.
template <int lane, int rows, int vectors>
OCTILE_NEON inline __attribute__((always_inline)) void add_lane(int32x4_t (&sum)[rows][vectors],
                                                                const int8x16_t (&left)[rows], const std::uint8_t* b,
                                                                std::int64_t b_stride) {
#pragma GCC unroll 16
  for (int j = 0; j < vectors; ++j) {
    const std::uint8_t* quarter = b + j / kQuarters * b_stride + lane * kPanelLine + j % kQuarters * kVector;
    const int8x16_t right = vreinterpretq_s8_u8(vld1q_u8(quarter));
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) sum[i][j] = vdotq_laneq_s32(sum[i][j], right, left[i], lane);
  }
}

// (rows, vectors) sums in registers, from quarter `first` on.
template <int rows, int vectors>
OCTILE_NEON void multiply_tile(const TileRun& run, int first) {
  int32x4_t sum[rows][vectors];
  std::int32_t* sums = run.sums + first * kQuarter;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) {
      sum[i][j] = run.accumulate ? vld1q_s32(sums + i * run.sums_stride + j * kQuarter) : vdupq_n_s32(0);
    }
  }
  const std::uint8_t* b = run.b + first / kQuarters * run.b_stride + first % kQuarters * kVector;
  for (std::int64_t c = 0; c < run.depth; c += kVector) {
    int8x16_t left[rows];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) left[i] = vreinterpretq_s8_u8(vld1q_u8(run.a + i * run.a_stride + c));
    const std::uint8_t* lines = b + c * kPanelChannels;
    add_lane<0>(sum, left, lines, run.b_stride);
    add_lane<1>(sum, left, lines, run.b_stride);
    add_lane<2>(sum, left, lines, run.b_stride);
    add_lane<3>(sum, left, lines, run.b_stride);
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) vst1q_s32(sums + i * run.sums_stride + j * kQuarter, sum[i][j]);
  }
}

template <int rows, int vectors>
void multiply_rows(const TileRun& run) {
  const int end = run.panels * kQuarters;
  int j = 0;
  for (; j + vectors <= end; j += vectors) multiply_tile<rows, vectors>(run, j);
  if constexpr (vectors > kQuarters) {
    for (; j < end; j += kQuarters) multiply_tile<rows, kQuarters>(run, j);
  }
}

void multiply(const TileRun& run) {
  using Rows = void (*)(const TileRun&);
  static constexpr Rows kTiles[kRows] = {multiply_rows<1, 16>, multiply_rows<2, 8>, multiply_rows<3, 8>,
                                         multiply_rows<4, 4>,  multiply_rows<5, 4>, multiply_rows<6, 2>,
                                         multiply_rows<7, 2>,  multiply_rows<8, 2>};
  kTiles[run.rows - 1](run);
}

constexpr PanelKernel kKernel = {LeftForm::plain, kRows, 1, 1024, multiply, nullptr, nullptr, nullptr};

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

std::size_t workspace(const GemmProblem& problem) { return panels_workspace(kKernel, problem); }

}  // namespace

extern constinit const GemmKernel w8a8_gemm_neon = {
    .name = "w8a8_gemm_neon",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::neon>,
    .cost = at_rate<130>,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace octile::cpu
