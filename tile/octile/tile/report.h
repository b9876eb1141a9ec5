// What the checked executor saw of one launch: plain data, which the verdict in the terminal and the HTML report print.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "octile/tile/tensor.h"
#include "octile/tile/types.h"

namespace octile::tile {

enum class Access : std::uint8_t { load, store, atomic };
constexpr const char* name(Access access) {
  constexpr const char* kNames[] = {"load", "store", "atomic"};
  return kNames[static_cast<int>(access)];
}

enum class Problem : std::uint8_t {
  out_of_bounds,    // an index below 0 or past the tensor's end
  undefined_value,  // stores a lane that a masked load without `other` left undefined, or that was computed from one
  undefined_index,  // uses such a lane as an index or a mask
  uninitialized,    // reads memory that was never written
  race,             // several programs use an element, one of them writes it, and not all do so by atomics
  same_address,     // two lanes of one store write to one element
  unordered,        // a program uses an element twice, one of the two stores, and no barrier says which comes first
  overflow,         // an index or a mask comes from index arithmetic that left 32 bits
  endless           // a program exceeded its maximum number of accesses
};
inline constexpr int kProblems = 9;
constexpr const char* name(Problem problem) {
  constexpr const char* kNames[] = {"out of bounds", "undefined value", "undefined index", "uninitialized memory",
                                    "race",          "same address",    "missing barrier", "index overflow",
                                    "endless loop"};
  return kNames[static_cast<int>(problem)];
}

// What the instances of a problem are counted in.
constexpr const char* unit(Problem problem) {
  return problem == Problem::race ? "element" : problem == Problem::endless ? "step" : "lane";
}

// One line of a kernel that touches memory: a call of load, store, fetch, atomic_add or atomic_max, for one tensor.
struct Site {
  Access access = Access::load;
  std::string file;
  unsigned line = 0, column = 0;
  int tensor = 0;

  std::int64_t calls = 0;    // tiles accessed
  std::int64_t lanes = 0;    // their elements
  std::int64_t active = 0;   // those not masked off
  std::int64_t bytes = 0;    // of the active lanes
  std::int64_t sectors = 0;  // different 32-byte sectors touched, call by call: what no layout can avoid
  bool masked = false;       // the call has a mask, whether or not it is ever false

  // On a GPU, with WarpLayout: instructions of one warp, the sectors they ask for, and the bytes that they use of
  // them, each once.
  std::int64_t requests = 0, request_sectors = 0, request_bytes = 0;
  std::int64_t scalar_calls = 0;      // tiles whose rows are contiguous, but which cannot be accessed in whole vectors:
  std::int64_t misaligned_calls = 0;  // a row's address is no multiple of the vector, or (the rest) the mask cuts in
};

// What left a lane undefined, if not a load.
enum class Cause : std::uint8_t { none, division, shift };

struct Instance {
  std::array<int, 3> program{};
  std::array<int, 3> lane{-1, -1, -1};  // plane, row, column of the tile; -1: not known
  std::int64_t index = 0;               // element of the tensor
  Cause cause = Cause::none;
  // Of an undefined value or index: the load that it came from. Of a race or a missing barrier: the other access, and
  // the program that did it.
  int other_site = -1;
  std::array<int, 3> other_program{-1, -1, -1};
};

struct Finding {
  Problem problem = Problem::out_of_bounds;
  int site = 0;            // of a race: the store
  std::int64_t count = 0;  // of unit(problem); of an endless loop: the program's accesses
  Instance first;
};

// A strided block of one access: lane (p, r, c) is element base + p * plane_stride + r * row_stride + c *
// column_stride. Masked-off lanes are left out; lanes out of bounds are in. An irregular mask takes several records.
struct Record {
  std::int32_t site = 0, program = 0;
  std::int32_t operation = 0;  // counts the accesses of a program, in their order
  std::int32_t planes = 1, rows = 1, columns = 1;
  std::int64_t base = 0, plane_stride = 0, row_stride = 0, column_stride = 0;
};

struct TensorUse {
  std::string name;
  DType dtype = DType::f32;
  int element_bytes = 4;
  std::vector<std::int64_t> shape;
  std::int64_t size = 1;                                 // elements
  std::int64_t elements_read = 0, elements_written = 0;  // different ones; a lower bound of the traffic
  std::int64_t never_written = 0;                        // neither by this launch nor before it
  std::vector<std::array<std::int64_t, 2>> unwritten{};  // ranges not written before the launch
};

// How a GPU would spread a tile over its threads: rows x columns of threads, `vector` neighbouring elements each.
struct WarpLayout {
  int rows = 0, columns = 0,
      vector = 0;  // 0: 128 threads, 4 elements; all in one row for a tile of one row, else 4 x 32
};

struct Report {
  std::string kernel;
  Grid grid;
  WarpLayout layout;
  std::vector<TensorUse> tensors;
  std::vector<Site> sites;
  std::vector<Finding> findings;      // one per problem and site, in the order of the first instances
  std::vector<Record> records;        // in the order of execution
  std::int64_t records_left_out = 0;  // if there are too many, only those of some programs are kept
  std::int64_t flops = 0;             // of dot()

  bool clean() const { return findings.empty(); }
  // An undefined value or index: other_site is the load that it came from.
  static bool has_origin(const Finding& finding) {
    return finding.problem == Problem::undefined_value || finding.problem == Problem::undefined_index;
  }
  std::array<int, 3> program(std::int64_t number) const {
    return {static_cast<int>(number % grid.x), static_cast<int>(number / grid.x % grid.y),
            static_cast<int>(number / grid.x / grid.y)};
  }
};

// One line: "masked_add.h:12:20: load x: out of bounds, 24 lanes; first: program (6,0,0), lane 8, x[200] of 200".
std::string text(const Report& report, const Finding& finding);

}  // namespace octile::tile
