// How much shared memory a kernel takes. Shapes are types, so compiling the kernel tells: this executor computes
// nothing, and each operation that is compiled for it notes its bytes before main() begins. `Key` is a launch.
#pragma once

#include "octile/tile/cuda_dot.h"
#include "octile/tile/cuda_pipeline.h"
#include "octile/tile/cuda_reduce.h"
#include "octile/tile/tensor.h"

namespace octile::tile::gpu {

template <class Key>
struct Noted {
  static inline int scratch = 0;   // one operation after the other uses this
  static inline int pipeline = 0;  // and this lies behind it
};
template <class Key, int kScratch, int kPipeline>
struct Note {
  static bool note() {
    int& scratch = Noted<Key>::scratch;
    int& pipeline = Noted<Key>::pipeline;
    scratch = larger(scratch, (kScratch + 127) / 128 * 128);
    pipeline = larger(pipeline, kPipeline);
    return true;
  }
  static inline bool noted = note();
};

template <class L, class Key>
struct Needs {
  template <class T, class S>
  struct Storage {};
  template <class I>
  using Index = I;
  using Overflow = NoOverflow;
  struct Memory {};

  template <int kScratch, int kPipeline = 0>
  TILE_FUNCTION static void takes() {
#if !defined(__CUDA_ARCH__)
    if (!Note<Key, kScratch, kPipeline>::noted) __builtin_trap();
#endif
  }

  template <class S, class F, class... A>
  TILE_FUNCTION static auto map(F, const A&...) {
    using T = decltype(std::declval<F>()(widen(std::declval<typename A::Type>())...));
    return Tile<Needs, T, S>{};
  }
  template <int Axis, class F, class A>
  TILE_FUNCTION static auto reduce(F, const A&) {
    using S = typename A::Shape;
    using T = Common<typename A::Type, typename A::Type>;
    takes<reduce_bytes<L, Axis, S, T>()>();
    return Tile<Needs, T, Reduced<S, Axis>>{};
  }
  template <class S, class A, class Source>
  TILE_FUNCTION static auto rearrange(const A&, Source) {
    takes<S::kSize* static_cast<int>(sizeof(typename A::Type))>();
    return Tile<Needs, typename A::Type, S>{};
  }
  template <class A, class B, class C>
  TILE_FUNCTION static C dot(const A&, const B&, C sum) {
    takes<operand_bytes<A>() + operand_bytes<B>()>();
    return sum;
  }
  template <class T>
  static Pointer<Needs, T> pointer(const Tensor<T>&) {
    return {};
  }

  struct Program {
    TILE_FUNCTION int id(int) const { return 0; }
    TILE_FUNCTION int count(int) const { return 1; }
    TILE_FUNCTION void barrier() {}
    template <class P, class M, class Other>
    TILE_FUNCTION auto load(const P&, const M&, Other, Where) {
      return Tile<Needs, std::remove_const_t<typename P::Element>, typename P::Shape>{};
    }
    template <class P, class V, class M>
    TILE_FUNCTION void store(const P&, const V&, const M&, Where) {}
    template <AtomicOp kOp, class P, class V, class M>
    TILE_FUNCTION void atomic(const P&, const V&, const M&, Where) {}
    template <class Context, int Stages, class Stage, class Body>
    TILE_FUNCTION void pipeline(Context&, Constant<Stages>, int, Stage& stage, Body& body) {
      takes<0, stages_of<Stages>() * fetched_bytes<decltype(stage(0))>>();
      int offset = 0;
      stage(0).each(StagedFetches<Needs>{&offset}, body, 0);
    }
  };
};

}  // namespace octile::tile::gpu
