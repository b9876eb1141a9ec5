// The int8 product behind the w8a8 and w4a8 rows of one instruction set each; a (m, k) s8, b (n, k) s8 or s4:
//
//   one scale per channel:  y[i, j] = fma(Real(acc), a_scale[i] * b_scale[j], bias[j]), acc = sum_c a[i, c] * b[j, c]
//   scales in groups:       y[i, j] = fma(t, a_scale[i], bias[j]), where t folds the groups g in order, from 0:
//                           t = fma(Real(acc), b_scale[j, g], t), acc = sum_{c in g} a[i, c] * (b[j, c] - z[j, g])
//   a in blocks:            y[i, j] = t, where t folds the blocks g in order, from 0:
//                           t = fma(Real(acc), a_scale[i, g], t), acc = sum_{c in g} a[i, c] * b[j, c]
//
// b comes in panels of 16 channels (packed_weight.h), packed once by the caller or here. a is copied once, in the form
// that the tile takes. A kernel is a tile, a few rows of a times up to four panels; everything else is here.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <utility>

#include "cpu/support/cost.h"
#include "plan/kernel.h"
#include "plan/packed_weight.h"

// Of a tile's functions, in a file that says OCTILE_TILE, their target.
#define OCTILE_TILE_INLINE OCTILE_TILE inline __attribute__((always_inline))

