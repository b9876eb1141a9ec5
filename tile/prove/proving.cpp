#include "prove/proving.h"

#include <algorithm>
#include <limits>

namespace octile::tile {

using symbolic::Atom;
using symbolic::Demand;
using symbolic::Lanes;
using symbolic::Model;
using symbolic::NotDecided;
using symbolic::Pass;
using symbolic::Path;
using symbolic::Solver;
using symbolic::Space;
using symbolic::Term;
using symbolic::Undefined;
using symbolic::Walk;

namespace {

constexpr std::size_t kMaxPaths = 64;
struct TooManyWays {};
constexpr std::int64_t kMaxRunElements = 1 << 22;
constexpr int kMaxAttempts = 2;  // to refute a property, after which it is not decided

std::size_t at_index(int i) { return static_cast<std::size_t>(i); }
bool is_store(const symbolic::Event& event) { return event.access != tile::Access::load; }

void append(std::vector<symbolic::Formula>& to, const std::vector<symbolic::Formula>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

Proving::Proving(const std::function<void(Prover&)>& setup, const ProofLimits& limits)
    : setup_(setup), limits_(limits) {}

double Proving::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

Proving::Answer Proving::ask(const Facts& facts, int milliseconds) {
  if (seconds() > limits_.seconds) return Answer::unknown;
  return solver_.ask(facts, Solver::Products::linear, milliseconds_left(milliseconds));
}

symbolic::Term Proving::size(const std::string& name, std::int64_t min) {
  if (const auto found = named_.find("size " + name); found != named_.end()) return found->second;
  const Term result = space_.symbol(name, Atom::Owner::everybody, min >= 0);
  space_.say(result, symbolic::less_equal(min, result) & symbolic::less_equal(result, limits_.max_elements));
  sizes_.emplace_back(name, result);
  return named_["size " + name] = result;
}

symbolic::Term Proving::program(int launch, int axis, const Term& count) {
  const std::string name = std::string("program ") + "xyz"[axis] + (launch > 0 ? "#" + std::to_string(launch) : "");
  std::map<int, std::string> names;
  const std::string key = name + " of " + space_.signature(count, names);
  if (const auto found = named_.find(key); found != named_.end()) return found->second;
  return named_[key] = space_.bounded(name, Atom::Owner::program, 0, count);
}

// ---- Ways through the kernels ----

void Proving::explore() {
  for (bool again = true; again;) {
    again = false;
    try {
      explore(again);
    } catch (const TooManyWays&) {
      if (!all_second_passes_) throw NotDecided("more than 64 ways through the kernel, by conditions on sizes");
      all_second_passes_ = false;  // at least to refute it
      again = true;
    }
  }
  collect();
}

void Proving::explore(bool& again) {
  paths_.clear();
  skipped_ = carries_ = false;
  std::vector<std::vector<bool>> open{{}};
  std::vector<symbolic::TensorFacts> as_said;
  while (!open.empty()) {
    if (paths_.size() >= kMaxPaths) throw TooManyWays{};
    if (seconds() > limits_.seconds) throw NotDecided("no time to follow all ways through the kernel");
    Walk walk(space_);
    walk.decisions = open.back();
    walk.forced = open.back().size();
    open.pop_back();
    walk.stored = &stored_;
    walk.all_second_passes = all_second_passes_;
    walk.feasible = [this](const Facts& facts) { return ask(facts, 300) != Answer::impossible; };
    const symbolic::Under under(&walk);
    Prover prover;
    prover.proving_ = this;
    bool ends = false;
    try {
      setup_(prover);
    } catch (const symbolic::PathEnds&) {
      ends = true;
    }
    for (const std::size_t i : walk.open) {
      std::vector<bool> other(walk.decisions.begin(), walk.decisions.begin() + static_cast<std::ptrdiff_t>(i));
      other.push_back(!walk.decisions[i]);
      open.push_back(std::move(other));
    }
    if (ends) continue;
    for (const Event& event : walk.path.events) {
      if (!event.is_barrier && is_store(event) && stored_.insert(event.tensor).second) again = true;
    }
    std::vector<symbolic::TensorFacts> known = walk.tensors;
    for (symbolic::TensorFacts& tensor : known) {
      for (Term& side : tensor.shape) side = walk.with_known_sizes(side);
    }
    const auto same_shapes = [](const auto& a, const auto& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                        [](const auto& x, const auto& y) { return x.shape == y.shape; });
    };
    if (paths_.empty()) tensors_ = known, as_said = walk.tensors;
    if (!same_shapes(as_said, walk.tensors)) throw NotDecided("the shape of a tensor depends on a condition on sizes");
    if (!same_shapes(tensors_, known)) tensors_ = as_said;
    launches_ = walk.launches;
    skipped_ = skipped_ || walk.skipped;
    carries_ = carries_ || walk.carries;
    loops_ = std::max(loops_, walk.next_loop());
    paths_.push_back(std::move(walk.path));
  }
}

std::string Proving::signature(const Event& event) {
  std::map<int, std::string> names;
  std::string result = std::to_string(event.tensor) + " " + std::to_string(static_cast<int>(event.access)) + " " +
                       std::to_string(event.launch) + " " + std::to_string(event.where.line) + ":" +
                       std::to_string(event.where.column) + (event.since >= 0 ? "f" : "");
  for (const int side : event.sides) result += "," + std::to_string(side);
  for (const Pass& pass : event.loops) result += ";" + space_.signature(pass.range, names);
  result += "|" + space_.signature(event.index, names) + "|" + space_.signature(event.mask, names);
  for (const Formula& fact : event.path) result += "&" + space_.signature(fact, names);
  for (const Lanes* lanes : {&event.index_lanes, &event.mask_lanes, &event.value_lanes}) {
    result += "/";
    for (const Undefined& u : lanes->undefined) result += "u" + space_.signature(u.where, names);
    for (const symbolic::Checked& c : lanes->checked) result += "c" + space_.signature(c.value, names);
  }
  return result;
}

std::string Proving::signature(const Facts& facts) {
  std::map<int, std::string> names;
  std::string result;
  for (const Formula& fact : facts) result += "&" + space_.signature(fact, names);
  return result;
}

void Proving::collect() {
  std::map<std::string, int> known;
  accesses_.clear();
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    for (Event& event : paths_[path].events) {
      if (event.is_barrier) continue;
      const auto [place, is_new] = known.try_emplace(signature(event), static_cast<int>(accesses_.size()));
      if (is_new) accesses_.push_back({event, static_cast<int>(path)});
      event.number = place->second;
    }
  }
  // An index that a loop carries on shows: in the second pass it is not that of the first with another iteration.
  std::map<std::array<unsigned, 3>, std::array<std::set<std::string>, 2>> passes;
  for (const Path& path : paths_) {
    for (const Event& event : path.events) {
      if (event.is_barrier || event.loops.empty()) continue;
      std::map<int, std::string> names;
      std::string text;
      for (const Pass& pass : event.loops) text += ";" + space_.signature(pass.range, names);
      text += space_.signature(event.index, names) + "|" + space_.signature(event.mask, names);
      for (std::size_t depth = 0; depth < event.loops.size(); ++depth) {
        auto& texts = passes[{event.where.line, event.where.column, static_cast<unsigned>(depth)}];
        texts[at_index(event.loops[depth].number)].insert(text);
      }
    }
  }
  for (const auto& [place, texts] : passes) {
    if (!std::includes(texts[0].begin(), texts[0].end(), texts[1].begin(), texts[1].end())) carried_.insert(place[0]);
  }
}

// ---- Questions ----

symbolic::Term Proving::at_lane(const Term& term, const Lane& lane) {
  return space_.replaced(term, [&](int id) { return id < 3 ? &lane[at_index(id)] : nullptr; });
}
symbolic::Formula Proving::at_lane(const Formula& formula, const Lane& lane) {
  return space_.replaced(formula, [&](int id) { return id < 3 ? &lane[at_index(id)] : nullptr; });
}

Proving::Lane Proving::lane_of(const Event& event, const char* suffix) {
  Lane lane;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const std::string name = std::string("lane ") + "prc"[axis] + std::to_string(event.sides[axis]) + suffix;
    const auto [place, is_new] = named_.try_emplace(name);
    if (is_new) place->second = space_.bounded(name, Atom::Owner::program, 0, event.sides[axis]);
    lane[axis] = named_[name];
  }
  return lane;
}

