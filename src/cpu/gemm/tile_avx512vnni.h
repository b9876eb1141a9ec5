// Tiles of AVX-512 VNNI: a vector holds 16 channels of a row. Terms: integer_panels.h.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

#define OCTILE_TILE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define OCTILE_TILE_INLINE OCTILE_TILE inline __attribute__((always_inline))

namespace octile::cpu {

namespace {

constexpr __mmask16 kAllLanes = 0xffff;

OCTILE_TILE_INLINE __m512i broadcast(const std::uint8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm512_set1_epi32(lane);
}

template <class Terms, bool kFolds>
struct Tile : Terms {
  // (rows, panels) sums in registers, from panel `first` on.
  template <int rows, int panels>
  OCTILE_TILE static void run(const TileRun& run, int first) {
    __m512i sum[rows][panels];
    TileOperands at{run.a, run.b + first * run.b_stride, nullptr};
    if constexpr (!kFolds) {
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
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < panels; ++j) {
          _mm512_storeu_si512(sums + i * run.sums_stride + j * kPanelChannels, sum[i][j]);
        }
      }
    } else {
      for (std::int64_t g = 0; g < run.group.groups; ++g) {
        start(run.group, first, g, sum);
        Terms::multiply(run, at, sum);
        fold(run.group, first, g, sum);
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
      const std::int64_t segment = (first + j) * run.segments_stride + g * kPanelChannels;
      [[maybe_unused]] __m512i channel = _mm512_setzero_si512();
      if constexpr (Terms::kStart == Start::channel_sums) {
        const __m512i sums = _mm512_loadu_si512(run.channel_sums + segment * 4);
        channel = _mm512_sub_epi32(channel, _mm512_maskz_slli_epi32(kAllLanes, sums, 7));
      } else if (run.zero_points) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(run.zero_points + segment));
        channel = _mm512_maskz_cvtepu8_epi32(kAllLanes, bytes);
      }
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        if constexpr (Terms::kStart == Start::channel_sums) {
          sum[i][j] = channel;
        } else {
          const __m512i less = _mm512_set1_epi32(-run.row_sums[i * run.row_sums_stride + g]);
          sum[i][j] = run.zero_points ? _mm512_mullo_epi32(less, channel) : _mm512_maskz_slli_epi32(kAllLanes, less, 3);
        }
      }
    }
  }

  template <int rows, int panels>
  OCTILE_TILE_INLINE static void fold(const GroupRun& run, int first, std::int64_t g, __m512i (&sum)[rows][panels]) {
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
      const __m512 scale = _mm512_loadu_ps(run.scales + ((first + j) * run.segments_stride + g * kPanelChannels) * 4);
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        float* totals = run.totals + i * run.totals_stride + (first + j) * kPanelChannels;
        const __m512 acc = _mm512_maskz_cvtepi32_ps(kAllLanes, sum[i][j]);
        _mm512_storeu_ps(totals, _mm512_fmadd_ps(acc, scale, _mm512_loadu_ps(totals)));
      }
    }
  }
};

}  // namespace

}  // namespace octile::cpu