namespace octile::cpu {

inline constexpr std::int64_t kMaxPanels = 4;  // of a tile

// What a tile needs to fold groups: all of it from the first of them on.
struct GroupRun {
  std::int64_t groups;               // 0: sums are stored, not folded
  const std::uint8_t* scales;        // Fold::channels: panels of (groups, 16) f32
  const std::uint8_t* channel_sums;  // s8, AForm::offset: panels of (groups, 16) s32
  const std::uint8_t* zero_points;   // s4: panels of (groups, 16) as 8 + z; null: 8
  std::int64_t segments_stride;      // segments from one panel to the next, of these three
  const std::int32_t* row_sums;      // s4: (rows, groups), of a
  std::int64_t row_sums_stride;
  const std::uint8_t* rest;  // AForm::symmetric: the second halves of a, or null
  float* totals;             // (rows, 16 * panels)
  std::int64_t totals_stride;
  const float* row_scales;  // Fold::rows: (rows, groups), with these strides
  std::int64_t row_scales_stride;
  std::int64_t row_scales_group;
};

// How the sums of a part become y, as FinishRows does it, while they are still in registers.
struct TileFinish {
  const std::int32_t* correction;  // (channels)
  const float* left_scale;         // (rows)
  const float* right_scale;        // (channels)
  const float* bias;               // (channels), or null
  void* y;                         // (rows, channels)
  DType y_type;                    // f32, f16 or bf16
  std::int64_t y_stride;
  std::int64_t channels;
};

// Without groups: sums[r, c] (+)= sum over `depth` terms of a[r] * b[c], modulo 2^32, which the end result fits.
// With them, each of `depth` terms and in order: totals[r, c] = fma(f32(acc), scale, totals[r, c]).
struct TileRun {
  const std::uint8_t* a;  // (rows, depth); AForm::tiled: blocks of (depth / 64, 16, 64)
  std::int64_t a_stride;  // tiled: a sixteenth of a block's bytes
  const std::uint8_t* b;  // panels of (depth / 4, 16, 4); s4: (depth / 8, 16, 4)
  std::int64_t b_stride;
  std::int64_t depth;        // a multiple of 32, of s4 8; beyond the last term b is 0
  int rows;                  // at most the kernel's
  int panels;                // at most kMaxPanels
  std::int32_t* sums;        // (rows, 16 * panels); rows up to a multiple of the kernel's may be overwritten
  std::int64_t sums_stride;  // a multiple of 16
  bool accumulate;
  const TileFinish* finish;    // y is written instead of sums; null: it is not
  std::int64_t row;            // of the part, for `finish`
  std::int64_t later;          // bytes from the first panel to one that a later tile meets, to be fetched; 0: none
  int later_panels;            // this many of them, 1 or 2
  int later_lines;             // AForm::tiled: instead, of each panel this many lines with every 64 terms
  bool whole;                  // `depth` is a whole panel, and the next one follows it
  bool one_panel;              // at a time, for a row alone
  const std::uint8_t* narrow;  // (panels, kMaxNarrowBlocks), from the kernel's find_narrow; null: nothing is known
  GroupRun group;
};

// Few rows of a times channels of an unpacked b, contiguous along k:
// sums[r, c] = sum over `depth` terms of (a[r] - 128) * b[c], a in AForm::offset.
struct DotRun {
  const std::uint8_t* a;  // (rows, depth)
  std::int64_t a_stride;
  const std::uint8_t* b;  // (channels, depth)
  std::int64_t b_stride;
  std::int64_t depth;
  std::int64_t rows, channels;
  std::int32_t* sums;  // (rows, channels), channels up to a multiple of 4 may be overwritten
  std::int64_t sums_stride;
};

// A row of a times channels of an unpacked b, s4 in groups, contiguous along k:
// totals[c] folds acc = sum over `depth` terms of a * b[c] of each group in order, from 0: fma(f32(acc), scale, total).
struct GroupDotRun {
  const std::uint8_t* a;  // (k): of each 8 terms the even ones first
  const std::uint8_t* b;  // (channels, k / 2): terms 2 i and 2 i + 1 in the low and the high half of a byte
  std::int64_t b_stride;  // bytes
  std::int64_t groups;
  std::int64_t depth;  // 32, 64, or a multiple of 128
  std::int64_t channels;
  const float* scales;  // (channels, groups), with these strides
  std::int64_t scales_stride, scales_group;
  const std::int32_t* a_sums;  // (groups)
  float* totals;               // (channels), up to a multiple of 4 may be overwritten
};

// A tile prefetches b this many bytes ahead in each panel, and scales this many groups ahead. Scales are apart from the
// panels, a line for each group and panel; without the prefetch each is a miss if the weight comes from memory.
inline constexpr std::int64_t kAhead = 2048;
inline constexpr std::int64_t kScalesAhead = 4;

inline constexpr std::int64_t kNarrowDepth = 64;      // terms that share a flag
inline constexpr std::int64_t kMaxNarrowBlocks = 64;  // flags of a panel

// What a kernel's tile takes as a.
enum class AForm : std::uint8_t {
  plain,      // s8
  offset,     // u8, 128 more: 128 * sum(b) is subtracted from the sums
  symmetric,  // s8 in -127..127: a row that holds -128 is taken as the sum of two halves
  tiled,      // s8, 16 rows by 64 terms together
};
inline constexpr std::int64_t kTiledRows = 16;

struct PanelKernel {
  AForm a;
  int rows;            // of a tile, at most
  int row_step;        // its rows cost as much as the next multiple of this
  std::int64_t depth;  // terms of a block: its part of b stays in a cache for all rows; more where `stream_rows`
  void (*tile)(const TileRun&);
  void (*folding_tile)(const TileRun&) = nullptr;      // for groups, whose scales are b's
  void (*row_folding_tile)(const TileRun&) = nullptr;  // for groups, whose scales are a's; s8
  // Flags the blocks of a panel whose sums fit 16 bits, before many rows meet it; may be null.
  void (*find_narrow)(const std::uint8_t* panel, std::int64_t depth, std::uint8_t* narrow) = nullptr;
  void (*configure)() = nullptr;  // on each thread, before its tiles; may be null
  void (*release)() = nullptr;
  // Rows of a tile where there are many. 64 channels of b then stay in the L2 cache while rows of a stream past them,
  // and y is finished tile by tile, by the tile itself or from sums that are still in the L1 cache. 0: tiles of `rows`,
  // and parts whose rows of y are long.
  int stream_rows = 0;
  // A packed weight of this many bytes or more is more likely in memory than in a cache: a single row then goes through
  // one panel after the other, since one stream reads memory faster than several. 0: never.
  std::int64_t one_panel_bytes = 0;
  bool finishes = false;                            // supports `TileRun::finish`
  void (*dot)(const DotRun&) = nullptr;             // null: a part packs what it needs of a weight that is not packed
  int dot_rows = 0;                                 // so does one of more rows
  void (*group_dot)(const GroupDotRun&) = nullptr;  // the same for one row, and s4 in groups without zero points
};

// What is subtracted from the sums of a group, since the tile's operands are not a and b themselves.
enum class Offset : std::uint8_t {
  none,
  channel_sums,  // 128 * the channel's sum: a is 128 too large
  row_sums,      // (8 + z) * the row's sum: b is q + 8
};

// What a tile does with the sums of its terms.
enum class Fold : std::uint8_t {
  none,      // stores them
  channels,  // adds them to the totals, times a scale for each channel and group
  rows,      // times a scale for each row and group
};

// A kernel gives its `Terms`, and the header of its instruction set makes tiles of them:
//   kRowStep   rows of a row step
//   kColSteps  column steps of a panel: vectors that hold a row of its sums
//   kSteps[]   column steps at a time, for 1, 2, ... row steps: what the registers hold
//   kOffset
//   kDepthBytes  of a panel, for each term
//   multiply(run, operands, sum)  adds `run.depth` terms to (row steps, column steps) of sums in registers
struct TileOperands {
  const std::uint8_t* a;
  const std::uint8_t* b;
  const std::uint8_t* narrow;
  std::int64_t later = 0;  // TileRun's, where b is the first panel
  // From term `near` on b is fetched `far` bytes ahead: where a panel ends, what the next tile meets first.
  std::int64_t near = 0;
  std::int64_t far = kAhead;
};

// For a tile of `panels` that have this many terms left.
inline void look_ahead(const TileRun& run, std::int64_t terms, int panels, std::int64_t depth_bytes, TileOperands& at) {
  at.near = terms - kAhead / depth_bytes;
  if (run.whole) at.far = kAhead + (panels - 1) * run.b_stride;
}

// Fetches the scales of group g + kScalesAhead, or of a group of the panels behind these.
inline __attribute__((always_inline)) void fetch_scales(const GroupRun& run, bool whole, std::int64_t g, int first,
                                                        int panels) {
  std::int64_t later = g + kScalesAhead;
  if (whole && later >= run.groups) later += (panels - 1) * run.groups;
  for (int j = 0; j < panels; ++j) {
    const std::int64_t segment = (first + j) * run.segments_stride + later * kPanelChannels;
    __builtin_prefetch(run.scales + segment * static_cast<std::int64_t>(sizeof(float)));
  }
}

// The whole run, by a tile's `run<row steps, column steps>(run, first column step)`.
template <class Tile, std::size_t kIndex>
void run_row_steps(const TileRun& run) {
  constexpr int kStep = Tile::kSteps[kIndex];
  const int end = run.panels * Tile::kColSteps;
  int j = 0;
  if (kIndex > 0 || !run.one_panel) {
    for (; j + kStep <= end; j += kStep) Tile::template run<kIndex + 1, kStep>(run, j);
    if constexpr (kStep > 2 * Tile::kColSteps) {
      for (; j + kStep / 2 <= end; j += kStep / 2) Tile::template run<kIndex + 1, kStep / 2>(run, j);
    }
  }
  if constexpr (kStep > Tile::kColSteps) {
    for (; j < end; j += Tile::kColSteps) Tile::template run<kIndex + 1, Tile::kColSteps>(run, j);
  }
}

template <class Tile>
void run_tile(const TileRun& run) {
  static constexpr auto kRuns = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<void (*)(const TileRun&), sizeof...(kIndex)>{run_row_steps<Tile, kIndex>...};
  }
  (std::make_index_sequence<std::size(Tile::kSteps)>());
  kRuns[static_cast<std::size_t>((run.rows - 1) / Tile::kRowStep)](run);
}

