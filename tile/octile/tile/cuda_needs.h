// How much shared memory a kernel needs. Shapes are types, so compilation determines it: this executor computes
// nothing; each operation instantiated for it records its bytes before main() begins. `Key` is a launch.
#pragma once

#include "octile/tile/cuda_dot.h"
#include "octile/tile/cuda_pipeline.h"
#include "octile/tile/cuda_reduce.h"
#include "octile/tile/cuda_tma.h"
#include "octile/tile/cuda_wgmma.h"

namespace octile::tile::gpu {

template <class Key>
struct Noted {
  static inline int scratch = 0;   // shared by all operations, one at a time
  static inline int pipeline = 0;  // after it: a part per pipeline, since pipelines nest
  // Or, of warpgroups: a stage of any pipeline, and which of a stage's fetches are transposed, with their bytes.
  static inline int slot = 0;
  static inline int copies = 0;  // of operands, in a step
  static inline int transposed[kMaxTransposed] = {};
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

template <class Key, int kBytes>
struct NoteSlot {
  static bool note() {
    Noted<Key>::slot = larger(Noted<Key>::slot, kBytes);
    return true;
  }
  static inline bool noted = note();
};

template <class Key, int kBytes>
struct NoteCopies {
  static bool note() {
    Noted<Key>::copies = larger(Noted<Key>::copies, kBytes);
    return true;
  }
  static inline bool noted = note();
};

template <class Key, int kPlace, int kBytes>
struct NoteTransposed {
  static bool note() {
    Noted<Key>::transposed[kPlace] = larger(Noted<Key>::transposed[kPlace], kBytes);
    return true;
  }
  static inline bool noted = note();
};

template <class L, class Key>
struct Needs : Hollow<Needs<L, Key>> {
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
  TILE_FUNCTION static auto map(F f, const A&... a) {
    return hollow_map<Needs, L, S>(f, a...);
  }
  template <class T, class S>  // of a computed tile, which trans() then takes to shared memory
  TILE_FUNCTION static void note_change() {
    takes<S::kSize* static_cast<int>(sizeof(T))>();
  }

  template <int Axis, class F, class A>
  TILE_FUNCTION static auto reduce(F f, const A& a) {
    using S = typename A::Shape;
    takes<reduce_bytes<L, Axis, S, Common<typename A::Type, typename A::Type>>()>();
    return Hollow<Needs>::template reduce<Axis>(f, a);
  }
  template <class S, class A, class Source>
  TILE_FUNCTION static auto rearrange(const A& a, Source source) {
    if constexpr (stays_staged<L, S, A, Source>()) {
      return StagedTransposed<A>{a};
    } else if constexpr (is_transposed_expression<A, Source>()) {
      return hollow_transposed<Needs, S>(a);
    } else {
      takes<S::kSize* static_cast<int>(sizeof(typename A::Type))>();
      return Hollow<Needs>::template rearrange<S>(a, source);
    }
  }
  template <class A, class B, class Sum>
  TILE_FUNCTION static auto dot(const A&, const B&, Sum&& sum) {
    using C = typename PlainOf<std::remove_cvref_t<Sum>>::Type;
    if constexpr (uses_wgmma<L, typename A::Type, typename C::Shape, A::Shape::kColumns>()) {
      takes<wgmma_bytes<A, B>()>();  // if the sum is one that products are waited for
      note<NoteCopies<Key, copied_in_step<A, B, std::is_lvalue_reference_v<Sum>>()>>();
      if constexpr (right_operand<B>() == Operand::transposed_before)
        note<NoteTransposed<Key, B::kFetch, transposed_bytes<B>()>>();
    } else {
      takes<operand_bytes<A>() + operand_bytes<B>()>();
    }
    return C(sum);
  }
  template <class T>
  static Pointer<Needs, T> pointer(const Tensor<T>&) {
    return {};
  }

  struct Program : Hollow<Needs>::Program {
    TILE_FUNCTION int id(int) const { return 0; }
    TILE_FUNCTION int count(int) const { return 1; }
    template <class Context, int Stages, class Stage, class Body>
    TILE_FUNCTION void pipeline(Context&, Constant<Stages>, int, Stage& stage, Body& body) {
      int offset = 0;
      if constexpr (L::kWgmma) {
        note<NoteSlot<Key, boxed_bytes<decltype(stage(0))>>>();
        stage(0).each(BoxedFetches<Needs, Program>{this, nullptr, &offset, nullptr}, body, 0);
      } else {
        note<NotePipeline<Key, pipeline_bytes<Stages, Stage>, Stage, Body>>();
        stage(0).each(StagedFetches<Needs>{&offset}, body, 0);
      }
    }
  };
};

}  // namespace octile::tile::gpu