Proving::Facts Proving::at(const Event& event, const Lane& lane, bool masked) {
  Facts facts = event.path;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    facts.push_back(symbolic::between(0, event.program[axis], event.grid[axis]));
  }
  if (masked) facts.push_back(at_lane(event.mask, lane));
  return facts;
}

Proving::Facts Proving::primed(const Facts& facts) {
  Facts result;
  for (const Formula& fact : facts) result.push_back(space_.primed(fact));
  return result;
}

// Every way to take neighbouring dimensions as one, the finest first.
const std::vector<Proving::Grouping>& Proving::groupings(int tensor) {
  const auto [place, is_new] = groupings_.try_emplace(tensor);
  if (!is_new) return place->second;
  const std::vector<Term>& shape = tensors_[at_index(tensor)].shape;
  const unsigned joints = shape.empty() ? 0 : static_cast<unsigned>(shape.size()) - 1;
  for (unsigned joined = 0; joined < 1u << joints; ++joined) {
    Grouping grouping;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (i > 0 && (joined >> (i - 1) & 1u) != 0) {
        grouping.sides.back() *= shape[i];
      } else {
        grouping.sides.push_back(shape[i]);
      }
    }
    if (grouping.sides.empty()) grouping.sides.push_back(1);
    grouping.strides.assign(grouping.sides.size(), Term(1));
    for (std::size_t i = grouping.sides.size() - 1; i > 0; --i) {
      grouping.strides[i - 1] = grouping.strides[i] * grouping.sides[i];
    }
    const bool usable = std::all_of(grouping.strides.begin(), grouping.strides.end(),
                                    [](const Term& stride) { return stride.parts().size() == 1; });
    if (usable) place->second.push_back(std::move(grouping));
  }
  return place->second;
}

