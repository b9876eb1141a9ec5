// The symbolic executor: runs a kernel once for all programs and sizes. A tile holds what is known of its elements.
#pragma once

#include "octile/tile/symbolic_int.h"
#include "octile/tile/tensor.h"

namespace octile::tile {

namespace symbolic {

enum class Kind { integer, boolean, real };
template <class T>
inline constexpr Kind kind_of = std::is_same_v<T, bool> ? Kind::boolean
                                : is_float_type<T>      ? Kind::real
                                                        : Kind::integer;

template <class F>
struct OperatorOf {
  static constexpr Operator value = Operator::other;
};
#define TILE_OPERATOR(Name, name)                     \
  template <>                                         \
  struct OperatorOf<scalar::Name> {                   \
    static constexpr Operator value = Operator::name; \
  };
TILE_OPERATOR(Add, add)
TILE_OPERATOR(Subtract, subtract)
TILE_OPERATOR(Multiply, multiply)
TILE_OPERATOR(Divide, divide)
TILE_OPERATOR(Remainder, remainder)
TILE_OPERATOR(And, bit_and)
TILE_OPERATOR(Or, bit_or)
TILE_OPERATOR(ShiftLeft, shift_left)
TILE_OPERATOR(ShiftRight, shift_right)
TILE_OPERATOR(Less, less)
TILE_OPERATOR(LessEqual, less_equal)
TILE_OPERATOR(Greater, greater)
TILE_OPERATOR(GreaterEqual, greater_equal)
TILE_OPERATOR(Equal, equal)
TILE_OPERATOR(NotEqual, not_equal)
TILE_OPERATOR(Negate, negate)
TILE_OPERATOR(Not, invert)
TILE_OPERATOR(Maximum, maximum)
TILE_OPERATOR(Minimum, minimum)
TILE_OPERATOR(Select, select)
#undef TILE_OPERATOR
template <class To, Round kRound>
struct OperatorOf<scalar::Cast<To, kRound>> {
  static constexpr Operator value = Operator::cast;
};

struct Operand {
  Kind kind;
  Lanes lanes;
};
struct Result {
  Kind kind;
  std::array<int, 3> sides;
  std::int64_t low, high;  // of its type
};
Lanes mapped(Operator op, const Result& result, const std::vector<Operand>& operands);
Lanes reduced(int axis, const Result& result, const std::array<int, 3>& sides, const Lanes& lanes);
Lanes multiplied(const Result& result, int terms, const Lanes& a, const Lanes& b, const Lanes& sum);
Lanes in_same_order(const std::array<int, 3>& to, const std::array<int, 3>& from, const Lanes& lanes);
Lanes transposed(const Lanes& lanes);

void assign(std::shared_ptr<const Lanes>& lanes, const std::shared_ptr<const Lanes>& next, const void* variable,
            std::int64_t born);

struct Place {  // of an access
  int tensor;
  std::array<int, 3> sides;
  Lanes index, mask;
  bool masked;
  Where where;
};
Lanes loaded(const Place& place, const Result& result, bool has_other, std::int64_t other);
void stored(const Place& place, Access access, const Lanes& value);
void barrier();

// The passes of a pipeline, with its loads at its beginning.
class PipelinePasses {
 public:
  explicit PipelinePasses(SymbolicInt steps);
  ~PipelinePasses();
  PipelinePasses(const PipelinePasses&) = delete;
  PipelinePasses& operator=(const PipelinePasses&) = delete;
  SymbolicInt enter(int number);
  void leave();
  void loads(bool on);

