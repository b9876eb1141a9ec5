// w4a16 and w8a16 with tdpbf16ps: 16 rows by 32 terms, times 32 terms of 16 channels. 16 elements of a panel of
// weights, pairs as in bf16_pairs.h, already form such a tile in memory; panels of left are tiles of (16 pairs, rows,
// 16 pairs).
//
// An instruction adds the products of the pairs' first terms to one sum, in order, and those of the second terms to
// another, and then both to the tile's. It rounds to nearest, whatever MXCSR says, and takes subnormal numbers for
// zero: x, and sums as they grow. A row's bits do not depend on how many rows a tile has. AVX-512 folds a segment's
// sums (float_panels.h) into the totals, with its scales.
#pragma once

#include "cpu/gemm/bf16_pairs.h"
#include "cpu/gemm/tiles.h"

#define OCTILE_TARGET_AMX_BF16 OCTILE_TARGET_AVX512BF16 ",amx-tile,amx-bf16"
#define OCTILE_AMX __attribute__((target(OCTILE_TARGET_AMX_BF16)))
#define OCTILE_AMX_INLINE inline __attribute__((always_inline, target(OCTILE_TARGET_AMX_BF16)))

namespace octile::cpu {

namespace {

constexpr std::int64_t kTilePairs = kTileBytes / static_cast<std::int64_t>(sizeof(Bf16Pair));  // of a row

// Constants: GCC 12 does not know that _tile_loadconfig reads 64 bytes.
constexpr auto kConfigurations = [] {
  std::array<TileConfiguration, kTileRows + 1> configurations{};
  for (int rows = 1; rows <= kTileRows; ++rows) {
    configurations[static_cast<std::size_t>(rows)] = tile_configuration(rows);
  }
  return configurations;
}();

OCTILE_AMX void configure_tiles(std::int64_t left_rows) {
  _tile_loadconfig(&kConfigurations[static_cast<std::size_t>(left_rows)]);
}

OCTILE_AMX void release_tiles() { _tile_release(); }

// Of each segment: how many tiles of a channel, and where its scales are. `take` returns the current tile, `prepare`
// decodes the next.
struct PanelLines {
  static constexpr std::int64_t kStride = kMaxCols * sizeof(Bf16Pair);
  static constexpr std::int64_t kNext = kPanelChannels;  // pairs from a panel to the one beside it

  const FloatTile<Bf16Pair>& run;
  const Bf16Pair* next;

  OCTILE_AMX_INLINE explicit PanelLines(const FloatTile<Bf16Pair>& tile) : run(tile), next(tile.right) {}

  OCTILE_AMX_INLINE std::int64_t segments() const { return ceil_div(run.depth, run.segment); }
  OCTILE_AMX_INLINE std::int64_t tiles(std::int64_t s) const {
    return std::min(run.segment, run.depth - s * run.segment) / kTilePairs;
  }
  OCTILE_AMX_INLINE const float* scales(std::int64_t s, int panel) const {
    return run.scales + s * kMaxCols + panel * kPanelChannels;
  }
  OCTILE_AMX_INLINE void prepare() {}
  OCTILE_AMX_INLINE const Bf16Pair* take() {
    const Bf16Pair* tile = next;
    next += kTilePairs * kMaxCols;
    return tile;
  }
};

// From integers, 32 terms of kPanels panels at a time.
template <template <Isa> class Codec, int kPanels, NibbleOrder kOrder, bool kZeroPoints>
struct StreamLines {
  using V = Codec<Isa::amx>;
  static constexpr std::int64_t kStride = kTileBytes;
  static constexpr std::int64_t kNext = kTileRows * kTilePairs;
  static constexpr int kLineTerms = V::kLineTerms;
  static constexpr int kLineElements = kLineTerms / 2;
  static constexpr int kLines = kTileRows / kLineElements;  // of a tile
  static constexpr std::int64_t kTileTerms = 2 * kTilePairs;

  const StreamRun<Bf16Pair>& run;
  std::int64_t per_group;  // segments
  V codecs[kZeroPoints ? kPanels : 1];
  std::int64_t group = 0, term = 0;  // of the tile to be prepared
  std::int64_t at = 0;               // bytes into each panel
  std::int64_t near;                 // from here on, what is ahead is the next part's
  int turn = 0;
  alignas(64) Bf16Pair buffers[2][kPanels][kNext];

  OCTILE_AMX_INLINE explicit StreamLines(const StreamRun<Bf16Pair>& stream)
      : run(stream),
        per_group(ceil_div(stream.group_depth, kDepth)),
        near(stream.groups * stream.group_depth / kLineTerms * kPanelLine - kPrefetch) {
    if (!kZeroPoints) codecs[0].set(nullptr);
  }

