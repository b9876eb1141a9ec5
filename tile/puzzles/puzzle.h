// A puzzle: what a kernel has to compute, at which sizes, and how exactly; and the outcome of a trial.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "octile/tile/progress.h"
#include "report/write_report.h"

namespace octile::tile::puzzles {

inline constexpr double kUnit = 0x1p-24;      // unit roundoff of f32: half a unit in the last place of 1
inline constexpr double kHalfUnit = 0x1p-11;  // of f16
inline constexpr double kMinHalf = 0x1p-25;   // half the smallest f16 above 0
inline constexpr double kMinFloat = 0x1p-126;

// What the inputs are like. A line is a row, or the whole tensor where one scale belongs to all of it.
enum class Values : std::uint8_t {
  mixed,     // [-1/2, 1/2), some of them 0
  negative,  // [-1/2, 0)
  large,     // [-160, 160), of f16 [-48000, 48000], with the maximum and half of it often
  zero,
  tied,      // halves of an odd number, and 127 of it often: that is the scale of int8, and every other level is a tie
  low,       // [-320, -280), every other line [-4000, -3000)
  rising,    // each block of 32 in a line is 200 above the one before it, in every other line 95
  falling,   // ... below it
  apart,     // every other line is 200 below the rest
  tiny,      // up to 20 times the smallest f16 above 0: a 127th of them is below the minimum scale of int8
  nan,       // a NaN, the first, the last or the middle element of a line; other lines have none
  infinite,  // so has an infinity
};
constexpr const char* name(Values values) {
  constexpr const char* kNames[] = {"mixed values",
                                    "negative values",
                                    "large values",
                                    "zeros alone",
                                    "values halfway between two levels",
                                    "rows far below 0",
                                    "blocks that rise",
                                    "blocks that fall",
                                    "rows 200 apart",
                                    "tiny values",
                                    "a NaN among the values",
                                    "an infinity among the values"};
  return kNames[static_cast<int>(values)];
}

struct Case {
  std::vector<int> sizes;  // of Facts::size_names
  bool stated = false;     // in the task's text; a hidden one is shown only where it goes wrong
  Values values = Values::mixed;
  int blocks = 0;  // which of the puzzle's block sizes
};

// The cases of a puzzle: the stated sizes, then hidden ones.
class Cases {
 public:
  using Sizes = std::vector<std::vector<int>>;
  explicit Cases(std::vector<int> stated) : cases_{{std::move(stated), true}} {}
  Cases& with(Values values, const Sizes& sizes, int blocks = 0) {
    for (const std::vector<int>& each : sizes) cases_.push_back({each, false, values, blocks});
    return *this;
  }
  Cases& sizes(const Sizes& sizes, int blocks = 0) { return with(Values::mixed, sizes, blocks); }
  operator std::vector<Case>() const { return cases_; }

 private:
  std::vector<Case> cases_;
};

struct Facts {
  int number = 0;
  std::string name;
  std::string task;  // one line
  std::vector<std::string> size_names;
  std::string tensors;
  std::string launch;  // grid and block sizes
  std::string hint;
  std::string tolerance;   // how it is derived
  std::string parameters;  // of a kernel
  std::vector<Case> cases;
  std::vector<std::string> kernels = {"MyKernel"};  // what the learner calls them; each is launched once, in order
};

std::string text(const Facts& facts, const Case& a_case);  // "n0 = 33, negative values"

// What an element has to be. NaN and infinities have to be met exactly.
struct Expected {
  double value = 0;
  double bound = 0;
};

struct Mismatch {
  std::string tensor;
  std::int64_t size = 0;
  std::int64_t count = 0;
  std::int64_t index = 0;  // of the first
  double got = 0;
  Expected expected;
  bool written = true;
  bool input = false;            // that a kernel stored to: nothing else is filled in but count and index
  int launch = -1, record = -1;  // of the checked launches, who wrote it last
};

// One try of one case by one executor.
struct Outcome {
  Case the_case;
  std::vector<Report> reports;  // checked executor: one per launch
  std::vector<Mismatch> mismatches;
  std::vector<std::byte> outputs;     // all of them, one after the other
  std::vector<TensorValues> tensors;  // checked executor: after the launches
  double worst = 0;                   // largest error as a share of its bound
  std::vector<std::string> inputs;
  std::int64_t min_bytes = 0;  // each input read once, each output written once

