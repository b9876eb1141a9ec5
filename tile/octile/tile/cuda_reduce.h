// Reductions in the order of the language: the highest bit of the index is folded first. Of a column index the high
// bits count groups, the middle ones threads, the low ones the elements of a vector.
#pragma once

#include "octile/tile/cuda_device.h"
#include "octile/tile/cuda_layout.h"
#include "octile/tile/cuda_math.h"

namespace octile::tile::gpu {

// f(mine, theirs), with the lower index first. Where the order changes no bit it costs nothing.
template <class F, class T>
TILE_FUNCTION T ordered(F f, bool mine_is_second, T mine, T theirs) {
  if constexpr (std::is_same_v<F, scalar::Add> || is_integer_type<T>) {
    return f(mine, theirs);
  } else {
    return f(mine_is_second ? theirs : mine, mine_is_second ? mine : theirs);
  }
}

template <int n, int inner, class F, class T>
TILE_FUNCTION void fold_in_order(F f, T* x) {
  if constexpr (n > 1) {
    TILE_UNROLL
    for (int i = 0; i < n / 2 * inner; ++i) x[i] = f(x[i], x[i + n / 2 * inner]);
    fold_in_order<n / 2, inner>(f, x);
  }
}

template <int n, int inner, class F>
TILE_FUNCTION void fold_extreme(F f, f32* x) {
  if constexpr (n > 1) {
    TILE_UNROLL
    for (int i = 0; i < n / 2 * inner; ++i) x[i] = extreme(f, x[i], x[i + n / 2 * inner]);
    fold_extreme<n / 2, inner>(f, x);
  }
}

// Folds n rows of `inner` values into the first row.
template <int n, int inner, class F, class T>
TILE_FUNCTION void fold(F f, T* x) {
  if constexpr (is_extreme<F> && std::is_same_v<T, f32> && n >= 4) {
    T y[n / 2 * inner];
    TILE_UNROLL
    for (int i = 0; i < n / 2 * inner; ++i) y[i] = extreme(f, x[i], x[i + n / 2 * inner]);
    fold_extreme<n / 2, inner>(f, y);
    bool plain = true;
    TILE_UNROLL
    for (int i = 0; i < inner; ++i) plain = plain & (fabsf(y[i]) > 0.0f);
    if (plain) {
      TILE_UNROLL
      for (int i = 0; i < inner; ++i) x[i] = y[i];
      return;
    }
  }
  fold_in_order<n, inner>(f, x);
}

// Bits `kFirst` .. `kFirst + kCount - 1` of the thread's number, all of them above a warp: `n` values a thread, through
// shared memory.
template <int kThreads, int kFirst, int kCount, int n, class F, class T>
TILE_FUNCTION void fold_warps(F f, T* x) {
  constexpr int kPartners = 1 << kCount;
  constexpr int kTogether = smaller(n, 16 / static_cast<int>(sizeof(T)));  // up to 16 bytes of a thread side by side
  T* const shared = reinterpret_cast<T*>(arena());
  const int me = thread();
  const int first = me & ~((kPartners - 1) << kFirst);
  barrier();
  TILE_UNROLL
  for (int i = 0; i < n; i += kTogether) store_vector<kTogether>(shared + i * kThreads + me * kTogether, x + i);
  barrier();
  TILE_UNROLL
  for (int i = 0; i < n; i += kTogether) {
    T values[kPartners * kTogether];
    TILE_UNROLL
    for (int p = 0; p < kPartners; ++p) {
      load_vector<kTogether>(values + p * kTogether, shared + i * kThreads + (first + (p << kFirst)) * kTogether);
    }
    fold<kPartners, kTogether>(f, values);
    TILE_UNROLL
    for (int j = 0; j < kTogether; ++j) x[i + j] = values[j];
  }
}

// One bit of the lane, `n` values a thread.
template <int kBit, int n, class F, class T>
TILE_FUNCTION void fold_lane(F f, T* x) {
  const bool second = ((thread() >> kBit) & 1) != 0;
  TILE_UNROLL
  for (int i = 0; i < n; ++i) x[i] = ordered(f, second, x[i], shuffle_xor(x[i], 1 << kBit));
}

// The lowest `kBits` bits of the thread columns, then the vector of `n` that each thread holds. Where it has more than
// one, a lane gives half of its vector away for the other lane's half: then each has half as many sums to make. The
// bits of the vector that lanes stand for in this way (kLanes, the highest first) are folded after all thread columns.
template <class L, int kBits, int n, int... kLanes, class F, class T>
TILE_FUNCTION void fold_columns(F f, T* x) {
  if constexpr (kBits == 0) {
    (fold_lane<kLanes, n>(f, x), ...);
    fold<n, 1>(f, x);
  } else {
    constexpr int kBit = L::column_bit(kBits - 1);
    if constexpr (n == 1) {
      fold_lane<kBit, 1>(f, x);
      fold_columns<L, kBits - 1, 1, kLanes...>(f, x);
    } else {
      const bool second = ((thread() >> kBit) & 1) != 0;
      TILE_UNROLL
      for (int i = 0; i < n / 2; ++i) {
        const T theirs = shuffle_xor(second ? x[i] : x[i + n / 2], 1 << kBit);
        x[i] = ordered(f, second, second ? x[i + n / 2] : x[i], theirs);
      }
      fold_columns<L, kBits - 1, n / 2, kLanes..., kBit>(f, x);
    }
  }
}

// How many bits of the thread rows, or columns, that a tile uses stand above a warp.
template <class L, int Axis, class S>
TILE_FUNCTION constexpr int bits_of() {
  return log2_of(Axis == 1 ? Part<L, S>::kThreadRows : Part<L, S>::kThreadColumns);
}
template <class L, int Axis, class S>
TILE_FUNCTION constexpr int warp_bits() {
  int bits = 0;
  for (int i = 0; i < bits_of<L, Axis, S>(); ++i) bits += (Axis == 1 ? L::row_bit(i) : L::column_bit(i)) >= 5;
  return bits;
}

// The shared memory that reduce() takes.
template <class L, int Axis, class S, class T>
TILE_FUNCTION constexpr int reduce_bytes() {
  using P = Part<L, S>;
  if (Axis == 0 || warp_bits<L, Axis, S>() == 0) return 0;
  return L::kThreads * static_cast<int>(sizeof(T)) * (Axis == 1 ? S::kPlanes * P::kRow : P::kSize / P::kGroups);
}

template <class L, int kBits, int n, class F, class T>
TILE_FUNCTION void fold_rows(F f, T* x) {
  if constexpr (kBits > 0) {
    fold_lane<L::row_bit(kBits - 1), n>(f, x);
    fold_rows<L, kBits - 1, n>(f, x);
  }
}

// x: one thread's part of a tile S. The result is at the front of x.
template <class L, int Axis, class S, class F, class T>
TILE_FUNCTION void reduce(F f, T* x) {
  using P = Part<L, S>;
  constexpr int kBits = Axis == 0 ? 0 : bits_of<L, Axis, S>();
  constexpr int kWarpBits = Axis == 0 ? 0 : warp_bits<L, Axis, S>();
  if constexpr (Axis == 0) {
    fold<S::kPlanes, P::kRows * P::kRow>(f, x);
  } else if constexpr (Axis == 1) {
    TILE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      fold<P::kRows, P::kRow>(f, x + p * P::kRows * P::kRow);
      TILE_UNROLL
      for (int i = 0; i < P::kRow; ++i) x[p * P::kRow + i] = x[p * P::kRows * P::kRow + i];
    }
    constexpr int n = S::kPlanes * P::kRow;
    if constexpr (kWarpBits > 0) fold_warps<L::kThreads, L::row_bit(kBits - kWarpBits), kWarpBits, n>(f, x);
    fold_rows<L, kBits - kWarpBits, n>(f, x);
  } else {
    constexpr int kRows = S::kPlanes * P::kRows;
    TILE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      fold<P::kGroups, P::kVector>(f, x + r * P::kRow);
      TILE_UNROLL
      for (int i = 0; i < P::kVector; ++i) x[r * P::kVector + i] = x[r * P::kRow + i];
    }
    if constexpr (kWarpBits > 0) {
      fold_warps<L::kThreads, L::column_bit(kBits - kWarpBits), kWarpBits, kRows * P::kVector>(f, x);
    }
    TILE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      fold_columns<L, kBits - kWarpBits, P::kVector>(f, x + r * P::kVector);
      x[r] = x[r * P::kVector];
    }
  }
}

}  // namespace octile::tile::gpu
