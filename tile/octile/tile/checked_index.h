// Index arithmetic that detects when it exceeds 32 bits, as it would on a GPU.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "octile/tile/affine.h"
#include "octile/tile/scalar.h"

namespace octile::tile {

// Lanes of a tile; a side of length 1 applies to every index.
struct LaneSet {
  int planes = 1, rows = 1, columns = 1;
  std::vector<bool> lanes = {true};

  bool has(int p, int r, int c) const {
    return lanes[static_cast<std::size_t>(((planes == 1 ? 0 : p) * rows + (rows == 1 ? 0 : r)) * columns +
                                          (columns == 1 ? 0 : c))];
  }
  auto operator<=>(const LaneSet&) const = default;
};

// The lanes whose arithmetic left 32 bits. Usually none, so an index carries only a pointer; the sets live as long as
// the thread's launch.
struct CheckedOverflow {
  const LaneSet* lanes = nullptr;
  bool division = false;  // by 0, that is what happened

  bool happened() const { return lanes != nullptr; }
  bool by_zero() const { return division; }
  bool at(int p, int r, int c) const { return lanes != nullptr && lanes->has(p, r, c); }
  void merge(CheckedOverflow other) {
    if (lanes == nullptr || other.lanes == nullptr || lanes == other.lanes) {
      if (lanes == nullptr) *this = other;
    } else {
      lanes = either(*lanes, *other.lanes);
    }
  }
  template <class A>
  void check(const A& affine) {
    if constexpr (std::is_same_v<typename A::Type, s32>) {
      if (affine.lowest() >= INT32_MIN && affine.highest() <= INT32_MAX) return;
      using S = typename A::Shape;
      // Named, because nvcc 13.0 loses half of a line with nested braces.
      const std::array<int, 3> sides{S::kPlanes, S::kRows, S::kColumns};
      const std::array<s64, 4> index{affine.base, affine.plane, affine.row, affine.column};
      CheckedOverflow here;
      here.lanes = outside(sides, index);
      merge(here);
    }
  }
  void to_column() {
    if (lanes != nullptr) lanes = as_column(*lanes);
  }
  static CheckedOverflow everywhere(bool division = false) {
    return {outside({1, 1, 1}, {s64{1} << 32, 0, 0, 0}), division};
  }
  static void forget();  // every set

 private:
  static const LaneSet* either(const LaneSet& a, const LaneSet& b);
  static const LaneSet* as_column(const LaneSet& a);  // for col()
  // Where base + p * plane + r * row + c * column is no s32.
  static const LaneSet* outside(std::array<int, 3> sides, std::array<s64, 4> index);
};

// What program_id() gives: an integer.
struct CheckedIndex {
  s64 value = 0;
  CheckedOverflow program_index_overflow{};

  operator int() const { return static_cast<int>(value); }

  // As of an int, which it is on the other executors.
  template <IntegerNumber N>
  requires(!ProgramIndex<N>) CheckedIndex& operator=(N n) { return *this = of(n); }
#define TILE_INDEX_ASSIGN(op, Name)                        \
  template <IntegerNumber N>                               \
  CheckedIndex& operator op(N n) {                         \
    return *this = combined(scalar::Name{}, *this, of(n)); \
  }
  TILE_INDEX_ASSIGN(+=, Add)
  TILE_INDEX_ASSIGN(-=, Subtract)
  TILE_INDEX_ASSIGN(*=, Multiply)
  TILE_INDEX_ASSIGN(/=, Divide)
  TILE_INDEX_ASSIGN(%=, Remainder)
#undef TILE_INDEX_ASSIGN
  CheckedIndex& operator++() { return *this += 1; }
  CheckedIndex& operator--() { return *this -= 1; }
  CheckedIndex operator++(int) {
    const CheckedIndex old = *this;
    ++*this;
    return old;
  }
  CheckedIndex operator--(int) {
    const CheckedIndex old = *this;
    --*this;
    return old;
  }
  CheckedIndex operator+() const { return *this; }
  CheckedIndex operator-() const { return combined(scalar::Subtract{}, of(0), *this); }

  template <class F>
  static CheckedIndex combined(F f, CheckedIndex a, CheckedIndex b) {
    CheckedIndex result{f(a.value, b.value), a.program_index_overflow};
    result.program_index_overflow.merge(b.program_index_overflow);
    if (result.value < INT32_MIN || result.value > INT32_MAX) {
      result.program_index_overflow = CheckedOverflow::everywhere();
    }
    if constexpr (requires { F::undefined(a.value, b.value); }) {
      if (F::undefined(a.value, b.value)) result.program_index_overflow.merge(CheckedOverflow::everywhere(true));
    }
    return result;
  }
  template <IntegerNumber N>
  static CheckedIndex of(N n) {
    if constexpr (ProgramIndex<N>) {
      return n;
    } else {
      return {static_cast<s64>(number(n)), {}};
    }
  }
};

// As an operand of map.
struct CheckedScalar {
  using Type = s32;
  using Shape = Single;
  s32 value;
  CheckedOverflow overflow;
};
inline CheckedScalar operand(CheckedIndex a) { return {static_cast<s32>(a.value), a.program_index_overflow}; }

template <class A>
inline constexpr bool is_narrow = ProgramIndex<A> || is_constant<A> || sizeof(A) <= 4;
template <class A>
concept NarrowInteger = IntegerNumber<A> && is_narrow<A>;

#define TILE_INDEX_OPERATOR(op, Name)                                                                               \
  template <NarrowInteger A, NarrowInteger B>                                                                       \
  requires(std::is_same_v<A, CheckedIndex> || std::is_same_v<B, CheckedIndex>) CheckedIndex operator op(A a, B b) { \
    return CheckedIndex::combined(scalar::Name{}, CheckedIndex::of(a), CheckedIndex::of(b));                        \
  }
TILE_INDEX_OPERATOR(+, Add)
TILE_INDEX_OPERATOR(-, Subtract)
TILE_INDEX_OPERATOR(*, Multiply)
TILE_INDEX_OPERATOR(/, Divide)
TILE_INDEX_OPERATOR(%, Remainder)
#undef TILE_INDEX_OPERATOR

}  // namespace octile::tile
