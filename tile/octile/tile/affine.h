// Index tiles. arange and everything made of it by + - * with numbers is base + a * plane + b * row + c * column, so
// four numbers are kept and no element is stored. Anything else (%, /, >>, a loaded index) becomes a stored tile of
// integers.
#pragma once

#include "octile/tile/value.h"

namespace octile::tile {

// For executors that do not detect overflow.
struct NoOverflow {
  TILE_FUNCTION void merge(NoOverflow) {}
  template <class A>
  TILE_FUNCTION void check(const A&) {}
  TILE_FUNCTION void to_column() {}
};

// Unit: the column stride is 1, known to the compiler. The stride of a dimension of length 1 is 0.
template <class E, class I, class S, bool Unit>
struct Affine {
  using Executor = E;
  using Type = I;  // s32 or s64
  using Shape = S;
  using Stored = typename E::template Index<I>;
  static constexpr bool kUnit = Unit;
  static_assert(S::kSize > 0);  // looks at the shape

  Stored base{}, plane{}, row{}, column{};
  typename E::Overflow
      overflow{};  // often empty, but not [[no_unique_address]]: nvcc 13.0 then loses the members that follow

  TILE_KEEPS_ITS_TYPE(Affine)

  TILE_FUNCTION Stored at(int p, int r, int c) const { return row_start(p, r) + along(c); }
  TILE_FUNCTION Stored row_start(int p, int r) const {
    Stored sum = base;
    if constexpr (S::kPlanes > 1) sum += plane * static_cast<Stored>(p);
    if constexpr (S::kRows > 1) sum += row * static_cast<Stored>(r);
    return sum;
  }
  TILE_FUNCTION Stored along(int c) const {
    if constexpr (S::kColumns == 1) return 0;
    if constexpr (Unit) return static_cast<Stored>(c);
    return column * static_cast<Stored>(c);
  }

  TILE_FUNCTION Stored lowest() const { return base + end<false>(); }
  TILE_FUNCTION Stored highest() const { return base + end<true>(); }
  template <bool kHigh>
  TILE_FUNCTION Stored end() const {
    const Stored ends[] = {plane * (S::kPlanes - 1), row * (S::kRows - 1), column * (S::kColumns - 1)};
    Stored sum = 0;
    for (const Stored step : ends) sum += (step > 0) == kHigh ? step : 0;
    return sum;
  }
};

template <class A>
inline constexpr bool is_affine = false;
template <class E, class I, class S, bool Unit>
inline constexpr bool is_affine<Affine<E, I, S, Unit>> = true;
template <class A>
concept AffineTile = is_affine<A>;

// The index type of a result: 64 bits as soon as one side has them.
template <class A, class B>
using CommonIndex = std::conditional_t<std::is_same_v<A, s64> || std::is_same_v<B, s64>, s64, s32>;
template <class A>
struct IndexTypeOf {
  using Type = decltype(number(A{}));
};
template <TileLike A>
struct IndexTypeOf<A> {
  using Type = typename A::Type;
};

template <class To, AffineTile A>
TILE_FUNCTION To affine_as(const A& a) {
  using Stored = typename To::Stored;
  To result{};
  result.base = static_cast<Stored>(a.base);
  result.plane = static_cast<Stored>(a.plane);
  result.row = static_cast<Stored>(a.row);
  result.column = static_cast<Stored>(a.column);
  result.overflow = a.overflow;
  return result;
}

template <class Result, IntegerNumber N>
TILE_FUNCTION auto stored_number(Result& result, const N& n) {
  if constexpr (ProgramIndex<N>) result.overflow.merge(n.program_index_overflow);
  if constexpr (ProgramIndex<N>) {
    return static_cast<typename Result::Stored>(n.value);
  } else {
    return static_cast<typename Result::Stored>(number(n));
  }
}

namespace affine {

template <int Sign, AffineTile A, AffineTile B>
TILE_FUNCTION auto sum(const A& a, const B& b) {
  using S = Broadcast<typename A::Shape, typename B::Shape>;
  constexpr bool kUnit = (A::kUnit && B::Shape::kColumns == 1) || (Sign > 0 && B::kUnit && A::Shape::kColumns == 1);
  using Result = Affine<typename A::Executor, CommonIndex<typename A::Type, typename B::Type>, S, kUnit>;
  Result result = affine_as<Result>(a);
  const Result other = affine_as<Result>(b);
  constexpr typename Result::Stored kSign = Sign;
  result.base += kSign * other.base;
  result.plane += kSign * other.plane;
  result.row += kSign * other.row;
  result.column += kSign * other.column;
  result.overflow.merge(other.overflow);
  result.overflow.check(result);
  return result;
}

template <int Sign, AffineTile A, IntegerNumber N>
TILE_FUNCTION auto sum(const A& a, const N& n) {
  using Result = Affine<typename A::Executor, CommonIndex<typename A::Type, typename IndexTypeOf<N>::Type>,
                        typename A::Shape, A::kUnit>;
  Result result = affine_as<Result>(a);
  constexpr typename Result::Stored kSign = Sign;
  result.base += kSign * stored_number(result, n);
  result.overflow.check(result);
  return result;
}

template <AffineTile A, IntegerNumber N>
TILE_FUNCTION auto product(const A& a, const N& n) {
  using Result = Affine<typename A::Executor, CommonIndex<typename A::Type, typename IndexTypeOf<N>::Type>,
                        typename A::Shape, false>;
  Result result = affine_as<Result>(a);
  const auto factor = stored_number(result, n);
  result.base *= factor;
  result.plane *= factor;
  result.row *= factor;
  result.column *= factor;
  result.overflow.check(result);
  return result;
}

// v[..., None]
template <AffineTile A>
TILE_FUNCTION auto column(const A& a) {
  using Result = Affine<typename A::Executor, typename A::Type, ColumnShape<typename A::Shape>, false>;
  Result result = affine_as<Result>(a);
  result.plane = result.row;
  result.row = result.column;
  result.column = 0;
  result.overflow.to_column();
  return result;
}

}  // namespace affine
}  // namespace octile::tile
