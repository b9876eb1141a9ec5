// Tensors as a kernel sees them. A pointer refers to its tensor; pointer + index tile is a tile of pointers.
#pragma once

#include "octile/tile/functions.h"

namespace octile::tile {

template <class E, class T>
struct Pointer {
  using Executor = E;
  using Element = T;  // const for a tensor that is only read
  T* data = nullptr;
  typename E::Memory memory{};  // the executor's data about the tensor
};

// Index: an Affine or a Tile of s32 or s64. Offsets are added to a pointer in 64 bits, each within its own type.
template <class E, class T, class Index>
struct Pointers {
  using Executor = E;
  using Element = T;
  using Shape = typename Index::Shape;
  Pointer<E, T> tensor;
  Index index;
};

template <class E>
using SingleIndex = Affine<E, s64, Single, false>;

template <class A>
inline constexpr bool is_index_tile = TileLike<A> && !Mask<A>;
template <class A>
concept Offset = IntegerNumber<A> || is_index_tile<A>;

template <class E, class T, class Index>
TILE_FUNCTION auto pointers(const Pointer<E, T>& tensor, const Index& index) {
  if constexpr (AffineTile<Index>) {
    using Wide = Affine<E, s64, typename Index::Shape, Index::kUnit>;
    return Pointers<E, T, Wide>{tensor, affine_as<Wide>(index)};
  } else {
    static_assert(is_integer_type<typename Index::Type>, "octile: an index is an integer.");
    if constexpr (is_integer_type<typename Index::Type>) {
      return Pointers<E, T, typename ValuesOf<Index>::Type>{tensor, settled(index)};
    } else {
      return Pointers<E, T, Affine<E, s64, typename Index::Shape, false>>{tensor, {}};  // after the error, no other
    }
  }
}

template <class E, class T, Offset A>
TILE_FUNCTION auto operator+(const Pointer<E, T>& tensor, const A& offset) {
  if constexpr (TileLike<A>) {
    return pointers(tensor, offset);
  } else {
    return pointers(tensor, affine::sum<1>(SingleIndex<E>{}, offset));
  }
}
// The index of pointers as another offset is added to it: in 64 bits. A stored index keeps its type until then.
template <class Index>
TILE_FUNCTION decltype(auto) wide_index(const Index& index) {
  if constexpr (is_tile<Index>) {
    return cast<s64>(index);
  } else {
    return (index);
  }
}
template <class E, class T, class Index, Offset A>
TILE_FUNCTION auto operator+(const Pointers<E, T, Index>& p, const A& offset) {
  return pointers(p.tensor, wide_index(p.index) + offset);
}
template <class E, class T, class Index, Offset A>
TILE_FUNCTION auto operator-(const Pointers<E, T, Index>& p, const A& offset) {
  return pointers(p.tensor, wide_index(p.index) - offset);
}
template <class E, class T, class Index, Offset A>
TILE_FUNCTION auto& operator+=(Pointers<E, T, Index>& p, const A& offset) {
  using Sum = decltype(p + offset);
  static_assert(std::is_same_v<typename Sum::Shape, typename Index::Shape>,
                "octile: += would change the shape of the pointers on its left.");
  static_assert(
      std::is_same_v<Sum, Pointers<E, T, Index>> || !std::is_same_v<typename Sum::Shape, typename Index::Shape>,
      "octile: += would change the type of the pointers on its left; x + cast<s64>(index) starts wide ones.");
  if constexpr (std::is_same_v<Sum, Pointers<E, T, Index>>) p = p + offset;
  return p;
}

}  // namespace octile::tile