std::vector<symbolic::Term> Proving::digits(const Term& index, const Grouping& grouping) {
  std::vector<Term> result;
  Term rest = index;
  for (const Term& stride : grouping.strides) {
    const auto& [wanted, divisor] = *stride.parts().begin();
    Term digit;
    const Term now = rest;
    for (const auto& [monomial, coefficient] : now.parts()) {
      Term::Monomial left = monomial;
      bool has = coefficient % divisor == 0;
      for (const int id : wanted) {
        const auto found = std::find(left.begin(), left.end(), id);
        has = has && found != left.end();
        if (!has) break;
        left.erase(found);
      }
      if (!has) continue;
      Term part(coefficient / divisor);
      for (const int id : left) part *= Term::atom(id);
      digit += part;
    }
    rest += digit * stride * Term(-1);
    result.push_back(std::move(digit));
  }
  if (!(rest == Term())) result.back() += rest;  // the last stride is 1: never
  return result;
}

bool Proving::digits_hold(Access& access, std::size_t grouping) {
  const std::vector<Grouping>& all = groupings(access.event.tensor);
  access.digits_hold.resize(all.size());
  int& known = access.digits_hold[grouping];
  if (known == 0) {
    const Lane lane = lane_of(access.event);
    Facts facts = at(access.event, lane);
    const std::vector<Term> found = digits(at_lane(access.event.index, lane), all[grouping]);
    Formula inside;
    for (std::size_t i = 0; i < found.size(); ++i) {
      inside = inside & symbolic::between(0, found[i], all[grouping].sides[i]);
    }
    facts.push_back(!inside);
    known = ask(facts) == Answer::impossible ? 1 : -1;
  }
  return known > 0;
}

symbolic::Formula Proving::same_element(Access& a, Access& b, const Term& index_a, const Term& index_b) {
  const std::vector<Grouping>& all = groupings(a.event.tensor);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!digits_hold(a, i) || !digits_hold(b, i)) continue;
    const std::vector<Term> x = digits(index_a, all[i]), y = digits(index_b, all[i]);
    Formula same;
    for (std::size_t j = 0; j < x.size(); ++j) same = same & symbolic::equal(x[j], y[j]);
    return same;
  }
  return symbolic::equal(index_a, index_b);
}

// The facts that the solver needs of q * stride, where a term is a sum of such: from 0 <= q < side follows
// 0 <= q * stride <= (side - 1) * stride; and that no tensor is too large.
Proving::Facts Proving::about_products(const std::vector<Term>& terms) {
  Facts facts;
  for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    facts.push_back(symbolic::less_equal(tensors_[tensor].size(), limits_.max_elements));
    for (const Grouping& grouping : groupings(static_cast<int>(tensor))) {
      for (const Term& term : terms) {
        const std::vector<Term> q = digits(term, grouping);
        for (std::size_t i = 0; i < q.size(); ++i) {
          const Term &stride = grouping.strides[i], &side = grouping.sides[i];
          if (stride.is_constant() || q[i].is_constant()) continue;
          const Term product = q[i] * stride;
          facts.push_back(implies(symbolic::less_equal(0, q[i]), symbolic::less_equal(0, product)));
          facts.push_back(implies(symbolic::less(q[i], side), symbolic::less_equal(product, side * stride - stride)));
        }
      }
    }
  }
  return facts;
}

Claim Proving::claim_of(Property property, tile::Answer answer, const Event* event) const {
  Claim claim;
  claim.property = property;
  claim.answer = answer;
  if (event->tensor >= 0) {
    claim.tensor = tensors_[at_index(event->tensor)].name;
    claim.where = event->where;
    claim.access = event->access;
  }
  return claim;
}

void Proving::settle(Property property, tile::Answer answer, const Event* event, const std::string& reason) {
  Claim claim = claim_of(property, answer, event);
  claim.reason = reason;
  claims_.try_emplace(property, claim);
}

bool Proving::suspect(const Query& query, Facts more) {
  const auto known = claims_.find(query.property);
  if (known != claims_.end() && known->second.answer == tile::Answer::refuted) return false;
  if (attempts_[query.property] >= kMaxAttempts) return false;  // not decided, whatever this one is
  if (ask(query.facts) == Answer::impossible) return true;
  if (!query.help.empty()) append(more, about_products(query.help));
  if (!more.empty()) {
    append(more, query.facts);
    if (ask(more, 2000) == Answer::impossible) return true;
  }
  ++attempts_[query.property];
  if (refute(query)) return false;
  if (seconds() > limits_.seconds) {
    settle(query.property, tile::Answer::not_decided, query.event, "no time left");
  } else {
    settle(query.property, tile::Answer::not_decided, query.event,
           unconfirmed_.empty() ? "the solver finds neither a proof nor a counterexample" : unconfirmed_);
  }
  return false;
}

