// What a proof runs, with symbols or with numbers.
#include <algorithm>

#include "octile/tile/prove.h"
#include "prove/proving.h"

namespace octile::tile {

using symbolic::Term;
using symbolic::Walk;

namespace {

constexpr std::int64_t kMaxRun = std::int64_t{1} << 26;  // elements that a counterexample is run with

}  // namespace

SymbolicInt Prover::size(const std::string& name, std::int64_t min) {
  if (arrays_) return SymbolicInt(next_number_ < numbers_.size() ? numbers_[next_number_++] : min);
  return SymbolicInt(proving_->size(name, min));
}

void Prover::assume(bool condition) {
  if (!condition) throw symbolic::PathEnds{};
}

int Prover::add(const std::string& name, DType dtype, std::size_t bytes, const std::vector<SymbolicInt>& shape,
                bool written, bool has_to_be) {
  if (!arrays_) {
    symbolic::TensorFacts facts;
    facts.name = name;
    facts.dtype = dtype;
    for (const SymbolicInt& side : shape) facts.shape.push_back(side.term());
    facts.written = written;
    facts.has_to_be_written = has_to_be;
    Walk& walk = symbolic::the_walk();
    walk.tensors.push_back(facts);
    return static_cast<int>(walk.tensors.size()) - 1;
  }
  Held held;
  held.name = name;
  std::int64_t size = 1;
  for (const SymbolicInt& side : shape) {
    held.shape.push_back(static_cast<s64>(side));
    size *= held.shape.back();
  }
  if (size < 0 || size > kMaxRun) throw symbolic::NotDecided("a tensor too large to run the counterexample");
  held.written = written;
  held.bytes.resize(static_cast<std::size_t>(size) * bytes + 1);
  held.marks.assign(static_cast<std::size_t>(size), written ? 1 : 0);
  if (contents_ != nullptr && contents_->contains(name)) {
    const std::vector<std::int64_t>& values = contents_->at(name);
    for (std::size_t i = 0; i < values.size() && i < static_cast<std::size_t>(size); ++i) {
      memcpy(held.bytes.data() + i * bytes, &values[i], bytes);  // the lower bytes
    }
  }
  held_.push_back(std::move(held));
  return static_cast<int>(held_.size()) - 1;
}

void Prover::limit(int tensor, SymbolicInt low, SymbolicInt high) {
  if (!arrays_) {
    symbolic::the_walk().tensors[static_cast<std::size_t>(tensor)].values = {low.term(), high.term()};
    return;
  }
  Held& held = held_[static_cast<std::size_t>(tensor)];
  const std::size_t count = held.marks.size();
  if (count == 0) return;
  const std::size_t bytes = (held.bytes.size() - 1) / count;
  for (std::size_t i = 0; i < count; ++i) {
    s64 value = 0;
    memcpy(&value, held.bytes.data() + i * bytes, bytes);
    if (bytes == 4) value = static_cast<s32>(value);
    if (value >= static_cast<s64>(low) && value < static_cast<s64>(high)) continue;
    value = static_cast<s64>(low);
    memcpy(held.bytes.data() + i * bytes, &value, bytes);
  }
}

void Prover::begin(const std::string& kernel, const SymbolicGrid& grid) {
  Walk& walk = symbolic::the_walk();
  symbolic::LaunchFacts facts;
  facts.kernel = kernel;
  facts.grid = {grid.x.term(), grid.y.term(), grid.z.term()};
  for (std::size_t axis = 0; axis < 3; ++axis) {
    facts.program[axis] =
        proving_->program(static_cast<int>(walk.launches.size()), static_cast<int>(axis), facts.grid[axis]);
  }
  walk.launches.push_back(facts);
}

void Prover::begin_checked(const Grid& grid) {
  if (grid.size() > (1 << 20)) throw symbolic::NotDecided("too many programs to run the counterexample");
}

}  // namespace octile::tile
