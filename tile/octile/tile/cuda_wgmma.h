// dot by WGMMA, in a layout of warpgroups: f16 and bf16 summed in f32, s8 in s32, exactly. What a pipeline has loaded
// is read in place, also trans() of it; f16 and bf16 tiles on the left come from registers; anything else is
// copied to shared memory first. s8 and f32 (as tf32) have their terms side by side in memory, so such an operand on
// the right whose rows are terms is transposed: s8 by the warps beside the one that loads, if a pipeline has loaded it.
#pragma once

#include "octile/tile/cuda_computed.h"
#include "octile/tile/cuda_hopper.h"
#include "octile/tile/cuda_staged.h"

namespace octile::tile::gpu {

template <class L, class S>
TILE_FUNCTION constexpr bool has_rows_of_wgmma() {
  if constexpr (L::kWgmma) return S::kPlanes == 1 && S::kRows >= 64 * L::kGroups && S::kColumns >= 8;
  return false;
}
template <class L, class T, class S, int K>
TILE_FUNCTION constexpr bool uses_wgmma() {
  if constexpr (has_rows_of_wgmma<L, S>() && K * sizeof(T) >= 32) {
    return sizeof(T) == 2 || std::is_same_v<T, s8> || (L::kTf32 && std::is_same_v<T, f32>);
  }
  return false;
}

// Rows of 64 16-bit elements or more can be read as columns.
template <class A>
inline constexpr bool whole_lines = sizeof(typename A::Type) == 2 && A::Shape::kColumns >= 64;

enum class Operand : std::uint8_t { staged, held, copied, transposed, transposed_before };
inline constexpr int kMaxTransposed = 4;  // of the fetches of a stage, the first ones

template <class A>
TILE_FUNCTION constexpr Operand left_operand() {
  if constexpr (is_plainly_staged<A>) return Operand::staged;
  if constexpr (is_staged_transposed<A>) {
    return whole_lines<decltype(A::tile)> ? Operand::staged : Operand::copied;
  }
  return sizeof(typename A::Type) == 2 ? Operand::held : Operand::copied;
}
template <class B>
TILE_FUNCTION constexpr Operand right_operand() {
  if constexpr (is_staged_transposed<B>) return Operand::staged;
  if constexpr (sizeof(typename B::Type) == 2 && copies_across<B>) return Operand::copied;
  if constexpr (is_plainly_staged<B> && std::is_same_v<typename B::Type, s8>) {
    if (B::kFetch >= 0 && B::kFetch < kMaxTransposed) return Operand::transposed_before;
  }
  if constexpr (!whole_lines<B>) return Operand::transposed;
  return is_plainly_staged<B> ? Operand::staged : Operand::copied;
}

// How an operand is copied: (M, K) and (N, K) with their terms side by side, or (K, N).
template <class A>
using TransposedShape = Shape<1, A::Shape::kColumns, A::Shape::kRows>;
template <class A>
TILE_FUNCTION constexpr int copied_bytes(Operand operand) {
  if (operand != Operand::copied && operand != Operand::transposed) return 0;
  const int bytes = StagedLayout<typename A::Type, TransposedShape<A>>::kBytes;  // either way
  return (bytes + 1023) / 1024 * 1024;
}
template <class A>
TILE_FUNCTION constexpr int transposed_bytes() {
  return (StagedLayout<s8, TransposedShape<A>>::kBytes + 1023) / 1024 * 1024;
}
template <class A, class B>
TILE_FUNCTION constexpr int wgmma_bytes() {
  return copied_bytes<A>(left_operand<A>()) + copied_bytes<B>(right_operand<B>());
}

// Whether an operand that no pipeline has fetched is copied to memory of the step's own: such products stay in flight
// as others do. There are kCopies of this memory. A barrier follows each copy, and a thread that reaches it has waited
// for the products of the step before the last one, so the memory that is written after it is no longer read. Not for a
// sum that starts with them, since that is read at once.
inline constexpr int kCopies = 3;
template <class A>
inline constexpr bool is_placed = false;
template <class E, class T, class S, int kPlace>
inline constexpr bool is_placed<Staged<E, T, S, kPlace>> = kPlace >= 0;
template <class A>
inline constexpr bool is_placed<StagedTransposed<A>> = is_placed<A>;
template <class A>
TILE_FUNCTION constexpr Operand left_operand_in_step() {
  return left_operand<A>() == Operand::held ? Operand::copied : left_operand<A>();
}
template <class A, class B, bool kCarried>
TILE_FUNCTION constexpr int copied_in_step() {
  if (!kCarried || (!is_placed<A> && !is_placed<B>)) return 0;
  return copied_bytes<A>(left_operand_in_step<A>()) + copied_bytes<B>(right_operand<B>());
}
template <class A, class B>
TILE_FUNCTION Step* step_of(const A& a, const B& b) {
  if constexpr (is_staged_transposed<A>) {
    return step_of(a.tile, b);
  } else if constexpr (is_staged_transposed<B>) {
    return step_of(a, b.tile);
  } else if constexpr (is_placed<A>) {
    return a.step;
  } else if constexpr (is_placed<B>) {
    return b.step;
  } else {
    return nullptr;
  }
}

// Bytes (K, N) to (N, K), 32 terms of 16 columns at a time and warp. Transposed as 16-bit elements, a lane gets two
// terms of two columns from each matrix, and two permutations make four terms of each column of them. Which rows are in
// which matrix keeps them in different banks.
template <int kWarps, class From, class To>
TILE_FUNCTION void transpose_bytes(const From& from, const To& to, int warp) {
  constexpr int K = From::Shape::kRows, N = From::Shape::kColumns;
  const int lane = thread() & 31, matrix = lane >> 3, line = lane & 7;
  // Terms 4 q and 4 q + 1 of a half, or 4 q + 2 and + 3: those come first in the second half of the lines.
  const int term = (matrix >> 1) * 16 + (line >> 1) * 4 + (line & 1) + (((matrix & 1) ^ (line >> 2)) << 1);
  const bool later = (lane & 2) != 0, odd = (lane & 16) != 0;
  const Word even_columns = later ? 0x2064 : 0x6420, odd_columns = later ? 0x3175 : 0x7531;
  const Word one = odd ? odd_columns : even_columns, two = odd ? even_columns : odd_columns;
  const int column = 2 * line + ((matrix & 1) ^ (line >> 2));
  constexpr int kTogether = smaller(4, K / 32);  // under way at a time
  TILE_NO_UNROLL
  for (int i = 0; i < (N / 16 + kWarps - 1) / kWarps; ++i) {
    int n = i * kWarps + warp;
    if (n >= N / 16) {
#if defined(__CUDACC__)
      break;
#endif
      n = N / 16 - 1;  // emulated, no warp may go its own way
    }
    TILE_UNROLL
    for (int first = 0; first < K / 32; first += kTogether) {
      Word m[kTogether][4];
      TILE_UNROLL
      for (int j = 0; j < kTogether; ++j) {
        load_matrices<true>(m[j], from.base() + From::Layout::chunk_at((first + j) * 32 + term, n));
      }
      TILE_UNROLL
      for (int j = 0; j < kTogether; ++j) {
        const Word transposed[4] = {choose_bytes(m[j][0], m[j][1], one), choose_bytes(m[j][0], m[j][1], two),
                                    choose_bytes(m[j][2], m[j][3], one), choose_bytes(m[j][2], m[j][3], two)};
        store_matrices(transposed, to.base() + To::Layout::chunk_at(n * 16 + column, (first + j) * 2 + (matrix >> 1)));
      }
    }
  }
}

template <class L, class A>
TILE_FUNCTION auto copy_operand(const A& a, int offset) {
  const Staged<typename A::Executor, typename A::Type, typename A::Shape> to{offset};
  if constexpr (is_staged<A>) {
    Tile<typename A::Executor, typename A::Type, typename A::Shape> read;
    read_part<L>(read.values, a);
    stage_part<L>(read.values, to);
  } else {
    stage_part<L>(a.values, to);
  }
  return to;
}
template <class L, bool kLeft, class A>
TILE_FUNCTION auto copy_factor(const A& a, int offset, [[maybe_unused]] int group) {
  if constexpr (is_computed<A> && sizeof(typename A::Type) == 2) {
    write_computed<L, kLeft>(a, offset, group);
    return copy_of<A>(offset);
  } else {
    return copy_operand<L>(a, offset);
  }
}
template <class L, class A>
TILE_FUNCTION auto transpose_operand(const A& a, int offset) {
  using S = typename A::Shape;
  const Staged<typename A::Executor, typename A::Type, TransposedShape<A>> to{offset};
  if constexpr (is_plainly_staged<A> && sizeof(typename A::Type) == 1 && S::kColumns >= 16) {
    transpose_bytes<L::kThreads / 32>(a, to, thread() >> 5);
  } else {
    using P = Part<L, S>;
    const int me = thread(), thread_row = L::row(me);
    if (P::owns(me)) {
      TILE_UNROLL
      for (int i = 0; i < P::kSize; ++i) {
        const int row = P::row(thread_row, i / P::kRow);
        const int column = P::column(me, i % P::kRow / P::kVector) + i % P::kVector;
        if constexpr (is_staged<A>) {
          to.at(column, row) = a.at(row, column);
        } else {
          to.at(column, row) = a.values[i];
        }
      }
    }
  }
  return to;
}

// An operand in shared memory: rows along their terms, or across them.
template <class Layout, bool kIsAlong>
struct Matrix {
  static constexpr bool kAlong = kIsAlong;
  std::uint64_t start;

