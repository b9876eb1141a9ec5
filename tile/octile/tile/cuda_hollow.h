// An executor whose tiles hold nothing: it runs all of a kernel except its values. The host runs kernels this way to
// learn what they need, and the warp that loads ahead to learn what to load.
#pragma once

#include "octile/tile/cuda_staged.h"
#include "octile/tile/tensor.h"

namespace octile::tile::gpu {

template <class E>
struct Hollow {
  template <class T, class S>
  struct Storage {};
  template <class I>
  using Index = I;
  using Overflow = NoOverflow;
  struct Memory {};

  template <class S, class F, class... A>
  TILE_FUNCTION static auto map(F, const A&...) {
    return Tile<E, decltype(std::declval<F>()(widen(std::declval<typename A::Type>())...)), S>{};
  }
  template <int Axis, class F, class A>
  TILE_FUNCTION static auto reduce(F, const A&) {
    return Tile<E, Common<typename A::Type, typename A::Type>, Reduced<typename A::Shape, Axis>>{};
  }
  template <class S, class A, class Source>
  TILE_FUNCTION static auto rearrange(const A&, Source) {
    return Tile<E, typename A::Type, S>{};
  }
  template <class A, class B, class C>
  TILE_FUNCTION static C dot(const A&, const B&, C sum) {
    return sum;
  }

  // The rest of a program: its places and its pipelines are the executor's own.
  struct Program {
    TILE_FUNCTION void barrier() {}
    template <class P, class M, class Other>
    TILE_FUNCTION auto load(const P&, const M&, Other, Where) {
      return Tile<E, std::remove_const_t<typename P::Element>, typename P::Shape>{};
    }
    template <class P, class V, class M>
    TILE_FUNCTION void store(const P&, const V&, const M&, Where) {}
    template <AtomicOp kOp, class P, class V, class M>
    TILE_FUNCTION void atomic(const P&, const V&, const M&, Where) {}
  };
};

// The operands of a step, as hollow tiles.
template <class E>
struct HollowFetches {
  template <class F, class Position>
  TILE_FUNCTION auto operator()(const F&, Position) const {
    using P = decltype(F::pointers);
    return Tile<E, std::remove_const_t<typename P::Element>, typename P::Shape>{};
  }
};

}  // namespace octile::tile::gpu
