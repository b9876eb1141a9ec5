// The context `t` that a kernel is called with. All memory goes through three gates of the executor's program: one for
// loads, one for stores, one for atomics.
#pragma once

#include "octile/tile/pointer.h"

namespace octile::tile {

struct Nothing {};  // a masked load without `other`: its masked-off lanes are undefined

// A load that is recorded now and done by pipeline().
template <class P, class M, class Other>
struct Fetch {
  P pointers;
  M mask;
  Other other;
  Where where;
};

template <class... F>
struct Fetches;
template <>
struct Fetches<> {
  template <class Load, class Body, class... Loaded>
  TILE_FUNCTION void each(Load, Body& body, int k, const Loaded&... loaded) const {
    body(k, loaded...);
  }
};
template <class F, class... More>
struct Fetches<F, More...> {
  F first;
  Fetches<More...> more;
  // body(k, load(first, c<0>), load(second, c<1>), ...)
  template <class Load, class Body, class... Loaded>
  TILE_FUNCTION void each(Load load, Body& body, int k, const Loaded&... loaded) const {
    more.each(load, body, k, loaded..., load(first, c<sizeof...(Loaded)>));
  }
};

// What one step of a pipeline loads.
TILE_FUNCTION Fetches<> fetches() { return {}; }
template <class F, class... More>
TILE_FUNCTION Fetches<F, More...> fetches(const F& first, const More&... more) {
  return {first, fetches(more...)};
}

enum class AtomicOp { add, max };

template <class E>
class Context {
 public:
  typename E::Program program;

  // Which program of the grid this is, and how many there are.
  template <class Axis>
  TILE_FUNCTION auto program_id(Axis axis) const {
    return program.id(static_cast<int>(axis));
  }
  template <class Axis>
  TILE_FUNCTION auto num_programs(Axis axis) const {
    return program.count(static_cast<int>(axis));
  }

  // 0, 1, ... N - 1, as a row.
  template <int N>
  TILE_FUNCTION auto arange(Constant<N>) const {
    Affine<E, s32, Shape<1, 1, N>, (N > 1)> index{};
    if constexpr (N > 1) index.column = 1;
    return index;
  }

  template <class N>
  TILE_FUNCTION auto arange(N) const {
    static_assert(is_constant<N>, "octile: arange() takes a size that the compiler knows, as c<32>.");
    return arange(c<1>);
  }

  // A tile of one value: s32 if it is an integer, f32 if it is a float.
  template <int C, Number V>
  TILE_FUNCTION auto full(Constant<C>, V value) const {
    return filled<Shape<1, 1, C>>(number(value));
  }
  template <int R, int C, Number V>
  TILE_FUNCTION auto full(Constant<R>, Constant<C>, V value) const {
    return filled<Shape<1, R, C>>(number(value));
  }
  template <int P, int R, int C, Number V>
  TILE_FUNCTION auto full(Constant<P>, Constant<R>, Constant<C>, V value) const {
    return filled<Shape<P, R, C>>(number(value));
  }

  template <class... A>
  TILE_FUNCTION auto full(A...) const {
    static_assert(sizeof...(A) == 0, "octile: full() takes one to three sizes that the compiler knows, and a value.");
    return filled<Single>(0.0f);
  }

  // Where the mask is false nothing is read, and the value is `other`, or undefined.
  template <class P, class M = Everything, class Other = Nothing>
  TILE_FUNCTION auto load(const P& p, const M& mask = {}, Other other = {}, Where where = Where::here()) {
    return load_through(p, mask, number_of(other), where);
  }

  template <class P, class V, class M = Everything>
  TILE_FUNCTION void store(const P& p, const V& value, const M& mask = {}, Where where = Where::here()) {
    store_through(p, value, mask, where);
  }

  // Integers: exact in any order. max also takes f32. A float sum would depend on the order, so there is none.
  template <class P, class V, class M = Everything>
  TILE_FUNCTION void atomic_add(const P& p, const V& value, const M& mask = {}, Where where = Where::here()) {
    atomic_through<AtomicOp::add>(p, value, mask, where);
  }
  template <class P, class V, class M = Everything>
  TILE_FUNCTION void atomic_max(const P& p, const V& value, const M& mask = {}, Where where = Where::here()) {
    atomic_through<AtomicOp::max>(p, value, mask, where);
  }

  // Before a barrier, a program may not read what it has stored.
  TILE_FUNCTION void barrier() { program.barrier(); }

  // for (k = 0 .. steps - 1) body(k, a, b, ...), where stage(k) returns fetches(t.fetch(...), ...). A GPU has the loads
  // of the next `Stages - 1` steps under way while it computes one.
  template <int Stages, class Steps, class Stage, class Body>
  TILE_FUNCTION void pipeline(Constant<Stages> stages, Steps steps, Stage stage, Body body) {
    program.pipeline(*this, stages, steps, stage, body);
  }
  template <class P, class M = Everything, class Other = Nothing>
  TILE_FUNCTION auto fetch(const P& p, const M& mask = {}, Other other = {}, Where where = Where::here()) const {
    return fetch_of(to_pointers(p), mask, number_of(other), where);
  }
  template <class F>
  TILE_FUNCTION auto load_fetch(const F& f) {
    return load_through(f.pointers, f.mask, f.other, f.where);
  }

 private:
  TILE_FUNCTION static Nothing number_of(Nothing) { return {}; }
  template <Number V>
  TILE_FUNCTION static auto number_of(V value) {
    return number(value);
  }

