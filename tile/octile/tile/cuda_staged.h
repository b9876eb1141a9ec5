// Tiles in shared memory: what dot reads, and what a pipeline loads ahead. Rows follow each other; what is wider than
// 128 bytes is several panels of 128 bytes, one after the other. The 16-byte chunks of a row are permuted by the number
// of the row, so that eight rows at one column are in different banks: as TMA swizzles them, and WGMMA reads them.
#pragma once

#include "octile/tile/cuda_device.h"
#include "octile/tile/cuda_layout.h"
#include "octile/tile/functions.h"

namespace octile::tile {

namespace gpu {

template <class T, class S>
struct StagedLayout {
  static constexpr int kElement = static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = S::kColumns * kElement;
  static constexpr int kRows = S::kPlanes * S::kRows;
  static constexpr int kBytes = larger(128, kRows* kRowBytes);
  static constexpr bool kChunks = kRowBytes >= 16;  // a row is whole chunks of 16 bytes
  static constexpr int kChunkElements = 16 / kElement;
  static constexpr int kLine = smaller(kRowBytes, 128), kPanels = larger(1, kRowBytes / 128), kPanel = kRows * kLine;

  // Where chunk `chunk` of row `row` is, in bytes. Rows shorter than 128 bytes share a line of banks.
  TILE_FUNCTION static constexpr int chunk_at(int row, int chunk) {
    if constexpr (kRowBytes >= 128) return (chunk >> 3) * kPanel + row * 128 + (((chunk ^ row) & 7) << 4);
    constexpr int kChunksInRow = larger(1, kRowBytes / 16), kRowsInLine = larger(1, 128 / larger(1, kRowBytes));
    return row * kRowBytes + ((chunk ^ ((row / kRowsInLine) & (kChunksInRow - 1))) << 4);
  }
  TILE_FUNCTION static constexpr int at(int row, int column) {
    if constexpr (!kChunks) return row * kRowBytes + column * kElement;
    return chunk_at(row, column / kChunkElements) + column % kChunkElements * kElement;
  }
};

}  // namespace gpu

// A step of a pipeline of warpgroups, as those who multiply run it.
struct Step {
  int products = 0;     // groups of them that read its stage
  bool copied = false;  // whether one of them reads copies
  int copies = 0;       // where these lie, in the shared memory of the block
  int group = 0;        // which warpgroup this is
};

// kPlace: of a tile that a pipeline of warpgroups has loaded, which of its stage's fetches it is.
template <class E, class T, class S, int kPlace = -1>
struct Staged {
  using Executor = E;
  using Type = T;
  using Shape = S;
  using Layout = gpu::StagedLayout<T, S>;

  static constexpr int kFetch = kPlace;

  int offset;  // in the shared memory of the block
  int transposed =
      -1;  // of bytes: where they lie with rows and columns exchanged, if a product on their left asks for it
  Step* step = nullptr;  // of a tile with a place

  TILE_FUNCTION unsigned char* base() const { return gpu::arena() + offset; }
  TILE_FUNCTION T& at(int row, int column) const { return *reinterpret_cast<T*>(base() + Layout::at(row, column)); }
};

// A staged tile seen with its rows as columns.
template <class A>
struct StagedTransposed {
  using Executor = typename A::Executor;
  using Type = typename A::Type;
  using Shape = octile::tile::Shape<1, A::Shape::kColumns, A::Shape::kRows>;