  bool right() const { return mismatches.empty(); }
  bool clean() const {
    for (const Report& report : reports) {
      if (!report.clean()) return false;
    }
    return true;
  }
};

inline double ratio(std::int64_t a, std::int64_t b) {
  return b == 0 ? 1 : static_cast<double>(a) / static_cast<double>(b);
}

// The bytes that a launch moves, and the minimum.
struct Score {
  std::int64_t moved_bytes = 0, min_bytes = 0;
  std::int64_t sector_bytes = 0, used_bytes = 0;  // of the sectors that warps ask for, and of what they use of them
  std::int64_t lanes = 0, active = 0;
  // Bytes loaded of a tensor, and those that differ: how often an element is read.
  struct Reuse {
    std::string tensor;
    std::int64_t loaded = 0, different = 0;
    double times() const { return ratio(loaded, different); }
  };
  std::vector<Reuse> reuse;  // of the tensors that are read, launch by launch

  double times_minimum() const { return ratio(moved_bytes, min_bytes); }
  double sector_use() const { return ratio(used_bytes, sector_bytes); }
  double masked_off() const { return 1 - ratio(active, lanes); }
};
Score score(const Outcome& outcome);

// What a proof of a kernel says; see octile/tile/prove.h.
struct ProofVerdict {
  bool proved = false;
  std::string text;             // lines, indented
  std::optional<Case> refuted;  // where the checked executor shows it
};

// Everything about the tries of one kernel.
struct Verdict {
  int cases = 0, hidden = 0;
  std::optional<Outcome> wrong;   // the first checked try that is wrong or unsafe
  std::optional<Outcome> stated;  // the last stated case, right or not: what the report shows and the score counts
  double worst = 0;               // largest error as a share of its bound, at any size
  std::optional<ProofVerdict> proof;
  std::string disagreement;  // of the fast executor with the checked one, or of a device: one line
  bool right() const { return !wrong && disagreement.empty(); }
};

// A kernel that is wrong, and how the checker finds out.
struct Wrong {
  // The comment "wrong: Kernel, Another" marks the source line to blame; "Kernel.mistake" is one of several of Kernel.
  std::string kernel;
  std::optional<Problem> problem;  // none: its result is wrong, and the line is that of the store
  std::string lesson;
  std::function<Outcome(const Case&)> run;
  bool leaves_out = false;  // the first wrong element is never written: there is no line to blame
};

// A puzzle with the kernels that solve it.
struct Puzzle {
  Facts facts;
  std::string type;  // that names it in check<...>()
  std::function<Outcome(const Case&)> checked;
  std::function<Outcome(const Case&, int threads)> fast;
  std::vector<Wrong> wrong;
};

// 1 to 12 are the puzzles, 13 to 18 the kernels of an int8 linear layer.
const std::vector<Puzzle>& puzzles();
const Puzzle* find_puzzle(const std::string& number_or_name);

// ---- The verdict ----

struct Try {
  std::function<Outcome(const Case&)> checked;                      // or on a device
  std::function<Outcome(const Case&, int threads)> fast = nullptr;  // has to give the same bits; nullptr: not tried
  bool hidden = true;
  std::function<void()> progress = {};  // after each case
  std::function<ProofVerdict()> prove = {};
};
Verdict judge(const std::vector<Case>& cases, const Try& a_try);

// What the source says at a site, with its line number and a caret; empty where there is none.
std::string excerpt(const Site& site);
// Of a program's last access.
Site site_of(const Progress& progress);
// The site of the store that wrote a mismatch, or none.
const Site* blamed(const Outcome& outcome, const Mismatch& mismatch);

// Short, for a terminal: at most a few lines for each problem.
std::string text(const Facts& facts, const Outcome& wrong);
std::string text(const Facts& facts, const Verdict& verdict);
std::string text(const Score& score);

}  // namespace octile::tile::puzzles