  template <class S, class T>
  TILE_FUNCTION static auto filled(T value) {
    const auto tile = E::template map<S>(scalar::Cast<T, Round::unstated>{}, Scalar<T>{value});
    if constexpr (may_run<E, T, S>) {
      return Running<E, T, S>(tile);
    } else {
      return tile;
    }
  }

  template <class T>
  TILE_FUNCTION static auto to_pointers(const Pointer<E, T>& p) {
    return pointers(p, SingleIndex<E>{});
  }
  template <class T, class Index>
  TILE_FUNCTION static const auto& to_pointers(const Pointers<E, T, Index>& p) {
    return p;
  }

  template <class P, class M, class Other>
  TILE_FUNCTION static Fetch<P, M, Other> fetch_of(const P& p, const M& mask, Other other, Where where) {
    return {p, mask, other, where};
  }

  template <class S, class M>
  TILE_FUNCTION static constexpr void check_mask() {
    static_assert(Mask<M>, "octile: a mask is a comparison, or a tile of bool.");
    static_assert(broadcasts_to<typename M::Shape, S>(),
                  "octile: the mask has more rows, columns or planes than the tile of pointers.");
  }

  template <class A, class M, class Other>
  TILE_FUNCTION auto load_through(const A& a, const M& mask, Other other, Where where) {
    const auto& p = to_pointers(a);
    using P = std::remove_cvref_t<decltype(p)>;
    check_mask<typename P::Shape, M>();
    if constexpr (!std::is_same_v<Other, Nothing>) {
      static_assert(!std::is_same_v<Other, f32> || is_float_type<std::remove_const_t<typename P::Element>>,
                    "octile: `other` is a float, but the tensor holds integers.");
    }
    if constexpr (Mask<M>) {
      return program.load(p, mask, other, where);
    } else {
      return program.load(p, Everything{}, other, where);  // after the error, no other
    }
  }

  template <class P, class V>
  TILE_FUNCTION static auto value_for(const V& value) {
    using T = typename P::Element;
    static_assert(!std::is_const_v<T>, "octile: this tensor is only read; its kernel argument is const.");
    if constexpr (TileLike<V>) {
      static_assert(broadcasts_to<typename V::Shape, typename P::Shape>(),
                    "octile: the value stored has more rows, columns or planes than the tile of pointers.");
      static_assert(std::is_same_v<typename V::Type, T>,
                    "octile: the value stored is of another type than the tensor; cast it, as in cast<f16>(v).");
      return E::template map<typename P::Shape>(scalar::Cast<T, Round::unstated>{}, value);
    } else {
      static_assert(is_float_type<T> || !(std::is_floating_point_v<V> || is_float_type<V>),
                    "octile: the value stored is a float, but the tensor holds integers; cast it.");
      return E::template map<typename P::Shape>(scalar::Cast<T, Round::unstated>{}, operand(value));
    }
  }

  template <class A, class V, class M>
  TILE_FUNCTION void store_through(const A& a, const V& value, const M& mask, Where where) {
    const auto& p = to_pointers(a);
    using P = std::remove_cvref_t<decltype(p)>;
    check_mask<typename P::Shape, M>();
    if constexpr (is_tile<V>) {
      if constexpr (std::is_same_v<typename V::Shape, typename P::Shape> &&
                    std::is_same_v<typename V::Type, typename P::Element>) {
        program.store(p, value, mask, where);
        return;
      }
    }
    program.store(p, value_for<P>(value), mask, where);
  }

  template <AtomicOp kOp, class A, class V, class M>
  TILE_FUNCTION void atomic_through(const A& a, const V& value, const M& mask, Where where) {
    const auto& p = to_pointers(a);
    using P = std::remove_cvref_t<decltype(p)>;
    using T = std::remove_const_t<typename P::Element>;
    check_mask<typename P::Shape, M>();
    static_assert(
        std::is_same_v<T, s32> || (kOp == AtomicOp::max && std::is_same_v<T, f32>),
        "octile: atomic_add() takes s32, atomic_max() s32 or f32; a sum of floats would depend on the order.");
    program.template atomic<kOp>(p, value_for<P>(value), mask, where);
  }
};

// for (int k : range(0, n, step)), as in Python; no iteration if the step is 0.
struct Range {
  // Iterations are counted: what follows the last one may leave 32 bits.
  struct Iterator {
    int value, step;
    unsigned left;
    TILE_FUNCTION int operator*() const { return value; }
    TILE_FUNCTION Iterator& operator++() {
      value = static_cast<int>(static_cast<unsigned>(value) + static_cast<unsigned>(step));
      --left;
      return *this;
    }
    TILE_FUNCTION bool operator!=(const Iterator& end) const { return left != end.left; }
  };
  int first, last, step;
  TILE_FUNCTION unsigned size() const {
    const unsigned from = static_cast<unsigned>(first), to = static_cast<unsigned>(last);
    if (step > 0 && first < last) return (to - from - 1u) / static_cast<unsigned>(step) + 1u;
    if (step < 0 && first > last) return (from - to - 1u) / (0u - static_cast<unsigned>(step)) + 1u;
    return 0;
  }
  TILE_FUNCTION Iterator begin() const { return {first, step, size()}; }
  TILE_FUNCTION Iterator end() const { return {last, step, 0}; }
};
TILE_FUNCTION Range range(int first, int last, int step = 1) { return {first, last, step}; }
TILE_FUNCTION Range range(int last) { return {0, last, 1}; }

inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr float kLog2E = 1.44269504f;

}  // namespace octile::tile
