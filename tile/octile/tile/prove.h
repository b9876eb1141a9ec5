// Proofs: what holds of a kernel for all sizes, programs and lanes, by the symbolic executor and a solver.
#pragma once

#include <chrono>

#include "octile/tile/symbolic.h"
#include "octile/tile/tile.h"

namespace octile::tile {

// What a proof is about.
enum class Property : std::uint8_t { bounds, race, order, defined, written, overflow };
inline constexpr int kProperties = 6;
constexpr const char* name(Property property) {
  constexpr const char* kNames[] = {"every access is in bounds",
                                    "no two programs meet at an element that one of them writes",
                                    "no barrier is missing",
                                    "nothing undefined or uninitialized is used",
                                    "every element of the outputs is written",
                                    "no index arithmetic overflows"};
  return kNames[static_cast<int>(property)];
}

enum class Answer : std::uint8_t { proved, refuted, not_decided };
constexpr const char* name(Answer answer) {
  constexpr const char* kNames[] = {"proved", "refuted", "not decided"};
  return kNames[static_cast<int>(answer)];
}

struct Counterexample {
  std::vector<std::int64_t> sizes;  // in the order of Proof::sizes
  std::array<std::int64_t, 3> program{}, lane{};
  std::int64_t index = 0;                                          // element of the tensor
  std::map<std::string, std::vector<std::int64_t>> contents = {};  // of tensors of integers, as far as they matter
};

struct Claim {
  Property property = Property::bounds;
  Answer answer = Answer::proved;
  std::string reason;  // of not_decided
  std::string tensor;
  Where where;  // of the access, if there is one
  Access access = Access::load;
  std::optional<Counterexample> counterexample;
  bool confirmed = false;        // the checked executor found the same there
  std::optional<Report> report;  // what it saw
  std::string seen;              // its finding, in a line
};

struct Proof {
  std::vector<std::string> sizes;
  std::int64_t max_elements = 0;
  std::vector<Claim> claims;  // the first of each property that is not proved; else one that is
  double seconds = 0;
  int queries = 0, paths = 0, loops = 0;

  Answer answer(Property property) const;
  bool proved() const;
  const Claim* refuted() const;
};
std::string text(const Proof& proof);                      // a line for each property
std::string text(const Proof& proof, const Claim& claim);  // its line

struct ProofLimits {
  double seconds = 10;                                // of a proof
  std::int64_t max_elements = std::int64_t{1} << 30;  // of a tensor, and of a size
};

template <class T>
struct SymbolicTensor {
  using Element = T;
  int number = 0;
};

struct SymbolicGrid {
  SymbolicInt x = 1, y = 1, z = 1;
};

// What a proof runs: sizes, tensors, launches. With symbols, once for each way through the kernels; with numbers, on
// the checked executor, to confirm a counterexample.
class Prover {
 public:
  SymbolicInt size(const std::string& name, std::int64_t min = 0);
  void assume(bool condition);  // otherwise the launch is not considered

  // Already written; `low <= element < high` may be said of integers.
  template <class T>
  SymbolicTensor<T> input(const std::string& name, const std::vector<SymbolicInt>& shape) {
    return add<T>(name, shape, true, false);
  }
  template <class T>
  SymbolicTensor<T> input(const std::string& name, const std::vector<SymbolicInt>& shape, SymbolicInt low,
                          SymbolicInt high) {
    const SymbolicTensor<T> result = add<T>(name, shape, true, false);
    limit(result.number, low, high);
    return result;
  }
  // Every element has to be written.
  template <class T>
  SymbolicTensor<T> output(const std::string& name, const std::vector<SymbolicInt>& shape) {
    return add<T>(name, shape, false, true);
  }

  template <class Kernel, class... Args>
  void launch(SymbolicGrid grid, const Kernel& kernel, Args... args) {
    if (arrays_) {
      const Grid numbers{static_cast<int>(grid.x), static_cast<int>(grid.y), static_cast<int>(grid.z)};
      begin_checked(numbers);
      reports_.push_back(tile::launch(CheckedCpu{.max_steps = 1'000'000}, numbers, kernel, checked(args)...));
      return;
    }
    begin(type_name(typeid(Kernel)), grid);
    Context<Symbolic> t{Symbolic::Program{}};
    kernel(t, argument(args)...);
  }

  const std::vector<Report>& reports() const { return reports_; }

 private:
  friend class Proving;
  struct Held {  // a tensor of numbers
    std::string name;
    std::vector<std::int64_t> shape;
    bool written;
    std::vector<std::byte> bytes;
    std::vector<std::uint8_t> marks;
    std::optional<std::pair<std::int64_t, std::int64_t>> values;
  };

  template <class T>
  SymbolicTensor<T> add(const std::string& name, const std::vector<SymbolicInt>& shape, bool written, bool has_to_be) {
    return {add(name, dtype_of<T>(), sizeof(T), shape, written, has_to_be)};
  }
  int add(const std::string& name, DType dtype, std::size_t bytes, const std::vector<SymbolicInt>& shape, bool written,
          bool has_to_be);
  void limit(int tensor, SymbolicInt low, SymbolicInt high);
  void begin(const std::string& kernel, const SymbolicGrid& grid);
  void begin_checked(const Grid& grid);

  template <class T>
  static Pointer<Symbolic, T> argument(SymbolicTensor<T> tensor) {
    return {nullptr, {tensor.number}};
  }
  template <class A>
  static A argument(A value) {
    return value;
  }
  template <class T>
  Tensor<T> checked(SymbolicTensor<T> tensor) {
    Held& held = held_[static_cast<std::size_t>(tensor.number)];
    return {held.name, reinterpret_cast<T*>(held.bytes.data()), held.shape, held.marks.data()};
  }
  template <class A>
  static A checked(A value) {
    return value;
  }

  // Of numbers.
  bool arrays_ = false;
  std::vector<std::int64_t> numbers_;
  std::size_t next_number_ = 0;
  const std::map<std::string, std::vector<std::int64_t>>* contents_ = nullptr;
  std::deque<Held> held_;
  std::vector<Report> reports_;
  // Of symbols: what does not depend on the way through the kernels.
  class Proving* proving_ = nullptr;
};

inline SymbolicInt argument(Symbolic&, SymbolicInt value) { return value; }
inline SymbolicInt argument(CheckedCpu&, SymbolicInt value) { return value; }

// Runs `setup` with symbols, and again with the numbers of a counterexample.
Proof prove(const std::function<void(Prover&)>& setup, const ProofLimits& limits = {});

}  // namespace octile::tile
