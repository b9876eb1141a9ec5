// Which part of a tile a thread of a block holds. Layouts are separable: the rows of a thread depend on its thread row
// only, its columns on its thread column only. So operands of one row or one column, broadcasts and reductions need no
// data from other threads but the sums themselves.
#pragma once

#include "octile/tile/shape.h"

namespace octile::tile {

TILE_FUNCTION constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }
TILE_FUNCTION constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Rows x Columns threads, Vector neighbouring elements each: 16 bytes of f32 with 4. Blocks: how many of these
// blocks an SM should hold at least; the compiler limits registers accordingly.
//
// When a row of a tile spans several warps, eight lanes are adjacent (128 bytes of f32), then the warps, then the other
// two bits of the lane. A sum starts with the highest bit, so it has a quarter of its size left when it reaches the
// warps. `kUsed`: how many thread columns the tile has elements for.
template <int Rows, int Columns, int Vector = 4, int Blocks = 1>
struct Threads {
  static constexpr int kRows = Rows, kColumns = Columns, kVector = Vector, kThreads = Rows * Columns, kBlocks = Blocks;
  static constexpr bool kMma = false, kWgmma = false;
  static_assert(power_of_two(Rows) && power_of_two(Columns) && power_of_two(Vector));
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "octile: a block has whole warps, and up to 1024 threads.");

  // Bit operations: the compiler does not know that thread numbers are never negative.
  TILE_FUNCTION static constexpr int row(int thread) { return thread >> log2_of(Columns); }
  TILE_FUNCTION static constexpr int place(int thread) { return thread & (Columns - 1); }
  template <int kUsed>
  TILE_FUNCTION static constexpr int column(int thread) {
    constexpr int kWarpBits = warp_bits(kUsed);
    const int used = thread & (kUsed - 1);
    if constexpr (kWarpBits == 0) return used;
    return (used & 7) | (used >> 5 << 3) | ((used >> 3 & 3) << (3 + kWarpBits));
  }
  // Where bit `i` of the thread row, or column, is in the thread number.
  TILE_FUNCTION static constexpr int row_bit(int i) { return log2_of(Columns) + i; }
  template <int kUsed>
  TILE_FUNCTION static constexpr int column_bit(int i) {
    constexpr int kWarpBits = warp_bits(kUsed);
    return kWarpBits == 0 || i < 3 ? i : i < 3 + kWarpBits ? i + 2 : i - kWarpBits;
  }

 private:
  TILE_FUNCTION static constexpr int warp_bits(int used) { return used > 32 ? log2_of(used) - 5 : 0; }
};

// Rows x Columns warps, each laid out as the accumulator of mma.sync m16n8: for kernels with a dot. Vector 2 is for f16
// and bf16, 4 for s8.
template <int Rows, int Columns, int Vector = 2, int Blocks = 1>
struct Warps {
  static constexpr int kRows = 8 * Rows, kColumns = 4 * Columns, kVector = Vector, kThreads = 32 * Rows * Columns;
  static constexpr int kBlocks = Blocks;
  static constexpr bool kMma = true, kWgmma = false;
  static_assert(power_of_two(Rows) && power_of_two(Columns) && (Vector == 2 || Vector == 4));
  static_assert(kThreads <= 1024, "octile: a block has up to 1024 threads.");

  TILE_FUNCTION static constexpr int row(int thread) {
    return (thread >> (5 + log2_of(Columns)) << 3) | (thread >> 2 & 7);
  }
  TILE_FUNCTION static constexpr int place(int thread) { return ((thread >> 5 & (Columns - 1)) << 2) | (thread & 3); }
  template <int kUsed>
  TILE_FUNCTION static constexpr int column(int thread) {
    return place(thread) & (kUsed - 1);
  }
  TILE_FUNCTION static constexpr int row_bit(int i) { return i < 3 ? 2 + i : 5 + log2_of(Columns) + i - 3; }
  template <int kUsed>
  TILE_FUNCTION static constexpr int column_bit(int i) {
    return i < 2 ? i : 5 + i - 2;
  }
};

