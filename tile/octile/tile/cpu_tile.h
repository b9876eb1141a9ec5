// Tiles on a CPU: arrays in row-major order. Both CPU executors compute with these loops, so they give the same bits.
#pragma once

#include <cstring>
#include <new>
#include <utility>

#include "octile/tile/context.h"

namespace octile::tile {

// The n elements of a tile: an array, or, if it is large, memory of the heap. A kernel has many tiles, and the stack of
// a thread is 8 MB.
inline constexpr std::size_t kMaxStackBytes = 1 << 16;

template <class T, int n, bool kLarge = (n * sizeof(T) > kMaxStackBytes)>
struct CpuValues {
  alignas(n * sizeof(T) >= 64 ? 64 : alignof(T)) T values[n];
};
template <class T, int n>
struct CpuValues<T, n, true> {
  T* values;  // null after a move

  CpuValues() : values(allocated()) {}
  CpuValues(const CpuValues& other) : CpuValues() { memcpy(static_cast<void*>(values), other.values, n * sizeof(T)); }
  CpuValues(CpuValues&& other) noexcept : values(std::exchange(other.values, nullptr)) {}
  CpuValues& operator=(const CpuValues& other) {
    if (this == &other) return *this;
    if (values == nullptr) values = allocated();
    memcpy(static_cast<void*>(values), other.values, n * sizeof(T));
    return *this;
  }
  CpuValues& operator=(CpuValues&& other) noexcept {
    std::swap(values, other.values);
    return *this;
  }
  ~CpuValues() { ::operator delete (static_cast<void*>(values), std::align_val_t{64}); }