  TILE_FUNCTION explicit Matrix(const unsigned char* base)
      : start(descriptor<Layout::kLine>(shared_address(base), kAlong ? 16 : Layout::kPanel)) {}
  // From row `row` on, 32 bytes of terms.
  TILE_FUNCTION std::uint64_t at(int row, int step) const {
    if constexpr (kAlong) {
      const int byte = step * 32;
      return start + static_cast<std::uint64_t>(static_cast<Word>(byte / Layout::kLine * Layout::kPanel +
                                                                  row * Layout::kLine + byte % Layout::kLine) >>
                                                4);
    } else {
      return start + static_cast<std::uint64_t>(static_cast<Word>(row / 64 * Layout::kPanel + step * 16 * 128) >> 4);
    }
  }
};
template <class A>
TILE_FUNCTION auto left_matrix(const A& a) {
  if constexpr (is_staged_transposed<A>) {
    return Matrix<typename decltype(A::tile)::Layout, false>(a.tile.base());
  } else {
    return Matrix<typename A::Layout, true>(a.base());
  }
}
template <bool kTransposed, class B>
TILE_FUNCTION auto right_matrix(const B& b) {
  if constexpr (is_staged_transposed<B>) {
    return Matrix<typename decltype(B::tile)::Layout, true>(b.tile.base());
  } else {
    return Matrix<typename B::Layout, kTransposed>(b.base());
  }
}

template <class L, class S, int K, class T, class Left, class Right, class C>
TILE_FUNCTION void multiply_all(const Left& left, const Right& right, C* sums, [[maybe_unused]] int group) {
  using P = Part<L, S>;
  constexpr int kSteps = K * static_cast<int>(sizeof(T)) / 32, kBlocks = P::kRows / 2;
  constexpr int kColumns = smaller(S::kColumns, 256);
  Word held[std::is_pointer_v<Left> ? kSteps * kBlocks * 4 : 1];  // all of a, before the first product
  if constexpr (std::is_pointer_v<Left>) {
    using PA = Part<L, Shape<1, S::kRows, K>>;  // a thread's part of a tile (M, K)
    TILE_UNROLL
    for (int i = 0; i < kSteps * kBlocks * 4; ++i) {
      const int step = i / 4 / kBlocks, block = i / 4 % kBlocks;
      memcpy(&held[i], left + (2 * block + i % 2) * PA::kRow + (2 * step + i % 4 / 2) * 2, 4);
    }
    pin<kSteps * kBlocks * 4>(held);
  }
  pin<P::kSize>(sums);
  products_begin();
  TILE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    TILE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      TILE_UNROLL
      for (int column = 0; column < S::kColumns; column += kColumns) {
        C* const sum = sums + 2 * block * P::kRow + column / 4;
        const std::uint64_t b = right.at(column, step);
        if constexpr (std::is_pointer_v<Left>) {
          Wgmma<kColumns>::template add_held<T, Right::kAlong, P::kRow>(sum, held + (step * kBlocks + block) * 4, b);
        } else {
          const std::uint64_t a = left.at((block * L::kGroups + group) * 64, step);
          Wgmma<kColumns>::template add<T, Left::kAlong, Right::kAlong, P::kRow>(sum, a, b);
        }
      }
    }
  }
  products_end();
}

