// Vectors of a tile on Arm: 16 bytes hold 4 channels of 4 terms, a quarter of a panel's line.
#pragma once

#include <arm_neon.h>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

inline constexpr int kQuarterChannels = 4;
inline constexpr int kVectorBytes = 16;
inline constexpr int kQuarters = 4;  // of a panel

// Where quarter `quarter` of the run's panels begins.
inline const std::uint8_t* quarter_of(const TileRun& run, int quarter) {
  return run.b + quarter / kQuarters * run.b_stride + quarter % kQuarters * kVectorBytes;
}

template <int rows, int quarters>
inline __attribute__((always_inline)) void load_sums(const TileRun& run, int first, int32x4_t (&sum)[rows][quarters]) {
  const std::int32_t* sums = run.sums + first * kQuarterChannels;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      sum[i][j] = run.accumulate ? vld1q_s32(sums + i * run.sums_stride + j * kQuarterChannels) : vdupq_n_s32(0);
    }
  }
}

template <int rows, int quarters>
inline __attribute__((always_inline)) void store_sums(const TileRun& run, int first,
                                                      const int32x4_t (&sum)[rows][quarters]) {
  std::int32_t* sums = run.sums + first * kQuarterChannels;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) vst1q_s32(sums + i * run.sums_stride + j * kQuarterChannels, sum[i][j]);
  }
}

// The same of smmla: of each quarter the channels 0, 1 and the channels 2, 3, each as (row, channel) of two rows. An
// odd last row stands beside the row below it, whose sums nobody reads.
template <int pairs, int quarters>
inline __attribute__((always_inline)) void load_sums(const TileRun& run, int first,
                                                     int32x4_t (&sum)[pairs][quarters][2]) {
  const std::int32_t* sums = run.sums + first * kQuarterChannels;
#pragma GCC unroll 8
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      if (run.accumulate) {
        const std::int32_t* at = sums + 2 * i * run.sums_stride + j * kQuarterChannels;
        const int64x2_t upper = vreinterpretq_s64_s32(vld1q_s32(at));
        const int64x2_t lower = vreinterpretq_s64_s32(vld1q_s32(at + run.sums_stride));
        sum[i][j][0] = vreinterpretq_s32_s64(vzip1q_s64(upper, lower));
        sum[i][j][1] = vreinterpretq_s32_s64(vzip2q_s64(upper, lower));
      } else {
        sum[i][j][0] = sum[i][j][1] = vdupq_n_s32(0);
      }
    }
  }
}

template <int pairs, int quarters>
inline __attribute__((always_inline)) void store_sums(const TileRun& run, int first,
                                                      const int32x4_t (&sum)[pairs][quarters][2]) {
  std::int32_t* sums = run.sums + first * kQuarterChannels;
#pragma GCC unroll 8
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      std::int32_t* at = sums + 2 * i * run.sums_stride + j * kQuarterChannels;
      const int64x2_t left_half = vreinterpretq_s64_s32(sum[i][j][0]);
      const int64x2_t right_half = vreinterpretq_s64_s32(sum[i][j][1]);
      vst1q_s32(at, vreinterpretq_s32_s64(vzip1q_s64(left_half, right_half)));
      vst1q_s32(at + run.sums_stride, vreinterpretq_s32_s64(vzip2q_s64(left_half, right_half)));
    }
  }
}

// Eight terms of two rows.
inline __attribute__((always_inline)) int8x16_t load_pair(const std::uint8_t* row, std::int64_t stride) {
  return vreinterpretq_s8_u8(vcombine_u8(vld1_u8(row), vld1_u8(row + stride)));
}

}  // namespace octile::cpu
