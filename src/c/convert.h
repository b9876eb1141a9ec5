// The structures and tensors of the C interface become their C++ twins, field by field: a new field is a line in the
// header, a line in the C++ structure and a word in its list of fields.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "base/fields.h"
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

constexpr std::uint8_t code_of(DType dtype) {
  if (dtype == DType::bf16) return OCTILE_CODE_BFLOAT;
  return is_float(dtype) ? OCTILE_CODE_FLOAT : dtype == DType::u8 ? OCTILE_CODE_UINT : OCTILE_CODE_INT;
}

constexpr std::int32_t kSame = -1;  // OCTILE_DTYPE_SAME, OCTILE_LAYOUT_SAME

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
    for (DType known{}; bits(known) > 0; known = static_cast<DType>(static_cast<int>(known) + 1)) {
      if (element.code == code_of(known) && element.bits == bits(known) && element.lanes == 1) return known;
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
      t.strides = t.rank == 1 ? std::array<std::int64_t, 2>{1, 0}
                              : std::array<std::int64_t, 2>{row_elements(t.dtype, t.cols()), 1};
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

  // The fields of `d` that the list names, from those of `c`.
  template <class List, class C, class D>
  void fields(const List& list, const C& c, D& d) const {
    std::string_view rest = list.text;
    const auto next = [&rest] {  // "a.x, a.scale"
      const std::string_view name = rest.substr(2, rest.find(',') - 2);
      rest.remove_prefix(std::min(rest.size(), name.size() + 4));
      return name;
    };
    const auto into = list.tie(d);
    std::apply([&](const auto&... from) { std::apply([&](auto&... to) { (field(next(), c, from, to), ...); }, into); },
               list.tie(c));
  }

 private:
  template <class C, class From, class To>
  void field(std::string_view what, const C& c, const From& from, To& to) const {
    if constexpr (std::is_same_v<To, bool>) {
      to = boolean(what, from);
    } else if constexpr (std::is_enum_v<To>) {
      choice(to, what, from);
    } else if constexpr (std::is_same_v<To, std::optional<DType>> || std::is_same_v<To, std::optional<WeightLayout>>) {
      if (from != kSame) choice(to.emplace(), what, from);
    } else if constexpr (std::is_same_v<To, WeightFormat>) {
      to = weight(c);
    } else if constexpr (std::is_same_v<To, Device>) {
      to = device("the description", from);
    } else if constexpr (std::is_same_v<From, const octile_tensor*>) {
      to = tensor(what, from);
    } else if constexpr (std::is_same_v<To, std::string>) {
      to = from ? from : "";
    } else {
      to = from;
    }
  }

  // C spells a format as one of four names and, where the structure has them, a group and a zero point.
  template <class C>
  WeightFormat weight(const C& c) const {
    bool zero_point = false;
    if constexpr (requires { c.weight_zero_point; }) zero_point = boolean("weight_zero_point", c.weight_zero_point);
    if constexpr (requires { c.zero_point; }) zero_point = boolean("zero_point", c.zero_point);
    if (c.weight < 0 || c.weight >= static_cast<std::int32_t>(kWeightFormats.size())) {
      fail(Status::invalid_argument, function_, ": weight = ", c.weight, " is not one of its values");
    }
    WeightFormat format = kWeightFormats[static_cast<std::size_t>(c.weight)];
    std::int64_t group = 0;
    if constexpr (requires { c.group; }) group = c.group;
    if (format.granularity == Granularity::group) format.group = group;
    format.zero_point = zero_point;
    return format;
  }

  std::string_view function_;
};

// The defaults of a description: those of its C++ twin.
template <class Description, class C>
C defaults() {
  const Description d;
  C c = {};
  const auto field = [&]<class From, class To>(const From& from, To& to) {
    if constexpr (std::is_same_v<From, bool> || std::is_enum_v<From>) {
      to = static_cast<std::int32_t>(from);
    } else if constexpr (std::is_same_v<From, WeightFormat>) {
      to = OCTILE_WEIGHT_S8_PER_CHANNEL;
      if constexpr (requires { c.group; }) c.group = WeightFormat::s4_group.group;
    } else if constexpr (std::is_same_v<From, Device>) {
      to = {OCTILE_DEVICE_CPU, 0};
    } else if constexpr (std::is_arithmetic_v<From>) {
      to = static_cast<To>(from);
    } else if constexpr (!std::is_same_v<From, std::string>) {
      to = kSame;
    }
  };
  const auto into = kFields<Description>.tie(c);
  std::apply([&](const auto&... from) { std::apply([&](auto&... to) { (field(from, to), ...); }, into); },
             kFields<Description>.tie(d));
  return c;
}

// A description, or the arguments of a call.
template <class Twin, class C>
Twin convert(std::string_view function, const C* given) {
  constexpr bool kDescribes = requires(const C& c) { c.threads; };
  C c = {};
  if constexpr (kDescribes) c = defaults<Twin, C>();
  c = read_struct(function, kDescribes ? "description" : "args", given, c);
  Twin twin;
  Converter(function).fields(kFields<Twin>, c, twin);
  if constexpr (requires { twin.seed; }) twin.seed = c.seed;
  return twin;
}

}  // namespace octile::c_interface

namespace octile {

template <>
inline constexpr auto kFields<QuantizeDescription> = OCTILE_FIELDS(a.rows, a.cols, a.x, a.q, a.granularity, a.group,
                                                                   a.scale, a.mapping, a.rounding, a.orientation,
                                                                   a.multiplier, a.mask, a.q_min, a.q_max, a.min_scale,
                                                                   a.device, a.threads, a.kernel, a.prologue, a.gated,
                                                                   a.epsilon, a.norm_weight, a.residual);
template <>
inline constexpr auto kFields<LinearDescription> = OCTILE_FIELDS(a.m, a.n, a.k, a.x, a.y, a.activation, a.static_scale,
                                                                 a.weight, a.weight_layout, a.bias, a.x_multiplier,
                                                                 a.device, a.threads, a.packed_weight, a.kernel);
template <>
inline constexpr auto kFields<LinearBackwardDescription> = OCTILE_FIELDS(
    a.m, a.n, a.k, a.dy, a.dw_dtype, a.dx, a.dw, a.db, a.activation, a.static_scale, a.x_transposed, a.weight,
    a.weight_layout, a.rounding, a.device, a.threads, a.dw_accumulate, a.kernel, a.dw_layout, a.gradient_block);
template <>
inline constexpr auto kFields<GroupedLinearDescription> = OCTILE_FIELDS(a.experts, a.m, a.n, a.k, a.tokens, a.gather,
                                                                        a.slots, a.x, a.y, a.activation, a.static_scale,
                                                                        a.weight, a.packed_weight, a.bias, a.clear_rest,
                                                                        a.device, a.threads, a.kernel);
template <>
inline constexpr auto kFields<GroupedLinearBackwardDescription> =
    OCTILE_FIELDS(a.experts, a.m, a.n, a.k, a.dy, a.dw_dtype, a.dx, a.dw, a.db, a.activation, a.static_scale, a.weight,
                  a.rounding, a.gradient_block, a.device, a.threads, a.dw_accumulate, a.clear_rest, a.kernel);

}  // namespace octile
