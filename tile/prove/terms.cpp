#include <algorithm>

#include "octile/tile/symbolic_term.h"

namespace octile::tile::symbolic {

namespace {

std::int64_t checked_sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) throw NotDecided("a coefficient leaves 64 bits");
  return result;
}
std::int64_t checked_product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) throw NotDecided("a coefficient leaves 64 bits");
  return result;
}
std::int64_t floored(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0); }

std::string key(const Term& term) {
  std::string result;
  for (const auto& [monomial, coefficient] : term.parts()) {
    result += std::to_string(coefficient);
    for (const int id : monomial) result += "*" + std::to_string(id);
    result += "+";
  }
  return result;
}

std::string key(const Formula& formula) {
  const Formula::Node& node = formula.node();
  std::string result = std::to_string(static_cast<int>(node.kind)) + (node.value ? "t" : "f") + key(node.term) + "(";
  for (const Formula& part : node.parts) result += key(part) + ",";
  return result + ")";
}

}  // namespace

// ---- Terms ----

Term::Term(std::int64_t constant) { add({}, constant); }

Term Term::atom(int id) {
  Term result;
  result.add({id}, 1);
  return result;
}

std::int64_t Term::constant() const {
  const auto found = parts_.find({});
  return found == parts_.end() ? 0 : found->second;
}

bool Term::is_linear() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part.first.size() <= 1; });
}

void Term::add(const Monomial& monomial, std::int64_t coefficient) {
  if (coefficient == 0) return;
  const auto [place, is_new] = parts_.try_emplace(monomial, coefficient);
  if (is_new) return;
  place->second = checked_sum(place->second, coefficient);
  if (place->second == 0) parts_.erase(place);
}

Term& Term::operator+=(const Term& other) {
  for (const auto& [monomial, coefficient] : other.parts_) add(monomial, coefficient);
  return *this;
}

Term& Term::operator*=(const Term& other) {
  Term result;
  for (const auto& [a, x] : parts_) {
    for (const auto& [b, y] : other.parts_) {
      Monomial both = a;
      both.insert(both.end(), b.begin(), b.end());
      std::sort(both.begin(), both.end());
      result.add(both, checked_product(x, y));
    }
  }
  return *this = std::move(result);
}

// ---- Formulas ----

Formula::Formula(bool value) {
  if (!value) node_ = std::make_shared<const Node>(Node{Kind::constant, false, {}, {}});
}

const Formula::Node& Formula::node() const {
  static const Node kTrue;
  return node_ ? *node_ : kTrue;
}

Formula Formula::at_most_zero(const Term& term) {
  if (term.is_constant()) return term.constant() <= 0;
  return Formula(Node{Kind::at_most_zero, true, term, {}});
}

Formula Formula::zero(const Term& term) {
  if (term.is_constant()) return term.constant() == 0;
  return Formula(Node{Kind::zero, true, term, {}});
}

Formula operator!(const Formula& a) {
  const Formula::Node& node = a.node();
  if (node.kind == Formula::Kind::constant) return !node.value;
  if (node.kind == Formula::Kind::negation) return node.parts[0];
  if (node.kind == Formula::Kind::at_most_zero) return Formula::at_most_zero(Term(1) - node.term);
  return Formula(Formula::Node{Formula::Kind::negation, true, {}, {a}});
}

Formula Formula::joined(Kind kind, const Formula& a, const Formula& b) {
  const bool neutral = kind == Kind::all;
  if (a.is(neutral) || b.is(!neutral)) return b;
  if (b.is(neutral) || a.is(!neutral)) return a;
  std::vector<Formula> parts;
  for (const Formula* side : {&a, &b}) {
    const std::vector<Formula> own = side->node().kind == kind ? side->node().parts : std::vector<Formula>{*side};
    for (const Formula& part : own) {
      if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(part);
    }
  }
  if (parts.size() == 1) return parts[0];
  return Formula(Node{kind, true, {}, std::move(parts)});
}

bool operator==(const Formula& a, const Formula& b) {
  if (a.node_ == b.node_) return true;
  const Formula::Node &x = a.node(), &y = b.node();
  return x.kind == y.kind && x.value == y.value && x.term == y.term && x.parts == y.parts;
}

bool operator<(const Formula& a, const Formula& b) {
  const Formula::Node &x = a.node(), &y = b.node();
  if (x.kind != y.kind) return x.kind < y.kind;
  if (x.value != y.value) return x.value < y.value;
  if (!(x.term == y.term)) return x.term < y.term;
  return x.parts < y.parts;
}

Formula between(const Term& low, const Term& value, const Term& high) {
  return less_equal(low, value) & less(value, high);
}
Formula all_of(const std::vector<Formula>& parts) {
  Formula result;
  for (const Formula& part : parts) result = result & part;
  return result;
}
Formula any_of(const std::vector<Formula>& parts) {
  Formula result(false);
  for (const Formula& part : parts) result = result | part;
  return result;
}

// ---- Atoms ----

