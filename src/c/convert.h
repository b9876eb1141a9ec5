// The structures and tensors of the C interface become their C++ twins. Field by field, so that a new field is a line
// in the header, a line in the C++ structure and a line here.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/message.h"
#include "octile/octile.h"
#include "octile/octile.hpp"

namespace octile::c_interface {

constexpr std::size_t kLargestStruct = 4096;

inline std::size_t checked_size(std::string_view function, std::string_view what, std::size_t size) {
  if (size < sizeof(std::size_t) || size % 8 != 0 || size > kLargestStruct) {
    fail(Status::invalid_argument, function, ": ", what, " has struct_size = ", size,
         ", expected its sizeof: a multiple of 8 from 8 to ", kLargestStruct);
  }
  return size;
}

// What the caller gave over the defaults. Reads no byte beyond the caller's struct_size.
template <class Struct>
Struct read_struct(std::string_view function, std::string_view what, const Struct* given, Struct values = {}) {
  if (given == nullptr) fail(Status::invalid_argument, function, ": ", what, " is NULL");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  std::size_t size = 0;
  std::memcpy(&size, bytes, sizeof size);
  checked_size(function, what, size);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      fail(Status::invalid_argument, function, ": ", what, " has struct_size = ", size, " and byte ", i, " = ",
           static_cast<int>(bytes[i]), "; this library knows ", sizeof(Struct), " bytes, those beyond must be 0");
    }
  }
  std::memcpy(&values, bytes, std::min(size, sizeof(Struct)));
  return values;
}

// As much of `values` as the caller has room for; the rest of a larger structure becomes 0.
template <class Struct>
void write_struct(std::string_view function, std::string_view what, Struct* wanted, Struct values) {
  if (wanted == nullptr) fail(Status::invalid_argument, function, ": ", what, " is NULL");
  auto* bytes = reinterpret_cast<unsigned char*>(wanted);
  std::size_t size = 0;
  std::memcpy(&size, bytes, sizeof size);
  checked_size(function, what, size);
  values.struct_size = size;
  std::memcpy(bytes, &values, std::min(size, sizeof(Struct)));
  if (size > sizeof(Struct)) std::memset(bytes + sizeof(Struct), 0, size - sizeof(Struct));
}

struct Element {
  std::uint8_t code;
  std::uint8_t bits;
  DType dtype;
};

constexpr std::array<Element, 8> kElements = {{{OCTILE_CODE_FLOAT, 16, DType::f16},
                                               {OCTILE_CODE_BFLOAT, 16, DType::bf16},
                                               {OCTILE_CODE_FLOAT, 32, DType::f32},
                                               {OCTILE_CODE_FLOAT, 64, DType::f64},
                                               {OCTILE_CODE_INT, 8, DType::s8},
                                               {OCTILE_CODE_UINT, 8, DType::u8},
                                               {OCTILE_CODE_INT, 4, DType::s4},
                                               {OCTILE_CODE_INT, 32, DType::s32}}};

// By the value of OCTILE_WEIGHT_....
constexpr std::array kWeightFormats = {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor,
                                       WeightFormat::s4_group, WeightFormat::s8_group};

// Converts the fields of one structure; the names are for its errors.
class Converter {
 public:
  explicit Converter(std::string_view function) : function_(function) {}

  // The plans check that a choice is one of its enumeration's values; here it only has to survive the conversion.
  template <class Enum>
  void choice(Enum& choice, std::string_view what, std::int32_t value) const {
    if (value < 0 || value > 255) {
      fail(Status::invalid_argument, function_, ": ", what, " = ", value, " is not one of its values");
    }
    choice = static_cast<Enum>(value);
  }

  // C spells a format as one of four names, a group and a zero point.
  WeightFormat weight(std::int32_t name, std::int64_t group = 0, bool zero_point = false) const {
    if (name < 0 || name >= static_cast<std::int32_t>(kWeightFormats.size())) {
      fail(Status::invalid_argument, function_, ": weight = ", name, " is not one of its values");
    }
    WeightFormat format = kWeightFormats[static_cast<std::size_t>(name)];
    if (format.granularity == Granularity::group) format.group = group;
    format.zero_point = zero_point;
    return format;
  }

