// Tiles of AVX-512 VNNI: a vector holds 16 channels of a row. Terms: integer_panels.h. The file that
// includes this says OCTILE_TILE, the target of its functions.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/integer_panels.h"
#include "cpu/gemm/tile_finish_avx512.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

OCTILE_TILE_INLINE __m512i broadcast(const std::uint8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm512_set1_epi32(lane);
}

// In each quarter of a vector the sums of that quarter's lanes, one for each of the four vectors.
OCTILE_TILE_INLINE __m512i sum_quarters(const __m512i (&sum)[4]) {
  __m512i pairs[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    pairs[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi32(kAllLanes, sum[2 * i], sum[2 * i + 1]),
                                _mm512_maskz_unpackhi_epi32(kAllLanes, sum[2 * i], sum[2 * i + 1]));
  }
  return _mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xff, pairs[0], pairs[1]),
                          _mm512_maskz_unpackhi_epi64(0xff, pairs[0], pairs[1]));
}

template <class Terms, Fold kFold>
struct Tile : Terms {
  // (rows, panels) sums in registers, from panel `first` on.
  template <int rows, int panels>
  OCTILE_TILE static void run(const TileRun& run, int first) {
    TileOperands at{run.a, run.b + first * run.b_stride, nullptr, first == 0 ? run.later : 0};
    if constexpr (kFold == Fold::none) {
      look_ahead(run, run.depth, panels, Terms::kDepthBytes, at);
      __m512i sum[rows][panels];
      std::int32_t* sums = run.sums + first * kPanelChannels;
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < panels; ++j) {
          sum[i][j] = run.accumulate ? _mm512_loadu_si512(sums + i * run.sums_stride + j * kPanelChannels)
                                     : _mm512_setzero_si512();
        }
      }
      Terms::multiply(run, at, sum);
      if (run.finish) {
        const TileFinish f = *run.finish;  // a copy, as of the groups below
        return finish_sums(f, run.row, first, sum);
      }
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < panels; ++j) {
          _mm512_storeu_si512(sums + i * run.sums_stride + j * kPanelChannels, sum[i][j]);
        }
      }
    } else {
      const GroupRun group = run.group;  // stores to totals might change another's, for all that the compiler knows
      for (std::int64_t g = 0; g < group.groups; ++g) {
        if constexpr (kFold == Fold::channels) {
          fetch_scales(group, run.whole, g, first, panels);
          look_ahead(run, (group.groups - g) * run.depth, panels, Terms::kDepthBytes, at);
        }
        __m512i sum[rows][panels];
        start(group, first, g, sum);
        Terms::multiply(run, at, sum);
        fold(group, first, g, sum);
        at.a += run.depth;
        at.b += run.depth * Terms::kDepthBytes;
      }
    }
  }

 private:
  template <int rows, int panels>
  OCTILE_TILE_INLINE static void start(const GroupRun& run, int first, std::int64_t g, __m512i (&sum)[rows][panels]) {
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        sum[i][j] = _mm512_setzero_si512();
        if constexpr (Terms::kOffset != Offset::row_sums) continue;
        const __m512i less = _mm512_set1_epi32(-run.row_sums[i * run.row_sums_stride + g]);
        sum[i][j] = _mm512_maskz_slli_epi32(kAllLanes, less, 3);
        if (!run.zero_points) continue;
        const std::uint8_t* z = run.zero_points + (first + j) * run.segments_stride + g * kPanelChannels;
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(z));
        sum[i][j] = _mm512_mullo_epi32(less, _mm512_maskz_cvtepu8_epi32(kAllLanes, bytes));
      }
    }
  }

  // A panel at a time by recursion, not in a loop: GCC 12 unrolls no loop that becomes so long, and then keeps the sums
  // on the stack. It does so, too, with sums that begin at the same value other than 0.
  template <int j = 0, int rows, int panels>
  OCTILE_TILE_INLINE static void fold(const GroupRun& run, int first, std::int64_t g, __m512i (&sum)[rows][panels]) {
    [[maybe_unused]] const std::int64_t segment = (first + j) * run.segments_stride + g * kPanelChannels;
    [[maybe_unused]] __m512 scale;
    if constexpr (kFold == Fold::channels) scale = _mm512_loadu_ps(run.scales + segment * 4);
    [[maybe_unused]] __m512i less;
    if constexpr (Terms::kOffset == Offset::channel_sums) {
      less = _mm512_maskz_slli_epi32(kAllLanes, _mm512_loadu_si512(run.channel_sums + segment * 4), 7);
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
      asm("" : "+v"(sum[i][j]));
      if constexpr (Terms::kOffset == Offset::channel_sums) sum[i][j] = _mm512_sub_epi32(sum[i][j], less);
      if constexpr (kFold == Fold::rows) {
        scale = _mm512_set1_ps(run.row_scales[i * run.row_scales_stride + g * run.row_scales_group]);
      }
      float* totals = run.totals + i * run.totals_stride + (first + j) * kPanelChannels;
      const __m512 acc = _mm512_maskz_cvtepi32_ps(kAllLanes, sum[i][j]);
      _mm512_storeu_ps(totals, _mm512_fmadd_ps(acc, scale, _mm512_loadu_ps(totals)));
    }
    if constexpr (j + 1 < panels) fold<j + 1>(run, first, g, sum);
  }
};

}  // namespace

}  // namespace octile::cpu
