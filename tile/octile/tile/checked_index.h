// Index arithmetic that notices when it leaves 32 bits, as it would on a GPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "octile/tile/affine.h"
#include "octile/tile/scalar.h"

namespace octile::tile {

struct CheckedOverflow {
  bool happened = false;

  void merge(CheckedOverflow other) { happened = happened || other.happened; }
  template <class A>
  void check(const A& affine) {
    if constexpr (std::is_same_v<typename A::Type, s32>) {
      happened = happened || affine.lowest() < INT32_MIN || affine.highest() > INT32_MAX;
    }
  }
};

// What program_id() gives: an integer.
struct CheckedIndex {
  s64 value = 0;
  CheckedOverflow program_index_overflow{};

  operator int() const { return static_cast<int>(value); }

  template <class F>
  static CheckedIndex combined(F f, CheckedIndex a, CheckedIndex b) {
    CheckedIndex result{f(a.value, b.value), a.program_index_overflow};
    result.program_index_overflow.merge(b.program_index_overflow);
    if (result.value < INT32_MIN || result.value > INT32_MAX) result.program_index_overflow.happened = true;
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
