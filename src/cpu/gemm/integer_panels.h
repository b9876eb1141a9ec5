// The integer product behind the w8a8 rows of one instruction set each: y[i, j] = fma(Real(sum_c a[i, c] * b[j, c]),
// a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8.
//
// b comes in panels of 16 channels, 4 terms to a 32-bit lane: packed once by the caller (packed_weight.h), or here. a
// is copied once, as the kernel wants it. A kernel is a tile: a few rows of a times up to four panels.
#pragma once

#include <cstdint>

#include "cpu/support/isa.h"
#include "plan/kernel.h"

namespace octile::cpu {

inline constexpr std::int64_t kMostPanels = 4;  // that a tile goes through

// sums[r, c] (+)= sum over `depth` terms of a[r] * b[c]: modulo 2^32, which the end result fits.
struct TileRun {
  const std::uint8_t* a;  // (rows, depth); LeftForm::tiled: blocks of (depth / 64, 16, 64)
  std::int64_t a_stride;  // tiled: a sixteenth of a block's bytes
  const std::uint8_t* b;  // panels of (depth / 4, 16, 4)
  std::int64_t b_stride;
  std::int64_t depth;        // a multiple of 64; beyond the last term b is 0
  int rows;                  // at most the kernel's
  int panels;                // at most kMostPanels
  std::int32_t* sums;        // (rows, 16 * panels); rows up to a multiple of the kernel's may be overwritten
  std::int64_t sums_stride;  // a multiple of 16
  bool accumulate;
  const std::uint8_t* marks;  // (panels, kMostMarks): what the kernel's `mark` wrote; null: nothing is known
};
// How far ahead of its reading a tile of few rows, which waits for memory alone, asks for b: bytes of each panel.
inline constexpr std::int64_t kAhead = 2048;
inline constexpr int kFewRows = 4;

inline constexpr std::int64_t kMarkedDepth = 64;  // terms that share a mark
inline constexpr std::int64_t kMostMarks = 16;    // of one panel's block

// What a kernel's tile takes as a.
enum class LeftForm : std::uint8_t {
  plain,      // s8
  offset,     // u8, 128 more: 128 * sum(b) is subtracted from the sums
  symmetric,  // s8 in -127..127: a row that holds -128 is taken as the sum of two halves
  tiled,      // s8, 16 rows by 64 terms together
};
inline constexpr std::int64_t kTiledRows = 16;

struct PanelKernel {
  LeftForm left;
  int rows;            // of a tile, at most
  int row_step;        // its rows cost as much as the next multiple of this
  std::int64_t depth;  // terms of a block: its part of b stays in a cache for all rows
  void (*tile)(const TileRun&);
  // Looks at `depth` terms of a panel before many rows meet it; may be null.
  void (*mark)(const std::uint8_t* panel, std::int64_t depth, std::uint8_t* marks);
  void (*begin)();  // on each thread, before its tiles; may be null
  void (*end)();
};

void multiply_panels(const PanelKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch);
std::size_t panels_workspace(const PanelKernel& kernel, const GemmProblem& problem);

}  // namespace octile::cpu