  A tile;
  TILE_FUNCTION Type& at(int row, int column) const { return tile.at(column, row); }
};

template <class A>
inline constexpr bool is_plainly_staged = false;
template <class E, class T, class S, int kPlace>
inline constexpr bool is_plainly_staged<Staged<E, T, S, kPlace>> = true;
template <class A>
inline constexpr bool is_staged_transposed = false;
template <class A>
inline constexpr bool is_staged_transposed<StagedTransposed<A>> = true;
template <class A>
inline constexpr bool is_staged = is_plainly_staged<A> || is_staged_transposed<A>;

// A staged tile holds values and is accepted wherever a tile is.
template <class E, class T, class S, int kPlace>
inline constexpr bool is_tile<Staged<E, T, S, kPlace>> = true;
template <class A>
inline constexpr bool is_tile<StagedTransposed<A>> = true;

namespace gpu {

// In a layout of warpgroups trans() of a staged tile is another look at it, and so is col() of a row.
template <class L, class S, class A, class Source>
TILE_FUNCTION constexpr bool stays_staged() {
  if constexpr (is_plainly_staged<A>) {
    using From = typename A::Shape;
    constexpr bool kSwaps = std::is_same_v<S, Shape<1, From::kColumns, From::kRows>>;
    return L::kWgmma && From::kPlanes == 1 && kSwaps && (std::is_same_v<Source, Transposed> || From::kRows == 1);
  }
  return false;
}

// Writes this thread's part of a tile into shared memory.
template <class L, class E, class T, class S>
TILE_FUNCTION void stage_part(const T* values, Staged<E, T, S> to) {
  using P = Part<L, S>;
  if constexpr (L::kWgmma && sizeof(T) == 2 && S::kPlanes == 1 && P::kGroups % 2 == 0 && interleaves_rows<L, S>) {
    // As it is, a warp's part is matrices of eight rows by eight columns.
    const int lane = thread() & 31, thread_row = L::row(thread() & ~31);
    TILE_UNROLL
    for (int a = 0; a < P::kRows; a += 2) {
      TILE_UNROLL
      for (int g = 0; g < P::kGroups; g += 2) {
        Word words[4];
        TILE_UNROLL
        for (int i = 0; i < 4; ++i) memcpy(&words[i], values + (a + i % 2) * P::kRow + (g + i / 2) * 2, 4);
        store_matrices(
            words, to.base() + decltype(to)::Layout::chunk_at(P::row(thread_row, a) + (lane & 15), g + (lane >> 4)));
      }
    }
    return;
  }
  const int me = thread(), thread_row = L::row(me);
  if (!P::owns(thread())) return;
  TILE_UNROLL
  for (int p = 0; p < S::kPlanes; ++p) {
    TILE_UNROLL
    for (int a = 0; a < P::kRows; ++a) {
      TILE_UNROLL
      for (int b = 0; b < P::kGroups; ++b) {
        const int row = p * S::kRows + P::row(thread_row, a), column = P::column(me, b);
        const T* const from = values + (p * P::kRows + a) * P::kRow + b * P::kVector;
        if constexpr (P::kVector * sizeof(T) <= 16 && P::kVector > 1) {
          store_vector<P::kVector>(&to.at(row, column), from);
        } else {
          TILE_UNROLL
          for (int v = 0; v < P::kVector; ++v) to.at(row, column + v) = from[v];
        }
      }
    }
  }
}

// And back.
template <class L, class A, class T>
TILE_FUNCTION void read_part(T* values, const A& from) {
  using S = typename A::Shape;
  using P = Part<L, S>;
  constexpr bool kVectors = is_plainly_staged<A> && P::kVector > 1 && P::kVector * sizeof(T) <= 16;
  const int me = thread(), thread_row = L::row(me);
  TILE_UNROLL
  for (int p = 0; p < S::kPlanes; ++p) {
    TILE_UNROLL
    for (int a = 0; a < P::kRows; ++a) {
      TILE_UNROLL
      for (int g = 0; g < P::kGroups; ++g) {
        T* const to = values + (p * P::kRows + a) * P::kRow + g * P::kVector;
        const int row = p * S::kRows + P::row(thread_row, a), column = P::column(me, g);
        if constexpr (kVectors) {
          load_vector<P::kVector>(to, &from.at(row, column));
        } else {
          TILE_UNROLL
          for (int v = 0; v < P::kVector; ++v) to[v] = from.at(row, column + v);
        }
      }
    }
  }
}

}  // namespace gpu
}  // namespace octile::tile
