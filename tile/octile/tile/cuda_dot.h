// dot on a GPU, from operands in shared memory. f16 and bf16 on Warps<.., .., 2> and s8 on Warps<.., .., 4> use
// mma.sync; everything else multiplies and adds, in the order of k: for f32 one fma a product, so a sum of K products
// is within K 2^-24 sum |a| |b| of the exact one.
#pragma once

#include "octile/tile/cuda_wgmma.h"
#include "octile/tile/scalar.h"

namespace octile::tile::gpu {

template <class L, class T, class S, int K>
TILE_FUNCTION constexpr bool uses_mma() {
  if constexpr (!L::kMma || std::is_same_v<T, f32>) return false;
  using P = Part<L, S>;
  return L::kVector == (sizeof(T) == 2 ? 2 : 4) && P::kRows >= 2 && S::kColumns >= L::kColumns * L::kVector &&
         K * sizeof(T) >= 32;
}

// One step along k, 32 bytes of a row of a: this thread's fragments of a and b for mma.sync.
template <class L, class T, class S>
struct Fragments {
  using P = Part<L, S>;
  static constexpr int kPairs = P::kRows / 2;                   // of eight rows each
  static constexpr int kColumns = P::kGroups * L::kVector / 2;  // in eights

  Word a[kPairs][4];
  Word b[kColumns][2];

  // Rows `first_a` .. of a and `first_b` .. of b are the plane's. Eight rows of a matrix may be any eight rows.
  template <class A, class B>
  TILE_FUNCTION void read(A left, int first_a, B right, int first_b, int step) {
    const int lane = thread() % 32, matrix = lane / 8, line = lane % 8;
    const int warp_row = L::row(thread()) / 8, warp_column = L::place(thread()) / 4;
    TILE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const int row = first_a + (2 * i + matrix % 2) * L::kRows + warp_row * 8 + line;
      load_matrices<false>(a[i], left.base() + A::Layout::chunk_at(row, 2 * step + matrix / 2));
    }
    constexpr int kWarpColumns = L::kColumns / 4;
    if constexpr (sizeof(T) == 2) {
      constexpr int kTogether = P::kGroups > 1 ? 2 : 1;
      const int row = first_b + 16 * step + matrix % 2 * 8 + line;
      TILE_UNROLL
      for (int g = 0; g < P::kGroups; g += kTogether) {
        const int group = g + (kTogether == 2 ? matrix / 2 : 0);
        Word m[4];
        load_matrices<true>(m, right.base() + B::Layout::chunk_at(row, group * kWarpColumns + warp_column));
        TILE_UNROLL
        for (int i = 0; i < 2 * kTogether; ++i) b[g + i / 2][i % 2] = m[i];
      }
    } else {
      // A word needs four neighbours along k, which lie in four rows. Transposing as 16-bit elements gives a lane two
      // rows of two neighbouring columns at a time; the row order makes these the four that it needs.
      const int row = first_b + 32 * step + matrix / 2 * 16 + line / 2 * 4 + line % 2 + matrix % 2 * 2;
      TILE_UNROLL
      for (int g = 0; g < P::kGroups; ++g) {
        Word m[4];
        load_matrices<true>(m, right.base() + B::Layout::chunk_at(row, g * kWarpColumns + warp_column));
        TILE_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          b[2 * g + odd][0] = choose_bytes(m[0], m[1], odd ? 0x7531 : 0x6420);
          b[2 * g + odd][1] = choose_bytes(m[2], m[3], odd ? 0x7531 : 0x6420);
        }
      }
    }
  }

  template <class C>
  TILE_FUNCTION void multiply(C* sum) const {
    // Which elements of a thread's vector are columns 2 t and 2 t + 1 of eight: with vectors of four, the even ones.
    constexpr int kHalves = L::kVector / 2, kNext = kHalves;
    TILE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      TILE_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        C* const upper = sum + 2 * i * P::kRow + j / kHalves * L::kVector + j % kHalves;
        C* const lower = upper + P::kRow;
        C c[4] = {upper[0], upper[kNext], lower[0], lower[kNext]};
        multiply_matrices<T>(c, a[i], b[j]);
        upper[0] = c[0];
        upper[kNext] = c[1];
        lower[0] = c[2];
        lower[kNext] = c[3];
      }
    }
  }
};

