// Every elementwise operator, as a function object on single values. All executors call these, so they agree to the
// bit: none of them depends on contraction (compile with -ffp-contract=off, nvcc -fmad=false).
#pragma once

#include <cmath>

#include "octile/tile/types.h"

namespace octile::tile::scalar {

template <class T>
using Unsigned = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// Integer arithmetic wraps, as a GPU's does.
#define TILE_ARITHMETIC(Name, op)                                                          \
  struct Name {                                                                            \
    template <class A, class B>                                                            \
    TILE_FUNCTION auto operator()(A a, B b) const {                                        \
      using T = Common<A, B>;                                                              \
      if constexpr (std::is_same_v<T, f32>) {                                              \
        return static_cast<f32>(a) op static_cast<f32>(b);                                 \
      } else {                                                                             \
        return static_cast<T>(static_cast<Unsigned<T>>(a) op static_cast<Unsigned<T>>(b)); \
      }                                                                                    \
    }                                                                                      \
  };
TILE_ARITHMETIC(Add, +)
TILE_ARITHMETIC(Subtract, -)
TILE_ARITHMETIC(Multiply, *)
#undef TILE_ARITHMETIC

// Integers: towards zero, as in C++. x / 0 is 0 and x % 0 is x here; the checker calls them undefined.
struct Divide {
  template <class A, class B>
  TILE_FUNCTION auto operator()(A a, B b) const {
    using T = Common<A, B>;
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    if constexpr (std::is_same_v<T, f32>) {
      return x / y;
    } else {
      if (y == 0) return T(0);
      return y == T(-1) ? static_cast<T>(Unsigned<T>(0) - static_cast<Unsigned<T>>(x)) : static_cast<T>(x / y);
    }
  }
  template <class A, class B>
  static bool undefined(A, B b) {
    return !std::is_same_v<Common<A, B>, f32> && b == B(0);
  }
};

struct Remainder {
  template <class A, class B>
  TILE_FUNCTION auto operator()(A a, B b) const {
    using T = Common<A, B>;
    static_assert(!std::is_same_v<T, f32>, "octile: % takes integers.");
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    if constexpr (std::is_same_v<T, f32>) {
      return x;  // after the error, no other
    } else {
      return y == 0 ? x : y == T(-1) ? T(0) : static_cast<T>(x % y);
    }
  }
  template <class A, class B>
  static bool undefined(A, B b) {
    return b == B(0);
  }
};

#define TILE_BITWISE(Name, op)                                                                           \
  struct Name {                                                                                          \
    template <class A, class B>                                                                          \
    TILE_FUNCTION auto operator()(A a, B b) const {                                                      \
      using T = Common<A, B>;                                                                            \
      static_assert(!std::is_same_v<T, f32>, "octile: the bit operators & | ^ take integers or masks."); \
      if constexpr (std::is_same_v<A, bool> && std::is_same_v<B, bool>) {                                \
        return static_cast<bool>(a op b);                                                                \
      } else if constexpr (std::is_same_v<T, f32>) {                                                     \
        return T(0); /* after the error, no other */                                                     \
      } else {                                                                                           \
        return static_cast<T>(static_cast<T>(a) op static_cast<T>(b));                                   \
      }                                                                                                  \
    }                                                                                                    \
  };
TILE_BITWISE(And, &)
TILE_BITWISE(Or, |)
TILE_BITWISE(Xor, ^)
#undef TILE_BITWISE

// Shifts: the count is taken modulo the number of bits; the checker calls a count outside of them undefined.
struct ShiftLeft {
  template <class A, class B>
  TILE_FUNCTION auto operator()(A a, B b) const {
    static_assert(!std::is_same_v<Common<A, B>, f32>, "octile: a shift takes integers.");
    using T = Common<A, s32>;
    return static_cast<T>(static_cast<Unsigned<T>>(a) << (static_cast<unsigned>(b) % (8 * sizeof(T))));
  }
  template <class A, class B>
  static bool undefined(A, B b) {
    return static_cast<std::uint64_t>(b) >= 8 * sizeof(Common<A, s32>);
  }
};

struct ShiftRight {  // arithmetic: the sign moves in
  template <class A, class B>
  TILE_FUNCTION auto operator()(A a, B b) const {
    static_assert(!std::is_same_v<Common<A, B>, f32>, "octile: a shift takes integers.");
    using T = Common<A, s32>;
    return static_cast<T>(static_cast<T>(a) >> (static_cast<unsigned>(b) % (8 * sizeof(T))));
  }
  template <class A, class B>
  static bool undefined(A a, B b) {
    return ShiftLeft::undefined(a, b);
  }
};

#define TILE_COMPARISON(Name, op)                    \
  struct Name {                                      \
    template <class A, class B>                      \
    TILE_FUNCTION bool operator()(A a, B b) const {  \
      using T = Common<A, B>;                        \
      return static_cast<T>(a) op static_cast<T>(b); \
    }                                                \
  };
TILE_COMPARISON(Less, <)
TILE_COMPARISON(LessEqual, <=)
TILE_COMPARISON(Greater, >)
TILE_COMPARISON(GreaterEqual, >=)
TILE_COMPARISON(Equal, ==)
TILE_COMPARISON(NotEqual, !=)
#undef TILE_COMPARISON

struct Negate {
  template <class A>
  TILE_FUNCTION auto operator()(A a) const {
    if constexpr (std::is_same_v<A, f32>) {
      return -a;
    } else {
      return Subtract{}(s32{0}, a);
    }
  }
};

struct Not {  // of a mask; ~ of an integer
  template <class A>
  TILE_FUNCTION auto operator()(A a) const {
    static_assert(!std::is_same_v<A, f32>, "octile: ! and ~ take masks or integers.");
    if constexpr (std::is_same_v<A, bool>) {
      return !a;
    } else {
      return static_cast<A>(~a);
    }
  }
};

struct Abs {
  template <class A>
  TILE_FUNCTION auto operator()(A a) const {
    if constexpr (std::is_same_v<A, f32>) {
      return bits_as<f32>(bits_as<std::uint32_t>(a) & 0x7fffffffu);
    } else {
      return a < A(0) ? Negate{}(a) : Common<A, A>(a);
    }
  }
};

// A NaN on either side is the result, so that a reduction does not hide it.
#define TILE_EXTREME(Name, op)                              \
  struct Name {                                             \
    template <class A, class B>                             \
    TILE_FUNCTION auto operator()(A a, B b) const {         \
      using T = Common<A, B>;                               \
      const T x = static_cast<T>(a), y = static_cast<T>(b); \
      return ((x op y) | (x != x)) ? x : y;                 \
    }                                                       \
  };
TILE_EXTREME(Maximum, >)
TILE_EXTREME(Minimum, <)
#undef TILE_EXTREME

// To the nearest integer, ties to even; keeps the sign of zero.
TILE_FUNCTION f32 round_even(f32 x) {
#if defined(__CUDA_ARCH__) || defined(__SSE4_1__) || defined(__aarch64__)
  return rintf(x);
#else
  // Without an instruction for it: adding 2^23 pushes the fraction out.
  const std::uint32_t sign = bits_as<std::uint32_t>(x) & 0x80000000u;
  const f32 magnitude = bits_as<f32>(bits_as<std::uint32_t>(x) & 0x7fffffffu);
  const f32 rounded = (magnitude + 0x1p23f) - 0x1p23f;
  return bits_as<f32>(sign | bits_as<std::uint32_t>(magnitude < 0x1p23f ? rounded : magnitude));
#endif
}
struct Rint {
  TILE_FUNCTION f32 operator()(f32 x) const { return round_even(x); }
};

struct Sqrt {
  TILE_FUNCTION f32 operator()(f32 x) const { return sqrtf(x); }
};

// 2^x within 1 unit in the last place; infinity, 0, NaN and subnormal results as they should be. x = n + r with
// |r| <= 1/2; 2^r is a polynomial; 2^n is multiplied in two halves, so that a subnormal result is rounded once.
struct Exp2 {
  TILE_FUNCTION static f32 power(f32 r) {  // 2^r
    f32 p = 0.00015353359f;
    p = fmaf(p, r, 0.0013398875f);
    p = fmaf(p, r, 0.009618437f);
    p = fmaf(p, r, 0.055503324f);
    p = fmaf(p, r, 0.24022648f);
    p = fmaf(p, r, 0.6931472f);
    p = fmaf(p, r, 1.0f);
    return p;
  }