  OCTILE_AMX_INLINE std::int64_t segments() const { return run.groups * per_group; }
  OCTILE_AMX_INLINE std::int64_t tiles(std::int64_t s) const {
    return ceil_div(std::min(kDepth, run.group_depth - s % per_group * kDepth), kTileTerms);
  }
  OCTILE_AMX_INLINE const float* scales(std::int64_t s, int panel) const {
    return static_cast<const float*>(run.panels[panel].scales) + s / per_group * kPanelChannels;
  }

  OCTILE_AMX_INLINE void prepare() {
    if (group == run.groups) return;
    if (term == 0) begin_group();
    const auto lines = static_cast<int>(std::min<std::int64_t>(kLines, (run.group_depth - term) / kLineTerms));
    const std::int64_t ahead = at + kPrefetch + (at < near ? 0 : run.next);
    for (int i = 0; i < kPanels; ++i) {
      Bf16Pair* out = buffers[turn][i];
      const V& codec = codecs[kZeroPoints ? i : 0];
#pragma GCC unroll 8
      for (int l = 0; l < kLines; ++l, out += kLineElements * kTilePairs) {
        const std::uint8_t* line = run.panels[i].lines + l * kPanelLine;
        if (l >= lines) {  // beyond the last term
          std::memset(out, 0, kLineElements * kTileBytes);
          continue;
        }
        __builtin_prefetch(line + ahead);
        typename V::Words lanes;
        std::memcpy(&lanes, line + at, sizeof lanes);
#pragma GCC unroll 4
        for (int t = 0; t < kLineElements; ++t) {
          typename V::Elements& row = *reinterpret_cast<typename V::Elements*>(out + t * kTilePairs);
          codec.template element<kOrder, !kZeroPoints>(lanes, t, row);
        }
      }
    }
    turn ^= 1;
    at += lines * kPanelLine;
    term += kTileTerms;
    if (term < run.group_depth) return;
    term = 0;
    ++group;
  }

  OCTILE_AMX_INLINE const Bf16Pair* take() const { return buffers[turn ^ 1][0]; }

 private:
  OCTILE_AMX_INLINE void begin_group() {
    const std::int64_t later = group + kScalesAhead;
    const std::int64_t line = later < run.groups || run.next == 0 ? later : later + run.next_scales;
    for (int i = 0; i < kPanels; ++i) {
      __builtin_prefetch(static_cast<const float*>(run.panels[i].scales) + line * kPanelChannels);
      if constexpr (kZeroPoints) codecs[i].set(run.panels[i].zero_points + group * kPanelChannels);
    }
  }
};

// Tiles of left, and their totals.
struct TileSums {
  const Bf16Pair* left;      // (depth / 16, rows, 16)
  std::int64_t left_stride;  // to the second tile
  std::int64_t rows;         // of a tile
  float* totals;             // (tiles * rows, stride)
  std::int64_t stride;
};

// (kRowTiles, kPanels) tiles of sums: (2, 2), (1, 2) or (1, 4).
template <int kRowTiles, int kPanels>
struct SumTiles {
  static constexpr int kCols = kPanels * static_cast<int>(kPanelChannels);

  template <class Lines>
  OCTILE_AMX_INLINE static void run(TileSums run, Lines& lines) {
    // Two of them: while the tiles multiply a segment, the sums of the one before are folded.
    alignas(64) float sums[2][kRowTiles * kTileRows * kCols];
    const std::int64_t segments = lines.segments();
    lines.prepare();
    for (std::int64_t s = 0; s < segments; ++s) {
      zero();
      for (std::int64_t tiles = lines.tiles(s); tiles > 0; --tiles) {
        const Bf16Pair* right = lines.take();
        lines.prepare();
        written_for_tiles();
        multiply<Lines>(run, right);
        run.left += kTilePairs * run.rows;
      }
      if (s > 0) fold(run, lines, s - 1, sums[(s - 1) % 2]);
      store(run.rows, sums[s % 2]);
    }
    if (segments > 0) fold(run, lines, segments - 1, sums[(segments - 1) % 2]);
  }

