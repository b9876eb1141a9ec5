// What a symbolic run of a kernel leaves: its accesses as formulas over sizes, program, loop iterations and lanes.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "octile/tile/platform.h"
#include "octile/tile/report.h"
#include "octile/tile/symbolic_term.h"

namespace octile::tile::symbolic {

// One run through the body of a loop. A body is run twice, for two iterations of which the first one is earlier.
struct Pass {
  int loop = 0;  // which time that a loop was entered
  int number = 0;
  bool pipeline = false;
  Term iteration;  // from 0
  Formula range;   // of it
};

struct Checked {
  Term value;  // has to fit
  int bits = 32;
};

struct Undefined {
  Formula where;  // of which lanes
  Where load;     // that masked them off; no line: a division by zero or a shift too far
};

// What is known of the elements of a tile, as functions of the lane.
struct Lanes {
  Term number;    // of integers
  Formula truth;  // of bools
  std::vector<Undefined> undefined;
  std::vector<Checked> checked;  // index arithmetic on the way

  void take(const Lanes& other);  // its undefined lanes and its index arithmetic
};

struct Event {
  bool is_barrier = false;
  int number = -1;  // equal numbers: the same except for the names of iterations
  Access access = Access::load;
  int launch = 0, tensor = 0, position = 0;
  int since = -1;  // of a pipeline's load: the position of its pipeline, after which no barrier counts
  Where where;
  std::array<int, 3> sides{1, 1, 1};
  std::array<Term, 3> program, grid;
  Term index;
  Formula mask;
  Lanes index_lanes, mask_lanes, value_lanes;  // for what is undefined or too large in them
  std::vector<Pass> loops;
  std::vector<Formula> path;
};

// What has to hold where the kernel computes with sizes.
struct Demand {
  Formula must;
  std::string what;
  std::vector<Pass> loops;
  std::vector<Formula> path;
  int launch = 0;
  Term value;
  std::array<Term, 3> program, grid;
};

struct TensorFacts {
  std::string name;
  DType dtype = DType::f32;
  std::vector<Term> shape;
  bool written = true;  // before the launches
  bool has_to_be_written = false;
  std::optional<std::pair<Term, Term>> values;  // low <= element < high, of integers
  Term size() const;
};

struct LaunchFacts {
  std::array<Term, 3> grid, program;
  std::string kernel;
};

// One way through the kernels, as far as conditions on sizes decide about it.
struct Path {
  std::vector<Formula> conditions;
  std::vector<Event> events;
  std::vector<Demand> demands;
  bool left_a_loop = false;  // by break or return
};

struct PathEnds {};  // thrown where an assumption does not hold

// The run under way. There is one at a time in a thread.
class Walk {
 public:
  explicit Walk(Space& space) : space(space) {}
  Space& space;
  std::vector<bool> decisions;  // taken; the first `forced` of them are given
  std::size_t forced = 0;
  std::vector<std::size_t> open;  // decisions that could be otherwise
  std::function<bool(const std::vector<Formula>&)> feasible;

  std::vector<TensorFacts> tensors;
  std::vector<LaunchFacts> launches;
  Path path;
  std::vector<Pass> loops;
  int position = 0, since = -1;
  const std::set<int>* stored = nullptr;  // tensors whose values change
  bool all_second_passes = false;         // decide every way in the second pass of a loop too, not only one
  bool skipped = false;                   // such a way

  const Term* keep(const Term& term) { return &kept_.emplace_back(term); }
  Term column(const Term& term);  // v[..., None] of it
  Formula column(const Formula& formula);
  bool decide(const Formula& formula);
  Term with_known_sizes(const Term& term);  // a size that is decided to be a number is one
  void demand(const Formula& must, const std::string& what, const Term& value);
  void add(Event event);
  void enter(int number, const Term& first, const Term& last, const Term& step, int loop, bool pipeline);
  void leave();
  // A variable that was made before a loop got another value in it: to be compared after the two passes.
  std::int64_t birth() { return births_++; }
  bool older_than_a_loop(std::int64_t born) const { return !states_.empty() && born < states_.back().start; }
  void assigned(const void* variable, std::int64_t born, const Lanes& before, const Lanes& after);
  bool carries = false;  // a loop whose second pass leaves other values than its first
  int next_loop() { return loop_count_++; }
  Term opaque(const std::array<int, 3>& sides, std::int64_t low, std::int64_t high);
  std::vector<Formula> conditions() const;  // that hold here
  std::size_t decided() const { return decided_; }

 private:
  void know(const Formula& condition);
  struct Condition {
    Formula formula;
    std::size_t depth;
  };
  // What the passes of a loop have assigned to variables that are older than it.
  struct LoopState {
    std::int64_t start = 0;
    int opaques = 0;  // before the loop
    Term iteration;   // of the first pass
    Formula empty;    // there is no iteration
    std::size_t pass = 0;
    std::map<const void*, std::array<Lanes, 3>> variables = {};  // before the loop, and after each pass
  };
  bool settled(const LoopState& state, const Term& second_iteration) const;
  bool begins_as_it_ends(const LoopState& state) const;
  std::string signature(const LoopState& state, std::size_t after, int second_iteration) const;

  std::vector<Condition> here_;
  std::vector<LoopState> states_;  // of `loops`
  std::int64_t births_ = 1;
  std::map<int, Term> known_;
  std::deque<Term> kept_;
  std::size_t decided_ = 0;
  int loop_count_ = 0, opaque_count_ = 0;
};

Walk* walk_under_way();
Walk& the_walk();  // throws if there is none

// When a variable was made, in a run.
std::int64_t birth_now();
constexpr std::int64_t birth() { return std::is_constant_evaluated() ? 0 : birth_now(); }
bool older_than_a_loop(std::int64_t born);
class Under {
 public:
  explicit Under(Walk* run);
  ~Under();
  Under(const Under&) = delete;
  Under& operator=(const Under&) = delete;

 private:
  Walk* outer_;
};

}  // namespace octile::tile::symbolic