bool Proving::refute(const Query& query) {
  unconfirmed_.clear();
  std::vector<std::int64_t> bounds = {2, 5, 9, 20, 40, 80, 160, 350, 1100, 5000, 20'000, 300'000};
  if (query.property == Property::overflow) bounds = {9, 160, 5000, limits_.max_elements};
  Claim claim = claim_of(query.property, tile::Answer::refuted, query.event);
  int tried = 0;
  std::int64_t at_least = 0;  // all sizes together, after a counterexample that is none
  for (const std::int64_t bound : bounds) {
    if (seconds() > limits_.seconds || tried >= 3) break;
    const bool large = bound == limits_.max_elements;
    Facts facts = query.facts;
    Term total;
    for (const auto& [name, size] : sizes_) {
      facts.push_back(symbolic::less_equal(size, bound));
      total += size;
    }
    facts.push_back(symbolic::less_equal(at_least, total));
    for (const symbolic::TensorFacts& tensor : tensors_) {  // else it could not be run
      if (bound > 1100) {
        facts.push_back(symbolic::less_equal(tensor.size(), large ? limits_.max_elements : kMaxRunElements));
      }
    }
    Model model;
    const Answer found = solver_.ask(facts, Solver::Products::exact, milliseconds_left(500), &model);
    if (found != Answer::impossible) ++tried;
    if (found != Answer::possible) continue;
    // Smaller ones, while there are.
    for (int i = 0; i < 40 && !large && seconds() < limits_.seconds; ++i) {
      Facts smaller = facts;
      const std::int64_t now = model.at(total, space_);
      smaller.push_back(symbolic::less(total, i < 8 ? now / 2 + now / 4 : now));
      Model next;
      const Answer answer = solver_.ask(smaller, Solver::Products::exact, milliseconds_left(300), &next);
      if (answer == Answer::possible) {
        model = next;
      } else if (i >= 8) {
        break;
      } else {
        i = 7;
      }
    }
    Counterexample example;
    for (const auto& [name, size] : sizes_) example.sizes.push_back(model.at(size, space_));
    if (query.event->tensor >= 0) {
      for (std::size_t axis = 0; axis < 3; ++axis) {
        example.program[axis] = model.at(query.event->program[axis], space_);
        example.lane[axis] = model.at(query.lane[axis], space_);
      }
      example.index = model.at(at_lane(query.event->index, query.lane), space_);
    }
    for (const auto& [id, value] : model.atoms) {
      const Atom& atom = space_[id];
      if (atom.kind != Atom::Kind::value || !atom.name.ends_with("[]")) continue;
      const std::int64_t index = model.at(atom.operands[0], space_);
      if (index < 0 || index >= (1 << 20)) continue;
      std::vector<std::int64_t>& values = example.contents[atom.name.substr(0, atom.name.size() - 2)];
      if (values.size() <= static_cast<std::size_t>(index)) values.resize(static_cast<std::size_t>(index) + 1);
      values[static_cast<std::size_t>(index)] = value;
    }
    claim.counterexample = example;
    if (confirm(claim)) {
      claims_[query.property] = claim;
      return true;
    }
    at_least = 2 * model.at(total, space_) + 1;
  }
  return false;
}

// For all the rest of a proof.
int Proving::milliseconds_left(int wanted) const {
  return std::clamp(static_cast<int>(1000 * (limits_.seconds - seconds())), 1, wanted);
}

bool Proving::confirm(Claim& claim) {
  const Counterexample& example = *claim.counterexample;
  std::string sizes;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    sizes += (i == 0 ? "" : ", ") + sizes_[i].first + " = " + std::to_string(example.sizes[i]);
  }
  Prover prover;
  prover.arrays_ = true;
  prover.numbers_ = example.sizes;
  prover.contents_ = &example.contents;
  const symbolic::Under nobody(nullptr);
  try {
    setup_(prover);
  } catch (const symbolic::PathEnds&) {
    unconfirmed_ = "the counterexample of the solver (" + sizes + ") is against an assumption";
    return false;
  } catch (const NotDecided& error) {
    unconfirmed_ = std::string("the counterexample of the solver (") + sizes + ") cannot be run: " + error.what();
    return false;
  }
  const auto is_of = [&](Problem problem) {
    switch (claim.property) {
      case Property::bounds:
        return problem == Problem::out_of_bounds;
      case Property::race:
        return problem == Problem::race;
      case Property::order:
        return problem == Problem::unordered || problem == Problem::same_address;
      case Property::defined:
        return problem == Problem::undefined_value || problem == Problem::undefined_index ||
               problem == Problem::uninitialized;
      case Property::overflow:
        return problem == Problem::overflow;
      case Property::written:
        return false;
    }
    return false;
  };
  for (const Report& report : prover.reports_) {
    for (const Finding& finding : report.findings) {
      const Site& site = report.sites[at_index(finding.site)];
      if (!is_of(finding.problem)) continue;
      if (!claim.tensor.empty() && report.tensors[at_index(site.tensor)].name != claim.tensor) continue;
      claim.confirmed = true;
      claim.report = report;
      claim.seen = text(report, finding);
      return true;
    }
  }
  if (claim.property == Property::written && !prover.reports_.empty()) {
    const Report& last = prover.reports_.back();
    for (const TensorUse& use : last.tensors) {
      if (use.name != claim.tensor || use.never_written == 0) continue;
      claim.confirmed = true;
      claim.report = last;
      claim.seen = claim.tensor + ": " + std::to_string(use.never_written) + " of " + std::to_string(use.size) +
                   " are never written";
      return true;
    }
  }
  unconfirmed_ = "the checked executor finds nothing at the counterexample of the solver: " + sizes;
  return false;
}

