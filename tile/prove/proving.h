// One proof: ways through the kernels, and questions about them.
#pragma once

#include <chrono>
#include <map>
#include <set>

#include "octile/tile/prove.h"
#include "prove/solver.h"

namespace octile::tile {

class Proving {
 public:
  Proving(const std::function<void(Prover&)>& setup, const ProofLimits& limits);
  Proof proof();

  // For the Prover.
  symbolic::Term size(const std::string& name, std::int64_t min);
  symbolic::Term program(int launch, int axis, const symbolic::Term& count);

 private:
  using Term = symbolic::Term;
  using Formula = symbolic::Formula;
  using Event = symbolic::Event;
  using Facts = std::vector<Formula>;
  using Lane = std::array<Term, 3>;
  using Answer = symbolic::Solver::Answer;

  // A tensor's dimensions, neighbours of them taken as one: digits of an index.
  struct Grouping {
    std::vector<Term> sides, strides;
  };
  struct Access {
    Event event;
    int path = 0;
    bool in_bounds = true;
    std::vector<int> digits_hold = {};  // of each grouping: 0 unknown, 1 yes, -1 no
  };
  struct Query {  // a violation, if it is possible
    Property property;
    const Event* event;
    Facts facts;
    Lane lane;
    std::vector<Term> help = {};  // whose products matter
  };

  void explore();
  void explore(bool& again);
  void collect();
  void check_bounds();
  void check_races();
  void check_order();
  bool may_meet(Access& a, Access& b);  // in one program, lane and iteration aside
  void check_order_of(const std::set<int>& tensors);
  void check_defined();
  void check_written();
  void check_overflow();

  bool suspect(const Query& query, Facts more = {});  // true: it is impossible
  Claim claim_of(Property property, tile::Answer answer, const Event* event) const;
  void settle(Property property, tile::Answer answer, const Event* event, const std::string& reason);
  bool refute(const Query& query);
  bool confirm(Claim& claim);

  Facts at(const Event& event, const Lane& lane, bool masked = true);
  Lane lane_of(const Event& event, const char* suffix = "");
  Term at_lane(const Term& term, const Lane& lane);
  Formula at_lane(const Formula& formula, const Lane& lane);
  Facts primed(const Facts& facts);
  const std::vector<Grouping>& groupings(int tensor);
  static std::vector<Term> digits(const Term& index, const Grouping& grouping);
  bool digits_hold(Access& access, std::size_t grouping);
  // That two indices are one element: by digits if both have them, else as they are.
  Formula same_element(Access& a, Access& b, const Term& index_a, const Term& index_b);
  Facts about_products(const std::vector<Term>& terms);
  bool covered(int tensor, int up_to_launch);
  bool initialized(const Access& load, const std::vector<Event>& events);
  std::string signature(const Event& event);
  std::string signature(const Facts& facts);

  Answer ask(const Facts& facts, int milliseconds = 1000);
  double seconds() const;
  int milliseconds_left(int wanted) const;

  const std::function<void(Prover&)>& setup_;
  ProofLimits limits_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  symbolic::Space space_;
  symbolic::Solver solver_{space_};
  std::vector<std::pair<std::string, Term>> sizes_;
  std::map<std::string, Term> named_;
  std::set<int> stored_;
  bool all_second_passes_ = true, skipped_ = false, carries_ = false;
  std::vector<symbolic::Path> paths_;
  std::vector<symbolic::TensorFacts> tensors_;
  std::vector<symbolic::LaunchFacts> launches_;
  std::vector<Access> accesses_;  // different ones
  std::map<int, std::vector<Grouping>> groupings_;
  std::map<Property, Claim> claims_;
  std::map<Property, int> attempts_;
  std::set<unsigned> carried_;  // lines of accesses whose index a loop carries
  std::string unconfirmed_;     // why the last counterexample is none
  struct {
    Facts facts;
    std::vector<Term> element;
    Grouping grouping;
  } unwritten_;
  int loops_ = 0;
};

}  // namespace octile::tile