  bool boolean(std::string_view what, std::int32_t value) const {
    if (value != 0 && value != 1) {
      fail(Status::invalid_argument, function_, ": ", what, " = ", value, ", expected 0 or 1");
    }
    return value == 1;
  }

  Device device(std::string_view what, octile_device device) const {
    if (device.type != OCTILE_DEVICE_CPU && device.type != OCTILE_DEVICE_CUDA) {
      fail(Status::invalid_argument, function_, ": the device type of ", what, " is ", device.type,
           ", expected 1 (CPU) or 2 (CUDA)");
    }
    return {device.type == OCTILE_DEVICE_CPU ? DeviceType::cpu : DeviceType::cuda, device.id};
  }

  DType dtype(std::string_view what, octile_element element) const {
    for (const Element& known : kElements) {
      if (element.code == known.code && element.bits == known.bits && element.lanes == 1) return known.dtype;
    }
    fail(Status::invalid_argument, function_, ": ", what, " has dtype code ", int{element.code}, ", bits ",
         int{element.bits}, ", lanes ", element.lanes,
         "; expected lanes 1 and code 0 (int) with bits 4, 8 or 32, 1 (uint) with 8, 2 (float) with 16, 32 or 64, or "
         "4 (bfloat) with 16");
  }

  Tensor tensor(std::string_view what, const octile_tensor* given) const {
    if (given == nullptr) return {};
    Tensor t;
    t.dtype = dtype(what, given->dtype);
    t.device = device(what, given->device);
    if (given->ndim != 1 && given->ndim != 2) {
      fail(Status::shape_mismatch, function_, ": ", what, " has ndim = ", given->ndim, ", expected 1 or 2");
    }
    if (given->shape == nullptr) fail(Status::invalid_argument, function_, ": the shape of ", what, " is NULL");
    t.rank = given->ndim;
    std::copy_n(given->shape, t.rank, t.shape.begin());
    if (given->strides != nullptr) {
      std::copy_n(given->strides, t.rank, t.strides.begin());
    } else {
      t.strides = t.rank == 1 ? std::array<std::int64_t, 2>{1, 0} : std::array<std::int64_t, 2>{compact_row(t), 1};
    }
    auto address = reinterpret_cast<std::uintptr_t>(given->data);
    if (given->byte_offset != 0 &&
        (given->data == nullptr || __builtin_add_overflow(address, given->byte_offset, &address))) {
      fail(Status::invalid_argument, function_, ": ", what, " has byte_offset = ", given->byte_offset, " and data at ",
           given->data);
    }
    t.data = reinterpret_cast<void*>(address);
    return t;
  }

 private:
  // Rows of s4 start on a byte, so a compact one has an even number of elements. Unsigned, so that a wild size reaches
  // the plan's checks without an overflow here.
  static std::int64_t compact_row(const Tensor& t) {
    const auto elements = static_cast<std::uint64_t>(t.cols());
    return static_cast<std::int64_t>(t.dtype == DType::s4 ? elements + elements % 2 : elements);
  }

  std::string_view function_;
};

inline const char* text(const char* kernel) { return kernel ? kernel : ""; }

inline octile_quantize_description defaults_of_quantize() {
  const QuantizeDescription d;
  octile_quantize_description c = {};
  c.x = static_cast<std::int32_t>(d.x);
  c.q = static_cast<std::int32_t>(d.q);
  c.granularity = static_cast<std::int32_t>(d.granularity);
  c.scale = static_cast<std::int32_t>(d.scale);
  c.mapping = static_cast<std::int32_t>(d.mapping);
  c.rounding = static_cast<std::int32_t>(d.rounding);
  c.orientation = static_cast<std::int32_t>(d.orientation);
  c.multiplier = static_cast<std::int32_t>(d.multiplier);
  c.mask = static_cast<std::int32_t>(d.mask);
  c.device = {OCTILE_DEVICE_CPU, 0};
  c.min_scale = d.min_scale;
  return c;
}

