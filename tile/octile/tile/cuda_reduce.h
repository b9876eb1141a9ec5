// Reductions in the language's order: the highest bit of the index is folded first. In a column index the high bits
// count groups, the middle bits threads, the low bits the elements of a vector.
#pragma once

#include "octile/tile/cuda_device.h"
#include "octile/tile/cuda_layout.h"
#include "octile/tile/cuda_math.h"

namespace octile::tile::gpu {

// f(mine, theirs), with the lower index first. Free where the order does not matter.
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

// extreme() as a fold: in any order, ignoring the special cases of zeros and NaNs.
template <class F>
struct Extreme {
  TILE_FUNCTION f32 operator()(f32 a, f32 b) const { return extreme(F{}, a, b); }
};

// Folds n rows of `inner` values into the first row.
template <int n, int inner, class F, class T>
TILE_FUNCTION void fold(F f, T* x) {
  if constexpr (is_extreme<F> && std::is_same_v<T, f32> && n >= 4) {
    T y[n / 2 * inner];
    TILE_UNROLL
    for (int i = 0; i < n / 2 * inner; ++i) y[i] = extreme(f, x[i], x[i + n / 2 * inner]);
    fold_in_order<n / 2, inner>(Extreme<F>{}, y);
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
template <class L, int kFirst, int kCount, int n, class F, class T>
TILE_FUNCTION void fold_warps(F f, T* x) {
  constexpr int kThreads = L::kThreads;
  constexpr int kPartners = 1 << kCount;
  constexpr int kTogether = smaller(n, 16 / static_cast<int>(sizeof(T)));  // up to 16 bytes of a thread side by side
  T* const shared = reinterpret_cast<T*>(arena());
  const int me = thread();
  const int first = me & ~((kPartners - 1) << kFirst);
  barrier<L>();
  TILE_UNROLL
  for (int i = 0; i < n; i += kTogether) store_vector<kTogether>(shared + i * kThreads + me * kTogether, x + i);
  barrier<L>();
  TILE_UNROLL
  for (int i = 0; i < n; i += kTogether) {
    T values[kPartners * kTogether];
    TILE_UNROLL
    for (int p = 0; p < kPartners; ++p) {
      load_vector<kTogether>(values + p * kTogether, shared + i * kThreads + (first + (p << kFirst)) * kTogether);
    }
    fold_in_order<kPartners, kTogether>(f, values);
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

// How many of the lowest `kBits` bits of the thread columns follow each other above a warp, from the highest down.
template <class P, int kBits>
TILE_FUNCTION constexpr int warp_bits_on_top() {
  int bits = 0;
  while (bits < kBits && P::column_bit(kBits - 1 - bits) >= 5) ++bits;
  return bits;
}

// The lowest `kBits` bits of the thread columns, then the vector of `n` that each thread holds of each of its rows.
// With more than one element, two lanes exchange halves of their vectors, so each computes half as many sums. The
// vector bits that lanes then stand for (kLanes, the highest first) are folded after all thread columns.
template <class P, int kBits, int kRows, int n, int... kLanes, class F, class T>
TILE_FUNCTION void fold_columns(F f, T* x) {
  constexpr int kWarpBits = warp_bits_on_top<P, kBits>();
  if constexpr (kBits == 0) {
    (fold_lane<kLanes, kRows * n>(f, x), ...);
    TILE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      fold_in_order<n, 1>(f, x + r * n);
      x[r] = x[r * n];
    }
  } else if constexpr (kWarpBits > 0) {
    fold_warps<typename P::Layout, P::column_bit(kBits - kWarpBits), kWarpBits, kRows * n>(f, x);
    fold_columns<P, kBits - kWarpBits, kRows, n, kLanes...>(f, x);
  } else {
    constexpr int kBit = P::column_bit(kBits - 1);
    if constexpr (n == 1) {
      fold_lane<kBit, kRows>(f, x);
      fold_columns<P, kBits - 1, kRows, 1, kLanes...>(f, x);
    } else {
      const bool second = ((thread() >> kBit) & 1) != 0;
      TILE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        TILE_UNROLL
        for (int i = 0; i < n / 2; ++i) {
          const T low = x[r * n + i], high = x[r * n + i + n / 2];
          const T mine = second ? high : low, theirs = shuffle_xor(second ? low : high, 1 << kBit);
          x[r * (n / 2) + i] = ordered(f, second, mine, theirs);
        }
      }
      fold_columns<P, kBits - 1, kRows, n / 2, kLanes..., kBit>(f, x);
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
  for (int i = 0; i < bits_of<L, Axis, S>(); ++i) bits += (Axis == 1 ? L::row_bit(i) : Part<L, S>::column_bit(i)) >= 5;
  return bits;
}

// The elements of a vector that a thread still holds when a sum over the columns comes to the warps.
template <class L, class S>
TILE_FUNCTION constexpr int vector_at_warps() {
  int n = Part<L, S>::kVector;
  for (int i = bits_of<L, 2, S>(); i > 0 && Part<L, S>::column_bit(i - 1) < 5; --i) n = larger(1, n / 2);
  return n;
}

// The shared memory that reduce() takes.
template <class L, int Axis, class S, class T>
TILE_FUNCTION constexpr int reduce_bytes() {
  using P = Part<L, S>;
  if (Axis == 0 || warp_bits<L, Axis, S>() == 0) return 0;
  const int below = interleaves_rows<L, S> ? 2 : 1;
  const int values = Axis == 1 ? S::kPlanes * below * P::kRow : S::kPlanes * P::kRows * vector_at_warps<L, S>();
  return L::kThreads * static_cast<int>(sizeof(T)) * values;
}

template <class L, int kBits, int n, class F, class T>
TILE_FUNCTION void fold_rows(F f, T* x) {
  if constexpr (kBits > 0) {
    fold_lane<L::row_bit(kBits - 1), n>(f, x);
    fold_rows<L, kBits - 1, n>(f, x);
  }
}

template <class P, int kBits, int n, class F>
TILE_FUNCTION void fold_columns_anyhow(F f, f32* x) {
  constexpr int kWarpBits = warp_bits_on_top<P, kBits>();
  if constexpr (kWarpBits > 0) {
    fold_columns_anyhow<P, kBits - kWarpBits, n>(f, x);  // lanes first
    fold_warps<typename P::Layout, P::column_bit(kBits - kWarpBits), kWarpBits, n>(f, x);
  } else if constexpr (kBits > 0) {
    TILE_UNROLL
    for (int i = 0; i < n; ++i) x[i] = f(x[i], shuffle_xor(x[i], 1 << P::column_bit(kBits - 1)));
    fold_columns_anyhow<P, kBits - 1, n>(f, x);
  }
}

// The maximum or minimum of each row by extreme(). True if none is zero or NaN: then all are exact. All threads that
// must agree on the answer do.
template <class L, class S, class F>
TILE_FUNCTION bool reduce_extreme(F, const f32* x, f32* out) {
  using P = Part<L, S>;
  constexpr int kRows = S::kPlanes * P::kRows;
  TILE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    f32 row[P::kRow];
    TILE_UNROLL
    for (int i = 0; i < P::kRow; ++i) row[i] = x[r * P::kRow + i];
    fold_in_order<P::kRow, 1>(Extreme<F>{}, row);
    out[r] = row[0];
  }
  fold_columns_anyhow<P, bits_of<L, 2, S>(), kRows>(Extreme<F>{}, out);
  bool right = true;
  TILE_UNROLL
  for (int r = 0; r < kRows; ++r) right = right & (fabsf(out[r]) > 0.0f);
  return P::kThreadRows == 1 ? right : all_lanes(right);
}
// Not for several rows that several warps share: some threads would not know whether all rows are exact. Nor for many
// rows per thread: it would double their code.
template <class L, class S>
inline constexpr bool extreme_is_agreed =
    (Part<L, S>::kThreadRows == 1 || warp_bits<L, 2, S>() == 0) && Part<L, S>::kRows* S::kPlanes <= 8;

// x: one thread's part of a tile S. The result is at the front of x.
template <class L, int Axis, class S, class F, class T>
TILE_FUNCTION void reduce(F f, T* x) {
  using P = Part<L, S>;
  constexpr int kBits = Axis == 0 ? 0 : bits_of<L, Axis, S>();
  if constexpr (Axis == 0) {
    fold<S::kPlanes, P::kRows * P::kRow>(f, x);
  } else if constexpr (Axis == 1) {
    // Rows of a thread that lie below the bits of the warps are folded after them.
    constexpr int kBelow = interleaves_rows<L, S> ? 2 : 1, kLow = kBelow * P::kRow;
    TILE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      fold<P::kRows / kBelow, kLow>(f, x + p * P::kRows * P::kRow);
      TILE_UNROLL
      for (int i = 0; i < kLow; ++i) x[p * kLow + i] = x[p * P::kRows * P::kRow + i];
    }
    constexpr int n = S::kPlanes * P::kRow, kWarpBits = warp_bits<L, 1, S>();
    if constexpr (kWarpBits > 0) fold_warps<L, L::row_bit(kBits - kWarpBits), kWarpBits, kBelow * n>(f, x);
    if constexpr (kBelow > 1) {
      TILE_UNROLL
      for (int p = 0; p < S::kPlanes; ++p) {
        fold<kBelow, P::kRow>(f, x + p * kLow);
        TILE_UNROLL
        for (int i = 0; i < P::kRow; ++i) x[p * P::kRow + i] = x[p * kLow + i];
      }
    }
    fold_rows<L, kBits - kWarpBits, n>(f, x);
  } else {
    constexpr int kRows = S::kPlanes * P::kRows;
    if constexpr (is_extreme<F> && std::is_same_v<T, f32> && extreme_is_agreed<L, S>) {
      f32 result[kRows];
      if (reduce_extreme<L, S>(f, x, result)) {
        TILE_UNROLL
        for (int r = 0; r < kRows; ++r) x[r] = result[r];
        return;
      }
    }
    TILE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      fold_in_order<P::kGroups, P::kVector>(f, x + r * P::kRow);
      TILE_UNROLL
      for (int i = 0; i < P::kVector; ++i) x[r * P::kVector + i] = x[r * P::kRow + i];
    }
    fold_columns<P, kBits, kRows, P::kVector>(f, x);
  }
}

}  // namespace octile::tile::gpu