// As Other of Warpgroups: a launch that WGMMA cannot run throws std::invalid_argument, and the second kernel that it
// would fall back to is not compiled.
struct NoFallback {};

// Hopper: one or two warpgroups that multiply by WGMMA, each laid out as its accumulator, and one more warpgroup, which
// loads ahead by TMA. Where TMA cannot load what a kernel fetches, the launch is one of the layout Other. Tf32:
// products of f32 are by tensor cores, too, which read 11 of the 24 bits of a factor.
template <int Groups = 2, class Other = Warps<4, 2>, bool Tf32 = false>
struct Warpgroups {
  static constexpr int kGroups = Groups, kRows = 32 * Groups, kColumns = 4, kVector = 2, kThreads = 128 * Groups;
  static constexpr int kBlocks = 1;
  static constexpr bool kMma = false, kWgmma = true, kTf32 = Tf32;
  using Fallback = Other;
  static_assert(Groups == 1 || Groups == 2, "octile: one or two warpgroups multiply.");

  TILE_FUNCTION static constexpr int row(int thread) { return thread >> 2; }
  TILE_FUNCTION static constexpr int place(int thread) { return thread & 3; }
  template <int kUsed>
  TILE_FUNCTION static constexpr int column(int thread) {
    return place(thread) & (kUsed - 1);
  }
  TILE_FUNCTION static constexpr int row_bit(int i) { return 2 + i; }
  template <int kUsed>
  TILE_FUNCTION static constexpr int column_bit(int i) {
    return i;
  }
};

// Whether the rows of a tile are distributed as in the accumulator of WGMMA: bit 3 of the row counts rows of a thread,
// the bits above it warps, and the bits above these again rows of a thread.
template <class L, class S>
inline constexpr bool interleaves_rows = L::kWgmma&& S::kRows >= 2 * L::kRows;

// The elements of a tile S that one thread holds: planes x rows x groups of columns x a vector of columns, in this
// order. Where the tile has fewer rows or columns than the threads can hold, several threads hold the same elements,
// and the first of them owns them.
template <class L, class S>
struct Part {
  using Layout = L;
  static constexpr int kRows = larger(1, S::kRows / L::kRows);
  static constexpr int kVector = smaller(S::kColumns, L::kVector);
  static constexpr int kGroups = larger(1, S::kColumns / (L::kColumns * L::kVector));
  static constexpr int kRow = kGroups * kVector;  // elements of one row
  static constexpr int kSize = S::kPlanes * kRows * kRow;
  static constexpr int kThreads = L::kThreads;
  static constexpr int kThreadRows = smaller(S::kRows, L::kRows);  // that hold different elements
  static constexpr int kThreadColumns = smaller(S::kColumns / kVector, L::kColumns);
  static constexpr int kHolders = kThreads / (kThreadRows * kThreadColumns);  // of one element

  TILE_FUNCTION static constexpr int row(int thread_row, int a) {
    if constexpr (interleaves_rows<L, S>) {
      return (a >> 1) * (2 * L::kRows) + (thread_row >> 3 << 4) + (a & 1) * 8 + (thread_row & 7);
    }
    return a * L::kRows + (thread_row & (kThreadRows - 1));
  }
  TILE_FUNCTION static constexpr int column(int thread, int group) {  // the first of a vector
    return (group * L::kColumns + L::template column<kThreadColumns>(thread)) * kVector;
  }
  TILE_FUNCTION static constexpr int column_bit(int i) { return L::template column_bit<kThreadColumns>(i); }
  TILE_FUNCTION static constexpr bool owns(int thread) {
    return L::row(thread) < kThreadRows && L::place(thread) < kThreadColumns;
  }
};

}  // namespace octile::tile