Space::Space() {
  for (const char* name : {"plane", "row", "column"}) symbol(name, Atom::Owner::lane_of_tile);
}

Term Space::made(Atom atom) {
  if (atom.kind != Atom::Kind::symbol) {
    std::string name = std::to_string(static_cast<int>(atom.kind)) + atom.name + ":" + key(atom.condition);
    for (const Term& operand : atom.operands) name += ";" + key(operand);
    const auto [place, is_new] = known_.try_emplace(name, size());
    if (!is_new) return Term::atom(place->second);
  }
  atoms_.push_back(std::move(atom));
  return Term::atom(size() - 1);
}

Term Space::symbol(const std::string& name, Atom::Owner owner, bool nonnegative) {
  Atom atom;
  atom.name = name;
  atom.owner = owner;
  atom.nonnegative = nonnegative;
  if (nonnegative) atom.range = less_equal(0, Term::atom(size()));
  return made(std::move(atom));
}

void Space::say(const Term& symbol, const Formula& range) {
  Atom& atom = atoms_[static_cast<std::size_t>(symbol.parts().begin()->first.at(0))];
  atom.range = atom.range & range;
}

Term Space::bounded(const std::string& name, Atom::Owner owner, const Term& low, const Term& high) {
  if (low == high - 1) return low;
  const Term result = symbol(name, owner, nonnegative(low));
  say(result, between(low, result, high));
  return result;
}

bool Space::nonnegative(const Term& term) const {
  return std::all_of(term.parts().begin(), term.parts().end(), [&](const auto& part) {
    return part.second > 0 &&
           std::all_of(part.first.begin(), part.first.end(), [&](int id) { return (*this)[id].nonnegative; });
  });
}

Term Space::floor_quotient(const Term& a, const Term& b) {
  if (b == Term(1)) return a;
  Term whole, rest = a;
  if (b.is_constant() && b.constant() > 0) {
    // floor((b * whole + rest) / b) = whole + floor(rest / b)
    const std::int64_t divisor = b.constant();
    for (const auto& [monomial, coefficient] : a.parts()) {
      Term part(1);
      for (const int id : monomial) part *= Term::atom(id);
      if (coefficient % divisor != 0 && !monomial.empty()) continue;
      const std::int64_t times = floored(coefficient, divisor);
      whole += part * Term(times);
      rest += part * Term(-times * divisor);
    }
    if (rest.is_constant()) return whole;
  }
  Atom atom;
  atom.kind = Atom::Kind::quotient;
  atom.operands = {rest, b};
  atom.nonnegative = nonnegative(rest) && nonnegative(b);
  return whole + made(std::move(atom));
}

Term Space::quotient(const Term& a, const Term& b) {
  if (a.is_constant() && b.is_constant() && b.constant() != 0) return a.constant() / b.constant();
  const Formula positive = less(0, b);
  if (!positive.is(true) && !nonnegative(b)) throw NotDecided("a division by what may be negative");
  if (nonnegative(a)) return floor_quotient(a, b);
  return choice(less_equal(0, a), floor_quotient(a, b), -floor_quotient(-a, b));
}

Term Space::value(const std::string& function, std::vector<Term> operands, std::int64_t low, std::int64_t high) {
  Atom atom;
  atom.kind = Atom::Kind::value;
  atom.name = function;
  atom.operands = std::move(operands);
  atom.nonnegative = low >= 0;
  const Term result = made(std::move(atom));
  const int id = result.parts().begin()->first[0];
  atoms_[static_cast<std::size_t>(id)].range = less_equal(low, result) & less_equal(result, high);
  return result;
}

Term Space::choice(const Formula& condition, const Term& a, const Term& b) {
  if (condition.is(true) || a == b) return a;
  if (condition.is(false)) return b;
  Atom atom;
  atom.kind = Atom::Kind::choice;
  atom.condition = condition;
  atom.operands = {a, b};
  atom.nonnegative = nonnegative(a) && nonnegative(b);
  return made(std::move(atom));
}

// ---- Replacing ----

Term Space::replaced_atom(int id, const Replacement& by, std::map<int, Term>& done) {
  if (const Term* const other = by(id)) return *other;
  if ((*this)[id].kind == Atom::Kind::symbol) return Term::atom(id);
  if (const auto found = done.find(id); found != done.end()) return found->second;
  const Atom atom = (*this)[id];  // atoms_ may grow
  std::vector<Term> operands;
  for (const Term& operand : atom.operands) operands.push_back(replaced(operand, by, done));
  Term result;
  if (atom.kind == Atom::Kind::quotient) {
    result = floor_quotient(operands[0], operands[1]);
  } else if (atom.kind == Atom::Kind::choice) {
    result = choice(replaced(atom.condition, by, done), operands[0], operands[1]);
  } else {
    Atom copy;
    copy.kind = Atom::Kind::value;
    copy.name = atom.name;
    copy.operands = operands;
    copy.nonnegative = atom.nonnegative;
    result = made(std::move(copy));
    const int to = result.parts().begin()->first[0];
    const Replacement self = [&](int other) { return other == id ? &result : nullptr; };
    if (to != id) {
      std::map<int, Term> fresh;
      atoms_[static_cast<std::size_t>(to)].range = replaced(atom.range, self, fresh);
    }
  }
  done[id] = result;
  return result;
}

