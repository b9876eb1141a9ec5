// A case in words.
#include <array>

#include "base/message.h"
#include "check/cases.h"

namespace octile::check {

namespace {

std::string describe_one(const QuantizerCase& c) {
  const QuantizeDescription& d = c.description;
  return message(name(c.operation), " x=", d.x, " q=", d.q, " rows=", c.rows, " of ", d.rows, " cols=", d.cols, ' ',
                 name(d.granularity), " group=", d.group, ' ', name(d.scale), ' ', name(d.mapping), ' ',
                 name(d.rounding), ' ', name(d.orientation), " multiplier=", name(d.multiplier), " mask=", name(d.mask),
                 " range=", d.q_min, "..", d.q_max, " min_scale=", d.min_scale, " scale_out=", c.scale_out,
                 d.prologue == Prologue::none ? "" : message(' ', name(d.prologue), d.gated ? " gated" : ""),
                 is_norm(d.prologue) ? message(" epsilon=", d.epsilon, " norm_weight=", d.norm_weight) : "",
                 d.residual ? " residual" : "");
}

std::string describe_one(const LinearCase& c) {
  const LinearDescription& d = c.description;
  return message("linear m=", c.rows, " of ", d.m, " n=", d.n, " k=", d.k, " x=", d.x, " y=", d.y, ' ',
                 name(d.activation), " static_scale=", d.static_scale, ' ', name(d.weight), ' ', name(d.weight_layout),
                 d.packed_weight ? " packed" : "", " group=", d.weight.group, " zero_point=", d.weight.zero_point,
                 " bias=", d.bias, " x_multiplier=", d.x_multiplier);
}

std::string describe_one(const LinearBackwardCase& c) {
  const LinearBackwardDescription& d = c.description;
  return message("linear_backward m=", c.rows, " of ", d.m, " n=", d.n, " k=", d.k, " dy=", d.dy,
                 " dw_dtype=", d.dw_dtype.value_or(d.dy), d.dw_accumulate ? " dw_accumulate" : "", " dx=", name(d.dx),
                 " dw=", name(d.dw), " db=", d.db, ' ', name(d.activation), " static_scale=", d.static_scale,
                 " x_transposed=", d.x_transposed, ' ', name(d.weight), ' ', name(d.weight_layout),
                 " dw_layout=", name(d.dw_layout.value_or(d.weight_layout)), ' ', name(d.rounding),
                 d.gradient_block > 0 ? message(" gradient_block=", d.gradient_block) : "");
}

std::string joined(const std::vector<std::int32_t>& offsets) {
  std::string text;
  for (const std::int32_t offset : offsets) text += message(text.empty() ? "" : ",", offset);
  return text;
}

std::string describe_one(const GroupedLinearCase& c) {
  const GroupedLinearDescription& d = c.description;
  return message("grouped_linear experts=", d.experts, " m=", c.rows, " of ", d.m, " n=", d.n, " k=", d.k,
                 " tokens=", d.tokens, " gather=", d.gather, " slots=", d.slots, " x=", d.x, " y=", d.y, ' ',
                 name(d.activation), " static_scale=", d.static_scale, ' ', name(d.weight),
                 d.packed_weight ? " packed" : "", " group=", d.weight.group, " zero_point=", d.weight.zero_point,
                 " bias=", d.bias, " clear_rest=", d.clear_rest, " offsets=", joined(c.offsets));
}

std::string describe_one(const GroupedLinearBackwardCase& c) {
  const GroupedLinearBackwardDescription& d = c.description;
  return message("grouped_linear_backward experts=", d.experts, " m=", c.rows, " of ", d.m, " n=", d.n, " k=", d.k,
                 " dy=", d.dy, " dw_dtype=", d.dw_dtype.value_or(d.dy), d.dw_accumulate ? " dw_accumulate" : "",
                 " dx=", name(d.dx), " dw=", name(d.dw), " db=", d.db, ' ', name(d.activation),
                 " static_scale=", d.static_scale, ' ', name(d.weight), ' ', name(d.rounding),
                 " gradient_block=", d.gradient_block, " clear_rest=", d.clear_rest, " offsets=", joined(c.offsets));
}

}  // namespace

std::string_view name(Layout value) {
  static constexpr std::array<std::string_view, 5> kNames = {"compact", "padded", "sliced", "repeating", "pitched"};
  return kNames[static_cast<std::size_t>(value)];
}

std::string_view name(Data value) {
  static constexpr std::array<std::string_view, 11> kNames = {"normal",    "heavy_tailed", "ties",       "constant",
                                                              "tiny",      "zero_rows",    "huge",       "poisoned",
                                                              "near_ties", "sparse_ties",  "every_value"};
  return kNames[static_cast<std::size_t>(value)];
}

std::string describe(const Case& c) {
  const std::string text = std::visit([](const auto& one) { return describe_one(one); }, c);
  const CaseBase& base = std::visit([](const auto& one) -> const CaseBase& { return one; }, c);
  return message(text, " layout=", name(base.layout), " data=", name(base.data));
}

}  // namespace octile::check