  TILE_FUNCTION f32 operator()(f32 x) const {
    x = x < -152.0f ? -152.0f : x;
    x = x > 129.0f ? 129.0f : x;
    const f32 shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x is in the low bits
    const f32 r = x - (shifted - 12582912.0f);
    const s32 n = static_cast<s32>(bits_as<std::uint32_t>(shifted) - 0x4b400000u);
    const s32 half = n >> 1;
    const f32 low = bits_as<f32>(static_cast<std::uint32_t>(half + 127) << 23);
    const f32 high = bits_as<f32>(static_cast<std::uint32_t>(n - half + 127) << 23);
    return power(r) * low * high;
  }
};

struct Fma {
  template <class A, class B, class C>
  TILE_FUNCTION f32 operator()(A a, B b, C c) const {
    return fmaf(static_cast<f32>(a), static_cast<f32>(b), static_cast<f32>(c));
  }
};

struct Select {  // where(condition, a, b)
  template <class A, class B>
  TILE_FUNCTION auto operator()(bool condition, A a, B b) const {
    using T = std::conditional_t<std::is_same_v<A, B>, A, Common<A, B>>;
    const T x = static_cast<T>(a), y = static_cast<T>(b);
    return condition ? x : y;
  }
};

}  // namespace octile::tile::scalar