// ---- The properties ----

void Proving::check_bounds() {
  for (Access& access : accesses_) {
    bool holds = false;
    for (std::size_t i = 0; i < groupings(access.event.tensor).size() && !holds; ++i) holds = digits_hold(access, i);
    if (holds) continue;
    Query query{Property::bounds, &access.event, {}, lane_of(access.event), {}};
    query.facts = at(access.event, query.lane);
    const Term index = at_lane(access.event.index, query.lane);
    query.facts.push_back(!symbolic::between(0, index, tensors_[at_index(access.event.tensor)].size()));
    query.help = {index};
    access.in_bounds = suspect(query);
  }
}

void Proving::check_races() {
  for (std::size_t i = 0; i < accesses_.size(); ++i) {
    for (std::size_t j = i; j < accesses_.size(); ++j) {
      Access &a = accesses_[i], &b = accesses_[j];
      const Event &x = a.event, &y = b.event;
      if (x.tensor != y.tensor || x.launch != y.launch || (!is_store(x) && !is_store(y))) continue;
      if (x.access == tile::Access::atomic && y.access == tile::Access::atomic) continue;
      Formula other(false);
      for (std::size_t axis = 0; axis < 3; ++axis) {
        other = other | !symbolic::equal(x.program[axis], space_.primed(y.program[axis]));
      }
      if (other.is(false)) continue;  // one program
      const Event& store = is_store(x) ? x : y;
      Query query{Property::race, &store, {}, lane_of(x), {}};
      query.facts = at(x, query.lane);
      const Lane lane = lane_of(y);
      append(query.facts, primed(at(y, lane)));
      query.facts.push_back(other);
      query.facts.push_back(same_element(a, b, at_lane(x.index, query.lane), space_.primed(at_lane(y.index, lane))));
      suspect(query);
    }
  }
}

namespace {

// Whether a later access of the same program has to wait for an earlier one: always, if another lane did it, or never.
enum class Waits { never, for_other_lanes, always };
Waits waits(tile::Access earlier, tile::Access later) {
  using tile::Access;
  if (later == Access::load) return earlier == Access::load ? Waits::never : Waits::always;
  if (earlier == Access::atomic) return later == Access::atomic ? Waits::never : Waits::always;
  return Waits::for_other_lanes;
}

bool in_pass(const symbolic::Event& event, const Pass& pass) {
  return std::any_of(event.loops.begin(), event.loops.end(),
                     [&](const Pass& own) { return own.loop == pass.loop && own.number == pass.number; });
}
bool in_loop(const symbolic::Event& event, int loop) {
  return std::any_of(event.loops.begin(), event.loops.end(), [&](const Pass& own) { return own.loop == loop; });
}

symbolic::Formula differ(const std::array<Term, 3>& a, const std::array<Term, 3>& b) {
  symbolic::Formula result(false);
  for (std::size_t axis = 0; axis < 3; ++axis) result = result | !symbolic::equal(a[axis], b[axis]);
  return result;
}

}  // namespace

bool Proving::may_meet(Access& a, Access& b) {
  const Event &x = a.event, &y = b.event;
  const Waits one = waits(x.access, y.access), other = waits(y.access, x.access);
  const Lane lane = lane_of(x), lane_b = lane_of(y, "b");
  Facts facts = at(x, lane);
  // Of any other iterations.
  std::map<int, Term> others;
  for (const Pass& pass : y.loops) others[pass.iteration.parts().begin()->first[0]] = space_.primed(pass.iteration);
  const auto by = [&](int id) {
    const auto found = others.find(id);
    return found == others.end() ? nullptr : &found->second;
  };
  for (const Formula& fact : at(y, lane_b)) facts.push_back(space_.replaced(fact, by));
  if (one != Waits::always && other != Waits::always && x.sides == y.sides) facts.push_back(differ(lane, lane_b));
  facts.push_back(same_element(a, b, at_lane(x.index, lane), space_.replaced(at_lane(y.index, lane_b), by)));
  return ask(facts) != Answer::impossible;
}

void Proving::check_order() {
  for (Access& access : accesses_) {  // two lanes of one store
    const Event& event = access.event;
    if (event.access != tile::Access::store) continue;
    Query query{Property::order, &event, {}, lane_of(event), {}};
    const Lane other = lane_of(event, "b");
    const Formula lanes = differ(query.lane, other);
    if (lanes.is(false)) continue;
    query.facts = at(event, query.lane);
    query.facts.push_back(at_lane(event.mask, other));
    query.facts.push_back(lanes);
    query.facts.push_back(same_element(access, access, at_lane(event.index, query.lane), at_lane(event.index, other)));
    suspect(query);
  }
  std::set<int> tensors;
  for (std::size_t i = 0; i < accesses_.size(); ++i) {
    for (std::size_t j = i; j < accesses_.size(); ++j) {
      const Event &x = accesses_[i].event, &y = accesses_[j].event;
      if (x.tensor != y.tensor || x.launch != y.launch || tensors.contains(x.tensor)) continue;
      if (waits(x.access, y.access) == Waits::never && waits(y.access, x.access) == Waits::never) continue;
      if (may_meet(accesses_[i], accesses_[j])) tensors.insert(x.tensor);
    }
  }
  if (tensors.empty()) return;
  check_order_of(tensors);
}

