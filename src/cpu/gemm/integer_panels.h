// The int8 product behind the w8a8 and w4a8 rows of one instruction set each; a (m, k) s8, b (n, k) s8 or s4:
//
//   one scale per channel:  y[i, j] = fma(Real(acc), a_scale[i] * b_scale[j], bias[j]), acc = sum_c a[i, c] * b[j, c]
//   scales in groups:       y[i, j] = fma(t, a_scale[i], bias[j]), where t folds the groups g in order, from 0:
//                           t = fma(Real(acc), b_scale[j, g], t), acc = sum_{c in g} a[i, c] * (b[j, c] - z[j, g])
//
// b comes in panels of 16 channels (packed_weight.h), packed once by the caller or here. a is copied once, in the form
// that the tile takes. A kernel is a tile, a few rows of a times up to four panels; everything else is here.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <utility>

#include "cpu/support/isa.h"
#include "plan/kernel.h"

namespace octile::cpu {

inline constexpr std::int64_t kMaxPanels = 4;  // of a tile

// sums[r, c] (+)= sum over `depth` terms of a[r] * b[c], modulo 2^32, which the end result fits. An s4 b counts as
// q + 8.
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
  const std::uint8_t* narrow;  // (panels, kMaxNarrowBlocks), from the kernel's find_narrow; null: nothing is known
};

// A tile of few rows waits for memory alone. It prefetches b this many bytes ahead in each panel.
inline constexpr std::int64_t kAhead = 2048;
inline constexpr int kFewRows = 4;

inline constexpr std::int64_t kNarrowDepth = 64;      // terms that share a flag
inline constexpr std::int64_t kMaxNarrowBlocks = 16;  // flags of a panel

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
  std::int64_t depth;  // terms of a block: its part of b stays in a cache for all rows
  void (*tile)(const TileRun&);
  // Flags the blocks of a panel whose sums fit 16 bits, before many rows meet it; may be null.
  void (*find_narrow)(const std::uint8_t* panel, std::int64_t depth, std::uint8_t* narrow) = nullptr;
  void (*configure)() = nullptr;  // on each thread, before its tiles; may be null
  void (*release)() = nullptr;
};

// A Tile is a struct of constants and one function, `run<row steps, column steps>(run, first column step)`:
//   kRowStep     rows of a row step
//   kColSteps    column steps of a panel: vectors of sums that hold one row of it
//   kSteps[]     column steps at a time, for 1, 2, ... row steps: what the registers hold
template <class Tile, std::size_t kIndex>
void run_row_steps(const TileRun& run) {
  constexpr int kStep = Tile::kSteps[kIndex];
  const int end = run.panels * Tile::kColSteps;
  int j = 0;
  for (; j + kStep <= end; j += kStep) Tile::template run<kIndex + 1, kStep>(run, j);
  if constexpr (kStep > Tile::kColSteps) {
    for (; j < end; j += Tile::kColSteps) Tile::template run<kIndex + 1, Tile::kColSteps>(run, j);
  }
}

template <class Tile>
void run_tile(const TileRun& run) {
  using Run = void (*)(const TileRun&);
  constexpr auto kRuns = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<Run, sizeof...(kIndex)>{run_row_steps<Tile, kIndex>...};
  }
  (std::make_index_sequence<std::size(Tile::kSteps)>());
  static constexpr auto kTable = kRuns;
  kTable[static_cast<std::size_t>((run.rows - 1) / Tile::kRowStep)](run);
}

template <class Tile>
constexpr PanelKernel panel_kernel(AForm a, std::int64_t depth = 1024) {
  return {a, static_cast<int>(std::size(Tile::kSteps)) * Tile::kRowStep, Tile::kRowStep, depth, run_tile<Tile>};
}

void multiply_panels(const PanelKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch);
std::size_t panels_workspace(const PanelKernel& kernel, const GemmProblem& problem);

}  // namespace octile::cpu