inline octile_linear_description defaults_of_linear() {
  const LinearDescription d;
  octile_linear_description c = {};
  c.group = WeightFormat::s4_group.group;
  c.x = static_cast<std::int32_t>(d.x);
  c.y = static_cast<std::int32_t>(d.y);
  c.activation = static_cast<std::int32_t>(d.activation);
  c.weight = OCTILE_WEIGHT_S8_PER_CHANNEL;
  c.weight_layout = static_cast<std::int32_t>(d.weight_layout);
  c.device = {OCTILE_DEVICE_CPU, 0};
  return c;
}

inline octile_linear_backward_description defaults_of_linear_backward() {
  const LinearBackwardDescription d;
  octile_linear_backward_description c = {};
  c.dy = static_cast<std::int32_t>(d.dy);
  c.dw_dtype = OCTILE_DTYPE_SAME;
  c.dx = static_cast<std::int32_t>(d.dx);
  c.dw = static_cast<std::int32_t>(d.dw);
  c.activation = static_cast<std::int32_t>(d.activation);
  c.weight = OCTILE_WEIGHT_S8_PER_CHANNEL;
  c.weight_layout = static_cast<std::int32_t>(d.weight_layout);
  c.rounding = static_cast<std::int32_t>(d.rounding);
  c.device = {OCTILE_DEVICE_CPU, 0};
  c.dw_layout = OCTILE_LAYOUT_SAME;
  return c;
}

inline QuantizeDescription convert(std::string_view function, const octile_quantize_description* given) {
  const auto c = read_struct(function, "description", given, defaults_of_quantize());
  const Converter in(function);
  QuantizeDescription d;
  d.rows = c.rows;
  d.cols = c.cols;
  in.choice(d.x, "x", c.x);
  in.choice(d.q, "q", c.q);
  in.choice(d.granularity, "granularity", c.granularity);
  d.group = c.group;
  in.choice(d.scale, "scale", c.scale);
  in.choice(d.mapping, "mapping", c.mapping);
  in.choice(d.rounding, "rounding", c.rounding);
  in.choice(d.orientation, "orientation", c.orientation);
  in.choice(d.multiplier, "multiplier", c.multiplier);
  in.choice(d.mask, "mask", c.mask);
  d.q_min = c.q_min;
  d.q_max = c.q_max;
  d.min_scale = c.min_scale;
  d.device = in.device("the description", c.device);
  d.threads = c.threads;
  d.kernel = text(c.kernel);
  return d;
}

inline LinearDescription convert(std::string_view function, const octile_linear_description* given) {
  const auto c = read_struct(function, "description", given, defaults_of_linear());
  const Converter in(function);
  LinearDescription d;
  d.m = c.m;
  d.n = c.n;
  d.k = c.k;
  in.choice(d.x, "x", c.x);
  in.choice(d.y, "y", c.y);
  in.choice(d.activation, "activation", c.activation);
  d.static_scale = c.static_scale;
  d.weight = in.weight(c.weight, c.group, in.boolean("weight_zero_point", c.weight_zero_point));
  in.choice(d.weight_layout, "weight_layout", c.weight_layout);
  d.bias = in.boolean("bias", c.bias);
  d.x_multiplier = in.boolean("x_multiplier", c.x_multiplier);
  d.device = in.device("the description", c.device);
  d.threads = c.threads;
  d.packed_weight = in.boolean("packed_weight", c.packed_weight);
  d.kernel = text(c.kernel);
  return d;
}

