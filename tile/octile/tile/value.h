// What a kernel computes with: tiles that hold values, and plain numbers beside them.
//
// An executor E (checked CPU, fast CPU, CUDA) provides, as static members,
//   Storage<T, S>              how a tile is held: on a CPU an array, on a GPU one thread's part of it
//   Index<I>, Overflow         how an index of type I is held, and what detects its overflow
//   map<S>(f, operands...)     elementwise, operands broadcast to the shape S
//   reduce<Axis>(Op, v)        keeps the dimension, with length 1; order as in functions.h
//   rearrange<S>(v, Source)    element (p, r, c) of the result is v's element Source::of<..>(p, r, c)
//   dot(a, b, accumulator)
//   Program                    one program of the grid: id, count, load, store, atomic, barrier, pipeline
#pragma once

#include "octile/tile/shape.h"
#include "octile/tile/types.h"

namespace octile::tile {

// Tiles, index tiles and masks.
template <class A>
concept TileLike = requires {
  typename A::Executor;
  typename A::Type;
  typename A::Shape;
};

#define TILE_KEEPS_ITS_TYPE(Self)                                                                      \
  template <TileLike Other>                                                                            \
  requires(!same_values<Other, Self>) TILE_FUNCTION Self& operator=(const Other&) {                    \
    static_assert(same_values<Other, Self>,                                                            \
                  "octile: a variable keeps its type and its shape, and what is assigned has others; " \
                  "t.full(b, c<1>, v) starts a column.");                                              \
    return *this;                                                                                      \
  }

template <class E, class T, class S>
struct Running;

// Tiles that one variable may hold: equal types, except for whether they are running.
template <class A>
struct ValuesOf {
  using Type = A;
};
template <class A, class B>
inline constexpr bool same_values = std::is_same_v<typename ValuesOf<A>::Type, typename ValuesOf<B>::Type>;

template <class E, class T, class S>
struct Tile : E::template Storage<T, S> {
  using Executor = E;
  using Type = T;
  using Shape = S;
  TILE_KEEPS_ITS_TYPE(Tile)
  TILE_FUNCTION Tile& operator=(const Running<E, T, S>& other) { return *this = settled(other); }
};

// A sum of products that tensor cores may still be working on. Reading it waits for them, and so does copying it; a
// product added to it, and assigning the result of one, do not. t.full() starts one where an executor says so.
template <class E, class T, class S>
inline constexpr bool may_run = false;

template <class E, class T, class S>
struct Running {
  using Executor = E;
  using Type = T;
  using Shape = S;

  mutable Tile<E, T, S> tile;  // waiting tells the compiler that the values change

  TILE_FUNCTION explicit Running(const Tile<E, T, S>& values) : tile(values) {}
  TILE_FUNCTION Running(const Running& other) : tile(settled(other)) {}
  TILE_FUNCTION Running(Running&& other) noexcept : tile(other.tile) {}
  TILE_FUNCTION Running& operator=(const Running& other) { return *this = settled(other); }
  TILE_FUNCTION Running& operator=(Running&& other) noexcept {
    tile = other.tile;
    return *this;
  }
  TILE_FUNCTION Running& operator=(const Tile<E, T, S>& values) {
    settled(*this);  // or products that are under way would overwrite the values
    tile = values;
    return *this;
  }
  TILE_KEEPS_ITS_TYPE(Running)
};
template <class E, class T, class S>
struct ValuesOf<Running<E, T, S>> {
  using Type = Tile<E, T, S>;
};

// The values of an operand, once they are there.
template <class A>
TILE_FUNCTION const A& settled(const A& a) {
  return a;
}
template <class E, class T, class S>
TILE_FUNCTION const Tile<E, T, S>& settled(const Running<E, T, S>& running) {
  E::settle(running.tile);
  return running.tile;
}

template <class A>
inline constexpr bool is_tile = false;
template <class E, class T, class S>
inline constexpr bool is_tile<Tile<E, T, S>> = true;
template <class E, class T, class S>
inline constexpr bool is_tile<Running<E, T, S>> = true;

// A number beside a tile: a C++ number, a c<N>, or the executor's program index.
template <class A>
inline constexpr bool is_constant = false;
template <int N>
inline constexpr bool is_constant<Constant<N>> = true;
template <class A>
concept ProgramIndex = requires(A a) {
  a.program_index_overflow;
};
template <class A>
concept IntegerNumber = (std::is_integral_v<A> && !std::is_same_v<A, bool>) || is_constant<A> || ProgramIndex<A>;
template <class A>
concept Number = std::is_arithmetic_v<A> || IntegerNumber<A> || std::is_same_v<A, f16> || std::is_same_v<A, bf16>;

// The element type that a number counts as: f32 for any float, s64 for 64-bit and unsigned 32-bit integers, else s32.
template <Number A>
TILE_FUNCTION constexpr auto number(A a) {
  if constexpr (std::is_same_v<A, bool>) {
    return a;
  } else if constexpr (std::is_floating_point_v<A>) {
    return static_cast<f32>(a);
  } else if constexpr (std::is_integral_v<A>) {
    constexpr bool kWide = sizeof(A) == 8 || (sizeof(A) == 4 && std::is_unsigned_v<A>);
    return static_cast<std::conditional_t<kWide, s64, s32>>(a);
  } else if constexpr (IntegerNumber<A>) {
    return static_cast<s32>(a);
  } else {
    return widen(a);
  }
}

// A number as an operand of map.
template <class T>
struct Scalar {
  using Type = T;
  using Shape = Single;
  T value;
};

template <Number A>
TILE_FUNCTION auto operand(A a) {
  return Scalar<decltype(number(a))>{number(a)};
}

}  // namespace octile::tile