 private:
  static T* allocated() { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
};

namespace cpu {

// ---- One row of an operand: a function of the column ----

template <class T, int kColumns>
struct TileRow {
  const T* values;
  auto operator()(int c) const { return widen(values[kColumns == 1 ? 0 : c]); }
};
template <class T>
struct NumberRow {
  T value;
  auto operator()(int) const { return widen(value); }
};
template <class I, int kStep>  // 0 and 1: known to the compiler
struct IndexRow {
  s64 start, step;
  I operator()(int c) const { return static_cast<I>(start + (kStep >= 0 ? kStep : step) * c); }
};
struct IntervalRow {
  int low, high;
  bool operator()(int c) const { return (c >= low) & (c < high); }
};
template <class M>
struct MaskRow {
  const M& mask;
  int p, r;
  bool operator()(int c) const { return mask.at(p, r, c); }
};

template <class A>
inline auto row_of(const A& a, int p, int r) {
  using S = typename A::Shape;
  if constexpr (is_tile<A>) {
    const int row = (S::kPlanes == 1 ? 0 : p) * S::kRows + (S::kRows == 1 ? 0 : r);
    return TileRow<typename A::Type, S::kColumns>{a.values + row * S::kColumns};
  } else if constexpr (is_affine<A>) {
    constexpr int kStep = S::kColumns == 1 ? 0 : A::kUnit ? 1 : -1;
    return IndexRow<typename A::Type, kStep>{a.row_start(p, r), a.column};
  } else if constexpr (LazyMask<A>) {
    if constexpr (A::kInterval && S::kColumns > 1) {
      const Interval interval = a.interval(p, r);
      return IntervalRow{interval.low, interval.high};
    } else if constexpr (S::kColumns == 1) {
      return NumberRow<bool>{a.at(p, r, 0)};
    } else {
      return MaskRow<A>{a, p, r};
    }
  } else {
    return NumberRow<typename A::Type>{a.value};
  }
}

// All elements in one row: possible if every operand is a stored tile of the whole shape, or one value.
template <class S, class A>
constexpr bool flat_operand() {
  if constexpr (is_tile<A>) return std::is_same_v<typename A::Shape, S> || A::Shape::kSize == 1;
  return !TileLike<A>;
}
template <class S, class A>
inline auto flat(const A& a) {
  if constexpr (is_tile<A>) {
    return TileRow<typename A::Type, A::Shape::kSize>{a.values};
  } else {
    return row_of(a, 0, 0);
  }
}

template <int kColumns, class T, class F, class... Row>
inline void map_row(T* out, F f, Row... row) {
  for (int c = 0; c < kColumns; ++c) out[c] = f(row(c)...);
}

template <class S, class T, class F, class... A>
inline void map(T* out, F f, const A&... a) {
  if constexpr ((flat_operand<S, A>() && ...)) {
    map_row<S::kSize>(out, f, flat<S>(a)...);
  } else {
    for (int p = 0; p < S::kPlanes; ++p) {
      for (int r = 0; r < S::kRows; ++r) {
        map_row<S::kColumns>(out + (p * S::kRows + r) * S::kColumns, f, row_of(a, p, r)...);
      }
    }
  }
}

template <class F, class... A>
using MapType = decltype(std::declval<F>()(widen(std::declval<typename A::Type>())...));

// ---- Reductions ----

// x[i] = f(x[i], x[i + n / 2]), and so on with half of n: `inner` columns side by side.
template <int n, int inner, class F, class T>
inline void fold(F f, T* x) {
  if constexpr (n > 1) {
    constexpr int kHalf = n / 2 * inner;
    for (int i = 0; i < kHalf; ++i) x[i] = f(x[i], x[i + kHalf]);
    fold<n / 2, inner>(f, x);
  }
}

template <int n, int inner, class F, class From, class T>
inline void reduce(F f, const From* from, T* to) {
  if constexpr (n == 1) {
    for (int i = 0; i < inner; ++i) to[i] = widen(from[i]);
  } else {
    constexpr int kHalf = n / 2 * inner;
    CpuValues<T, kHalf> half;
    T* const x = half.values;
    for (int i = 0; i < kHalf; ++i) x[i] = f(widen(from[i]), widen(from[i + kHalf]));
    fold<n / 2, inner>(f, x);
    for (int i = 0; i < inner; ++i) to[i] = x[i];
  }
}

template <int Axis, class S, class F, class From, class T>
inline void reduce_tile(F f, const From* from, T* to) {
  constexpr int kLength = Axis == 0 ? S::kPlanes : Axis == 1 ? S::kRows : S::kColumns;
  constexpr int kInner = Axis == 0 ? S::kRows * S::kColumns : Axis == 1 ? S::kColumns : 1;
  for (int o = 0; o < S::kSize / (kLength * kInner); ++o) {
    reduce<kLength, kInner>(f, from + o * kLength * kInner, to + o * kInner);
  }
}

// ---- Dot ----

// c (M, N) += a (M, K) @ b (K, N). Each element is a sum in the order of k.
template <int M, int N, int K>
inline void dot_floats(const float* a, const float* b, float* c) {
  if constexpr (M % 4 == 0 && N % 16 == 0) {
    // Four rows by sixteen columns stay in registers; arrays would not.
    typedef float Vector __attribute__((vector_size(32), aligned(4)));
    for (int i = 0; i < M; i += 4) {
      for (int j = 0; j < N; j += 16) {
        Vector sum[4][2];
        for (int p = 0; p < 4; ++p) memcpy(sum[p], c + (i + p) * N + j, sizeof(sum[p]));
        for (int k = 0; k < K; ++k) {
          Vector right[2];
          memcpy(right, b + k * N + j, sizeof(right));
          for (int p = 0; p < 4; ++p) {
            const float left = a[(i + p) * K + k];
            sum[p][0] += left * right[0];
            sum[p][1] += left * right[1];
          }
        }
        for (int p = 0; p < 4; ++p) memcpy(c + (i + p) * N + j, sum[p], sizeof(sum[p]));
      }
    }
  } else {
    for (int i = 0; i < M; ++i) {
      for (int k = 0; k < K; ++k) {
        for (int j = 0; j < N; ++j) c[i * N + j] += a[i * K + k] * b[k * N + j];
      }
    }
  }
}

template <int M, int N, int K>
inline void dot_bytes(const s8* a, const s8* b, s32* c) {
  for (int i = 0; i < M; ++i) {
    for (int k = 0; k < K; ++k) {
      const s32 left = a[i * K + k];
      for (int j = 0; j < N; ++j) {
        c[i * N + j] = scalar::Add{}(c[i * N + j], left * s32{b[k * N + j]});
      }
    }
  }
}

template <class A, class B, class C>
inline void dot(const A& a, const B& b, C& c) {
  using SA = typename A::Shape;
  constexpr int M = SA::kRows, K = SA::kColumns, N = B::Shape::kColumns;
  for (int p = 0; p < SA::kPlanes; ++p) {
    const auto* left = a.values + p * M * K;
    const auto* right = b.values + p * K * N;
    auto* sum = c.values + p * M * N;
    if constexpr (std::is_same_v<typename A::Type, s8>) {
      dot_bytes<M, N, K>(left, right, sum);
    } else if constexpr (std::is_same_v<typename A::Type, f32>) {
      dot_floats<M, N, K>(left, right, sum);
    } else {
      CpuValues<float, M * K> wide_left;
      CpuValues<float, K * N> wide_right;
      for (int i = 0; i < M * K; ++i) wide_left.values[i] = widen(left[i]);
      for (int i = 0; i < K * N; ++i) wide_right.values[i] = widen(right[i]);
      dot_floats<M, N, K>(wide_left.values, wide_right.values, sum);
    }
  }
}

// An operand with its values in memory.
template <class A>
inline decltype(auto) stored(const A& a) {
  if constexpr (is_tile<A>) {
    return (a);
  } else {
    return elementwise(scalar::Cast<typename A::Type, Round::unstated>{}, a);
  }
}

}  // namespace cpu
}  // namespace octile::tile
