// Tiles of 32-byte vectors, which hold 8 channels of a row, half a panel. Terms: integer_panels.h. The file that
// includes this says OCTILE_TILE, the target of its functions.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/integer_panels.h"
#include "cpu/support/narrow_x86.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr int kHalfChannels = 8;
constexpr int kHalves = 2;  // of a panel

OCTILE_TILE_INLINE __m256i load(const std::uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

OCTILE_TILE_INLINE __m256i broadcast(const std::uint8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm256_set1_epi32(lane);
}

template <class Terms, Fold kFold>
struct Tile : Terms {
  // (rows, halves) vectors of sums in registers, from half `first` of the panels on.
  template <int rows, int halves>
  OCTILE_TILE static void run(const TileRun& run, int first) {
    const int panel = first / kHalves;
    TileOperands at{run.a, run.b + panel * run.b_stride, run.narrow ? run.narrow + panel * kMaxNarrowBlocks : nullptr,
                    first == 0 ? run.later : 0};
    if constexpr (kFold == Fold::none) {
      look_ahead(run, run.depth, halves / kHalves, Terms::kDepthBytes, at);
      __m256i sum[rows][halves];
      auto* sums = reinterpret_cast<__m256i*>(run.sums + first * kHalfChannels);
      const std::int64_t stride = run.sums_stride / kHalfChannels;
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < halves; ++j) {
          sum[i][j] = run.accumulate ? _mm256_loadu_si256(sums + i * stride + j) : _mm256_setzero_si256();
        }
      }
      Terms::multiply(run, at, sum);
      if (run.finish) {
        const TileFinish f = *run.finish;  // a copy, as of the groups below
        return finish(f, run.row, first, sum);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < halves; ++j) _mm256_storeu_si256(sums + i * stride + j, sum[i][j]);
      }
    } else {
      const GroupRun group = run.group;  // stores to totals might change another's, for all that the compiler knows
      for (std::int64_t g = 0; g < group.groups; ++g) {
        if constexpr (kFold == Fold::channels) {
          fetch_scales(group, run.whole, g, panel, halves / kHalves);
          look_ahead(run, (group.groups - g) * run.depth, halves / kHalves, Terms::kDepthBytes, at);
        }
        __m256i sum[rows][halves];
        start(group, first, g, sum);
        Terms::multiply(run, at, sum);
        if (Terms::kOffset == Offset::none && group.rest) {
          Terms::multiply(run, {group.rest + g * run.depth, at.b, at.narrow}, sum);
        }
        fold(group, first, g, sum);
        at.a += run.depth;
        at.b += run.depth * Terms::kDepthBytes;
        if (at.narrow) at.narrow += run.depth / kNarrowDepth;
      }
    }
  }

 private:
  OCTILE_TILE_INLINE static void store(const TileFinish& f, std::int64_t at, std::int64_t channels, __m256i mask,
                                       __m256 y) {
    if (f.y_type == DType::f32) {
      float* out = static_cast<float*>(f.y) + at;
      return channels >= kHalfChannels ? _mm256_storeu_ps(out, y) : _mm256_maskstore_ps(out, mask, y);
    }
    auto* out = static_cast<std::uint16_t*>(f.y) + at;
    const __m128i narrow = f.y_type == DType::f16 ? to_halves(y) : to_bfloats(y);
    if (channels >= kHalfChannels) return _mm_storeu_si128(reinterpret_cast<__m128i*>(out), narrow);
    std::uint16_t some[kHalfChannels];
    std::memcpy(some, &narrow, sizeof some);
    for (std::int64_t i = 0; i < channels; ++i) out[i] = some[i];
  }

  template <int j = 0, int rows, int halves>
  OCTILE_TILE_INLINE static void finish(const TileFinish& f, std::int64_t row, int first,
                                        __m256i (&sum)[rows][halves]) {
    const std::int64_t at = (first + j) * kHalfChannels;
    const std::int64_t channels = f.channels - at;
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(channels)), lanes);
    [[maybe_unused]] const __m256i correction = _mm256_maskload_epi32(f.correction + at, mask);
    const __m256 right_scale = _mm256_maskload_ps(f.right_scale + at, mask);
    // To add -0 changes nothing.
    const __m256 bias = f.bias ? _mm256_maskload_ps(f.bias + at, mask) : _mm256_set1_ps(-0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      asm("" : "+x"(sum[i][j]));
      if constexpr (Terms::kOffset != Offset::none) sum[i][j] = _mm256_sub_epi32(sum[i][j], correction);
      const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(f.left_scale[row + i]), right_scale);
      const __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][j]), scale, bias);
      store(f, (row + i) * f.y_stride + at, channels, mask, y);
    }
    if constexpr (j + 1 < halves) finish<j + 1>(f, row, first, sum);
  }

  // Of vector j, from half `first` on.
  static std::int64_t segment_of(const GroupRun& run, int half, std::int64_t g) {
    return half / kHalves * run.segments_stride + g * kPanelChannels + half % kHalves * kHalfChannels;
  }

  template <int rows, int halves>
  OCTILE_TILE_INLINE static void start(const GroupRun& run, int first, std::int64_t g, __m256i (&sum)[rows][halves]) {
#pragma GCC unroll 8
    for (int j = 0; j < halves; ++j) {
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        sum[i][j] = _mm256_setzero_si256();
        if constexpr (Terms::kOffset != Offset::row_sums) continue;
        const __m256i less = _mm256_set1_epi32(-run.row_sums[i * run.row_sums_stride + g]);
        sum[i][j] = _mm256_slli_epi32(less, 3);
        if (!run.zero_points) continue;
        const auto* z = reinterpret_cast<const __m128i*>(run.zero_points + segment_of(run, first + j, g));
        sum[i][j] = _mm256_mullo_epi32(less, _mm256_cvtepu8_epi32(_mm_loadl_epi64(z)));
      }
    }
  }

  // By recursion, not in a loop: tile_avx512vnni.h.
  template <int j = 0, int rows, int halves>
  OCTILE_TILE_INLINE static void fold(const GroupRun& run, int first, std::int64_t g, __m256i (&sum)[rows][halves]) {
    [[maybe_unused]] const std::int64_t segment = segment_of(run, first + j, g);
    [[maybe_unused]] __m256 scale;
    if constexpr (kFold == Fold::channels) scale = _mm256_castsi256_ps(load(run.scales + segment * 4));
    [[maybe_unused]] __m256i less;
    if constexpr (Terms::kOffset == Offset::channel_sums) {
      less = _mm256_slli_epi32(load(run.channel_sums + segment * 4), 7);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      asm("" : "+x"(sum[i][j]));
      if constexpr (Terms::kOffset == Offset::channel_sums) sum[i][j] = _mm256_sub_epi32(sum[i][j], less);
      if constexpr (kFold == Fold::rows) {
        scale = _mm256_set1_ps(run.row_scales[i * run.row_scales_stride + g * run.row_scales_group]);
      }
      float* totals = run.totals + i * run.totals_stride + (first + j) * kHalfChannels;
      _mm256_storeu_ps(totals, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][j]), scale, _mm256_loadu_ps(totals)));
    }
    if constexpr (j + 1 < halves) fold<j + 1>(run, first, g, sum);
  }
};

}  // namespace

}  // namespace octile::cpu
