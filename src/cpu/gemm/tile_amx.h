// Tiles of AMX: tdpbssd adds the product of 16 rows of a by 64 terms and of 64 terms by a panel, which are 1 KiB: 16
// lines of 16 channels of 4 terms. AVX-512, which all chips with AMX have, folds groups and blocks. Terms:
// integer_panels.h, but instead of `multiply`
//   kScratch                          bytes for each panel, for `lines`
//   lines(b, c, depth, scratch)       the lines of 64 of a panel's `depth` terms, from term c on; 0 where there are fewer
#pragma once

#define OCTILE_TILE __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl")))

#include <immintrin.h>

#include <algorithm>

#include "base/ceil_div.h"
#include "cpu/gemm/integer_panels.h"
#include "cpu/gemm/tile_finish_avx512.h"
#include "cpu/gemm/tiles.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

static_assert(kTileRows == kTiledRows && kTileBytes == kS8Depth);

OCTILE_TILE void configure() {
  static constexpr TileConfiguration kConfiguration = tile_configuration(kTileRows);
  _tile_loadconfig(&kConfiguration);
}

OCTILE_TILE void release() { _tile_release(); }

// What a tile fetches while it multiplies, a part of it with every 64 terms: its share of the next block of b, into the
// L2 cache, and towards the end the rows of y that it will write.
class Ahead {
 public:
  OCTILE_TILE_INLINE Ahead(const TileRun& run, int first, int rows, int panels)
      : b_(run.b + run.later + first * run.b_stride), lines_(run.later != 0 ? run.later_lines : 0) {
    if (!run.finish) return;
    const TileFinish& f = *run.finish;
    const std::int64_t y_bytes = bits(f.y_type) / 8;
    const std::int64_t steps = ceil_div(run.depth, std::int64_t{kTileBytes});
    y_stride_ = f.y_stride * y_bytes;
    y_ = static_cast<const std::uint8_t*>(f.y) + run.row * y_stride_ + first * kPanelChannels * y_bytes;
    y_last_ = panels * kPanelChannels * y_bytes - 1;
    rows_ = rows;
    rows_at_once_ = static_cast<int>(ceil_div(std::int64_t{rows}, steps));
    wait_ = steps - ceil_div(rows, rows_at_once_);
  }

  template <int panels>
  OCTILE_TILE_INLINE void step(std::int64_t b_stride) {
    for (int i = 0; i < lines_; ++i, b_ += kPanelLine) {
      _mm_prefetch(b_, _MM_HINT_T1);
      if constexpr (panels == 2) _mm_prefetch(b_ + b_stride, _MM_HINT_T1);
    }
    if (wait_-- > 0) return;
    for (int i = 0; i < rows_at_once_ && rows_ > 0; ++i, --rows_, y_ += y_stride_) {
      __builtin_prefetch(y_, 1);
      __builtin_prefetch(y_ + y_last_, 1);
    }
  }

 private:
  const std::uint8_t* b_;
  int lines_;
  const std::uint8_t* y_ = nullptr;
  std::int64_t y_stride_ = 0, y_last_ = 0, wait_ = 0;  // steps
  int rows_ = 0, rows_at_once_ = 0;
};

struct NothingAhead {
  template <int>
  void step(std::int64_t) const {}
};

template <class Terms, Fold kFold>
struct Tile : Terms {
  // (row tiles, panels) of sums, from panel `first` on.
  template <int row_tiles, int panels>
  OCTILE_TILE static void run(const TileRun& run, int first) {
    const std::uint8_t* a = run.a;
    const std::uint8_t* b = run.b + first * run.b_stride;
    const int rows = std::min(run.rows, row_tiles * kTileRows);
    if constexpr (kFold == Fold::none) {
      std::int32_t* sums = run.sums + first * kPanelChannels;
      run.accumulate ? load<row_tiles, panels>(sums, run.sums_stride) : zero();
      multiply<row_tiles, panels>(run, a, b, Ahead(run, first, rows, panels));
      if (!run.finish) return store<row_tiles, panels>(sums, run.sums_stride);
      alignas(64) std::int32_t finished[row_tiles * kTileRows][panels * kPanelChannels];
      store<row_tiles, panels>(finished[0], panels * kPanelChannels);
      const TileFinish f = *run.finish;
      int i = 0;
      for (; i + 4 <= rows; i += 4) finish<4, panels>(f, run.row + i, first, finished + i);
      for (; i < rows; ++i) finish<1, panels>(f, run.row + i, first, finished + i);
    } else {
      const GroupRun group = run.group;
      // Two of them, so that the tiles of a group needn't wait until the one before is folded.
      alignas(64) std::int32_t sums[2][row_tiles * kTileRows][panels * kPanelChannels];
      for (std::int64_t g = 0; g < group.groups; ++g) {
        zero();
        multiply<row_tiles, panels>(run, a, b, NothingAhead());
        store<row_tiles, panels>(sums[g % 2][0], panels * kPanelChannels);
        fold<panels>(group, first, g, rows, sums[g % 2]);
        a += run.depth * kTileRows;
        b += run.depth * Terms::kDepthBytes;
      }
    }
  }

