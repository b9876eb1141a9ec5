#include "prove/solver.h"

#include <z3++.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

namespace octile::tile::symbolic {

// Interrupts the solver when its time is over. Z3 4.8.12, which Debian 12 has, can wait forever in the timer of its own
// that a time limit and its tactics use.
class Watchdog {
 public:
  explicit Watchdog(z3::context& context) : context_(context), thread_([this] { watch(); }) {}
  ~Watchdog() {
    set({}, true);
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  using Time = std::chrono::steady_clock::time_point;
  void set(std::optional<Time> deadline, bool ends = false) {
    {
      const std::lock_guard lock(mutex_);
      deadline_ = deadline;
      ends_ = ends;
    }
    changed_.notify_one();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!ends_) {
      if (!deadline_) {
        changed_.wait(lock);
      } else if (std::chrono::steady_clock::now() < *deadline_) {
        changed_.wait_until(lock, Time(*deadline_));
      } else {
        context_.interrupt();
        deadline_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);  // should it not have begun yet
      }
    }
  }

  z3::context& context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Time> deadline_;
  bool ends_ = false;
  std::thread thread_;
};

struct Solver::Z3 {
  z3::context context;
  Watchdog watchdog{context};
};

namespace {

using Monomial = Term::Monomial;

// One question.
class Question {
 public:
  Question(Space& space, z3::context& context, Solver::Products products)
      : space_(space),
        context_(context),
        exact_(products == Solver::Products::exact),
        solver_(context, z3::solver::simple()) {}

  Solver::Answer ask(const std::vector<Formula>& facts, Model* model) {
    for (const Formula& fact : facts) {
      if (fact.is(false)) return Solver::Answer::impossible;
      solver_.add(translated(fact));
    }
    while (!waiting_.empty() || (!exact_ && explained_ < products_.size())) {  // what is known of the atoms
      if (waiting_.empty()) {
        explain(Monomial(products_[explained_++]));
      } else {
        const Formula fact = waiting_.back();
        waiting_.pop_back();
        solver_.add(translated(fact));
      }
    }
    const z3::check_result result = solver_.check();
    if (result == z3::unsat) return Solver::Answer::impossible;
    if (result == z3::unknown) return Solver::Answer::unknown;
    if (model != nullptr) {
      const z3::model found = solver_.get_model();
      for (const auto& [id, expression] : atoms_) {
        std::int64_t value = 0;
        if (found.eval(expression, true).is_numeral_i64(value)) model->atoms[id] = value;
      }
    }
    return Solver::Answer::possible;
  }

 private:
  z3::expr number(std::int64_t value) { return context_.int_val(value); }

  z3::expr translated(const Term& term) {
    z3::expr_vector sum(context_);
    for (const auto& [monomial, coefficient] : term.parts()) {
      if (monomial.empty()) {
        sum.push_back(number(coefficient));
      } else if (coefficient == 1) {
        sum.push_back(product(monomial));
      } else {
        sum.push_back(number(coefficient) * product(monomial));
      }
    }
    if (sum.empty()) return number(0);
    return sum.size() == 1 ? sum[0] : z3::sum(sum);
  }

  z3::expr product(const Monomial& monomial) {
    if (monomial.size() == 1) return atom(monomial[0]);
    if (exact_) {
      z3::expr result = atom(monomial[0]);
      for (std::size_t i = 1; i < monomial.size(); ++i) result = result * atom(monomial[i]);
      return result;
    }
    std::string name = "m";
    for (const int id : monomial) {
      name += "_" + std::to_string(id);
      atom(id);  // its range
    }
    if (known_products_.insert(monomial).second) products_.push_back(monomial);
    return context_.int_const(name.c_str());
  }

  // Of a product of what is not negative.
  void explain(const Monomial& monomial) {
    if (!std::all_of(monomial.begin(), monomial.end(), [&](int id) { return space_[id].nonnegative; })) return;
    const z3::expr whole = product(monomial);
    solver_.add(whole >= 0);
    for (std::size_t i = 0; i < monomial.size(); ++i) {
      if (i > 0 && monomial[i] == monomial[i - 1]) continue;
      Monomial others = monomial;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      const z3::expr factor = atom(monomial[i]), rest = product(others);
      solver_.add(z3::implies(factor == 0, whole == 0));
      solver_.add(z3::implies(factor == 1, whole == rest));
      solver_.add(z3::implies(factor >= 1, whole >= rest));
      solver_.add(z3::implies(factor >= 2, whole >= 2 * rest));
    }
  }

