// The functions of the language on tiles.
#pragma once

#include "octile/tile/operators.h"

namespace octile::tile {

template <class A>
using ElementOf = typename A::Type;

#define TILE_UNARY(function, Name)          \
  template <TileLike A>                     \
  TILE_FUNCTION auto function(const A& a) { \
    return elementwise(scalar::Name{}, a);  \
  }
#define TILE_FLOAT_UNARY(function, Name)                                                 \
  template <TileLike A>                                                                  \
  TILE_FUNCTION auto function(const A& a) {                                              \
    static_assert(is_float_type<ElementOf<A>>, "octile: " #function "() takes floats."); \
    return elementwise(scalar::Name{}, a);                                               \
  }
TILE_UNARY(abs, Abs)
TILE_FLOAT_UNARY(rint, Rint)  // ties to even
TILE_FLOAT_UNARY(sqrt, Sqrt)
TILE_FLOAT_UNARY(exp2, Exp2)
#undef TILE_UNARY
#undef TILE_FLOAT_UNARY

// Elementwise; a NaN on either side is the result.
template <class A, class B>
requires Operands<A, B> TILE_FUNCTION auto maximum(const A& a, const B& b) {
  return elementwise(scalar::Maximum{}, a, b);
}
template <class A, class B>
requires Operands<A, B> TILE_FUNCTION auto minimum(const A& a, const B& b) {
  return elementwise(scalar::Minimum{}, a, b);
}
template <TileLike A, class Low, class High>
TILE_FUNCTION auto clamp(const A& a, Low low, High high) {
  return minimum(maximum(a, low), high);
}

// a * b + c, rounded once.
template <TileLike A, class B, class C>
TILE_FUNCTION auto fma(const A& a, const B& b, const C& c) {
  using S = Broadcast<Broadcast<typename A::Shape, ShapeOf<B>>, ShapeOf<C>>;
  static_assert(is_float_type<ElementOf<A>>, "octile: fma() takes floats.");
  return A::Executor::template map<S>(scalar::Fma{}, a, as_tile(b), as_tile(c));
}

// condition ? a : b, lane by lane.
template <TileLike M, class A, class B>
TILE_FUNCTION auto where(const M& condition, const A& a, const B& b) {
  static_assert(Mask<M>, "octile: the first argument of where() is a mask.");
  using S = Broadcast<Broadcast<typename M::Shape, ShapeOf<A>>, ShapeOf<B>>;
  return M::Executor::template map<S>(scalar::Select{}, condition, as_tile(a), as_tile(b));
}

// Floats to 16-bit floats: to nearest, ties to even. Floats to integers: as stated; out of range gives the nearest end,
// NaN gives 0. Integers to integers: wraps.
template <class To, Round kRound = Round::unstated, TileLike A>
TILE_FUNCTION auto cast(const A& a) {
  static_assert(is_element_type<To>, "octile: cast to one of f32, f16, bf16, s8, u8, s32, s64, bool.");
  constexpr bool kFloatToInteger = is_float_type<ElementOf<A>> && is_integer_type<To>;
  static_assert(!kFloatToInteger || kRound != Round::unstated,
                "octile: a cast from a float to an integer states its rounding, as in cast<s8, Round::even>(x).");
  static_assert(kFloatToInteger || kRound == Round::unstated || kRound == Round::even,
                "octile: only a cast from a float to an integer rounds in another way than to nearest.");
  if constexpr (is_tile<A> && std::is_same_v<To, ElementOf<A>>) {
    return settled(a);
  } else {
    return elementwise(scalar::Cast<To, kRound>{}, a);
  }
}

// Reductions keep the dimension, with length 1. The order is part of the language: while more than one element is left,
// the second half is added to the first, element by element. 16-bit floats are summed in f32, small integers in s32.
template <int Axis = 2, TileLike A>
TILE_FUNCTION auto sum(const A& a, Over<Axis> = {}) {
  return A::Executor::template reduce<Axis>(scalar::Add{}, a);
}
template <int Axis = 2, TileLike A>
TILE_FUNCTION auto max(const A& a, Over<Axis> = {}) {
  return A::Executor::template reduce<Axis>(scalar::Maximum{}, a);
}
template <int Axis = 2, TileLike A>
TILE_FUNCTION auto min(const A& a, Over<Axis> = {}) {
  return A::Executor::template reduce<Axis>(scalar::Minimum{}, a);
}

// Where element (p, r, c) of a rearranged tile S comes from, as an index into the original in row-major order.
struct SameOrder {
  template <class S>
  TILE_FUNCTION static constexpr int of(int p, int r, int c) {
    return (p * S::kRows + r) * S::kColumns + c;
  }
};
struct Transposed {
  template <class S>
  TILE_FUNCTION static constexpr int of(int p, int r, int c) {
    return (p * S::kColumns + c) * S::kRows + r;
  }
};

// v[..., None]: a row becomes a column.
template <TileLike A>
TILE_FUNCTION auto col(const A& a) {
  static_assert(A::Shape::kPlanes == 1, "octile: col() would make a tile of rank 4; the maximum is 3.");
  static_assert(!LazyMask<A>, "octile: take col() of the index before it is compared: col(i) < n.");
  if constexpr (AffineTile<A>) {
    return affine::column(a);
  } else if constexpr (is_tile<A>) {
    return A::Executor::template rearrange<ColumnShape<typename A::Shape>>(a, SameOrder{});
  }
}

template <class A, int P, int R, int C>
TILE_FUNCTION auto reshaped(const A& a) {
  static_assert(is_tile<A>, "octile: reshape() takes values, not an index or a mask.");
  static_assert(Shape<P, R, C>::kSize == A::Shape::kSize, "octile: reshape() keeps the number of elements.");
  return A::Executor::template rearrange<Shape<P, R, C>>(a, SameOrder{});
}
template <TileLike A, int C>
TILE_FUNCTION auto reshape(const A& a, Constant<C>) {
  return reshaped<A, 1, 1, C>(a);
}
template <TileLike A, int R, int C>
TILE_FUNCTION auto reshape(const A& a, Constant<R>, Constant<C>) {
  return reshaped<A, 1, R, C>(a);
}
template <TileLike A, int P, int R, int C>
TILE_FUNCTION auto reshape(const A& a, Constant<P>, Constant<R>, Constant<C>) {
  return reshaped<A, P, R, C>(a);
}

// Rows become columns.
template <TileLike A>
TILE_FUNCTION auto trans(const A& a) {
  static_assert(is_tile<A>, "octile: trans() takes values, not an index or a mask.");
  using S = Shape<A::Shape::kPlanes, A::Shape::kColumns, A::Shape::kRows>;
  return A::Executor::template rearrange<S>(a, Transposed{});
}

// Repeats v to the shape of `like`.
template <TileLike A, TileLike B>
TILE_FUNCTION auto broadcast(const A& a, const B&) {
  static_assert(broadcasts_to<typename A::Shape, typename B::Shape>(),
                "octile: broadcast() repeats sides of length 1 only.");
  return A::Executor::template map<typename B::Shape>(scalar::Cast<ElementOf<A>, Round::unstated>{}, a);
}

// accumulator + a @ b, plane by plane. Products of s8 are summed in s32, exactly; all floats in f32, in an order of the
// executor's own.
template <TileLike A, TileLike B, class Accumulator>
requires TileLike<std::remove_cvref_t<Accumulator>> TILE_FUNCTION auto dot(const A& a, const B& b,
                                                                           Accumulator&& accumulator) {
  using C = std::remove_cvref_t<Accumulator>;
  using SA = typename A::Shape;
  using SB = typename B::Shape;
  static_assert(SA::kColumns == SB::kRows, "octile: dot(a, b) needs as many columns of a as rows of b.");
  static_assert(SA::kPlanes == SB::kPlanes, "octile: dot(a, b) needs as many planes of a as of b.");
  static_assert(std::is_same_v<typename C::Shape, Shape<SA::kPlanes, SA::kRows, SB::kColumns>>,
                "octile: the accumulator of dot(a, b) has the rows of a and the columns of b.");
  static_assert(std::is_same_v<ElementOf<A>, ElementOf<B>>, "octile: dot(a, b) takes two tiles of one type.");
  static_assert(is_float_type<ElementOf<A>> || std::is_same_v<ElementOf<A>, s8>,
                "octile: dot() takes f32, f16, bf16 or s8.");
  static_assert(std::is_same_v<ElementOf<C>, std::conditional_t<is_float_type<ElementOf<A>>, f32, s32>>,
                "octile: dot() sums floats in f32 and s8 in s32.");
  if constexpr (std::is_same_v<ElementOf<C>, f32> == is_float_type<ElementOf<A>>) {
    return C::Executor::dot(a, b, static_cast<Accumulator&&>(accumulator));
  } else {
    return C(accumulator);  // after the error, no other
  }
}

}  // namespace octile::tile
