// The tensors of a run, for each kind of plan: their types, shapes and contents. In the order of the fields of its
// argument structure, by which a list of views becomes arguments.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/fields.h"
#include "octile/octile.hpp"

namespace octile::check {

// A vector, or a matrix where there are columns.
struct Size {
  std::int64_t rows = 0;
  std::optional<std::int64_t> cols = {};
};

// A scale that the caller gives is positive and finite; one that a quantizer has computed may be NaN.
enum class Content : std::uint8_t { real, integer, zero_point, multiplier, given_scale, scale };

struct Operand {
  std::string_view name = {};  // empty: this run has no such tensor
  DType dtype = DType::f32;
  Size size = {};
  Content content = Content::real;
  std::array<int, 2> range = {};  // of integers and zero points
  double typical = 1;             // of scales and multipliers
  bool output = false;
  bool optional = false;                  // an output that the caller may leave out
  bool accumulates = false;               // an output that a run adds to
  std::vector<std::int32_t> values = {};  // of integers that are not random, row by row

  bool present() const { return !name.empty(); }
};

template <class PlanOfIt, class DescriptionOfIt>
struct KindOf {
  using Plan = PlanOfIt;
  using Description = DescriptionOfIt;
};
template <class Args>
struct Kind : KindOf<QuantizerPlan<Args>, QuantizeDescription> {};
template <>
struct Kind<LinearArgs> : KindOf<LinearPlan, LinearDescription> {};
template <>
struct Kind<LinearBackwardArgs> : KindOf<LinearBackwardPlan, LinearBackwardDescription> {};
template <>
struct Kind<GroupedLinearArgs> : KindOf<GroupedLinearPlan, GroupedLinearDescription> {};
template <>
struct Kind<GroupedLinearBackwardArgs> : KindOf<GroupedLinearBackwardPlan, GroupedLinearBackwardDescription> {};

// Of a run of this many rows. A weight is not packed here.
template <class Args>
std::vector<Operand> operands(const typename Kind<Args>::Description& d, std::int64_t rows);

// Rows of each expert, the sorted rows' tokens and the tokens' places are the case's own.
struct GroupedLinearCase;
std::vector<Operand> operands(const GroupedLinearCase& c);
struct GroupedLinearBackwardCase;
std::vector<Operand> operands(const GroupedLinearBackwardCase& c);

// Calls visit with the tensors among the arguments of a run, all at once.
template <class Args, class Visit>
void visit_tensors(Args& args, const Visit& visit) {
  std::apply(visit, kFields<Args>.tie(args));
}

// Arguments of these views, one for each operand. The seed is for those that have one.
template <class Args>
Args args_of(const std::vector<Tensor>& views, std::uint64_t seed) {
  Args args;
  visit_tensors(args, [&](auto&... field) {
    std::size_t i = 0;
    ((field = views[i++]), ...);
  });
  if constexpr (requires { args.seed; }) args.seed = seed;
  return args;
}

}  // namespace octile::check
