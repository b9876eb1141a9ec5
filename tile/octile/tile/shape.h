// Shapes, known to the compiler. A tile is always planes x rows x columns; leading dimensions that are not written
// are 1.
#pragma once

#include "octile/tile/platform.h"

namespace octile::tile {

// An integer that is part of the type: a block size passed to a kernel is c<32>.
template <int N>
struct Constant {
  static constexpr int value = N;
  TILE_FUNCTION constexpr operator int() const { return N; }
};

template <int N>
inline constexpr Constant<N> c{};

template <int A, int B>
TILE_FUNCTION constexpr Constant<A * B> operator*(Constant<A>, Constant<B>) {
  return {};
}
template <int A, int B>
TILE_FUNCTION constexpr Constant<A / B> operator/(Constant<A>, Constant<B>) {
  return {};
}
template <int A, int B>
TILE_FUNCTION constexpr Constant<A + B> operator+(Constant<A>, Constant<B>) {
  return {};
}
template <int A, int B>
TILE_FUNCTION constexpr Constant<A - B> operator-(Constant<A>, Constant<B>) {
  return {};
}

// The quotient, rounded up.
TILE_FUNCTION constexpr int cdiv(int a, int b) { return a / b + (a % b != 0 && (a < 0) == (b < 0) ? 1 : 0); }

TILE_FUNCTION constexpr bool power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

inline constexpr long long kMaxElements = 1 << 20;

template <int Planes, int Rows, int Columns>
struct Shape {
  static_assert(power_of_two(Planes) && power_of_two(Rows) && power_of_two(Columns),
                "octile: every side of a tile is a power of two.");
  // As in Triton. A block of a GPU has registers for 2^16.
  static_assert(1LL * Planes * Rows <= kMaxElements && 1LL * Planes * Rows * Columns <= kMaxElements,
                "octile: a tile has at most 2^20 elements; take it block by block.");
  static constexpr int kPlanes = Planes, kRows = Rows, kColumns = Columns, kSize = Planes * Rows * Columns;
};

using Single = Shape<1, 1, 1>;

template <class A, class B>
TILE_FUNCTION constexpr bool broadcasts_to() {
  return (A::kPlanes == 1 || A::kPlanes == B::kPlanes) && (A::kRows == 1 || A::kRows == B::kRows) &&
         (A::kColumns == 1 || A::kColumns == B::kColumns);
}

TILE_FUNCTION constexpr int larger(int a, int b) { return a > b ? a : b; }

template <class A, class B>
struct BroadcastShape {
  static_assert(A::kColumns == B::kColumns || A::kColumns == 1 || B::kColumns == 1,
                "octile: the two tiles have different numbers of columns, and neither has 1; col(v) is v[:, None].");
  static_assert(A::kRows == B::kRows || A::kRows == 1 || B::kRows == 1,
                "octile: the two tiles have different numbers of rows, and neither has 1.");
  static_assert(A::kPlanes == B::kPlanes || A::kPlanes == 1 || B::kPlanes == 1,
                "octile: the two tiles have different numbers of planes, and neither has 1.");
  using Type = Shape<larger(A::kPlanes, B::kPlanes), larger(A::kRows, B::kRows), larger(A::kColumns, B::kColumns)>;
};
template <class A, class B>
using Broadcast = typename BroadcastShape<A, B>::Type;

// v[..., None]: every dimension moves one to the left.
template <class S>
using ColumnShape = Shape<S::kRows, S::kColumns, 1>;

// The dimension that a reduction runs over. It stays, with length 1.
template <int Axis>
struct Over {};
inline constexpr Over<2> kColumns{};  // one result per row, the default
inline constexpr Over<1> kRows{};     // one result per column
inline constexpr Over<0> kPlanes{};

template <class S, int Axis>
using Reduced = Shape<Axis == 0 ? 1 : S::kPlanes, Axis == 1 ? 1 : S::kRows, Axis == 2 ? 1 : S::kColumns>;

}  // namespace octile::tile