template <class L, bool kCarried, class A, class B, class C>
TILE_FUNCTION void dot_wgmma(const A& a, const B& b, C& sum) {
  using T = typename A::Type;
  using S = typename C::Shape;
  constexpr int K = A::Shape::kColumns;
  constexpr bool kInStep = copied_in_step<A, B, kCarried>() > 0;
  constexpr Operand kLeft = kInStep ? left_operand_in_step<A>() : left_operand<A>(), kRight = right_operand<B>();
  constexpr bool kTransposes = kRight == Operand::transposed || kRight == Operand::transposed_before;
  constexpr bool kCopiesRight = copied_bytes<B>(kRight) > 0, kCopiesAny = kInStep || wgmma_bytes<A, B>() > 0;
  [[maybe_unused]] Step* const step = step_of(a, b);
  const int group = step != nullptr ? step->group : warpgroup();
  int memory = 0;
  if constexpr (kInStep) {
    memory = step->copies;
    if (step->copied) {  // there is room for the operands of one dot
      wait_for_products<0>();
      barrier<L>();
    }
    step->copied = true;
  } else if constexpr (kCopiesAny) {
    barrier<L>();
  }
  const auto left = [&] {
    if constexpr (kLeft == Operand::copied) {
      return copy_factor<L, true>(a, memory, group);
    } else {
      return &a;
    }
  }();
  const auto right = [&] {
    const int offset = memory + copied_bytes<A>(kLeft);
    if constexpr (kRight == Operand::copied) {
      return copy_factor<L, false>(b, offset, group);
    } else if constexpr (kRight == Operand::transposed) {
      return transpose_operand<L>(b, offset);
    } else if constexpr (kRight == Operand::transposed_before) {
      return Staged<typename B::Executor, s8, TransposedShape<B>>{b.transposed};
    } else {
      return &b;
    }
  }();
  if constexpr (kCopiesAny) {
    stores_to_matrices();
    if constexpr (kCopiesRight) {
      barrier<L>();
    } else {
      warpgroup_barrier(group);  // the rows of a warpgroup are its own
    }
  }
  const auto with_right = [&](const auto& from) {
    const auto matrix = right_matrix<kTransposes>(from);
    if constexpr (kLeft == Operand::held) {
      multiply_all<L, S, K, T>(static_cast<const T*>(a.values), matrix, sum.values, group);
    } else if constexpr (kLeft == Operand::copied) {
      multiply_all<L, S, K, T>(left_matrix(left), matrix, sum.values, group);
    } else {
      multiply_all<L, S, K, T>(left_matrix(*left), matrix, sum.values, group);
    }
  };
  if constexpr (kRight == Operand::staged) {
    with_right(*right);
  } else {
    with_right(right);
  }
  if (step != nullptr) ++step->products;
  // Other operations use the memory of the copies, and the compiler the registers of a tile on the left.
  if constexpr ((kCopiesAny && !kInStep) || kLeft == Operand::held) wait_for_products<0>();
}

}  // namespace octile::tile::gpu