inline LinearBackwardDescription convert(std::string_view function, const octile_linear_backward_description* given) {
  const auto c = read_struct(function, "description", given, defaults_of_linear_backward());
  const Converter in(function);
  LinearBackwardDescription d;
  d.m = c.m;
  d.n = c.n;
  d.k = c.k;
  in.choice(d.dy, "dy", c.dy);
  if (c.dw_dtype != OCTILE_DTYPE_SAME) in.choice(d.dw_dtype.emplace(), "dw_dtype", c.dw_dtype);
  in.choice(d.dx, "dx", c.dx);
  in.choice(d.dw, "dw", c.dw);
  d.db = in.boolean("db", c.db);
  in.choice(d.activation, "activation", c.activation);
  d.static_scale = c.static_scale;
  d.x_transposed = in.boolean("x_transposed", c.x_transposed);
  d.weight = in.weight(c.weight);
  in.choice(d.weight_layout, "weight_layout", c.weight_layout);
  in.choice(d.rounding, "rounding", c.rounding);
  d.device = in.device("the description", c.device);
  d.threads = c.threads;
  d.dw_accumulate = in.boolean("dw_accumulate", c.dw_accumulate);
  d.kernel = text(c.kernel);
  if (c.dw_layout != OCTILE_LAYOUT_SAME) in.choice(d.dw_layout.emplace(), "dw_layout", c.dw_layout);
  d.gradient_block = c.gradient_block;
  return d;
}

inline QuantizeArgs convert(std::string_view function, const octile_quantize_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.x = in.tensor("x", c.x),
          .multiplier = in.tensor("multiplier", c.multiplier),
          .given_scale = in.tensor("given_scale", c.given_scale),
          .given_zero_point = in.tensor("given_zero_point", c.given_zero_point),
          .q = in.tensor("q", c.q),
          .q_transposed = in.tensor("q_transposed", c.q_transposed),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .seed = c.seed};
}

inline DequantizeArgs convert(std::string_view function, const octile_dequantize_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.q = in.tensor("q", c.q),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .x = in.tensor("x", c.x)};
}

inline QuantizeBackwardArgs convert(std::string_view function, const octile_quantize_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy),
          .x = in.tensor("x", c.x),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .dx = in.tensor("dx", c.dx)};
}

inline DequantizeBackwardArgs convert(std::string_view function, const octile_dequantize_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy), .scale = in.tensor("scale", c.scale), .dq = in.tensor("dq", c.dq)};
}

inline FakeQuantizeArgs convert(std::string_view function, const octile_fake_quantize_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.x = in.tensor("x", c.x),
          .given_scale = in.tensor("given_scale", c.given_scale),
          .given_zero_point = in.tensor("given_zero_point", c.given_zero_point),
          .y = in.tensor("y", c.y),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .seed = c.seed};
}

inline FakeQuantizeBackwardArgs convert(std::string_view function, const octile_fake_quantize_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy),
          .x = in.tensor("x", c.x),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .dx = in.tensor("dx", c.dx)};
}

inline LinearArgs convert(std::string_view function, const octile_linear_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.x = in.tensor("x", c.x),
          .x_scale = in.tensor("x_scale", c.x_scale),
          .x_multiplier = in.tensor("x_multiplier", c.x_multiplier),
          .weight = in.tensor("weight", c.weight),
          .weight_scale = in.tensor("weight_scale", c.weight_scale),
          .weight_zero_point = in.tensor("weight_zero_point", c.weight_zero_point),
          .bias = in.tensor("bias", c.bias),
          .y = in.tensor("y", c.y)};
}

inline LinearPackArgs convert(std::string_view function, const octile_linear_pack_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.weight = in.tensor("weight", c.weight),
          .weight_scale = in.tensor("weight_scale", c.weight_scale),
          .weight_zero_point = in.tensor("weight_zero_point", c.weight_zero_point),
          .packed = in.tensor("packed", c.packed)};
}

inline LinearBackwardArgs convert(std::string_view function, const octile_linear_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy),
          .weight = in.tensor("weight", c.weight),
          .weight_scale = in.tensor("weight_scale", c.weight_scale),
          .x = in.tensor("x", c.x),
          .x_scale = in.tensor("x_scale", c.x_scale),
          .dx = in.tensor("dx", c.dx),
          .dw = in.tensor("dw", c.dw),
          .db = in.tensor("db", c.db),
          .seed = c.seed};
}

}  // namespace octile::c_interface
