// Z3 behind the interface that proofs need.
#pragma once

#include <map>
#include <memory>

#include "octile/tile/symbolic_term.h"

namespace octile::tile::symbolic {

struct Model {
  std::map<int, std::int64_t> atoms;
  std::int64_t at(const Term& term, const Space& space) const;  // 0 where nothing is said
};

class Solver {
 public:
  enum class Answer : std::uint8_t { impossible, possible, unknown };
  // linear: products of symbols are symbols of their own, with a few facts; so what is possible may be so in name only.
  enum class Products : std::uint8_t { linear, exact };

  explicit Solver(Space& space);
  ~Solver();
  Solver(const Solver&) = delete;
  Solver& operator=(const Solver&) = delete;

  Answer ask(const std::vector<Formula>& facts, Products products, int milliseconds, Model* model = nullptr);
  int queries() const { return queries_; }

 private:
  struct Z3;
  Space& space_;
  std::unique_ptr<Z3> z3_;
  int queries_ = 0;
};

}  // namespace octile::tile::symbolic