 private:
  // Tiles 0 to 3 are sums (row of tiles, panel), 4 and 5 hold a, 6 and 7 hold b: all eight.
  OCTILE_TILE_INLINE static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  template <int row_tiles, int panels>
  OCTILE_TILE_INLINE static void load(const std::int32_t* sums, std::int64_t stride) {
    const std::int32_t* lower = sums + kTileRows * stride;
    _tile_loadd(0, sums, 4 * stride);
    if constexpr (panels == 2) _tile_loadd(1, sums + kPanelChannels, 4 * stride);
    if constexpr (row_tiles == 2) _tile_loadd(2, lower, 4 * stride);
    if constexpr (row_tiles == 2 && panels == 2) _tile_loadd(3, lower + kPanelChannels, 4 * stride);
  }

  template <int row_tiles, int panels>
  OCTILE_TILE_INLINE static void store(std::int32_t* sums, std::int64_t stride) {
    std::int32_t* lower = sums + kTileRows * stride;
    _tile_stored(0, sums, 4 * stride);
    if constexpr (panels == 2) _tile_stored(1, sums + kPanelChannels, 4 * stride);
    if constexpr (row_tiles == 2) _tile_stored(2, lower, 4 * stride);
    if constexpr (row_tiles == 2 && panels == 2) _tile_stored(3, lower + kPanelChannels, 4 * stride);
  }

  template <int rows, int panels>
  OCTILE_TILE_INLINE static void finish(const TileFinish& f, std::int64_t row, int first,
                                        const std::int32_t (*sums)[panels * kPanelChannels]) {
    __m512i sum[rows][panels];
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < panels; ++j) sum[i][j] = _mm512_load_si512(sums[i] + j * kPanelChannels);
    }
    finish_sums(f, row, first, sum);
  }

  template <int row_tiles, int panels, class Ahead>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const std::uint8_t* a, const std::uint8_t* b,
                                          Ahead ahead) {
    // By turns, so that lines needn't wait until the ones before are loaded.
    alignas(64) std::uint8_t scratch[2][panels][std::max(Terms::kScratch, 1)];
    const std::uint8_t* lower_a = a + kTileRows * run.a_stride;
    for (std::int64_t c = 0; c < run.depth; c += kTileBytes) {
      auto& mine = scratch[c / kTileBytes % 2];
      _tile_loadd(4, a + c * kTileRows, kTileBytes);
      _tile_loadd(6, Terms::lines(b, c, run.depth, mine[0]), kTileBytes);
      if constexpr (panels == 2) _tile_loadd(7, Terms::lines(b + run.b_stride, c, run.depth, mine[1]), kTileBytes);
      if constexpr (row_tiles == 2) _tile_loadd(5, lower_a + c * kTileRows, kTileBytes);
      _tile_dpbssd(0, 4, 6);
      if constexpr (panels == 2) _tile_dpbssd(1, 4, 7);
      if constexpr (row_tiles == 2) _tile_dpbssd(2, 5, 6);
      if constexpr (row_tiles == 2 && panels == 2) _tile_dpbssd(3, 5, 7);
      ahead.template step<panels>(run.b_stride);
    }
  }

  // The sums of group g, of as many rows as there are: there are no scales for others.
  template <int panels>
  OCTILE_TILE_INLINE static void fold(const GroupRun& run, int first, std::int64_t g, int rows,
                                      const std::int32_t (*sums)[panels * kPanelChannels]) {
    __m512 scale[panels];
    __m512i zero_point[panels];
    for (int j = 0; j < panels; ++j) {
      const std::int64_t segment = (first + j) * run.segments_stride + g * kPanelChannels;
      if constexpr (kFold == Fold::channels) scale[j] = _mm512_loadu_ps(run.scales + segment * 4);
      if constexpr (Terms::kOffset == Offset::row_sums) {
        zero_point[j] = _mm512_set1_epi32(8);
        if (!run.zero_points) continue;
        const auto* z = reinterpret_cast<const __m128i*>(run.zero_points + segment);
        zero_point[j] = _mm512_maskz_cvtepu8_epi32(kAllLanes, _mm_loadu_si128(z));
      }
    }
    for (int i = 0; i < rows; ++i) {
      float* totals = run.totals + i * run.totals_stride + first * kPanelChannels;
      for (int j = 0; j < panels; ++j, totals += kPanelChannels) {
        __m512i acc = _mm512_load_si512(sums[i] + j * kPanelChannels);
        if constexpr (Terms::kOffset == Offset::row_sums) {
          const __m512i row_sum = _mm512_set1_epi32(run.row_sums[i * run.row_sums_stride + g]);
          acc = _mm512_sub_epi32(acc, _mm512_mullo_epi32(zero_point[j], row_sum));
        }
        if constexpr (kFold == Fold::rows) {
          scale[j] = _mm512_set1_ps(run.row_scales[i * run.row_scales_stride + g * run.row_scales_group]);
        }
        _mm512_storeu_ps(totals,
                         _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(kAllLanes, acc), scale[j], _mm512_loadu_ps(totals)));
      }
    }
  }
};

template <class Terms>
constexpr PanelKernel amx_kernel() {
  PanelKernel kernel = panel_kernel<Tile, Terms>(AForm::tiled);
  kernel.depth = 512;
  kernel.finishes = true;
  kernel.configure = configure;
  kernel.release = release;
  return kernel;
}

struct TermsOfTiles {
  static constexpr int kRowStep = kTileRows;
  static constexpr int kColSteps = 1;
  static constexpr int kSteps[] = {2, 2};
};

// A tile multiplies 16 rows, however many there are.
inline GemmProblem whole_tiles(GemmProblem p) {
  p.m = (p.m + kTileRows - 1) / kTileRows * kTileRows;
  return p;
}

}  // namespace

}  // namespace octile::cpu
