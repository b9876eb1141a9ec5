// Loads and stores of one thread's part of a tile: 16 bytes at a time where the pointers are contiguous, their rows
// begin at multiples of it, and the mask holds.
#pragma once

#include "octile/tile/context.h"
#include "octile/tile/cuda_staged.h"

namespace octile::tile::gpu {

// An operand at one of this thread's elements: the element's place in its part, and in the tile.
struct Place {
  int plane, a, group, v;
  int row, column;
};

// Calls visit(place, index in the part) for each of this thread's elements of a tile S.
template <class L, class S, class Visit>
TILE_FUNCTION void each_place(Visit visit) {
  using Mine = Part<L, S>;
  const int me = thread(), thread_row = L::row(me);
  TILE_UNROLL
  for (int i = 0; i < Mine::kSize; ++i) {
    const int line = i / Mine::kRow, a = line % Mine::kRows;
    const int group = i % Mine::kRow / Mine::kVector, v = i % Mine::kVector;
    visit(Place{line / Mine::kRows, a, group, v, Mine::row(thread_row, a), Mine::column(me, group) + v}, i);
  }
}

template <class L, class A>
TILE_FUNCTION auto value_at(const A& operand, const Place& at) {
  if constexpr (is_staged<A>) {
    using S = typename A::Shape;
    const int plane = S::kPlanes == 1 ? 0 : at.plane, row = S::kRows == 1 ? 0 : at.row;
    return widen(operand.at(plane * S::kRows + row, S::kColumns == 1 ? 0 : at.column));
  } else if constexpr (is_tile<A>) {
    using S = typename A::Shape;
    using P = Part<L, S>;
    const int row = (S::kPlanes == 1 ? 0 : at.plane) * P::kRows + (S::kRows == 1 ? 0 : at.a);
    return widen(operand.values[row * P::kRow + (S::kColumns == 1 ? 0 : at.group * P::kVector + at.v)]);
  } else if constexpr (AffineTile<A>) {
    return static_cast<typename A::Type>(operand.at(at.plane, at.row, at.column));
  } else if constexpr (LazyMask<A>) {
    return operand.at(at.plane, at.row, at.column);
  } else {
    return widen(operand.value);
  }
}

template <class Index>
TILE_FUNCTION constexpr bool unit_stride() {
  if constexpr (AffineTile<Index>) return Index::kUnit;
  return false;
}

// Every row begins at a multiple of kBytes.
template <int kBytes, class P>
TILE_FUNCTION bool rows_aligned(const P& p) {
  using S = typename P::Shape;
  auto bits = reinterpret_cast<std::uintptr_t>(p.tensor.data + p.index.base);
  if constexpr (S::kRows > 1) bits |= static_cast<std::uintptr_t>(p.index.row * s64{sizeof(typename P::Element)});
  if constexpr (S::kPlanes > 1) bits |= static_cast<std::uintptr_t>(p.index.plane * s64{sizeof(typename P::Element)});
  return bits % kBytes == 0;
}

// The mask holds for n columns from `column` on. May answer no where it does.
template <class M>
TILE_FUNCTION bool holds_for(const M& mask, int plane, int row, int column, int n) {
  if constexpr (LazyMask<M>) {
    if constexpr (M::kInterval) return mask.at(plane, row, column) && mask.at(plane, row, column + n - 1);
  }
  return false;
}

// Calls vector(pointer, index of the first element) where that many can be accessed at once, else
// element(pointer, index) for each that the mask holds for.
template <class L, class P, class M, class Vector, class Element>
TILE_FUNCTION void access(const P& p, const M& mask, Vector vector, Element element) {
  using S = typename P::Shape;
  using T = typename P::Element;
  using Index = decltype(p.index);
  using Mine = Part<L, S>;
  constexpr int kVector = Mine::kVector, kBytes = kVector * static_cast<int>(sizeof(T));
  const int me = thread(), thread_row = L::row(me);
  T* const data = in_global_memory(p.tensor.data);
  [[maybe_unused]] bool aligned = false;
  if constexpr (unit_stride<Index>() && kVector > 1) {
    aligned = rows_aligned<(kBytes < 16 ? kBytes : 16)>(p);
    if (aligned && holds_everywhere(mask)) {
      TILE_UNROLL
      for (int plane = 0; plane < S::kPlanes; ++plane) {
        TILE_UNROLL
        for (int a = 0; a < Mine::kRows; ++a) {
          T* const row = data + p.index.row_start(plane, Mine::row(thread_row, a)) + Mine::column(me, 0);
          TILE_UNROLL
          for (int g = 0; g < Mine::kGroups; ++g) {
            vector(row + g * L::kColumns * kVector, ((plane * Mine::kRows + a) * Mine::kGroups + g) * kVector);
          }
        }
      }
      return;
    }
  }
  TILE_UNROLL
  for (int plane = 0; plane < S::kPlanes; ++plane) {
    TILE_UNROLL
    for (int a = 0; a < Mine::kRows; ++a) {
      const int row = Mine::row(thread_row, a);
      TILE_UNROLL
      for (int g = 0; g < Mine::kGroups; ++g) {
        const int column = Mine::column(me, g);
        const int first = ((plane * Mine::kRows + a) * Mine::kGroups + g) * kVector;
        if constexpr (unit_stride<Index>() && kVector > 1) {
          if (aligned && holds_for(mask, plane, row, column, kVector)) {
            vector(data + p.index.at(plane, row, column), first);
            continue;
          }
        }
        TILE_UNROLL
        for (int v = 0; v < kVector; ++v) {
          const Place at{plane, a, g, v, row, column + v};
          if (value_at<L>(mask, at)) element(data + value_at<L>(p.index, at), first + v);
        }
      }
    }
  }
}

// Stores of 8 and 16 bits in a layout of warpgroups: two neighbours of a row are a thread's, so four lanes exchange
// theirs, and each stores eight.
template <class L, class P, class M>
TILE_FUNCTION constexpr bool stores_eights() {
  using Mine = Part<L, typename P::Shape>;
  return L::kWgmma && LazyMask<M> && sizeof(typename P::Element) <= 2 &&
         unit_stride<std::remove_cvref_t<decltype(P::index)>>() && Mine::kHolders == 1 && Mine::kGroups % 4 == 0;
}
// Lane i of four gets what each of them has at i.
TILE_FUNCTION void exchange_fours(Word (&w)[4]) {
  const int lane = thread() & 3;
  TILE_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool second = (lane & bit) != 0;
    TILE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const Word got = shuffle_xor(second ? w[i] : w[i + bit], bit);
      w[i] = second ? got : w[i];
      w[i + bit] = second ? w[i + bit] : got;
    }
  }
}
// Calls visit(plane, row, column, eight elements) for all of this thread's.
template <class L, class S, class T, class Visit>
TILE_FUNCTION void each_eight(const T* values, Visit visit) {
  using Mine = Part<L, S>;
  const int me = thread(), thread_row = L::row(me);
  TILE_UNROLL
  for (int line = 0; line < S::kPlanes * Mine::kRows; ++line) {
    TILE_UNROLL
    for (int g = 0; g < Mine::kGroups; g += 4) {
      Word w[4] = {};
      TILE_UNROLL
      for (int i = 0; i < 4; ++i) memcpy(&w[i], values + line * Mine::kRow + (g + i) * 2, 2 * sizeof(T));
      exchange_fours(w);
      T eight[8];
      TILE_UNROLL
      for (int i = 0; i < 4; ++i) memcpy(static_cast<void*>(eight + 2 * i), &w[i], 2 * sizeof(T));
      visit(line / Mine::kRows, Mine::row(thread_row, line % Mine::kRows), (g + (me & 3)) * 8, eight);
    }
  }
}
template <class L, class P, class M, class T>
TILE_FUNCTION void store_eights(const P& p, const M& mask, const T* values) {
  using S = typename P::Shape;
  T* const data = in_global_memory(p.tensor.data);
  const bool aligned = rows_aligned<8 * static_cast<int>(sizeof(T))>(p);
  if (aligned && holds_everywhere(mask)) {
    each_eight<L, S>(values, [&](int plane, int row, int column, const T* eight) {
      store_vector<8>(data + p.index.at(plane, row, column), eight);
    });
    return;
  }
  each_eight<L, S>(values, [&](int plane, int row, int column, const T* eight) {
    if (aligned && holds_for(mask, plane, row, column, 8)) {
      store_vector<8>(data + p.index.at(plane, row, column), eight);
    } else {
      TILE_UNROLL
      for (int v = 0; v < 8; ++v) {
        if (mask.at(plane, row, column + v)) data[p.index.at(plane, row, column + v)] = eight[v];
      }
    }
  });
}