  z3::expr atom(int id) {
    if (const auto found = atoms_.find(id); found != atoms_.end()) return found->second;
    const Atom atom = space_[id];  // space_ may grow
    const std::string name = "a" + std::to_string(id);
    z3::expr result(context_);
    if (atom.kind == Atom::Kind::value) {
      z3::sort_vector sorts(context_);
      z3::expr_vector arguments(context_);
      for (const Term& operand : atom.operands) {
        sorts.push_back(context_.int_sort());
        arguments.push_back(translated(operand));
      }
      const z3::func_decl function = context_.function(atom.name.c_str(), sorts, context_.int_sort());
      result = function(arguments);
    } else {
      result = context_.int_const(name.c_str());
    }
    atoms_.emplace(id, result);
    const Term self = Term::atom(id);
    waiting_.push_back(atom.range);
    if (atom.nonnegative) waiting_.push_back(less_equal(0, self));
    if (atom.kind == Atom::Kind::quotient) {
      const Term &a = atom.operands[0], &b = atom.operands[1];
      waiting_.push_back(implies(less(0, b), less_equal(b * self, a) & less(a, b * self + b)));
    } else if (atom.kind == Atom::Kind::choice) {
      waiting_.push_back(implies(atom.condition, equal(self, atom.operands[0])));
      waiting_.push_back(implies(!atom.condition, equal(self, atom.operands[1])));
    }
    return result;
  }

  z3::expr translated(const Formula& formula) {
    const Formula::Node& node = formula.node();
    switch (node.kind) {
      case Formula::Kind::constant:
        return context_.bool_val(node.value);
      case Formula::Kind::at_most_zero:
        return translated(node.term) <= 0;
      case Formula::Kind::zero:
        return translated(node.term) == 0;
      case Formula::Kind::negation:
        return !translated(node.parts[0]);
      case Formula::Kind::all:
      case Formula::Kind::any:
        break;
    }
    z3::expr_vector parts(context_);
    for (const Formula& part : node.parts) parts.push_back(translated(part));
    return node.kind == Formula::Kind::all ? z3::mk_and(parts) : z3::mk_or(parts);
  }

  Space& space_;
  z3::context& context_;
  bool exact_;
  z3::solver solver_;
  std::map<int, z3::expr> atoms_;
  std::vector<Formula> waiting_;
  std::set<Monomial> known_products_;
  std::vector<Monomial> products_;
  std::size_t explained_ = 0;
};

}  // namespace

std::int64_t Model::at(const Term& term, const Space& space) const {
  std::int64_t sum = 0;
  for (const auto& [monomial, coefficient] : term.parts()) {
    std::int64_t product = coefficient;
    for (const int id : monomial) {
      if (const auto found = atoms.find(id); found != atoms.end()) {
        product *= found->second;
        continue;
      }
      const Atom& atom = space[id];
      if (atom.kind == Atom::Kind::quotient) {
        const std::int64_t a = at(atom.operands[0], space), b = at(atom.operands[1], space);
        product *= b == 0 ? 0 : a / b - (a % b != 0 && (a % b < 0) != (b < 0) ? 1 : 0);
      } else {
        product = 0;
      }
    }
    sum += product;
  }
  return sum;
}

Solver::Solver(Space& space) : space_(space), z3_(std::make_unique<Z3>()) {}
Solver::~Solver() = default;

Solver::Answer Solver::ask(const std::vector<Formula>& facts, Products products, int milliseconds, Model* model) {
  ++queries_;
  try {
    Question question(space_, z3_->context, products);
    z3_->watchdog.set(std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds));
    const Answer answer = question.ask(facts, model);
    z3_->watchdog.set({});
    return answer;
  } catch (const z3::exception& error) {
    z3_->watchdog.set({});
    if (std::string(error.msg()).find("cancel") != std::string::npos) return Answer::unknown;
    throw NotDecided(std::string("the solver: ") + error.msg());
  }
}

}  // namespace octile::tile::symbolic
