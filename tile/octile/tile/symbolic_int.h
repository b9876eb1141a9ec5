// Integers of a kernel that may be symbols: what `int` is while a kernel is proved. With a number in it, it is one.
#pragma once

#include <exception>

#include "octile/tile/checked_index.h"
#include "octile/tile/context.h"
#include "octile/tile/symbolic_trace.h"

namespace octile::tile {

// As an index tile holds it: exact.
class SymbolicIndex {
 public:
  constexpr SymbolicIndex() = default;
  template <class N>
  requires std::is_integral_v<N>
  constexpr SymbolicIndex(N number) : number_(static_cast<s64>(number)) {}  // NOLINT
  constexpr SymbolicIndex(const SymbolicIndex& other) : number_(other.number_), term_(other.term_) {}
  constexpr SymbolicIndex& operator=(const SymbolicIndex& other) {
    if (!std::is_constant_evaluated() && symbolic::older_than_a_loop(born_)) note(other);
    number_ = other.number_;
    term_ = other.term_;
    return *this;
  }
  explicit SymbolicIndex(const symbolic::Term& term);

  constexpr bool is_number() const { return term_ == nullptr; }
  constexpr s64 constant() const { return number_; }  // if it is a number
  symbolic::Term term() const;
  explicit operator s64() const;  // throws if it is none

  friend SymbolicIndex operator+(SymbolicIndex a, SymbolicIndex b) { return SymbolicIndex(a.term() + b.term()); }
  friend SymbolicIndex operator*(SymbolicIndex a, SymbolicIndex b) { return SymbolicIndex(a.term() * b.term()); }
  SymbolicIndex& operator+=(SymbolicIndex b) { return *this = *this + b; }
  SymbolicIndex& operator*=(SymbolicIndex b) { return *this = *this * b; }

 private:
  void note(const SymbolicIndex& next) const;  // that it is about to be assigned

  s64 number_ = 0;
  const symbolic::Term* term_ = nullptr;  // kept as long as the run
  s64 born_ = symbolic::birth();
};

struct SymbolicOverflow {
  std::vector<symbolic::Checked> checked;
  s64 born = symbolic::birth();

  SymbolicOverflow() = default;
  SymbolicOverflow(const SymbolicOverflow& other) : checked(other.checked) {}
  SymbolicOverflow& operator=(const SymbolicOverflow& other);

  void merge(const SymbolicOverflow& other);
  template <class A>
  void check(const A& affine);
  void to_column();
};
struct NoSymbolicOverflow {  // a kernel's own integers are checked where they are computed
  operator SymbolicOverflow() const { return {}; }
  operator CheckedOverflow() const { return {}; }
  operator NoOverflow() const { return {}; }
};

// What `int` is.
class SymbolicInt {
 public:
  SymbolicIndex value{};
  NoSymbolicOverflow program_index_overflow{};

  constexpr SymbolicInt() = default;
  template <class N>
  requires(std::is_arithmetic_v<N>) constexpr SymbolicInt(N number) : value(static_cast<s32>(number)) {}  // NOLINT
  template <int N>
  constexpr SymbolicInt(Constant<N>) : value(N) {}         // NOLINT
  SymbolicInt(CheckedIndex index) : value(index.value) {}  // NOLINT
  explicit SymbolicInt(const symbolic::Term& term) : value(term) {}

  symbolic::Term term() const { return value.term(); }
  explicit operator int() const { return static_cast<int>(static_cast<s64>(value)); }
  explicit operator s64() const { return static_cast<s64>(value); }
  operator CheckedIndex() const { return {static_cast<s64>(value), {}}; }
  explicit operator float() const { return static_cast<float>(static_cast<s64>(value)); }

#define TILE_SYMBOLIC_ASSIGN(op)     \
  template <class B>                 \
  SymbolicInt& operator op##=(B b) { \
    return *this = *this op b;       \
  }
  TILE_SYMBOLIC_ASSIGN(+)
  TILE_SYMBOLIC_ASSIGN(-)
  TILE_SYMBOLIC_ASSIGN(*)
  TILE_SYMBOLIC_ASSIGN(/)
  TILE_SYMBOLIC_ASSIGN(%)
#undef TILE_SYMBOLIC_ASSIGN
  SymbolicInt& operator++() { return *this += 1; }
  SymbolicInt& operator--() { return *this -= 1; }
  SymbolicInt operator++(int) {
    const SymbolicInt old = *this;
    ++*this;
    return old;
  }
  SymbolicInt operator--(int) {
    const SymbolicInt old = *this;
    --*this;
    return old;
  }
};

// What `bool` may be: a bool, whose changes in a loop are seen.
class SymbolicBool {
 public:
  constexpr SymbolicBool() = default;
  constexpr SymbolicBool(bool value) : value_(value ? 1 : 0) {}  // NOLINT
  constexpr operator bool() const { return value_.constant() != 0; }

  SymbolicBool& operator|=(bool b) { return *this = *this || b; }
  SymbolicBool& operator&=(bool b) { return *this = *this && b; }
  SymbolicBool& operator^=(bool b) { return *this = *this != b; }

 private:
  SymbolicIndex value_{};
};

template <class A>
concept SymbolicOperand = std::is_same_v<A, SymbolicInt> || is_constant<A> ||(std::is_integral_v<A> && sizeof(A) <= 4);
template <class A, class B>
concept SymbolicOperands = SymbolicOperand<A> && SymbolicOperand<B> &&
    (std::is_same_v<A, SymbolicInt> || std::is_same_v<B, SymbolicInt>);

