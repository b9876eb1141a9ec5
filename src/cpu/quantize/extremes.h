// The smallest and the largest value of a run, a group or a column.
#pragma once

#include <bit>
#include <limits>
#include <type_traits>

#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"

namespace octile::cpu {

// Floats as integers in the same order: both zeros apart by one, infinity and NaN beyond every finite value. The
// minimum and the maximum of keys vectorize everywhere, and a NaN cannot hide from them. 16-bit floats are compared as
// they lie, without widening.
template <class T>
using Key =
    std::conditional_t<sizeof(T) == 2, std::int16_t, std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>>;

template <class Real>
inline constexpr Key<Real> kInfinityKey = std::bit_cast<Key<Real>>(std::numeric_limits<Real>::infinity());

template <class T>
OCTILE_INLINE Key<T> magnitude_key(T x) {
  return static_cast<Key<T>>(std::bit_cast<Key<T>>(x) & std::numeric_limits<Key<T>>::max());
}

// Its own inverse, except for the type.
template <class T>
OCTILE_INLINE Key<T> flipped(Key<T> bits) {
  return static_cast<Key<T>>(bits ^ ((bits >> (8 * sizeof(T) - 1)) & std::numeric_limits<Key<T>>::max()));
}

template <class T>
OCTILE_INLINE Key<T> key(T x) {
  return flipped<T>(std::bit_cast<Key<T>>(x));
}

template <class T>
OCTILE_INLINE T value_of(Key<T> key) {
  return std::bit_cast<T>(flipped<T>(key));
}

// The smallest and the largest key, 0 included. Symmetric problems keep magnitudes, and `low` stays 0.
template <class T>
struct Extremes {
  Key<T> low = 0;
  Key<T> high = 0;

  bool finite() const { return high < kInfinityKey<T> && low > ~kInfinityKey<T>; }
  template <class U>
  void add(const Extremes<U>& other) {
    if constexpr (std::is_same_v<T, U>) {
      low = std::min(low, other.low);
      high = std::max(high, other.high);
    } else {
      add(Extremes{key(static_cast<T>(value_of<U>(other.low))), key(static_cast<T>(value_of<U>(other.high)))});
    }
  }
};

template <bool symmetric, class T>
OCTILE_INLINE void include(T x, Key<T>& low, Key<T>& high) {
  if constexpr (symmetric) {
    high = std::max(high, magnitude_key(x));
  } else {
    low = std::min(low, key(x));
    high = std::max(high, key(x));
  }
}

// `groups` runs of `length` elements, one after another.
template <bool symmetric>
struct Measure {
  template <Isa, class T>
  OCTILE_INLINE static void run(const T* x, std::int64_t groups, std::int64_t length, Ahead ahead,
                                Extremes<T>* extremes) {
    for (std::int64_t g = 0; g < groups; ++g, x += length) {
      Key<T> low = extremes[g].low;
      Key<T> high = extremes[g].high;
      std::int64_t i = length / kAheadStep > 1 ? long_run(x, length, ahead, low, high) : 0;
      // Each step ends with a maximum across a vector: as few as the usual groups allow.
      for (; i + 128 <= length; i += 128) step<128>(x + i, low, high);
      for (; i + 64 <= length; i += 64) step<64>(x + i, low, high);
      for (; i + 32 <= length; i += 32) step<32>(x + i, low, high);
      for (; i < length; ++i) include<symmetric>(x[i], low, high);
      extremes[g] = {low, high};
    }
  }

  template <int n, class T>
  OCTILE_INLINE static void step(const T* x, Key<T>& low, Key<T>& high) {
    for (int j = 0; j < n; ++j) include<symmetric>(x[j], low, high);
  }

  // Whole steps of kAheadStep elements, with extremes of each lane that meet at the end. Returns where it stopped.
  template <class T>
  OCTILE_INLINE static std::int64_t long_run(const T* x, std::int64_t length, Ahead ahead, Key<T>& low, Key<T>& high) {
    constexpr int kLanes = 64;
    Key<T> lows[kLanes] = {};
    Key<T> highs[kLanes] = {};
    std::int64_t i = 0;
    for (; i + kAheadStep <= length; i += kAheadStep) {
      ahead.prefetch();
      for (int j = 0; j < kLanes; ++j) include<symmetric>(x[i + j], lows[j], highs[j]);
      for (int j = 0; j < kLanes; ++j) include<symmetric>(x[i + kLanes + j], lows[j], highs[j]);
    }
    for (int j = 0; j < kLanes; ++j) {
      low = std::min(low, lows[j]);
      high = std::max(high, highs[j]);
    }
    return i;
  }
};

// Magnitudes of 16-bit floats, as those of floats.
struct WidenMagnitudes {
  template <Isa, class T, class Real>
  OCTILE_INLINE static void run(const Extremes<T>* __restrict narrow, std::int64_t count,
                                Extremes<Real>* __restrict wide) {
    for (std::int64_t i = 0; i < count; ++i) {
      wide[i] = {0, std::bit_cast<Key<Real>>(static_cast<Real>(std::bit_cast<T>(narrow[i].high)))};
    }
  }
};

inline constexpr std::int64_t kRowsAtATime = 4;

// Down the columns: one pair of extremes for each element of a row, loaded and stored once for kRowsAtATime rows.
template <bool symmetric>
struct MeasureColumns {
  template <Isa, class T>
  OCTILE_INLINE static void run(const T* __restrict x, std::int64_t stride, std::int64_t rows, std::int64_t n,
                                Key<T>* __restrict low, Key<T>* __restrict high) {
    for (; rows >= kRowsAtATime; rows -= kRowsAtATime, x += kRowsAtATime * stride) {
      std::int64_t i = 0;
      for (; i + kAheadStep <= n; i += kAheadStep) {
        for (std::int64_t r = kRowsAtATime; r < 2 * kRowsAtATime; ++r) {
          Ahead(x + i, r * stride, 2 * sizeof(T)).prefetch();
        }
        step(x + i, stride, kAheadStep, low + i, high + i);
      }
      step(x + i, stride, n - i, low + i, high + i);
    }
    for (; rows > 0; --rows, x += stride) {
      for (std::int64_t j = 0; j < n; ++j) include<symmetric>(x[j], low[j], high[j]);
    }
  }

  template <class T>
  OCTILE_INLINE static void step(const T* __restrict x, std::int64_t stride, std::int64_t n, Key<T>* __restrict low,
                                 Key<T>* __restrict high) {
    for (std::int64_t j = 0; j < n; ++j) {
      for (int r = 0; r < kRowsAtATime; ++r) include<symmetric>(x[r * stride + j], low[j], high[j]);
    }
  }
};

}  // namespace octile::cpu