 private:
  SymbolicInt steps_;
  int loop_, since_, outer_since_;
};

template <class T>
constexpr std::int64_t lowest() {
  if constexpr (!is_integer_type<T>) return 0;
  if constexpr (is_integer_type<T>)
    return sizeof(T) == 8 ? -(s64{1} << 62) : std::is_signed_v<T> ? -(s64{1} << (8 * sizeof(T) - 1)) : 0;
}
template <class T>
constexpr std::int64_t highest() {
  if constexpr (!is_integer_type<T>) return 1;
  if constexpr (is_integer_type<T>) {
    return sizeof(T) == 8 ? (s64{1} << 62) : (s64{1} << (8 * sizeof(T) - (std::is_signed_v<T> ? 1 : 0))) - 1;
  }
}
template <class S>
constexpr std::array<int, 3> sides() {
  return {S::kPlanes, S::kRows, S::kColumns};
}
template <class T, class S>
constexpr Result result_of() {
  return {kind_of<T>, sides<S>(), lowest<T>(), highest<T>()};
}

template <class S>
Term at_lane(const SymbolicIndex& base, const SymbolicIndex& plane, const SymbolicIndex& row,
             const SymbolicIndex& column, bool unit) {
  Term result = base.term();
  if constexpr (S::kPlanes > 1) result += plane.term() * Term::atom(Space::kPlane);
  if constexpr (S::kRows > 1) result += row.term() * Term::atom(Space::kRow);
  if constexpr (S::kColumns > 1) result += (unit ? Term(1) : column.term()) * Term::atom(Space::kColumn);
  return result;
}

template <AffineTile A, Compare kCompare>
Formula formula_of(const Bound<A, kCompare>& bound, const Term& index) {
  // Both enumerations have the comparisons in the same order.
  constexpr auto kOperator = static_cast<Operator>(static_cast<int>(Operator::less) + static_cast<int>(kCompare));
  return compared(kOperator, index, bound.n.term());
}

template <class A>
Lanes lanes_of(const A& a) {
  Lanes result;
  if constexpr (is_tile<A>) {
    if (a.lanes) result = *a.lanes;
  } else if constexpr (is_affine<A>) {
    result.number = at_lane<typename A::Shape>(a.base, a.plane, a.row, a.column, A::kUnit);
    result.checked = a.overflow.checked;
  } else if constexpr (std::is_same_v<A, SymbolicScalar>) {
    result.number = a.number.term();
  } else if constexpr (LazyMask<A> && requires { a.b; }) {
    const Lanes left = lanes_of(a.a), right = lanes_of(a.b);
    result.take(left);
    result.take(right);
    result.truth = is_either<A> ? left.truth | right.truth : left.truth & right.truth;
  } else if constexpr (LazyMask<A> && requires { a.n; }) {
    result = lanes_of(a.a);
    result.truth = formula_of(a, result.number);
    result.number = {};
  } else if constexpr (LazyMask<A> && requires { a.a; }) {
    result = lanes_of(a.a);
    result.truth = !result.truth;
  } else if constexpr (LazyMask<A>) {  // Everything
  } else if constexpr (std::is_integral_v<typename A::Type>) {
    if constexpr (std::is_same_v<typename A::Type, bool>) {
      result.truth = a.value;
    } else {
      result.number = Term(a.value);
    }
  }
  return result;
}

}  // namespace symbolic

struct Symbolic {
  template <class T, class S>
  struct Storage {
    std::shared_ptr<const symbolic::Lanes> lanes;
    s64 born = symbolic::birth();

    Storage() = default;
    Storage(const Storage& other) : lanes(other.lanes) {}
    Storage& operator=(const Storage& other) {
      symbolic::assign(lanes, other.lanes, this, born);
      return *this;
    }
  };
  template <class I>
  using Index = SymbolicIndex;
  using Overflow = SymbolicOverflow;
  struct Memory {
    SymbolicIndex tensor = 0;  // a variable, too: of a pointer that changes between tensors
  };

  template <class T, class S>
  static auto tile(symbolic::Lanes lanes) {
    Tile<Symbolic, T, S> result;
    result.lanes = std::make_shared<const symbolic::Lanes>(std::move(lanes));
    return result;
  }

