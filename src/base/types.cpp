// The names of every choice, as they appear in explain(), in errors and on the command line.
#include "octile/types.h"

#include <array>

#include "octile/error.h"

namespace octile {

namespace {

template <class Enum, std::size_t kCount>
std::string_view pick(const std::array<std::string_view, kCount>& names, Enum value) {
  const auto i = static_cast<std::size_t>(value);
  return i < kCount ? names[i] : std::string_view("?");
}

}  // namespace

std::string_view name(DType dtype) {
  static constexpr std::array<std::string_view, 8> kNames = {"f16", "bf16", "f32", "f64", "s8", "u8", "s4", "s32"};
  return pick(kNames, dtype);
}

int bits(DType dtype) {
  static constexpr std::array<int, 8> kBits = {16, 16, 32, 64, 8, 8, 4, 32};
  const auto i = static_cast<std::size_t>(dtype);
  return i < kBits.size() ? kBits[i] : 0;
}

std::string_view name(DeviceType value) {
  static constexpr std::array<std::string_view, 2> kNames = {"cpu", "cuda"};
  return pick(kNames, value);
}

std::string_view name(Granularity value) {
  static constexpr std::array<std::string_view, 4> kNames = {"tensor", "row", "column", "group"};
  return pick(kNames, value);
}

std::string_view name(ScaleSource value) {
  static constexpr std::array<std::string_view, 2> kNames = {"dynamic", "given"};
  return pick(kNames, value);
}

std::string_view name(Mapping value) {
  static constexpr std::array<std::string_view, 2> kNames = {"symmetric", "affine"};
  return pick(kNames, value);
}

std::string_view name(Rounding value) {
  static constexpr std::array<std::string_view, 2> kNames = {"nearest", "stochastic"};
  return pick(kNames, value);
}

std::string_view name(Orientation value) {
  static constexpr std::array<std::string_view, 3> kNames = {"row_major", "transposed", "both"};
  return pick(kNames, value);
}

std::string_view name(Multiplier value) {
  static constexpr std::array<std::string_view, 3> kNames = {"none", "per_column", "per_row"};
  return pick(kNames, value);
}

std::string_view name(Mask value) {
  static constexpr std::array<std::string_view, 2> kNames = {"inclusive", "exclusive"};
  return pick(kNames, value);
}

std::string_view name(Activation value) {
  static constexpr std::array<std::string_view, 4> kNames = {"none", "dynamic_per_token", "dynamic_per_tensor",
                                                             "static_per_tensor"};
  return pick(kNames, value);
}

std::string_view name(const WeightFormat& value) {
  using Names = std::array<std::string_view, 4>;
  static constexpr Names kS8 = {"s8_per_tensor", "s8_per_channel", "s8_per_input", "s8_group"};
  static constexpr Names kS4 = {"s4_per_tensor", "s4_per_channel", "s4_per_input", "s4_group"};
  return value.type == DType::s4 ? pick(kS4, value.granularity) : pick(kS8, value.granularity);
}

std::string_view name(WeightLayout value) {
  static constexpr std::array<std::string_view, 2> kNames = {"out_in", "in_out"};
  return pick(kNames, value);
}

std::string_view name(Product value) {
  static constexpr std::array<std::string_view, 3> kNames = {"none", "dequantized", "int8"};
  return pick(kNames, value);
}

Error::~Error() = default;

}  // namespace octile
