// The one list of cases: what every row of the kernel table is run with. `octile check` walks it, row by row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "octile/octile.hpp"
#include "plan/kernel.h"

namespace octile::check {

// The memory layout of a case's tensors.
//   compact    no gaps
//   padded     leading dimensions longer than a row, vectors with a stride of 2
//   sliced     columns out of the middle of a wider matrix, so that nothing is aligned beyond its element
//   repeating  inputs whose first stride is 0: one row, one scale for all
//   pitched    rows at multiples of 64 elements, longer than a row: what a GPU's bulk copies take (large cases)
enum class Layout : std::uint8_t { compact, padded, sliced, repeating, pitched };

// What the float inputs hold. Integer inputs are uniform over their whole range, -128 included; with `constant` they
// are all its lowest value.
//   ties     multiples of 1/2 up to 127, which a scale of 1 leaves halfway between two integers
//   tiny     subnormal, and on both sides of what the floor of 1e-8 on a scale decides
//   poisoned normal, with NaNs of any payload and infinities here and there
//   near_ties    given scales of one random size, and odd multiples of half of them, up to two units in the last place off
//   sparse_ties  the same, but most elements are far from a tie
//   every_value  all values of a 16-bit type, times 1, 0.7, 3e-5 and 1e30 in bands of 64 rows
enum class Data : std::uint8_t {
  normal,
  heavy_tailed,
  ties,
  constant,
  tiny,
  zero_rows,
  huge,
  poisoned,
  near_ties,
  sparse_ties,
  every_value
};

std::string_view name(Layout value);
std::string_view name(Data value);

// What all cases have. `rows` is what is run; the description's own may be larger.
struct CaseBase {
  std::int64_t rows = 0;
  Layout layout = Layout::compact;
  Data data = Data::normal;
  // Too long for the oracle: what is expected comes from the CPU's fastest rows, which `octile check` compares with it.
  bool large = false;
};

struct QuantizerCase : CaseBase {
  Operation operation = Operation::quantize;  // one of the first six, or prologue_quantize
  QuantizeDescription description;
  bool scale_out = true;  // quantize with given scales: whether `scale` is an output too
};

struct LinearCase : CaseBase {
  LinearDescription description;
};

struct LinearBackwardCase : CaseBase {
  LinearBackwardDescription description;
};

// `rows` are the sorted rows, some of which may belong to no expert.
struct GroupedLinearCase : CaseBase {
  GroupedLinearDescription description;
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> token = {};  // with gather
  std::vector<std::int32_t> place = {};  // with slots: of each token
};

struct GroupedLinearBackwardCase : CaseBase {
  GroupedLinearBackwardDescription description;
  std::vector<std::int32_t> offsets;
};

using Case = std::variant<QuantizerCase, LinearCase, LinearBackwardCase, GroupedLinearCase, GroupedLinearBackwardCase>;

// All cases that exercise rows of this operation on a device of this type, in a fixed order; a GPU has large ones too.
// every: one case in this many, spread evenly, and the special ones. A prime above 7 is prime to every period of the
// list, so that the sample meets every option. Throws std::runtime_error for an operation that it has no cases for.
std::vector<Case> cases(Task task, DeviceType device, int every);

// Every parameter of a case, on one line.
std::string describe(const Case& c);

}  // namespace octile::check
