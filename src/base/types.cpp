// The names of every choice, as they appear in explain(), in errors and on the command line.
#include "octile/types.h"

#include "base/pick.h"
#include "octile/error.h"

namespace octile {

std::string_view name(DType value) { return pick({"f16", "bf16", "f32", "f64", "s8", "u8", "s4", "s32"}, value); }
std::string_view name(DeviceType value) { return pick({"cpu", "cuda"}, value); }
std::string_view name(Granularity value) { return pick({"tensor", "row", "column", "group"}, value); }
std::string_view name(ScaleSource value) { return pick({"dynamic", "given"}, value); }
std::string_view name(Mapping value) { return pick({"symmetric", "affine"}, value); }
std::string_view name(Rounding value) { return pick({"nearest", "stochastic"}, value); }
std::string_view name(Orientation value) { return pick({"row_major", "transposed", "both"}, value); }
std::string_view name(Multiplier value) { return pick({"none", "per_column", "per_row"}, value); }
std::string_view name(Prologue value) { return pick({"none", "gelu_tanh", "silu", "rms_norm", "layer_norm"}, value); }
std::string_view name(Mask value) { return pick({"inclusive", "exclusive"}, value); }
std::string_view name(Activation value) {
  return pick({"none", "dynamic_per_token", "dynamic_per_tensor", "static_per_tensor"}, value);
}
std::string_view name(const WeightFormat& value) {
  return value.type == DType::s4
             ? pick({"s4_per_tensor", "s4_per_channel", "s4_per_input", "s4_group"}, value.granularity)
             : pick({"s8_per_tensor", "s8_per_channel", "s8_per_input", "s8_group"}, value.granularity);
}
std::string_view name(WeightLayout value) { return pick({"out_in", "in_out"}, value); }
std::string_view name(Product value) { return pick({"none", "dequantized", "int8"}, value); }

Error::~Error() = default;

}  // namespace octile
