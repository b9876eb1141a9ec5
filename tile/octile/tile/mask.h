// Masks. A comparison of an index tile with a number is lazy: a few operations tell whether it holds everywhere, and
// for which columns of a row. Lazy masks stay lazy under & and !. All others are tiles of bool.
#pragma once

#include "octile/tile/affine.h"
#include "octile/tile/scalar.h"

namespace octile::tile {

struct Interval {  // low <= column < high
  int low, high;
};

enum class Compare { less, less_equal, greater, greater_equal, equal, not_equal };

// a < n, and the like.
template <AffineTile A, Compare kCompare>
struct Bound {
  using Executor = typename A::Executor;
  using Type = bool;
  using Shape = typename A::Shape;
  using Stored = typename A::Stored;
  static constexpr bool kMask = true;
  static constexpr bool kInterval = kCompare != Compare::not_equal;

  A a;
  Stored n;

  TILE_FUNCTION bool at(int p, int r, int c) const { return holds(a.at(p, r, c)); }
  TILE_FUNCTION bool holds(Stored index) const {
    if constexpr (kCompare == Compare::less) return index < n;
    if constexpr (kCompare == Compare::less_equal) return index <= n;
    if constexpr (kCompare == Compare::greater) return index > n;
    if constexpr (kCompare == Compare::greater_equal) return index >= n;
    if constexpr (kCompare == Compare::equal) return index == n;
    return index != n;
  }

  // Whether it holds everywhere; may return false negatives for not_equal.
  TILE_FUNCTION bool all() const {
    if constexpr (kCompare == Compare::not_equal) return a.lowest() > n || a.highest() < n;
    return holds(a.lowest()) && holds(a.highest());
  }

  TILE_FUNCTION Interval interval(int p, int r) const {
    static_assert(kInterval);
    const Stored start = a.row_start(p, r);
    if constexpr (kCompare == Compare::less) return below<false>(start);
    if constexpr (kCompare == Compare::less_equal) return below<true>(start);
    if constexpr (kCompare == Compare::greater) return rest(below<true>(start));
    if constexpr (kCompare == Compare::greater_equal) return rest(below<false>(start));
    const Interval low = rest(below<false>(start)), high = below<true>(start);
    const Interval both = {low.low > high.low ? low.low : high.low, low.high < high.high ? low.high : high.high};
    return both.low < both.high ? both : Interval{kColumns, kColumns};
  }

 private:
  static constexpr int kColumns = Shape::kColumns;
  using Distance = typename std::conditional_t<std::is_integral_v<Stored>, std::make_unsigned<Stored>,
                                               std::type_identity<Stored>>::type;  // of any two indices

  // The columns of a row that starts at `start` whose index is below n, or at most n: the first ones or the last ones.
  template <bool kToo>
  TILE_FUNCTION Interval below(Stored start) const {
    const bool first = kToo ? start <= n : start < n;
    if constexpr (kColumns == 1) return {0, first ? 1 : 0};
    const Stored step = A::kUnit ? Stored{1} : a.column;
    if (step == 0) return {0, first ? kColumns : 0};
    const Distance up = static_cast<Distance>(step), to = static_cast<Distance>(n), from = static_cast<Distance>(start);
    if (step > 0) return {0, first ? 1 + whole_steps(to - from - Distance{!kToo}, up) : 0};
    return {first ? 0 : 1 + whole_steps(from - to - Distance{kToo}, Distance{0} - up), kColumns};
  }
  TILE_FUNCTION static int whole_steps(Distance distance, Distance step) {
    const Distance steps = distance / step;
    return steps < Distance{kColumns} ? static_cast<int>(steps) : kColumns - 1;
  }
  TILE_FUNCTION static Interval rest(Interval part) {
    if (part.low > 0) return {0, part.low};
    return {part.high, Shape::kColumns};
  }
};

template <class A>
concept LazyMask = requires {
  A::kMask;
};
template <class A>
inline constexpr bool is_bool_tile = false;
template <class E, class S>
inline constexpr bool is_bool_tile<Tile<E, bool, S>> = true;
template <class A>
concept Mask = LazyMask<A> || is_bool_tile<A>;

template <LazyMask A, LazyMask B>
struct BothMasks {
  using Executor = typename A::Executor;
  using Type = bool;
  using Shape = Broadcast<typename A::Shape, typename B::Shape>;
  static constexpr bool kMask = true;
  static constexpr bool kInterval = A::kInterval && B::kInterval;

  A a;
  B b;

  TILE_FUNCTION bool at(int p, int r, int c) const { return a.at(p, r, c) && b.at(p, r, c); }
  TILE_FUNCTION bool all() const { return a.all() && b.all(); }
  TILE_FUNCTION Interval interval(int p, int r) const {
    const Interval x = widened(a, p, r), y = widened(b, p, r);
    const Interval both = {x.low > y.low ? x.low : y.low, x.high < y.high ? x.high : y.high};
    return both.low < both.high ? both : Interval{Shape::kColumns, Shape::kColumns};
  }

 private:
  // A mask of one column says the same for all columns.
  template <class M>
  TILE_FUNCTION static Interval widened(const M& mask, int p, int r) {
    const Interval part = mask.interval(p, r);
    if constexpr (M::Shape::kColumns != Shape::kColumns) return {0, part.low < part.high ? Shape::kColumns : 0};
    return part;
  }
};

template <LazyMask A, LazyMask B>
struct EitherMask {
  using Executor = typename A::Executor;
  using Type = bool;
  using Shape = Broadcast<typename A::Shape, typename B::Shape>;
  static constexpr bool kMask = true, kInterval = false;

  A a;
  B b;

  TILE_FUNCTION bool at(int p, int r, int c) const { return a.at(p, r, c) || b.at(p, r, c); }
  TILE_FUNCTION bool all() const { return a.all() || b.all(); }  // may return false negatives
};

template <class A>
inline constexpr bool is_either = false;
template <class A, class B>
inline constexpr bool is_either<EitherMask<A, B>> = true;

template <LazyMask A>
struct NotMask {
  using Executor = typename A::Executor;
  using Type = bool;
  using Shape = typename A::Shape;
  static constexpr bool kMask = true, kInterval = false;

  A a;

  TILE_FUNCTION bool at(int p, int r, int c) const { return !a.at(p, r, c); }
  TILE_FUNCTION bool all() const { return false; }
};

// Where a load or a store has no mask.
struct Everything {
  using Shape = Single;
  static constexpr bool kMask = true, kInterval = true;
  TILE_FUNCTION bool at(int, int, int) const { return true; }
  TILE_FUNCTION bool all() const { return true; }
};

// May answer no where it does.
template <class M>
TILE_FUNCTION bool holds_everywhere(const M& mask) {
  if constexpr (LazyMask<M>) {
    return mask.all();
  } else {
    return false;
  }
}

}  // namespace octile::tile
