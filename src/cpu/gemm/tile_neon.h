// Tiles of 16-byte vectors on Arm, which hold 4 channels of a row, a quarter of a panel. Terms: integer_panels.h. The
// file that includes this says OCTILE_TILE, the target of its functions.
#pragma once

#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr int kQuarterChannels = 4;
constexpr int kVectorBytes = 16;
constexpr int kQuarters = 4;  // of a panel

// The 8 + z of 4 channels.
OCTILE_TILE_INLINE int32x4_t zero_points_at(const std::uint8_t* four) {
  std::uint32_t bytes;
  std::memcpy(&bytes, four, sizeof bytes);
  const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words)));
}

// A quarter's sums of one row step. Of sdot: a vector, for one row.
OCTILE_TILE_INLINE void load_sums(const std::int32_t* row, std::int64_t, bool accumulate, int32x4_t& sum) {
  sum = accumulate ? vld1q_s32(row) : vdupq_n_s32(0);
}
OCTILE_TILE_INLINE int32x4_t row_of(const int32x4_t& sum, int) { return sum; }

// Of smmla: the channels 0, 1 and the channels 2, 3 of two rows. An odd last row is paired with the row below it, whose
// sums are not read.
OCTILE_TILE_INLINE void load_sums(const std::int32_t* row, std::int64_t stride, bool accumulate, int32x4_t (&sum)[2]) {
  sum[0] = sum[1] = vdupq_n_s32(0);
  if (!accumulate) return;
  const int64x2_t upper = vreinterpretq_s64_s32(vld1q_s32(row));
  const int64x2_t lower = vreinterpretq_s64_s32(vld1q_s32(row + stride));
  sum[0] = vreinterpretq_s32_s64(vzip1q_s64(upper, lower));
  sum[1] = vreinterpretq_s32_s64(vzip2q_s64(upper, lower));
}
OCTILE_TILE_INLINE int32x4_t row_of(const int32x4_t (&sum)[2], int row) {
  const int64x2_t left = vreinterpretq_s64_s32(sum[0]);
  const int64x2_t right = vreinterpretq_s64_s32(sum[1]);
  return vreinterpretq_s32_s64(row == 0 ? vzip1q_s64(left, right) : vzip2q_s64(left, right));
}

// Eight terms of two rows.
[[maybe_unused]] OCTILE_TILE_INLINE int8x16_t load_pair(const std::uint8_t* row, std::int64_t stride) {
  return vreinterpretq_s8_u8(vcombine_u8(vld1_u8(row), vld1_u8(row + stride)));
}

template <class Terms, Fold kFold>
struct Tile : Terms {
  using Sum = std::conditional_t<Terms::kRowStep == 2, int32x4_t[2], int32x4_t>;

  // (row steps, quarters) sums in registers, from quarter `first` of the panels on.
  template <int steps, int quarters>
  OCTILE_TILE static void run(const TileRun& run, int first) {
    TileOperands at{run.a, run.b + first / kQuarters * run.b_stride + first % kQuarters * kVectorBytes, nullptr};
    if constexpr (kFold == Fold::none) {
      Sum sum[steps][quarters];
      std::int32_t* sums = run.sums + first * kQuarterChannels;
      start(sums, run.sums_stride, run.accumulate, sum);
      Terms::multiply(run, at, sum);
#pragma GCC unroll 8
      for (int i = 0; i < steps * Terms::kRowStep; ++i) {
#pragma GCC unroll 16
        for (int j = 0; j < quarters; ++j) {
          vst1q_s32(sums + i * run.sums_stride + j * kQuarterChannels,
                    row_of(sum[i / Terms::kRowStep][j], i % Terms::kRowStep));
        }
      }
    } else {
      for (std::int64_t g = 0; g < run.group.groups; ++g) {
        Sum sum[steps][quarters];
        start(nullptr, 0, false, sum);
        Terms::multiply(run, at, sum);
        fold(run, first, g, sum);
        at.a += run.depth;
        at.b += run.depth * Terms::kDepthBytes;
      }
    }
  }

 private:
  template <int steps, int quarters>
  OCTILE_TILE_INLINE static void start(const std::int32_t* sums, std::int64_t stride, bool accumulate,
                                       Sum (&sum)[steps][quarters]) {
#pragma GCC unroll 8
    for (int i = 0; i < steps; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < quarters; ++j) {
        load_sums(sums + i * Terms::kRowStep * stride + j * kQuarterChannels, stride, accumulate, sum[i][j]);
      }
    }
  }

  template <int steps, int quarters>
  OCTILE_TILE_INLINE static void fold(const TileRun& run, int first, std::int64_t g, Sum (&sum)[steps][quarters]) {
    const GroupRun& group = run.group;
#pragma GCC unroll 16
    for (int j = 0; j < quarters; ++j) {
      const int quarter = first + j;
      const std::int64_t segment =
          quarter / kQuarters * group.segments_stride + g * kPanelChannels + quarter % kQuarters * kQuarterChannels;
      const int32x4_t offset = group.zero_points ? zero_points_at(group.zero_points + segment) : vdupq_n_s32(8);
      float32x4_t scale;
      if constexpr (kFold == Fold::channels) scale = vreinterpretq_f32_u8(vld1q_u8(group.scales + segment * 4));
#pragma GCC unroll 8
      for (int i = 0; i < steps * Terms::kRowStep; ++i) {
        if (i == run.rows) break;  // an odd last row
        int32x4_t acc = row_of(sum[i / Terms::kRowStep][j], i % Terms::kRowStep);
        if constexpr (Terms::kOffset == Offset::row_sums) {
          acc = vmlsq_n_s32(acc, offset, group.row_sums[i * group.row_sums_stride + g]);
        }
        if constexpr (kFold == Fold::rows) {
          scale = vdupq_n_f32(group.row_scales[i * group.row_scales_stride + g * group.row_scales_group]);
        }
        float* totals = group.totals + i * group.totals_stride + quarter * kQuarterChannels;
        vst1q_f32(totals, vfmaq_f32(vld1q_f32(totals), vcvtq_f32_s32(acc), scale));
      }
    }
  }
};

}  // namespace

}  // namespace octile::cpu
