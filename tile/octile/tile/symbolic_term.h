// Integers and conditions as formulas, for proofs: polynomials over atoms, and facts about them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace octile::tile::symbolic {

// What a proof cannot follow. It ends the attempt: not decided, with this reason.
struct NotDecided : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A polynomial with integer coefficients; its variables are atoms, by their numbers.
class Term {
 public:
  using Monomial = std::vector<int>;  // atoms in ascending order, a square twice; empty: the constant

  Term() = default;
  Term(std::int64_t constant);  // NOLINT: a number is a term
  static Term atom(int id);

  const std::map<Monomial, std::int64_t>& parts() const { return parts_; }
  bool is_constant() const { return parts_.empty() || (parts_.size() == 1 && parts_.begin()->first.empty()); }
  std::int64_t constant() const;  // its constant part
  bool is_linear() const;

  Term& operator+=(const Term& other);
  Term& operator*=(const Term& other);
  friend Term operator+(Term a, const Term& b) { return a += b; }
  friend Term operator-(Term a, const Term& b) { return a += b * Term(-1); }
  friend Term operator*(Term a, const Term& b) { return a *= b; }
  friend Term operator-(const Term& a) { return a * Term(-1); }
  friend bool operator==(const Term&, const Term&) = default;
  friend bool operator<(const Term& a, const Term& b) { return a.parts_ < b.parts_; }

 private:
  void add(const Monomial& monomial, std::int64_t coefficient);
  std::map<Monomial, std::int64_t> parts_;  // no coefficient is 0
};

// term <= 0, term == 0, and what can be said with them.
class Formula {
 public:
  enum class Kind : std::uint8_t { constant, at_most_zero, zero, negation, all, any };
  struct Node {
    Kind kind = Kind::constant;
    bool value = true;
    Term term;
    std::vector<Formula> parts;
  };

  Formula() = default;  // true
  Formula(bool value);  // NOLINT: so is a bool a formula
  static Formula at_most_zero(const Term& term);
  static Formula zero(const Term& term);

  const Node& node() const;
  bool is(bool value) const { return node().kind == Kind::constant && node().value == value; }

  friend Formula operator!(const Formula& a);
  friend Formula operator&(const Formula& a, const Formula& b) { return joined(Kind::all, a, b); }
  friend Formula operator|(const Formula& a, const Formula& b) { return joined(Kind::any, a, b); }
  friend bool operator==(const Formula& a, const Formula& b);
  friend bool operator<(const Formula& a, const Formula& b);

 private:
  static Formula joined(Kind kind, const Formula& a, const Formula& b);
  explicit Formula(Node node) : node_(std::make_shared<const Node>(std::move(node))) {}
  std::shared_ptr<const Node> node_;  // none: true
};

inline Formula less_equal(const Term& a, const Term& b) { return Formula::at_most_zero(a - b); }
inline Formula less(const Term& a, const Term& b) { return Formula::at_most_zero(a - b + 1); }
inline Formula equal(const Term& a, const Term& b) { return Formula::zero(a - b); }
inline Formula implies(const Formula& a, const Formula& b) { return (!a) | b; }
Formula between(const Term& low, const Term& value, const Term& high);  // low <= value < high
Formula all_of(const std::vector<Formula>& parts);
Formula any_of(const std::vector<Formula>& parts);

// The variables of terms.
struct Atom {
  enum class Kind : std::uint8_t {
    symbol,
    quotient,  // of two terms, rounded down
    value,     // a function, of which nothing else is known, of its operands: what a tensor holds, what a sum came to
    choice     // condition ? operands[0] : operands[1]
  };
  // Of a symbol: who has one of his own. Sizes are everybody's.
  enum class Owner : std::uint8_t { everybody, lane_of_tile, program };

  Kind kind = Kind::symbol;
  std::string name;  // of a symbol or a function
  Owner owner = Owner::everybody;
  std::vector<Term> operands;
  Formula condition;
  Formula range;  // what is known of it
  bool nonnegative = false;
};

// The atoms of one proof.
class Space {
 public:
  // Placeholders: which lane of a tile.
  static constexpr int kPlane = 0, kRow = 1, kColumn = 2;

  Space();
  const Atom& operator[](int id) const { return atoms_[static_cast<std::size_t>(id)]; }
  int size() const { return static_cast<int>(atoms_.size()); }

  Term symbol(const std::string& name, Atom::Owner owner, bool nonnegative = true);
  void say(const Term& symbol, const Formula& range);                                           // of a symbol
  Term bounded(const std::string& name, Atom::Owner owner, const Term& low, const Term& high);  // low <= it < high
  Term floor_quotient(const Term& a, const Term& b);
  Term quotient(const Term& a, const Term& b);  // towards zero
  Term value(const std::string& function, std::vector<Term> operands, std::int64_t low, std::int64_t high);
  Term choice(const Formula& condition, const Term& a, const Term& b);
  bool nonnegative(const Term& term) const;  // seen at a glance

  // Replaces atoms, within other atoms too.
  using Replacement = std::function<const Term*(int)>;
  Term replaced(const Term& term, const Replacement& by);
  Formula replaced(const Formula& formula, const Replacement& by);
  // The same for another program: all that is its own gets another name.
  Term primed(const Term& term);
  Formula primed(const Formula& formula);

  void atoms_of(const Term& term, std::vector<bool>& found) const;  // within others too
  void atoms_of(const Formula& formula, std::vector<bool>& found) const;

  // Equal for terms that differ only in the names of symbols that a single program owns; `names` are those met so far.
  // Unknown functions are told apart if `functions` has names for them.
  std::string signature(const Term& term, std::map<int, std::string>& names,
                        std::map<std::string, std::string>* functions = nullptr) const;
  std::string signature(const Formula& formula, std::map<int, std::string>& names,
                        std::map<std::string, std::string>* functions = nullptr) const;

 private:
  Term made(Atom atom);
  Term replaced_atom(int id, const Replacement& by, std::map<int, Term>& done);
  Term replaced(const Term& term, const Replacement& by, std::map<int, Term>& done);
  Formula replaced(const Formula& formula, const Replacement& by, std::map<int, Term>& done);

  std::vector<Atom> atoms_;
  std::map<std::string, int> known_;
  std::map<int, Term> primes_;
};

}  // namespace octile::tile::symbolic
