// How much shared memory a kernel needs. Shapes are types, so compilation determines it: this executor computes
// nothing; each operation instantiated for it records its bytes before main() begins. `Key` is a launch.
#pragma once

#include "octile/tile/cuda_dot.h"
#include "octile/tile/cuda_pipeline.h"
#include "octile/tile/cuda_reduce.h"
#include "octile/tile/tensor.h"

namespace octile::tile::gpu {

template <class Key>
struct Noted {
  static inline int scratch = 0;   // shared by all operations, one at a time
  static inline int pipeline = 0;  // after it: a part per pipeline, since pipelines nest
};
template <class Key, int kScratch>
struct NoteScratch {
  static bool note() {
    int& scratch = Noted<Key>::scratch;
    scratch = larger(scratch, (kScratch + 127) / 128 * 128);
    return true;
  }
  static inline bool noted = note();
};
template <class Key, int kBytes, class Stage, class Body>
struct NotePipeline {
  static bool note() {
    Noted<Key>::pipeline += kBytes;
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

  template <class Note>
  TILE_FUNCTION static void note() {
#if !defined(__CUDA_ARCH__)
    if (!Note::noted) __builtin_trap();
#endif
  }
  template <int kScratch>
  TILE_FUNCTION static void takes() {
    note<NoteScratch<Key, kScratch>>();
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
      note<NotePipeline<Key, pipeline_bytes<Stages, Stage>, Stage, Body>>();
      int offset = 0;
      stage(0).each(StagedFetches<Needs>{&offset}, body, 0);
    }
  };
};

}  // namespace octile::tile::gpu