namespace octile::tile {

// How a cast rounds. even: to nearest, ties to even.
enum class Round : std::uint8_t { unstated, even, zero, down, up };

namespace scalar {

template <class To, Round kRound>
struct Cast {
  template <class From>  // already widened: f32, s32, s64 or bool
  TILE_FUNCTION To operator()(From x) const {
    if constexpr (std::is_same_v<To, f32>) {
      return static_cast<f32>(x);  // integers: nearest even
    } else if constexpr (std::is_same_v<To, f16>) {
      return f16(static_cast<f32>(x));
    } else if constexpr (std::is_same_v<To, bf16>) {
      return bf16(static_cast<f32>(x));
    } else if constexpr (std::is_same_v<To, bool>) {
      return x != From(0);
    } else if constexpr (std::is_same_v<From, f32>) {
      return saturate(rounded(x));
    } else {
      return static_cast<To>(x);  // integer to integer: wraps
    }
  }

  TILE_FUNCTION static f32 rounded(f32 x) {
    if constexpr (kRound == Round::even) return round_even(x);
    if constexpr (kRound == Round::down) return floorf(x);
    if constexpr (kRound == Round::up) return ceilf(x);
    return x;  // the conversion truncates
  }

  // Out of range gives the nearest end, NaN gives 0.
  TILE_FUNCTION static To saturate(f32 x) {
    constexpr f32 kLow = static_cast<f32>(To(Unsigned<To>(!std::is_same_v<To, u8>) << (8 * sizeof(To) - 1)));
    constexpr f32 kEnd = std::is_same_v<To, u8> ? 256.0f : -kLow;  // one more than the largest
    if constexpr (sizeof(To) == 1) {  // the largest is a float: two comparisons, which vectorize
      x = x > kEnd - 1.0f ? kEnd - 1.0f : x;
      x = x < kLow ? kLow : x;
      return static_cast<To>(static_cast<s32>(x == x ? x : 0.0f));
    } else {
      constexpr To kMax = sizeof(To) == 4 ? To(0x7fffffff) : To(0x7fffffffffffffff);
      const f32 inside = x >= kEnd || x != x ? 0.0f : x < kLow ? kLow : x;
      return x >= kEnd ? kMax : static_cast<To>(inside);
    }
  }
};

}  // namespace scalar
}  // namespace octile::tile
