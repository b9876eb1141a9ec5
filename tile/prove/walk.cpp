// The run of a kernel whose sizes are symbols: decisions, loops, and integers.
#include <algorithm>
#include <limits>
#include <memory>

#include "octile/tile/symbolic.h"

namespace octile::tile {

using symbolic::Formula;
using symbolic::Term;
using symbolic::Walk;

namespace symbolic {

namespace {

thread_local Walk* under_way = nullptr;

constexpr std::size_t kMaxDecisions = 64;

std::vector<Formula> ranges(const std::vector<Pass>& loops) {
  std::vector<Formula> result;
  for (const Pass& pass : loops) result.push_back(pass.range);
  return result;
}

}  // namespace

Walk* walk_under_way() { return under_way; }
Walk& the_walk() {
  if (under_way == nullptr) throw NotDecided("a symbol outside of a proof");
  return *under_way;
}
Under::Under(Walk* run) : outer_(std::exchange(under_way, run)) {}
Under::~Under() { under_way = outer_; }

void Lanes::take(const Lanes& other) {
  for (const Undefined& u : other.undefined) {
    const auto same = [&](const Undefined& mine) { return mine.where == u.where && mine.load.line == u.load.line; };
    if (std::none_of(undefined.begin(), undefined.end(), same)) undefined.push_back(u);
  }
  for (const Checked& c : other.checked) {
    const auto same = [&](const Checked& mine) { return mine.value == c.value && mine.bits == c.bits; };
    if (std::none_of(checked.begin(), checked.end(), same)) checked.push_back(c);
  }
}

Term TensorFacts::size() const {
  Term result(1);
  for (const Term& side : shape) result *= side;
  return result;
}

std::vector<Formula> Walk::conditions() const {
  std::vector<Formula> result = ranges(loops);
  for (const Condition& condition : here_) result.push_back(condition.formula);
  return result;
}

namespace {
// (p, r, 0) of the result is (0, p, r).
template <class T>
T as_column(Space& space, const T& of) {
  static const Term kZero, kPlanes = Term::atom(Space::kPlane), kRows = Term::atom(Space::kRow);
  return space.replaced(of, [](int id) -> const Term* {
    return id == Space::kPlane ? &kZero : id == Space::kRow ? &kPlanes : id == Space::kColumn ? &kRows : nullptr;
  });
}
}  // namespace
Term Walk::column(const Term& term) { return as_column(space, term); }
Formula Walk::column(const Formula& formula) { return as_column(space, formula); }

bool Walk::decide(const Formula& formula) {
  if (formula.is(true)) return true;
  if (formula.is(false)) return false;
  std::vector<Formula> facts = conditions();
  for (const Formula& fact : facts) {  // decided already
    if (fact == formula) return true;
    if (fact == !formula) return false;
  }
  bool choice = true;
  if (decided_ < forced) {
    choice = decisions[decided_];
  } else {
    if (decided_ >= kMaxDecisions) throw NotDecided("more than 64 conditions on sizes on one way through the kernel");
    const bool second = std::any_of(loops.begin(), loops.end(), [](const Pass& pass) { return pass.number > 0; });
    facts.push_back(formula);
    const bool may_hold = feasible(facts);
    facts.back() = !formula;
    const bool may_fail = !may_hold || feasible(facts);
    choice = may_hold;
    decisions.resize(decided_);
    decisions.push_back(choice);
    if (may_hold && may_fail) {
      skipped = skipped || (second && !all_second_passes);
      if (!second || all_second_passes) open.push_back(decided_);
    }
  }
  ++decided_;
  // It holds as long as the iterations do that it speaks of.
  std::vector<bool> atoms;
  space.atoms_of(formula, atoms);
  std::size_t depth = loops.size();
  while (depth > 0 && !atoms[static_cast<std::size_t>(loops[depth - 1].iteration.parts().begin()->first[0])]) --depth;
  here_.push_back({choice ? formula : !formula, depth});
  if (depth == 0) {
    path.conditions.push_back(here_.back().formula);
    know(here_.back().formula);
  }
  return choice;
}

void Walk::know(const Formula& condition) {
  const Formula::Node& node = condition.node();
  if (node.kind != Formula::Kind::zero || node.term.parts().size() > 2) return;
  const auto& [monomial, coefficient] = *node.term.parts().rbegin();
  if (monomial.size() != 1 || (coefficient != 1 && coefficient != -1)) return;
  if (node.term.parts().size() == 2 && !node.term.parts().begin()->first.empty()) return;
  known_[monomial[0]] = Term(-coefficient * node.term.constant());
}

Term Walk::with_known_sizes(const Term& term) {
  if (known_.empty()) return term;
  return space.replaced(term, [&](int id) {
    const auto found = known_.find(id);
    return found == known_.end() ? nullptr : &found->second;
  });
}

void Walk::demand(const Formula& must, const std::string& what, const Term& value) {
  if (must.is(true)) return;
  Demand demand{must, what, loops, conditions(), static_cast<int>(launches.size()) - 1, value, {}, {}};
  demand.grid = {1, 1, 1};
  if (!launches.empty()) {
    demand.program = launches.back().program;
    demand.grid = launches.back().grid;
  }
  path.demands.push_back(std::move(demand));
}

void Walk::add(Event event) {
  event.launch = static_cast<int>(launches.size()) - 1;
  event.program = launches.back().program;
  event.grid = launches.back().grid;
  event.position = position++;
  event.since = event.access == Access::load ? since : -1;
  event.loops = loops;
  event.path = conditions();
  path.events.push_back(std::move(event));
}

void Walk::enter(int number, const Term& first, const Term& last, const Term& step, int loop, bool pipeline) {
  Pass pass;
  pass.loop = loop;
  pass.number = number;
  pass.pipeline = pipeline;
  pass.iteration = space.symbol("k" + std::to_string(loop) + (number == 0 ? "" : "b"), Atom::Owner::program);
  const bool backwards = step.is_constant() && step.constant() < 0;
  states_.resize(loops.size() + (number > 0 ? 1 : 0));
  if (number == 0) {
    states_.push_back({birth(), opaque_count_, pass.iteration, !(backwards ? less(last, first) : less(first, last))});
  } else {
    states_.back().pass = static_cast<std::size_t>(number);
  }
  const Term value = first + step * pass.iteration;
  pass.range = less_equal(0, pass.iteration) & (backwards ? less(last, value) : less(value, last));
  space.say(pass.iteration, pass.range);
  loops.push_back(pass);
}

void Walk::leave() {
  const Pass pass = std::move(loops.back());
  loops.pop_back();
  std::erase_if(here_, [&](const Condition& condition) { return condition.depth > loops.size(); });
  if (pass.number == 0) return;
  const LoopState state = std::move(states_.back());
  states_.pop_back();
  if (!carries && !settled(state, pass.iteration)) carries = true;
  // What follows has the values that the second pass left. It has to hold for those of no pass, too.
  if (carries || begins_as_it_ends(state)) return;
  std::vector<Formula> facts = conditions();
  facts.push_back(state.empty);
  carries = !state.empty.is(false) && feasible(facts);
}

// ---- What a loop carries on ----

std::int64_t birth_now() { return under_way == nullptr ? 0 : under_way->birth(); }
bool older_than_a_loop(std::int64_t born) { return under_way != nullptr && under_way->older_than_a_loop(born); }

void Walk::assigned(const void* variable, std::int64_t born, const Lanes& before, const Lanes& after) {
  for (LoopState& state : states_) {
    if (born >= state.start) continue;
    auto& values = state.variables.try_emplace(variable, std::array<Lanes, 3>{before, before, before}).first->second;
    for (std::size_t i = state.pass + 1; i < values.size(); ++i) values[i] = after;
  }
}

// The body of a loop is the same function of its variables and its iteration each time. So if the second pass leaves
// them as the first one did but for the iteration's number, every later one does too, and begins as the second did.
bool Walk::settled(const LoopState& state, const Term& second_iteration) const {
  const int second = second_iteration.parts().begin()->first[0];
  return signature(state, 1, second) == signature(state, 2, second);
}

// Whether the values before a loop are also some of those that are known to be possible after it.
bool Walk::begins_as_it_ends(const LoopState& state) const {
  const auto any_integer = [&](const Term& term) {  // of a type
    if (term.parts().size() != 1) return false;
    const auto& [monomial, coefficient] = *term.parts().begin();
    if (monomial.size() != 1 || coefficient != 1) return false;
    const Atom& atom = space[monomial[0]];
    return atom.kind == Atom::Kind::value && !atom.name.ends_with("[]");
  };
  const auto any_truth = [&](const Formula& formula) {
    const Formula::Node& node = formula.node();
    return node.kind == Formula::Kind::negation && node.parts[0].node().kind == Formula::Kind::zero &&
           any_integer(node.parts[0].node().term);
  };
  for (const auto& [variable, values] : state.variables) {
    const Lanes &before = values[0], &after = values[2];
    if (!(before.number == after.number || any_integer(after.number))) return false;
    if (!(before.truth == after.truth || any_truth(after.truth))) return false;
    Lanes both = after;
    both.take(before);
    if (both.undefined.size() != after.undefined.size() || both.checked.size() != after.checked.size()) return false;
  }
  return true;
}

std::string Walk::signature(const LoopState& state, std::size_t after, int second_iteration) const {
  std::map<int, std::string> outside;  // symbols that are the same in both passes
  const auto keep_name = [&](const Term& term) {
    std::vector<bool> atoms;
    space.atoms_of(term, atoms);
    for (std::size_t id = 0; id < atoms.size(); ++id) {
      if (atoms[id]) outside[static_cast<int>(id)] = "o" + std::to_string(id);
    }
  };
  for (const Pass& pass : loops) {
    if (pass.iteration.parts().begin()->first[0] != second_iteration) keep_name(pass.iteration);
  }
  keep_name(state.iteration);
  if (!launches.empty()) {
    for (const Term& program : launches.back().program) keep_name(program);
  }
  std::map<std::string, std::string> functions;
  for (int i = 0; i < space.size(); ++i) {
    const Atom& atom = space[i];
    if (atom.kind != Atom::Kind::value || atom.name.ends_with("[]")) continue;
    if (std::stoi(atom.name.substr(1)) < state.opaques) functions[atom.name] = atom.name;
  }
  const auto of_first_pass = [&](int id) { return id == second_iteration ? &state.iteration : nullptr; };
  std::map<int, std::string> names = outside;
  std::string result;
  for (const auto& [variable, values] : state.variables) {
    const Lanes& lanes = values[after];
    result += "|" + space.signature(space.replaced(lanes.number, of_first_pass), names, &functions);
    result += "," + space.signature(space.replaced(lanes.truth, of_first_pass), names, &functions);
    std::set<std::string> parts;  // of a sum, say: those of each iteration are alike
    for (const Undefined& u : lanes.undefined) {
      std::map<int, std::string> own = outside;
      parts.insert("u" + std::to_string(u.load.line) + ":" + std::to_string(u.load.column) + " " +
                   space.signature(space.replaced(u.where, of_first_pass), own));
    }
    for (const Checked& c : lanes.checked) {
      std::map<int, std::string> own = outside;
      parts.insert("c" + std::to_string(c.bits) + " " + space.signature(space.replaced(c.value, of_first_pass), own));
    }
    for (const std::string& part : parts) result += ";" + part;
  }
  return result;
}

void assign(std::shared_ptr<const Lanes>& lanes, const std::shared_ptr<const Lanes>& next, const void* variable,
            std::int64_t born) {
  if (older_than_a_loop(born)) {
    under_way->assigned(variable, born, lanes ? *lanes : Lanes{}, next ? *next : Lanes{});
  }
  lanes = next;
}

Term Walk::opaque(const std::array<int, 3>& sides, std::int64_t low, std::int64_t high) {
  std::string name = "v" + std::to_string(opaque_count_++) + "@";
  for (std::size_t i = 0; i < decided_; ++i) name += decisions[i] ? "t" : "f";
  std::vector<Term> operands;
  if (!launches.empty()) operands.assign(launches.back().program.begin(), launches.back().program.end());
  for (const Pass& pass : loops) operands.push_back(pass.iteration);
  for (int axis = 0; axis < 3; ++axis) {
    if (sides[static_cast<std::size_t>(axis)] > 1) operands.push_back(Term::atom(axis));
  }
  return space.value(name, operands, low, high);
}

// ---- Integers ----

Term computed(Space& space, Operator op, const Term& a, const Term& b) {
  const auto power = [](const Term& count) {
    if (!count.is_constant() || count.constant() < 0 || count.constant() > 31) {
      throw NotDecided("a shift of an index by what is not a number from 0 to 31");
    }
    return std::int64_t{1} << count.constant();
  };
  switch (op) {
    case Operator::add:
      return a + b;
    case Operator::subtract:
      return a - b;
    case Operator::multiply:
      return a * b;
    case Operator::divide:
      return space.quotient(a, b);
    case Operator::remainder:
      return a - b * space.quotient(a, b);
    case Operator::shift_left:
      return a * Term(power(b));
    case Operator::shift_right:
      return space.floor_quotient(a, Term(power(b)));
    default:  // bit_and
      break;
  }
  const Term& mask = b.is_constant() ? b : a;
  const Term& of = b.is_constant() ? a : b;
  const std::int64_t bits = mask.constant();
  if (!mask.is_constant() || bits < 0 || (bits & (bits + 1)) != 0) {
    throw NotDecided("& of an index with what is not 2^n - 1");
  }
  return of - Term(bits + 1) * space.floor_quotient(of, Term(bits + 1));
}

Formula compared(Operator op, const Term& a, const Term& b) {
  switch (op) {
    case Operator::less:
      return less(a, b);
    case Operator::less_equal:
      return less_equal(a, b);
    case Operator::greater:
      return less(b, a);
    case Operator::greater_equal:
      return less_equal(b, a);
    case Operator::equal:
      return equal(a, b);
    default:  // not_equal
      return !equal(a, b);
  }
}

namespace {

s64 computed(Operator op, s64 x, s64 y) {
  switch (op) {
    case Operator::add:
      return x + y;
    case Operator::subtract:
      return x - y;
    case Operator::multiply:
      return x * y;
    case Operator::divide:
      return y == 0 ? 0 : x / y;
    case Operator::remainder:
      return y == 0 ? x : x % y;
    case Operator::shift_left:
      return x << (y & 31);
    case Operator::shift_right:
      return x >> (y & 31);
    default:  // bit_and
      return x & y;
  }
}

}  // namespace

SymbolicInt computed(Operator op, SymbolicInt a, SymbolicInt b) {
  if (a.value.is_number() && b.value.is_number()) {
    const s64 x = static_cast<s64>(a.value), y = static_cast<s64>(b.value);
    return SymbolicInt(static_cast<s32>(computed(op, x, y)));
  }
  Walk& walk = the_walk();
  const Term left = a.term(), right = b.term();
  if (op == Operator::divide || op == Operator::remainder) {
    walk.demand(!equal(right, 0), "a division by 0", right);
  }
  const Term result = computed(walk.space, op, left, right);
  if (op == Operator::add || op == Operator::subtract || op == Operator::multiply || op == Operator::shift_left) {
    walk.demand(
        less_equal(std::numeric_limits<s32>::min(), result) & less_equal(result, std::numeric_limits<s32>::max()),
        "32 bits overflow", result);
  }
  return SymbolicInt(result);
}

bool decided(Operator op, SymbolicInt a, SymbolicInt b) {
  const Formula formula = compared(op, a.term(), b.term());
  if (formula.is(true) || formula.is(false)) return formula.is(true);
  return the_walk().decide(formula);
}

}  // namespace symbolic

SymbolicIndex::SymbolicIndex(const Term& term) {
  if (term.is_constant()) {
    number_ = term.constant();
  } else {
    term_ = symbolic::the_walk().keep(term);
  }
}

Term SymbolicIndex::term() const {
  if (term_ == nullptr) return number_;
  Walk* const walk = symbolic::walk_under_way();
  return walk == nullptr ? *term_ : walk->with_known_sizes(*term_);
}

void SymbolicIndex::note(const SymbolicIndex& next) const {
  symbolic::Lanes before, after;
  before.number = term();
  after.number = next.term();
  symbolic::the_walk().assigned(this, born_, before, after);
}

SymbolicOverflow& SymbolicOverflow::operator=(const SymbolicOverflow& other) {
  if (symbolic::older_than_a_loop(born)) {
    symbolic::Lanes before, after;
    before.checked = checked;
    after.checked = other.checked;
    symbolic::the_walk().assigned(this, born, before, after);
  }
  checked = other.checked;
  return *this;
}

SymbolicIndex::operator s64() const {
  if (term_ != nullptr) throw symbolic::NotDecided("a size becomes a number that the prover cannot follow");
  return number_;
}

void SymbolicOverflow::merge(const SymbolicOverflow& other) {
  symbolic::Lanes lanes;
  lanes.checked = std::move(checked);
  symbolic::Lanes more;
  more.checked = other.checked;
  lanes.take(more);
  checked = std::move(lanes.checked);
}

void SymbolicOverflow::to_column() {
  for (symbolic::Checked& c : checked) c.value = symbolic::the_walk().column(c.value);
}

// ---- Loops ----

SymbolicRange::SymbolicRange(SymbolicInt first, SymbolicInt last, SymbolicInt step)
    : first_(first), last_(last), step_(step), now_(first), exceptions_(std::uncaught_exceptions()) {
  Walk* const walk = symbolic::walk_under_way();
  symbolic_ = walk != nullptr;
  if (!symbolic_) return;
  loop_ = walk->next_loop();
  depth_ = walk->loops.size();
  const Term by = step.term();
  if (by.is_constant() && by.constant() == 0) throw symbolic::NotDecided("a loop whose step is 0");
  walk->demand(less_equal(last.term() + by, std::numeric_limits<s32>::max()), "32 bits overflow", last.term() + by);
  if (!by.is_constant()) walk->demand(less(0, by), "a loop whose step is not above 0", by);
}

SymbolicRange::~SymbolicRange() {
  if (!symbolic_ || ended_) return;
  Walk* const walk = symbolic::walk_under_way();
  if (walk == nullptr) return;
  if (std::uncaught_exceptions() == exceptions_) walk->path.left_a_loop = true;
  while (walk->loops.size() > depth_) walk->leave();
}

void SymbolicRange::next() {
  if (!symbolic_) now_ = now_ + step_;
}

bool SymbolicRange::goes_on() {
  if (!symbolic_) {
    const s64 now = static_cast<s64>(now_.value), last = static_cast<s64>(last_.value);
    return static_cast<s64>(step_.value) > 0 ? now < last : now > last;
  }
  Walk& walk = *symbolic::walk_under_way();
  if (passes_ > 0) walk.leave();
  if (passes_ == 2) {
    ended_ = true;
    return false;
  }
  walk.enter(passes_, first_.term(), last_.term(), step_.term(), loop_, false);
  // Created again, it is not a variable that the loop changes.
  std::construct_at(&now_, SymbolicInt(first_.term() + step_.term() * walk.loops.back().iteration));
  ++passes_;
  return true;
}

}  // namespace octile::tile