Term Space::replaced(const Term& term, const Replacement& by, std::map<int, Term>& done) {
  Term result;
  for (const auto& [monomial, coefficient] : term.parts()) {
    Term product(coefficient);
    for (const int id : monomial) product *= replaced_atom(id, by, done);
    result += product;
  }
  return result;
}

Formula Space::replaced(const Formula& formula, const Replacement& by, std::map<int, Term>& done) {
  const Formula::Node& node = formula.node();
  switch (node.kind) {
    case Formula::Kind::constant:
      return formula;
    case Formula::Kind::at_most_zero:
      return Formula::at_most_zero(replaced(node.term, by, done));
    case Formula::Kind::zero:
      return Formula::zero(replaced(node.term, by, done));
    case Formula::Kind::negation:
      return !replaced(node.parts[0], by, done);
    case Formula::Kind::all:
    case Formula::Kind::any:
      break;
  }
  std::vector<Formula> parts;
  for (const Formula& part : node.parts) parts.push_back(replaced(part, by, done));
  return node.kind == Formula::Kind::all ? all_of(parts) : any_of(parts);
}

Term Space::replaced(const Term& term, const Replacement& by) {
  std::map<int, Term> done;
  return replaced(term, by, done);
}
Formula Space::replaced(const Formula& formula, const Replacement& by) {
  std::map<int, Term> done;
  return replaced(formula, by, done);
}

Term Space::primed(const Term& term) {
  return replaced(term, [this](int id) -> const Term* {
    if ((*this)[id].owner != Atom::Owner::program) return nullptr;
    if (const auto found = primes_.find(id); found != primes_.end()) return &found->second;
    const Term other = symbol((*this)[id].name + "'", Atom::Owner::program, (*this)[id].nonnegative);
    primes_[id] = other;  // before its range, which speaks of it
    const int to = other.parts().begin()->first[0];
    const Formula range = primed((*this)[id].range);
    atoms_[static_cast<std::size_t>(to)].range = range;
    return &primes_[id];
  });
}
Formula Space::primed(const Formula& formula) {
  // As above, through the terms in it.
  return replaced(formula, [this](int id) -> const Term* {
    if ((*this)[id].owner != Atom::Owner::program) return nullptr;
    primed(Term::atom(id));
    return &primes_[id];
  });
}

void Space::atoms_of(const Term& term, std::vector<bool>& found) const {
  found.resize(atoms_.size());
  for (const auto& [monomial, coefficient] : term.parts()) {
    for (const int id : monomial) {
      if (found[static_cast<std::size_t>(id)]) continue;
      found[static_cast<std::size_t>(id)] = true;
      for (const Term& operand : (*this)[id].operands) atoms_of(operand, found);
      atoms_of((*this)[id].condition, found);
    }
  }
}
void Space::atoms_of(const Formula& formula, std::vector<bool>& found) const {
  atoms_of(formula.node().term, found);
  for (const Formula& part : formula.node().parts) atoms_of(part, found);
}

std::string Space::signature(const Term& term, std::map<int, std::string>& names,
                             std::map<std::string, std::string>* functions) const {
  std::string result;
  for (const auto& [monomial, coefficient] : term.parts()) {
    result += std::to_string(coefficient);
    for (const int id : monomial) {
      const Atom& atom = (*this)[id];
      if (atom.kind == Atom::Kind::symbol) {
        const bool own = atom.owner == Atom::Owner::program;
        const auto [name, is_new] = names.try_emplace(id, own ? "p" + std::to_string(names.size()) : atom.name);
        result += "*" + name->second;
        continue;
      }
      result += "*" + std::to_string(static_cast<int>(atom.kind));
      if (atom.kind == Atom::Kind::value) {
        if (atom.name.ends_with("[]")) {
          result += atom.name;
        } else if (functions != nullptr) {
          result += functions->try_emplace(atom.name, "f" + std::to_string(functions->size())).first->second;
        }
      }
      result += "{" + signature(atom.condition, names, functions);
      for (const Term& operand : atom.operands) result += ";" + signature(operand, names, functions);
      result += "}";
    }
    result += "+";
  }
  return result;
}

std::string Space::signature(const Formula& formula, std::map<int, std::string>& names,
                             std::map<std::string, std::string>* functions) const {
  const Formula::Node& node = formula.node();
  std::string result = std::to_string(static_cast<int>(node.kind)) + (node.value ? "" : "f") +
                       signature(node.term, names, functions) + "(";
  for (const Formula& part : node.parts) result += signature(part, names, functions) + ",";
  return result + ")";
}

}  // namespace octile::tile::symbolic