template <template <class, Fold> class Tile, class Terms>
constexpr PanelKernel panel_kernel(AForm a) {
  PanelKernel kernel = {.a = a,
                        .rows = static_cast<int>(std::size(Terms::kSteps)) * Terms::kRowStep,
                        .row_step = Terms::kRowStep,
                        .depth = 1024,
                        .tile = run_tile<Tile<Terms, Fold::none>>,
                        .folding_tile = run_tile<Tile<Terms, Fold::channels>>};
  // Blocks of a gradient meet s8 alone.
  if constexpr (Terms::kOffset != Offset::row_sums) kernel.row_folding_tile = run_tile<Tile<Terms, Fold::rows>>;
  return kernel;
}

void multiply_panels(const PanelKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch);
std::size_t panels_workspace(const PanelKernel& kernel, const GemmProblem& problem);

// A row of the kernel table that multiplies with kKernel.
template <const PanelKernel& kKernel>
constexpr GemmKernel panels_row(std::string_view name, octile::Task task, decltype(GemmKernel::supports) supports,
                                decltype(GemmKernel::cost) cost) {
  return {.name = name,
          .task = task,
          .supports = supports,
          .cost = cost,
          .workspace = [](const GemmProblem& p) { return panels_workspace(kKernel, p); },
          .launch = [](const GemmProblem& p, const GemmOperands& o,
                       const Launch& l) { multiply_panels(kKernel, p, o, l); }};
}

}  // namespace octile::cpu