namespace symbolic {

// The operators of scalar.h, as far as they matter to an index.
enum class Operator {
  add,
  subtract,
  multiply,
  divide,
  remainder,
  bit_and,
  bit_or,
  shift_left,
  shift_right,
  less,
  less_equal,
  greater,
  greater_equal,
  equal,
  not_equal,
  negate,
  invert,
  maximum,
  minimum,
  select,
  cast,
  other
};
// With an operator of TILE_SYMBOLIC_OPERATOR.
SymbolicInt computed(Operator op, SymbolicInt a, SymbolicInt b);
// With a comparison.
bool decided(Operator op, SymbolicInt a, SymbolicInt b);
// Of formulas: as above, for a stored tile or a number.
Term computed(Space& space, Operator op, const Term& a, const Term& b);
Formula compared(Operator op, const Term& a, const Term& b);

}  // namespace symbolic

#define TILE_SYMBOLIC_OPERATOR(op, name)                              \
  template <class A, class B>                                         \
  requires SymbolicOperands<A, B> SymbolicInt operator op(A a, B b) { \
    return symbolic::computed(symbolic::Operator::name, a, b);        \
  }
TILE_SYMBOLIC_OPERATOR(+, add)
TILE_SYMBOLIC_OPERATOR(-, subtract)
TILE_SYMBOLIC_OPERATOR(*, multiply)
TILE_SYMBOLIC_OPERATOR(/, divide)
TILE_SYMBOLIC_OPERATOR(%, remainder)
TILE_SYMBOLIC_OPERATOR(&, bit_and)
TILE_SYMBOLIC_OPERATOR(<<, shift_left)
TILE_SYMBOLIC_OPERATOR(>>, shift_right)
#undef TILE_SYMBOLIC_OPERATOR
inline SymbolicInt operator-(SymbolicInt a) { return 0 - a; }
#define TILE_SYMBOLIC_BITS(op)            \
  template <class B>                      \
  requires std::is_same_v<B, SymbolicInt> \
  int operator op(CheckedIndex a, B b) { return static_cast<int>(a) op static_cast<int>(b); }
TILE_SYMBOLIC_BITS(&)
TILE_SYMBOLIC_BITS(<<)
TILE_SYMBOLIC_BITS(>>)
#undef TILE_SYMBOLIC_BITS

// A comparison decides: each outcome that is possible is followed.
#define TILE_SYMBOLIC_COMPARISON(op, name) \
  template <class A, class B>              \
  requires SymbolicOperands<A, B>          \
  bool operator op(A a, B b) { return symbolic::decided(symbolic::Operator::name, a, b); }
TILE_SYMBOLIC_COMPARISON(<, less)
TILE_SYMBOLIC_COMPARISON(<=, less_equal)
TILE_SYMBOLIC_COMPARISON(>, greater)
TILE_SYMBOLIC_COMPARISON(>=, greater_equal)
TILE_SYMBOLIC_COMPARISON(==, equal)
#undef TILE_SYMBOLIC_COMPARISON
template <class A, class B>
requires SymbolicOperands<A, B>
bool operator!=(A a, B b) { return !(a == b); }

template <class A, class B>
requires SymbolicOperands<A, B> SymbolicInt cdiv(A a, B b) { return (SymbolicInt(a) + SymbolicInt(b) - 1) / b; }
template <class A, class B>
requires SymbolicOperands<A, B> SymbolicInt larger(A a, B b) { return a > b ? SymbolicInt(a) : SymbolicInt(b); }

// As an operand of map.
struct SymbolicScalar {
  using Type = s32;
  using Shape = Single;
  s32 value;  // if it is a number
  SymbolicInt number;
};
inline SymbolicScalar operand(SymbolicInt a) {
  return {a.value.is_number() ? static_cast<s32>(static_cast<s64>(a.value)) : 0, a};
}

// for (int k : range(0, n, step)): of numbers, every one; of symbols, any two of them.
class SymbolicRange {
 public:
  SymbolicRange(SymbolicInt first, SymbolicInt last, SymbolicInt step);
  ~SymbolicRange();
  SymbolicRange(const SymbolicRange&) = delete;
  SymbolicRange& operator=(const SymbolicRange&) = delete;

  struct Iterator {
    SymbolicRange* range;
    SymbolicInt operator*() const { return range->now_; }
    Iterator& operator++() {
      range->next();
      return *this;
    }
    bool operator!=(const Iterator&) const { return range->goes_on(); }
  };
  Iterator begin() { return {this}; }
  Iterator end() { return {this}; }

 private:
  void next();
  bool goes_on();

  SymbolicInt first_, last_, step_, now_;
  bool symbolic_ = false, ended_ = false;
  int loop_ = 0, passes_ = 0;
  int exceptions_ = 0;
  std::size_t depth_ = 0;
};
template <class A>
requires std::is_same_v<A, SymbolicInt> SymbolicRange range(A last) { return {0, last, 1}; }
template <class A, class B>
requires SymbolicOperands<A, B> SymbolicRange range(A first, B last) { return {first, last, 1}; }
template <class A, class B, class C>
requires(SymbolicOperands<A, B> || SymbolicOperands<A, C> || SymbolicOperands<B, C>) SymbolicRange
    range(A first, B last, C step) {
  return {first, last, step};
}

}  // namespace octile::tile