template <class L, class S, class A, class B, class C>
TILE_FUNCTION void dot_mma(A a, B b, C* sum) {
  using T = typename A::Type;
  using P = Part<L, S>;
  constexpr int K = A::Shape::kColumns, kSteps = K * static_cast<int>(sizeof(T)) / 32;
  TILE_UNROLL
  for (int p = 0; p < S::kPlanes; ++p) {
    Fragments<L, T, S> fragments[2];  // one is loaded while the other is multiplied
    fragments[0].read(a, p * S::kRows, b, p * K, 0);
    TILE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) fragments[(step + 1) % 2].read(a, p * S::kRows, b, p * K, step + 1);
      fragments[step % 2].multiply(sum + p * P::kRows * P::kRow);
    }
  }
}

template <class T>
TILE_FUNCTION auto multiply_add(T a, T b, decltype(widen(T{})) sum) {
  if constexpr (is_float_type<T>) {
    return fmaf(widen(a), widen(b), sum);
  } else {
    return scalar::Add{}(sum, scalar::Multiply{}(widen(a), widen(b)));
  }
}

template <class L, class S, class A, class B, class C>
TILE_FUNCTION void dot_plain(A a, B b, C* sum) {
  using T = typename A::Type;
  using P = Part<L, S>;
  constexpr int K = A::Shape::kColumns;
  constexpr int kTogether = A::Layout::kChunks ? A::Layout::kChunkElements : 1;  // along k
  constexpr bool kVectors = P::kVector > 1 && P::kVector * sizeof(T) <= 16;
  const int me = thread(), thread_row = L::row(me);
  TILE_UNROLL
  for (int p = 0; p < S::kPlanes; ++p) {
    for (int k = 0; k < K; k += kTogether) {
      T left[P::kRows][kTogether];
      TILE_UNROLL
      for (int r = 0; r < P::kRows; ++r) {
        load_vector<kTogether>(left[r], &a.at(p * S::kRows + P::row(thread_row, r), k));
      }
      TILE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        TILE_UNROLL
        for (int g = 0; g < P::kGroups; ++g) {
          const int column = P::column(me, g);
          T right[P::kVector];
          if constexpr (kVectors) {
            load_vector<P::kVector>(right, &b.at(p * K + k + i, column));
          } else {
            TILE_UNROLL
            for (int v = 0; v < P::kVector; ++v) right[v] = b.at(p * K + k + i, column + v);
          }
          TILE_UNROLL
          for (int r = 0; r < P::kRows; ++r) {
            TILE_UNROLL
            for (int v = 0; v < P::kVector; ++v) {
              C& c = sum[(p * P::kRows + r) * P::kRow + g * P::kVector + v];
              c = multiply_add(left[r][i], right[v], c);
            }
          }
        }
      }
    }
  }
}

// Shared memory for operands that are not staged yet.
template <class A, class S = typename A::Shape, class T = typename A::Type>
TILE_FUNCTION constexpr int operand_bytes() {
  return is_plainly_staged<A> ? 0 : (StagedLayout<T, S>::kBytes + 127) / 128 * 128;
}

template <class L, class A>
TILE_FUNCTION auto staged_operand(const A& a, [[maybe_unused]] int offset) {
  if constexpr (is_plainly_staged<A>) {
    return a;
  } else {
    return copy_operand<L>(a, offset);
  }
}

// All that WGMMA does not do.
template <class L, class A, class B, class C>
TILE_FUNCTION void dot(const A& a, const B& b, C& sum) {
  constexpr bool kStages = !is_plainly_staged<A> || !is_plainly_staged<B>;
  if constexpr (kStages) barrier<L>();
  const auto left = staged_operand<L>(a, 0);
  const auto right = staged_operand<L>(b, operand_bytes<A>());
  if constexpr (kStages) barrier<L>();
  if constexpr (uses_mma<L, typename A::Type, typename C::Shape, A::Shape::kColumns>()) {
    dot_mma<L, typename C::Shape>(left, right, sum.values);
  } else {
    dot_plain<L, typename C::Shape>(left, right, sum.values);
  }
}

}  // namespace octile::tile::gpu