// Stores of 16 bits in a layout of warpgroups where neighbours of a column are neighbours in memory: a matrix of eight
// rows by eight columns is transposed within a warp, and two lanes exchange theirs, so that each stores four rows.
template <class L, class P, class M>
TILE_FUNCTION constexpr bool may_store_columns() {
  using S = typename P::Shape;
  using Index = std::remove_cvref_t<decltype(P::index)>;
  return L::kWgmma && LazyMask<M> && sizeof(typename P::Element) == 2 && AffineTile<Index> && S::kPlanes == 1 &&
         interleaves_rows<L, S> && S::kColumns >= 8;
}
template <class L, class P, class M>
TILE_FUNCTION bool stores_columns(const P& p, const M& mask) {
  const auto bits = reinterpret_cast<std::uintptr_t>(p.tensor.data + p.index.base) |
                    static_cast<std::uintptr_t>(p.index.along(1) * 2);
  return p.index.row == 1 && bits % 8 == 0 && holds_everywhere(mask);
}
template <class L, class P, class T>
TILE_FUNCTION void store_columns(const P& p, const T* values) {
  using Mine = Part<L, typename P::Shape>;
  const int me = thread(), thread_row = L::row(me), lane = me & 31;
  const bool odd = (lane & 1) != 0;
  T* const data = in_global_memory(p.tensor.data);
  TILE_UNROLL
  for (int a = 0; a < Mine::kRows; a += 2) {
    const int row = (Mine::row(thread_row, a) & ~7) + (odd ? 6 : 0) + 2 * (lane & 3);
    TILE_UNROLL
    for (int g = 0; g < Mine::kGroups; ++g) {
      Word upper, lower;
      memcpy(&upper, values + a * Mine::kRow + g * 2, 4);
      memcpy(&lower, values + (a + 1) * Mine::kRow + g * 2, 4);
      upper = transpose_matrix(upper);
      lower = transpose_matrix(lower);
      const Word got = shuffle_xor(odd ? upper : lower, 1);
      const Word four[2] = {odd ? got : upper, odd ? lower : got};
      T rows[4];
      memcpy(static_cast<void*>(rows), four, 8);
      store_vector<4>(data + p.index.at(0, row, g * 8 + (lane >> 2)), rows);
    }
  }
}

template <AtomicOp kOp, class T>
TILE_FUNCTION void atomic(T* to, T value) {
#if defined(__CUDA_ARCH__)
  if constexpr (kOp == AtomicOp::add) {
    atomicAdd(to, value);
  } else if constexpr (std::is_same_v<T, s32>) {
    atomicMax(to, value);
  } else {
    int* const bits = reinterpret_cast<int*>(to);
    int seen = *reinterpret_cast<volatile int*>(to);
    for (;;) {
      const int next = bits_as<int>(scalar::Maximum{}(bits_as<f32>(seen), value));
      if (next == seen) break;
      const int found = atomicCAS(bits, seen, next);
      if (found == seen) break;
      seen = found;
    }
  }
#else
  if constexpr (kOp == AtomicOp::add) *to = scalar::Add{}(*to, value);
  if constexpr (kOp == AtomicOp::max) *to = scalar::Maximum{}(*to, value);
#endif
}

}  // namespace octile::tile::gpu