// By which of two accesses comes first, and the barriers between them.
void Proving::check_order_of(const std::set<int>& tensors) {
  std::set<std::string> asked;
  const auto iteration = [this](const Pass& pass, const Term& value) {
    const int id = pass.iteration.parts().begin()->first[0];
    return space_.replaced(pass.range, [&](int other) { return other == id ? &value : nullptr; });
  };
  for (const Path& path : paths_) {
    for (const Event& later : path.events) {
      if (later.is_barrier || !tensors.contains(later.tensor)) continue;
      std::vector<const Event*> barriers;  // that count for it
      for (const Event& event : path.events) {
        const int end = later.since >= 0 ? later.since : later.position;
        if (event.is_barrier && event.launch == later.launch && event.position < end) barriers.push_back(&event);
      }
      // Also those behind it, of an earlier iteration.
      const auto barrier_in = [&](int loop) {
        return std::any_of(path.events.begin(), path.events.end(), [&](const Event& event) {
          return event.is_barrier && !event.loops.empty() && event.loops.back().loop == loop &&
                 (later.since < 0 || event.position < later.since);
        });
      };
      for (const Event& earlier : path.events) {
        if (earlier.is_barrier || earlier.position >= later.position) continue;
        if (earlier.tensor != later.tensor || earlier.launch != later.launch) continue;
        const Waits needs = waits(earlier.access, later.access);
        if (needs == Waits::never) continue;
        Query query{Property::order, &later, {}, lane_of(later), {}};
        const Lane lane = lane_of(earlier, "b");
        query.facts = at(later, query.lane);
        append(query.facts, at(earlier, lane));
        bool ordered = false;
        for (const Event* barrier : barriers) {
          if (barrier->position < earlier.position) continue;
          Formula none(false);  // the loops that it alone is in do not run
          for (const Pass& pass : barrier->loops) {
            if (!in_pass(earlier, pass) && !in_pass(later, pass)) none = none | !iteration(pass, 0);
          }
          ordered = ordered || none.is(false);
          query.facts.push_back(none);
        }
        if (ordered) continue;
        std::size_t depth = 0;
        for (; depth < earlier.loops.size() && depth < later.loops.size(); ++depth) {
          const Pass &a = earlier.loops[depth], &b = later.loops[depth];
          if (a.loop != b.loop) break;
          if (a.number == b.number) continue;
          query.facts.push_back(barrier_in(a.loop) ? symbolic::equal(a.iteration + 1, b.iteration)
                                                   : symbolic::less(a.iteration, b.iteration));
          ++depth;
          break;
        }
        for (const Pass& pass : earlier.loops) {
          if (!in_loop(later, pass.loop) && barrier_in(pass.loop)) {
            query.facts.push_back(!iteration(pass, pass.iteration + 1));  // the last one
          }
        }
        for (const Pass& pass : later.loops) {
          if (!in_loop(earlier, pass.loop) && barrier_in(pass.loop))
            query.facts.push_back(symbolic::equal(pass.iteration, 0));
        }
        if (needs == Waits::for_other_lanes && earlier.sides == later.sides) {
          query.facts.push_back(differ(query.lane, lane));
        }
        query.facts.push_back(same_element(accesses_[at_index(earlier.number)], accesses_[at_index(later.number)],
                                           at_lane(earlier.index, lane), at_lane(later.index, query.lane)));
        if (!asked.insert(signature(query.facts)).second) continue;
        suspect(query);
      }
    }
  }
}

bool Proving::initialized(const Access& load, const std::vector<Event>& events) {
  const Event& event = load.event;
  const Lane lane = lane_of(event);
  for (const Event& store : events) {
    if (store.is_barrier || !is_store(store) || store.tensor != event.tensor || store.launch != event.launch) continue;
    if (store.position >= event.position || !(store.index == event.index) || store.sides != event.sides) continue;
    bool around = store.loops.size() <= event.loops.size();  // it has run if the load does
    for (const Pass& pass : store.loops) around = around && in_pass(event, pass);
    if (!around) continue;
    Facts facts = at(event, lane);
    facts.push_back(!at_lane(store.mask, lane));
    if (ask(facts) == Answer::impossible) return true;
  }
  return false;
}