  template <class S, class F, class... A>
  static auto map(F, const A&... a) {
    using T = decltype(std::declval<F>()(widen(std::declval<typename A::Type>())...));
    return tile<T, S>(symbolic::mapped(symbolic::OperatorOf<F>::value, symbolic::result_of<T, S>(),
                                       {{symbolic::kind_of<typename A::Type>, symbolic::lanes_of(a)}...}));
  }
  template <int Axis, class F, class A>
  static auto reduce(F, const A& a) {
    using T = Common<typename A::Type, typename A::Type>;
    using S = Reduced<typename A::Shape, Axis>;
    return tile<T, S>(symbolic::reduced(Axis, symbolic::result_of<T, S>(), symbolic::sides<typename A::Shape>(),
                                        symbolic::lanes_of(a)));
  }
  template <class S, class A, class Source>
  static auto rearrange(const A& a, Source) {
    if constexpr (std::is_same_v<Source, Transposed>) {
      return tile<typename A::Type, S>(symbolic::transposed(symbolic::lanes_of(a)));
    } else {
      return tile<typename A::Type, S>(
          symbolic::in_same_order(symbolic::sides<S>(), symbolic::sides<typename A::Shape>(), symbolic::lanes_of(a)));
    }
  }
  template <class A, class B, class C>
  static C dot(const A& a, const B& b, const C& sum) {
    using T = typename C::Type;
    using S = typename C::Shape;
    return tile<T, S>(symbolic::multiplied(symbolic::result_of<T, S>(), A::Shape::kColumns, symbolic::lanes_of(a),
                                           symbolic::lanes_of(b), symbolic::lanes_of(sum)));
  }

  class Program {
   public:
    SymbolicInt id(int axis) const { return SymbolicInt(here().program[grid_axis(axis)]); }
    SymbolicInt count(int axis) const { return SymbolicInt(here().grid[grid_axis(axis)]); }
    void barrier() { symbolic::barrier(); }

    template <class P, class M, class Other>
    auto load(const P& p, const M& mask, Other other, Where where) {
      using T = std::remove_const_t<typename P::Element>;
      using S = typename P::Shape;
      std::int64_t value = 0;
      if constexpr (std::is_integral_v<Other>) value = other;
      return tile<T, S>(
          symbolic::loaded(place(p, mask, where), symbolic::result_of<T, S>(), !std::is_same_v<Other, Nothing>, value));
    }
    template <class P, class V, class M>
    void store(const P& p, const V& value, const M& mask, Where where) {
      symbolic::stored(place(p, mask, where), Access::store, symbolic::lanes_of(value));
    }
    template <AtomicOp kOp, class P, class V, class M>
    void atomic(const P& p, const V& value, const M& mask, Where where) {
      symbolic::stored(place(p, mask, where), Access::atomic, symbolic::lanes_of(value));
    }
    template <class Context, class Stages, class Stage, class Body>
    void pipeline(Context& t, Stages, SymbolicInt steps, Stage& stage, Body& body) {
      symbolic::PipelinePasses passes(steps);
      for (const int number : {0, 1}) {
        const SymbolicInt k = passes.enter(number);
        const auto load = [&](const auto& fetch, auto) {
          passes.loads(true);
          auto loaded = t.load_fetch(fetch);
          passes.loads(false);
          return loaded;
        };
        const auto call = [&](int, const auto&... loaded) { body(k, loaded...); };
        stage(k).each(load, call, 0);
        passes.leave();
      }
    }

   private:
    static const symbolic::LaunchFacts& here() { return symbolic::the_walk().launches.back(); }
    template <class P, class M>
    static symbolic::Place place(const P& p, const M& mask, Where where) {
      const int tensor = static_cast<int>(static_cast<s64>(p.tensor.memory.tensor));
      return {tensor,
              symbolic::sides<typename P::Shape>(),
              symbolic::lanes_of(p.index),
              symbolic::lanes_of(mask),
              !std::is_same_v<M, Everything>,
              where};
    }
  };
};

template <class A>
void SymbolicOverflow::check(const A& affine) {
  constexpr int kBits = std::is_same_v<typename A::Type, s32> ? 32 : 64;
  SymbolicOverflow here;
  here.checked.push_back(
      {symbolic::at_lane<typename A::Shape>(affine.base, affine.plane, affine.row, affine.column, A::kUnit), kBits});
  merge(here);
}

}  // namespace octile::tile
