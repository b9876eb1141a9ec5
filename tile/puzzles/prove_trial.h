// A puzzle as a proof has it: its tensors and launches, for all sizes.
#pragma once

#include "octile/tile/prove.h"
#include "puzzles/trial.h"

namespace octile::tile::puzzles {

class ProofTrial {
 public:
  ProofTrial(Prover& prover, const Facts& facts, int blocks) : prover(prover), facts_(facts), blocks_(blocks) {}
  SymbolicInt size(int i) { return prover.size(facts_.size_names[static_cast<std::size_t>(i)]); }
  int blocks() const { return blocks_; }
  Values values() const { return Values::mixed; }
  float next_float(Values, Trial::Place) const { return 0; }
  void assume(bool condition) { prover.assume(condition); }
  template <class Kernel, class... Args>
  void launch(const SymbolicGrid& grid, const Kernel& kernel, Args... args) {
    prover.launch(grid, kernel, args...);
  }

  Prover& prover;

 private:
  const Facts& facts_;
  int blocks_;
};

using SymbolicShape = std::vector<SymbolicInt>;
template <class T = f32, class F>
SymbolicTensor<T> input(ProofTrial& t, const char* name, const SymbolicShape& shape, F) {
  return t.prover.input<T>(name, shape);
}
template <class T = f32>
SymbolicTensor<T> input(ProofTrial& t, const char* name, const SymbolicShape& shape) {
  return t.prover.input<T>(name, shape);
}
inline SymbolicTensor<f32> scales(ProofTrial& t, const char* name, const SymbolicShape& shape) {
  return t.prover.input<f32>(name, shape);
}
template <class T = f32>
SymbolicTensor<T> output(ProofTrial& t, const char* name, const SymbolicShape& shape) {
  return t.prover.output<T>(name, shape);
}
template <class T>
SymbolicTensor<T> between_launches(ProofTrial& t, const char* name, T) {
  return t.prover.input<T>(name, {1});
}
template <class T, class F>
void expect(ProofTrial&, const SymbolicTensor<T>&, F) {}

std::vector<int> blocks_of(const Facts& facts);  // that its cases have

// P::run with symbols.
template <class P, class... Kernels>
Proof proof(int blocks, const Kernels&... kernels) {
  const Facts facts = P::facts();
  return prove([&](Prover& prover) {
    ProofTrial trial(prover, facts, blocks);
    P::run(trial, kernels...);
  });
}
template <class P, class... Kernels>
std::vector<Proof> proofs(const Kernels&... kernels) {
  std::vector<Proof> result;
  for (const int blocks : blocks_of(P::facts())) result.push_back(proof<P>(blocks, kernels...));
  return result;
}

// Of the proofs of all block sizes, in a few lines.
ProofVerdict verdict_of(const std::vector<Proof>& proofs, const std::vector<int>& blocks);

// The main() of a learner's file in which an int is a SymbolicInt.
template <class P, class... Kernels>
int check(SymbolicInt argc, char** argv, const Kernels&... kernels) {
  Try a_try = try_of<P>(kernels...);
  a_try.prove = [&] { return verdict_of(proofs<P>(kernels...), blocks_of(P::facts())); };
  return check_main(P::facts(), a_try, {argv, argv + static_cast<int>(argc)});
}

}  // namespace octile::tile::puzzles
