// The operators of the language. Tiles broadcast; a number counts as a tile of one element.
#pragma once

#include "octile/tile/mask.h"

namespace octile::tile {

template <class A, class B>
concept Operands = (TileLike<A> && (TileLike<B> || Number<B>)) || (Number<A> && TileLike<B>);

template <TileLike A>
TILE_FUNCTION const A& as_tile(const A& a) {
  return a;
}
template <Number A>
TILE_FUNCTION auto as_tile(const A& a) {
  return operand(a);
}
template <class A>
using ShapeOf = typename std::remove_cvref_t<decltype(as_tile(std::declval<const A&>()))>::Shape;

template <class F, TileLike A>
TILE_FUNCTION auto elementwise(F f, const A& a) {
  return A::Executor::template map<typename A::Shape>(f, a);
}
template <class F, class A, class B>
requires Operands<A, B> TILE_FUNCTION auto elementwise(F f, const A& a, const B& b) {
  using Executor = typename std::conditional_t<TileLike<A>, A, B>::Executor;
  return Executor::template map<Broadcast<ShapeOf<A>, ShapeOf<B>>>(f, as_tile(a), as_tile(b));
}

// Numbers are taken by value: a constant of the host, by reference, would be undefined on a GPU.
#define TILE_BINARY(op, Name)                              \
  template <TileLike A, TileLike B>                        \
  TILE_FUNCTION auto operator op(const A& a, const B& b) { \
    return apply(scalar::Name{}, a, b);                    \
  }                                                        \
  template <TileLike A, Number B>                          \
  TILE_FUNCTION auto operator op(const A& a, B b) {        \
    return apply(scalar::Name{}, a, b);                    \
  }                                                        \
  template <Number A, TileLike B>                          \
  TILE_FUNCTION auto operator op(A a, const B& b) {        \
    return apply(scalar::Name{}, a, b);                    \
  }

template <class F, class A, class B>
TILE_FUNCTION auto apply(F f, const A& a, const B& b) {
  return elementwise(f, a, b);
}

// Index tiles stay index tiles under +, - and * with numbers, and + and - among themselves.
template <class A, class B>
TILE_FUNCTION auto apply(scalar::Add f, const A& a, const B& b) {
  if constexpr (AffineTile<A> && (AffineTile<B> || IntegerNumber<B>)) {
    return affine::sum<1>(a, b);
  } else if constexpr (IntegerNumber<A> && AffineTile<B>) {
    return affine::sum<1>(b, a);
  } else {
    return elementwise(f, a, b);
  }
}
template <class A, class B>
TILE_FUNCTION auto apply(scalar::Subtract f, const A& a, const B& b) {
  if constexpr (AffineTile<A> && (AffineTile<B> || IntegerNumber<B>)) {
    return affine::sum<-1>(a, b);
  } else if constexpr (IntegerNumber<A> && AffineTile<B>) {
    return affine::sum<1>(affine::product(b, -1), a);
  } else {
    return elementwise(f, a, b);
  }
}
template <class A, class B>
TILE_FUNCTION auto apply(scalar::Multiply f, const A& a, const B& b) {
  if constexpr (AffineTile<A> && IntegerNumber<B>) {
    return affine::product(a, b);
  } else if constexpr (IntegerNumber<A> && AffineTile<B>) {
    return affine::product(b, a);
  } else {
    return elementwise(f, a, b);
  }
}

template <Compare kCompare, AffineTile A, IntegerNumber N>
TILE_FUNCTION auto bound(const A& a, const N& n) {
  using Wide = Affine<typename A::Executor, CommonIndex<typename A::Type, typename IndexTypeOf<N>::Type>,
                      typename A::Shape, A::kUnit>;
  Bound<Wide, kCompare> result{affine_as<Wide>(a), {}};
  result.n = stored_number(result.a, n);
  return result;
}

template <Compare kCompare, Compare kMirrored, class F, class A, class B>
TILE_FUNCTION auto compare(F f, const A& a, const B& b) {
  static_assert((!Mask<A> && !Mask<B>) || kCompare == Compare::equal || kCompare == Compare::not_equal,
                "octile: a mask is compared with something; 0 <= i < n is written (i >= 0) & (i < n).");
  if constexpr (AffineTile<A> && IntegerNumber<B>) {
    return bound<kCompare>(a, b);
  } else if constexpr (IntegerNumber<A> && AffineTile<B>) {
    return bound<kMirrored>(b, a);
  } else if constexpr (AffineTile<A> && AffineTile<B>) {
    return bound<kCompare>(affine::sum<-1>(a, b), 0);
  } else {
    return elementwise(f, a, b);
  }
}

#define TILE_COMPARE(Name, kind, mirrored)                           \
  template <class A, class B>                                        \
  TILE_FUNCTION auto apply(scalar::Name f, const A& a, const B& b) { \
    return compare<Compare::kind, Compare::mirrored>(f, a, b);       \
  }
TILE_COMPARE(Less, less, greater)
TILE_COMPARE(LessEqual, less_equal, greater_equal)
TILE_COMPARE(Greater, greater, less)
TILE_COMPARE(GreaterEqual, greater_equal, less_equal)
TILE_COMPARE(Equal, equal, equal)
TILE_COMPARE(NotEqual, not_equal, not_equal)
#undef TILE_COMPARE

template <class A, class B>
TILE_FUNCTION auto apply(scalar::And f, const A& a, const B& b) {
  if constexpr (LazyMask<A> && LazyMask<B>) {
    return BothMasks<A, B>{a, b};
  } else {
    return elementwise(f, a, b);
  }
}
template <class A, class B>
TILE_FUNCTION auto apply(scalar::Or f, const A& a, const B& b) {
  if constexpr (LazyMask<A> && LazyMask<B>) {
    return EitherMask<A, B>{a, b};
  } else {
    return elementwise(f, a, b);
  }
}

TILE_BINARY(+, Add)
TILE_BINARY(-, Subtract)
TILE_BINARY(*, Multiply)
TILE_BINARY(/, Divide)
TILE_BINARY(%, Remainder)
TILE_BINARY(&, And)
TILE_BINARY(|, Or)
TILE_BINARY(^, Xor)
TILE_BINARY(<<, ShiftLeft)
TILE_BINARY(>>, ShiftRight)
TILE_BINARY(<, Less)
TILE_BINARY(<=, LessEqual)
TILE_BINARY(>, Greater)
TILE_BINARY(>=, GreaterEqual)
TILE_BINARY(==, Equal)
TILE_BINARY(!=, NotEqual)
#undef TILE_BINARY

template <TileLike A>
TILE_FUNCTION auto operator-(const A& a) {
  if constexpr (AffineTile<A>) {
    return affine::product(a, -1);
  } else {
    return elementwise(scalar::Negate{}, a);
  }
}
template <TileLike A>
TILE_FUNCTION auto operator~(const A& a) {
  if constexpr (LazyMask<A>) {
    return NotMask<A>{a};
  } else {
    return elementwise(scalar::Not{}, a);
  }
}
template <TileLike A>
TILE_FUNCTION auto operator!(const A& a) {
  static_assert(Mask<A>, "octile: ! takes a mask; ~ flips the bits of integers.");
  return ~a;
}

#define TILE_ASSIGN(op)                                                                            \
  template <TileLike A, class B>                                                                   \
  TILE_FUNCTION A& operator op##=(A& a, const B& b) {                                              \
    static_assert(same_values<decltype(a op b), A>,                                                \
                  "octile: " #op "= would change the type or the shape of the tile on its left."); \
    if constexpr (same_values<decltype(a op b), A>) a = a op b;                                    \
    return a;                                                                                      \
  }
TILE_ASSIGN(+)
TILE_ASSIGN(-)
TILE_ASSIGN(*)
TILE_ASSIGN(/)
#undef TILE_ASSIGN

}  // namespace octile::tile