void Proving::check_defined() {
  for (Access& access : accesses_) {
    const Event& event = access.event;
    const struct {
      const Lanes& lanes;
      bool masked;
    } uses[] = {{event.mask_lanes, false}, {event.index_lanes, true}, {event.value_lanes, true}};
    for (const auto& use : uses) {
      for (const Undefined& u : use.lanes.undefined) {
        Query query{Property::defined, &event, {}, lane_of(event), {}};
        query.facts = at(event, query.lane, use.masked);
        query.facts.push_back(at_lane(u.where, query.lane));
        suspect(query);
      }
    }
    const symbolic::TensorFacts& tensor = tensors_[at_index(event.tensor)];
    if (event.access == tile::Access::store || tensor.written) continue;
    if (initialized(access, paths_[at_index(access.path)].events)) continue;
    if (event.launch > 0 && covered(event.tensor, event.launch - 1)) continue;
    Query query{Property::defined, &event, {}, lane_of(event), {}};
    query.facts = at(event, query.lane);
    suspect(query);
  }
}

bool Proving::covered(int tensor, int up_to_launch) {
  const std::vector<Grouping>& all = groupings(tensor);
  std::vector<Access*> stores;
  for (Access& access : accesses_) {
    if (access.event.tensor == tensor && is_store(access.event) && access.event.launch <= up_to_launch &&
        !paths_[at_index(access.path)].left_a_loop) {
      stores.push_back(&access);
    }
  }
  for (std::size_t g = 0; g < all.size(); ++g) {
    // An element that is never written, described by the program, iteration and lane that should write it.
    Formula some_way(false);
    for (const Path& path : paths_) some_way = some_way | symbolic::all_of(path.conditions);
    Facts facts{some_way};
    std::vector<Term> element;
    for (std::size_t i = 0; i < all[g].sides.size(); ++i) {
      const std::string name =
          "element " + std::to_string(i) + " of " + std::to_string(tensor) + "/" + std::to_string(g);
      const auto [place, is_new] = named_.try_emplace(name);
      if (is_new) place->second = space_.symbol(name, Atom::Owner::everybody);
      element.push_back(place->second);
      facts.push_back(symbolic::between(0, element.back(), all[g].sides[i]));
    }
    for (Access* store : stores) {
      const Event& event = store->event;
      const Lane lane = lane_of(event);
      const Term index = at_lane(event.index, lane);
      const std::vector<Term> places = digits(index, all[g]);
      std::map<int, Term> inverse;
      bool solved = true;
      for (std::size_t i = 0; i < places.size() && solved; ++i) {
        std::vector<std::pair<std::int64_t, int>> unknowns;
        Term rest = element[i];
        for (const auto& [monomial, coefficient] : places[i].parts()) {
          const bool is_unknown = monomial.size() == 1 && space_[monomial[0]].owner == Atom::Owner::program &&
                                  space_[monomial[0]].kind == Atom::Kind::symbol;
          if (is_unknown && !inverse.contains(monomial[0]) && coefficient > 0) {
            unknowns.emplace_back(coefficient, monomial[0]);
            continue;
          }
          Term part(-coefficient);
          for (const int id : monomial) {
            const auto found = inverse.find(id);
            part *= found != inverse.end() ? found->second : Term::atom(id);
          }
          rest += part;
        }
        std::sort(unknowns.rbegin(), unknowns.rend());
        for (const auto& [coefficient, id] : unknowns) {
          const Term value = space_.floor_quotient(rest, coefficient);
          inverse[id] = value;
          rest += value * Term(-coefficient);
        }
      }
      const Term zero;
      const symbolic::Space::Replacement by = [&](int id) -> const Term* {
        if (const auto found = inverse.find(id); found != inverse.end()) return &found->second;
        const Atom& atom = space_[id];
        return atom.owner == Atom::Owner::program && atom.kind == Atom::Kind::symbol ? &zero : nullptr;
      };
      Facts here = at(event, lane);
      for (std::size_t axis = 0; axis < 3; ++axis) {
        here.push_back(symbolic::between(0, lane[axis], event.sides[axis]));
      }
      for (std::size_t i = 0; i < places.size(); ++i) here.push_back(symbolic::equal(places[i], element[i]));
      Formula writes = solved;
      for (const Formula& fact : here) writes = writes & space_.replaced(fact, by);
      facts.push_back(!writes);
    }
    const Answer answer = ask(facts, 2000);
    if (answer == Answer::impossible) return true;
    if (unwritten_.element.empty()) unwritten_ = {facts, element, all[g]};
  }
  return false;
}

void Proving::check_written() {
  for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    if (!tensors_[tensor].has_to_be_written) continue;
    unwritten_ = {};
    if (covered(static_cast<int>(tensor), static_cast<int>(launches_.size()))) continue;
    Event none;  // no access to blame
    none.tensor = static_cast<int>(tensor);
    Query query{Property::written, &none, unwritten_.facts, {}, {}};
    for (std::size_t i = 0; i < unwritten_.element.size(); ++i) {
      none.index += unwritten_.element[i] * unwritten_.grouping.strides[i];
    }
    if (unwritten_.element.empty()) {  // no digits: any element will do
      query.facts = {symbolic::less_equal(1, tensors_[tensor].size())};
    }
    suspect(query);
  }
}