 private:
  OCTILE_AMX_INLINE static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kRowTiles * kPanels == 4) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  // Tiles 0 to 3 are sums, (row tile, panel), 4 and 5 left, 6 and 7 right.
  template <class Lines>
  OCTILE_AMX_INLINE static void multiply(const TileSums& run, const Bf16Pair* right) {
    constexpr std::int64_t kStride = Lines::kStride, kNext = Lines::kNext;
    _tile_loadd(4, run.left, kTileBytes);
    _tile_loadd(6, right, kStride);
    _tile_loadd(7, right + kNext, kStride);
    if constexpr (kRowTiles == 2) _tile_loadd(5, run.left + run.left_stride, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if constexpr (kPanels == 4) {
      _tile_loadd(6, right + 2 * kNext, kStride);
      _tile_loadd(7, right + 3 * kNext, kStride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
    }
  }

  OCTILE_AMX_INLINE static void store(std::int64_t rows, float* sums) {
    constexpr std::int64_t kStride = kCols * sizeof(float);
    float* rest = kPanels == 4 ? sums + 2 * kPanelChannels : sums + rows * kCols;
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + kPanelChannels, kStride);
    if constexpr (kRowTiles * kPanels == 4) {
      _tile_stored(2, rest, kStride);
      _tile_stored(3, rest + kPanelChannels, kStride);
    }
  }

  // totals += scale * sums, of segment s.
  template <class Lines>
  OCTILE_AMX_INLINE static void fold(const TileSums& run, const Lines& lines, std::int64_t s, const float* sums) {
    __m512 scales[kPanels];
    for (int j = 0; j < kPanels; ++j) scales[j] = _mm512_loadu_ps(lines.scales(s, j));
    float* totals = run.totals;
    for (std::int64_t i = 0; i < kRowTiles * run.rows; ++i, totals += run.stride, sums += kCols) {
      for (int j = 0; j < kPanels; ++j) {
        float* total = totals + j * kPanelChannels;
        const __m512 sum = _mm512_load_ps(sums + j * kPanelChannels);
        _mm512_storeu_ps(total, _mm512_fmadd_ps(sum, scales[j], _mm512_loadu_ps(total)));
      }
    }
  }
};

template <int kRowTiles>
OCTILE_AMX void multiply_panels(const TileSums& sums, const FloatTile<Bf16Pair>& run) {
  PanelLines lines(run);
  SumTiles<kRowTiles, 2>::run(sums, lines);
}

template <template <Isa> class Codec, int kRowTiles, NibbleOrder kOrder, bool kZeroPoints>
OCTILE_AMX void stream_panels(const TileSums& sums, const StreamRun<Bf16Pair>& run) {
  constexpr int kPanels = kRowTiles == 1 ? 4 : 2;
  StreamLines<Codec, kPanels, kOrder, kZeroPoints> lines(run);
  SumTiles<kRowTiles, kPanels>::run(sums, lines);
}

// The Tile (weight_gemm.h) of a Codec of pairs.
template <template <Isa> class Codec>
struct AmxTile {
  static constexpr std::int64_t kRun = kTilePairs;
  static constexpr std::int64_t kMaxTiles = 2;

  struct Session {
    explicit Session(std::int64_t panel_rows) { configure_tiles(panel_rows); }
    ~Session() { release_tiles(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static std::int64_t rows() { return kTileRows; }
  static std::int64_t stream_rows() { return kTileRows; }
  static std::int64_t stream_panels(std::int64_t tiles, std::int64_t) { return tiles == 1 ? 4 : 2; }

  static void multiply(std::int64_t panel_rows, const FloatTile<Bf16Pair>& run) {
    TileSums sums{run.left, run.depth * panel_rows, panel_rows, run.sums, kPartCols};
    std::int64_t panels = run.panels;
    for (; panels >= 2; panels -= 2) {
      multiply_panels<2>(sums, run);
      sums.left += 2 * sums.left_stride;
      sums.totals += 2 * panel_rows * kPartCols;
    }
    if (panels > 0) multiply_panels<1>(sums, run);
  }

  static void stream(std::int64_t tiles, std::int64_t tile_rows, const StreamRun<Bf16Pair>& run) {
    const TileSums sums{run.left, run.left_stride, tile_rows, run.sums, kStreamCols};
    tiles == 1 ? stream_tiles<1>(sums, run) : stream_tiles<2>(sums, run);
  }

 private:
  template <int kRowTiles>
  static void stream_tiles(const TileSums& sums, const StreamRun<Bf16Pair>& run) {
    constexpr NibbleOrder kPacked = NibbleOrder::packed, kRow = NibbleOrder::row;
    const bool zero_points = run.panels[0].zero_points != nullptr;
    if constexpr (Codec<Isa::amx>::kLineTerms == 4) {
      cpu::stream_panels<Codec, kRowTiles, kPacked, false>(sums, run);
    } else if (run.order == kPacked) {
      zero_points ? cpu::stream_panels<Codec, kRowTiles, kPacked, true>(sums, run)
                  : cpu::stream_panels<Codec, kRowTiles, kPacked, false>(sums, run);
    } else {
      zero_points ? cpu::stream_panels<Codec, kRowTiles, kRow, true>(sums, run)
                  : cpu::stream_panels<Codec, kRowTiles, kRow, false>(sums, run);
    }
  }
};

// GFLOP/s of a core for the estimate; a Sapphire Rapids reaches 250 to 650.
inline constexpr int kTileGflops = 500;

}  // namespace

}  // namespace octile::cpu
