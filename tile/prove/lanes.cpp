// What is known of the lanes of a tile after each operation.
#include <algorithm>
#include <limits>

#include "octile/tile/symbolic.h"

namespace octile::tile::symbolic {

namespace {

Term as_number(Space& space, const Operand& operand) {
  if (operand.kind == Kind::boolean) return space.choice(operand.lanes.truth, 1, 0);
  return operand.lanes.number;
}
Formula as_truth(const Operand& operand) {
  return operand.kind == Kind::boolean ? operand.lanes.truth : !Formula::zero(operand.lanes.number);
}

Lanes unknown(const Result& result) {
  Lanes lanes;
  if (result.kind == Kind::real) return lanes;
  const Term value = the_walk().opaque(result.sides, result.low, result.high);
  if (result.kind == Kind::boolean) {
    lanes.truth = !Formula::zero(value);
  } else {
    lanes.number = value;
  }
  return lanes;
}

// Of a value known to be another's if its number is.
Lanes replaced(const Lanes& lanes, const Space::Replacement& by) {
  Space& space = the_walk().space;
  Lanes result = lanes;
  result.number = space.replaced(lanes.number, by);
  result.truth = space.replaced(lanes.truth, by);
  for (Undefined& u : result.undefined) u.where = space.replaced(u.where, by);
  for (Checked& c : result.checked) c.value = space.replaced(c.value, by);
  return result;
}

Lanes at(const Lanes& lanes, const Term& plane, const Term& row, const Term& column) {
  return replaced(lanes, [&](int id) -> const Term* {
    return id == Space::kPlane ? &plane : id == Space::kRow ? &row : id == Space::kColumn ? &column : nullptr;
  });
}

bool is_number(Kind kind) { return kind != Kind::real; }

bool numbers(const std::vector<Operand>& operands) {
  return std::all_of(operands.begin(), operands.end(), [](const Operand& o) { return is_number(o.kind); });
}

// The value alone; an operator that is not followed gives an unknown one.
Lanes value_of(Operator op, const Result& result, const std::vector<Operand>& operands) {
  Space& space = the_walk().space;
  Lanes lanes;
  if (result.kind == Kind::real) return lanes;
  if (op == Operator::select && operands[1].kind == result.kind && operands[2].kind == result.kind) {
    const Formula& condition = operands[0].lanes.truth;
    if (result.kind == Kind::boolean) {
      lanes.truth = (condition & operands[1].lanes.truth) | ((!condition) & operands[2].lanes.truth);
    } else {
      lanes.number = space.choice(condition, operands[1].lanes.number, operands[2].lanes.number);
    }
    return lanes;
  }
  if (!numbers(operands) || op == Operator::select) return unknown(result);
  if (result.kind == Kind::boolean) {
    const bool both = operands.size() == 2 && operands[0].kind == Kind::boolean && operands[1].kind == Kind::boolean;
    if (op == Operator::bit_and && both) {
      lanes.truth = operands[0].lanes.truth & operands[1].lanes.truth;
    } else if (op == Operator::bit_or && both) {
      lanes.truth = operands[0].lanes.truth | operands[1].lanes.truth;
    } else if (op == Operator::invert) {
      lanes.truth = !operands[0].lanes.truth;
    } else if (op == Operator::cast) {
      lanes.truth = as_truth(operands[0]);
    } else if (op >= Operator::less && op <= Operator::not_equal) {
      lanes.truth = compared(op, as_number(space, operands[0]), as_number(space, operands[1]));
    } else {
      return unknown(result);
    }
    return lanes;
  }
  const Term a = as_number(space, operands[0]), b = operands.size() > 1 ? as_number(space, operands[1]) : Term();
  switch (op) {
    case Operator::add:
    case Operator::subtract:
    case Operator::multiply:
    case Operator::divide:
    case Operator::remainder:
    case Operator::bit_and:
    case Operator::shift_left:
    case Operator::shift_right:
      try {
        lanes.number = computed(space, op, a, b);
      } catch (const NotDecided&) {  // only if it is used
        lanes = unknown(result);
      }
      break;
    case Operator::negate:
      lanes.number = -a;
      break;
    case Operator::maximum:
      lanes.number = space.choice(less(a, b), b, a);
      break;
    case Operator::minimum:
      lanes.number = space.choice(less(b, a), b, a);
      break;
    case Operator::cast:
      if (result.high < std::numeric_limits<s32>::max() && !a.is_constant()) return unknown(result);
      lanes.number = a;
      break;
    default:
      return unknown(result);
  }
  const bool exact = op == Operator::cast || op == Operator::divide || op == Operator::remainder ||
                     op == Operator::bit_and || op == Operator::maximum || op == Operator::minimum;
  if (!exact && !lanes.number.is_constant()) {
    lanes.checked.push_back({lanes.number, result.high > std::numeric_limits<s32>::max() ? 64 : 32});
  }
  return lanes;
}

}  // namespace

Lanes mapped(Operator op, const Result& result, const std::vector<Operand>& operands) {
  Lanes lanes = value_of(op, result, operands);
  if (op == Operator::select) {
    const Formula& condition = operands[0].lanes.truth;
    lanes.take(operands[0].lanes);
    for (const bool side : {true, false}) {
      Lanes taken = operands[side ? 1 : 2].lanes;
      for (Undefined& u : taken.undefined) u.where = u.where & (side ? condition : !condition);
      std::erase_if(taken.undefined, [](const Undefined& u) { return u.where.is(false); });
      lanes.take(taken);
    }
  } else if ((op == Operator::bit_and || op == Operator::bit_or) && result.kind == Kind::boolean) {
    for (const std::size_t side : {std::size_t{0}, std::size_t{1}}) {  // 0 & x and 1 | x do not depend on x
      Lanes taken = operands[side].lanes;
      const Formula& other = operands[1 - side].lanes.truth;
      Formula open = op == Operator::bit_and ? other : !other;
      for (const Undefined& u : operands[1 - side].lanes.undefined) open = open | u.where;
      for (Undefined& u : taken.undefined) u.where = u.where & open;
      lanes.take(taken);
    }
  } else {
    for (const Operand& operand : operands) lanes.take(operand.lanes);
  }
  const bool divides = op == Operator::divide || op == Operator::remainder;
  if (divides && result.kind == Kind::integer) {
    const Formula by_zero = Formula::zero(as_number(the_walk().space, operands[1]));
    if (!by_zero.is(false)) lanes.undefined.push_back({by_zero, {}});
  }
  if ((op == Operator::shift_left || op == Operator::shift_right) && result.kind == Kind::integer) {
    const Term count = as_number(the_walk().space, operands[1]);
    const Formula too_far = !between(0, count, result.high > std::numeric_limits<s32>::max() ? 64 : 32);
    if (!too_far.is(false)) lanes.undefined.push_back({too_far, {}});
  }
  return lanes;
}

Lanes reduced(int axis, const Result& result, const std::array<int, 3>& sides, const Lanes& lanes) {
  Lanes reduced = unknown(result);
  if (lanes.undefined.empty() && lanes.checked.empty()) return reduced;
  const int side = sides[static_cast<std::size_t>(axis)];
  const Term any = the_walk().space.bounded("l", Atom::Owner::program, 0, side);  // some lane of them
  reduced.take(replaced(lanes, [&](int id) { return id == axis ? &any : nullptr; }));
  return reduced;
}

Lanes multiplied(const Result& result, int terms, const Lanes& a, const Lanes& b, const Lanes& sum) {
  Lanes lanes = unknown(result);
  lanes.take(sum);
  if (!a.undefined.empty() || !b.undefined.empty()) {
    const Term any = the_walk().space.bounded("l", Atom::Owner::program, 0, terms);
    lanes.take(replaced(a, [&](int id) { return id == Space::kColumn ? &any : nullptr; }));
    lanes.take(replaced(b, [&](int id) { return id == Space::kRow ? &any : nullptr; }));
  }
  return lanes;
}

Lanes in_same_order(const std::array<int, 3>& to, const std::array<int, 3>& from, const Lanes& lanes) {
  const Term plane = to[0] > 1 ? Term::atom(Space::kPlane) : Term(), row = to[1] > 1 ? Term::atom(Space::kRow) : Term(),
             column = to[2] > 1 ? Term::atom(Space::kColumn) : Term();
  if (from[0] == 1 && to[0] == from[1] && to[1] == from[2] && to[2] == 1) return at(lanes, 0, plane, row);  // col()
  Space& space = the_walk().space;
  const Term place = (plane * Term(to[1]) + row) * Term(to[2]) + column;
  const Term line = space.floor_quotient(place, from[2]);
  const Term plane_from = space.floor_quotient(line, from[1]);
  return at(lanes, plane_from, line - plane_from * Term(from[1]), place - line * Term(from[2]));
}

Lanes transposed(const Lanes& lanes) {
  return at(lanes, Term::atom(Space::kPlane), Term::atom(Space::kColumn), Term::atom(Space::kRow));
}

// ---- Accesses ----

namespace {

Event event_of(const Place& place, Access access) {
  Event event;
  event.access = access;
  event.tensor = place.tensor;
  event.where = place.where;
  event.sides = place.sides;
  event.index = place.index.number;
  event.mask = place.mask.truth;
  event.index_lanes = place.index;
  event.mask_lanes = place.mask;
  return event;
}

}  // namespace

Lanes loaded(const Place& place, const Result& result, bool has_other, std::int64_t other) {
  Walk& walk = the_walk();
  walk.add(event_of(place, Access::load));
  const TensorFacts& tensor = walk.tensors[static_cast<std::size_t>(place.tensor)];
  Lanes lanes;
  if (result.kind != Kind::real) {
    if (walk.stored->contains(place.tensor)) {
      lanes = unknown(result);
    } else {
      const Term value = walk.space.value(tensor.name + "[]", {place.index.number}, result.low, result.high);
      if (result.kind == Kind::boolean) {
        lanes.truth = !Formula::zero(value);
      } else {
        if (tensor.values) walk.space.say(value, between(tensor.values->first, value, tensor.values->second));
        lanes.number = has_other ? walk.space.choice(place.mask.truth, value, other) : value;
      }
    }
  }
  // What is wrong with the index or the mask is said of this access.
  if (!has_other && !place.mask.truth.is(true)) lanes.undefined.push_back({!place.mask.truth, place.where});
  return lanes;
}

void stored(const Place& place, Access access, const Lanes& value) {
  Event event = event_of(place, access);
  event.value_lanes = value;
  the_walk().add(std::move(event));
}

void barrier() {
  Event event;
  event.is_barrier = true;
  the_walk().add(std::move(event));
}

PipelinePasses::PipelinePasses(SymbolicInt steps)
    : steps_(steps), loop_(the_walk().next_loop()), since_(the_walk().position), outer_since_(the_walk().since) {}
PipelinePasses::~PipelinePasses() {
  if (Walk* const walk = walk_under_way()) walk->since = outer_since_;
}
SymbolicInt PipelinePasses::enter(int number) {
  Walk& walk = the_walk();
  walk.enter(number, 0, steps_.term(), 1, loop_, true);
  return SymbolicInt(walk.loops.back().iteration);
}
void PipelinePasses::leave() { the_walk().leave(); }
void PipelinePasses::loads(bool on) { the_walk().since = on ? since_ : outer_since_; }

}  // namespace octile::tile::symbolic