void Proving::check_overflow() {
  std::set<std::string> asked;
  const auto fits = [](const Term& value, int bits) {
    const std::int64_t high = bits == 32 ? std::numeric_limits<s32>::max() : std::int64_t{1} << 62;
    return symbolic::less_equal(-high - 1, value) & symbolic::less_equal(value, high);
  };
  for (const Path& path : paths_) {
    for (const Demand& demand : path.demands) {
      Event nobody;
      nobody.tensor = -1;
      nobody.program = demand.program;
      nobody.grid = demand.grid;
      nobody.path = demand.path;
      Query query{Property::overflow, &nobody, at(nobody, {}), {}, {demand.value}};
      query.facts.push_back(!demand.must);
      if (!asked.insert(signature(query.facts)).second) continue;
      suspect(query);
    }
  }
  for (const Access& access : accesses_) {
    const Event& event = access.event;
    const struct {
      const Lanes& lanes;
      bool masked;
    } uses[] = {{event.mask_lanes, false}, {event.index_lanes, true}, {event.value_lanes, true}};
    for (const auto& use : uses) {
      for (const symbolic::Checked& checked : use.lanes.checked) {
        Query query{Property::overflow, &event, {}, lane_of(event), {}};
        query.facts = at(event, query.lane, use.masked);
        const Term value = at_lane(checked.value, query.lane);
        query.facts.push_back(!fits(value, checked.bits));
        query.help = {value, at_lane(event.index, query.lane)};
        if (!asked.insert(signature(query.facts)).second) continue;
        if (!access.in_bounds && ask(query.facts) != Answer::impossible) {
          settle(Property::overflow, tile::Answer::not_decided, &event, "its index is not proved to be in bounds");
          continue;
        }
        suspect(query);
      }
    }
  }
}

Proof Proving::proof() {
  std::string reason;
  try {
    explore();
  } catch (const NotDecided& error) {
    reason = error.what();
  }
  if (reason.empty() && !carried_.empty()) {
    reason = "a loop carries an index from one iteration to the next, in line " + std::to_string(*carried_.begin());
  }
  if (reason.empty() && carries_) {
    reason = "a variable that a loop changes is not the same after each of its iterations, or after none";
  }
  if (reason.empty() && skipped_) {
    reason = "more than 64 ways through two iterations of its loops, by conditions on sizes";
  }
  const std::pair<Property, void (Proving::*)()> checks[] = {
      {Property::bounds, &Proving::check_bounds},   {Property::race, &Proving::check_races},
      {Property::defined, &Proving::check_defined}, {Property::written, &Proving::check_written},
      {Property::order, &Proving::check_order},     {Property::overflow, &Proving::check_overflow}};
  for (const auto& [property, check] : checks) {
    try {
      if (!paths_.empty()) (this->*check)();
    } catch (const NotDecided& error) {
      Event none;
      none.tensor = -1;
      settle(property, tile::Answer::not_decided, &none, error.what());
    }
  }
  Proof proof;
  for (const auto& [name, term] : sizes_) proof.sizes.push_back(name);
  for (int i = 0; i < kProperties; ++i) {
    const auto property = static_cast<Property>(i);
    if (const auto found = claims_.find(property); found != claims_.end()) {
      proof.claims.push_back(found->second);
      continue;
    }
    Claim claim;
    claim.property = property;
    claim.answer = reason.empty() ? tile::Answer::proved : tile::Answer::not_decided;
    claim.reason = reason;
    proof.claims.push_back(claim);
  }
  proof.max_elements = limits_.max_elements;
  proof.seconds = seconds();
  proof.queries = solver_.queries();
  proof.paths = static_cast<int>(paths_.size());
  proof.loops = loops_;
  return proof;
}

Proof prove(const std::function<void(Prover&)>& setup, const ProofLimits& limits) {
  return Proving(setup, limits).proof();
}

Answer Proof::answer(Property property) const {
  for (const Claim& claim : claims) {
    if (claim.property == property) return claim.answer;
  }
  return Answer::not_decided;
}
bool Proof::proved() const {
  return std::all_of(claims.begin(), claims.end(), [](const Claim& c) { return c.answer == Answer::proved; });
}
const Claim* Proof::refuted() const {
  for (const Claim& claim : claims) {
    if (claim.answer == Answer::refuted) return &claim;
  }
  return nullptr;
}

std::string text(const Proof& proof, const Claim& claim) {
  std::string result = std::string("  ") + name(claim.answer) + ": " + name(claim.property);
  if (!claim.tensor.empty() && claim.seen.empty()) {
    result += "; " + claim.tensor;
    if (claim.where.line > 0) {
      result += std::string(", ") + name(claim.access) + " in line " + std::to_string(claim.where.line);
    }
  }
  if (claim.counterexample) {
    for (std::size_t i = 0; i < proof.sizes.size(); ++i) {
      result += (i == 0 ? "; at " : ", ") + proof.sizes[i] + " = " + std::to_string(claim.counterexample->sizes[i]);
    }
  }
  if (!claim.seen.empty()) result += ": " + claim.seen;
  if (!claim.reason.empty()) result += ": " + claim.reason;
  return result + "\n";
}

std::string text(const Proof& proof) {
  std::string result;
  for (const Claim& claim : proof.claims) result += text(proof, claim);
  return result;
}

}  // namespace octile::tile
