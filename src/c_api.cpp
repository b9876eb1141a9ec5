// The C interface: conversion and nothing else. Structures and tensors become their C++ twins, the plans of octile.hpp
// do the work, and exceptions become a status and a text.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "message.h"
#include "octile/octile.h"
#include "octile/octile.hpp"

struct octile_plan {
  std::variant<octile::QuantizePlan, octile::DequantizePlan, octile::QuantizeBackwardPlan,
               octile::DequantizeBackwardPlan, octile::FakeQuantizePlan, octile::FakeQuantizeBackwardPlan,
               octile::LinearPlan, octile::LinearBackwardPlan>
      plan;
  // The C++ plan returns its texts by value; a C caller is given pointers that live as long as the plan.
  std::string sku;
  std::string explanation;
  octile::PrecisionGuarantee guarantee;
};

namespace octile {

namespace {

constexpr std::size_t kLargestStruct = 4096;

thread_local std::string last_error;

// A short text needs no memory, so it can be kept when there is none.
octile_status keep_error(octile_status status, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error = "out of memory";
  }
  return status;
}

template <class Body>
octile_status guarded(const Body& body) noexcept {
  try {
    body();
    return OCTILE_OK;
  } catch (const Error& error) {
    return keep_error(static_cast<octile_status>(error.status()), error.what());
  } catch (const std::exception& error) {
    return keep_error(OCTILE_INTERNAL, error.what());
  } catch (...) {
    return keep_error(OCTILE_INTERNAL, "unknown error");
  }
}

// ---- Structures that begin with their size ----

std::size_t checked_size(std::string_view function, std::string_view what, std::size_t size) {
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

template <class Struct>
octile_status init_struct(std::string_view function, Struct* wanted, std::size_t size, const Struct& defaults) {
  return guarded([&] {
    checked_size(function, "description", size);
    if (wanted != nullptr) std::memcpy(wanted, &size, sizeof size);
    write_struct(function, "description", wanted, defaults);
  });
}

// ---- Descriptions and arguments ----

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

  void reserved(std::int32_t value) const {
    if (value != 0) fail(Status::invalid_argument, function_, ": reserved = ", value, ", expected 0");
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

const char* text(const char* kernel) { return kernel ? kernel : ""; }

octile_quantize_description defaults_of_quantize() {
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
  return c;
}

octile_linear_description defaults_of_linear() {
  const LinearDescription d;
  octile_linear_description c = {};
  c.group = d.group;
  c.x = static_cast<std::int32_t>(d.x);
  c.y = static_cast<std::int32_t>(d.y);
  c.activation = static_cast<std::int32_t>(d.activation);
  c.weight = static_cast<std::int32_t>(d.weight);
  c.weight_layout = static_cast<std::int32_t>(d.weight_layout);
  c.device = {OCTILE_DEVICE_CPU, 0};
  return c;
}

octile_linear_backward_description defaults_of_linear_backward() {
  const LinearBackwardDescription d;
  octile_linear_backward_description c = {};
  c.dy = static_cast<std::int32_t>(d.dy);
  c.dw_dtype = OCTILE_DTYPE_SAME;
  c.dx = static_cast<std::int32_t>(d.dx);
  c.dw = static_cast<std::int32_t>(d.dw);
  c.activation = static_cast<std::int32_t>(d.activation);
  c.weight = static_cast<std::int32_t>(d.weight);
  c.weight_layout = static_cast<std::int32_t>(d.weight_layout);
  c.rounding = static_cast<std::int32_t>(d.rounding);
  c.device = {OCTILE_DEVICE_CPU, 0};
  return c;
}

QuantizeDescription convert(std::string_view function, const octile_quantize_description* given) {
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
  d.device = in.device("the description", c.device);
  d.threads = c.threads;
  d.kernel = text(c.kernel);
  return d;
}

LinearDescription convert(std::string_view function, const octile_linear_description* given) {
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
  in.choice(d.weight, "weight", c.weight);
  in.choice(d.weight_layout, "weight_layout", c.weight_layout);
  d.group = c.group;
  d.weight_zero_point = in.boolean("weight_zero_point", c.weight_zero_point);
  d.bias = in.boolean("bias", c.bias);
  d.x_multiplier = in.boolean("x_multiplier", c.x_multiplier);
  d.device = in.device("the description", c.device);
  d.threads = c.threads;
  in.reserved(c.reserved);
  d.kernel = text(c.kernel);
  return d;
}

LinearBackwardDescription convert(std::string_view function, const octile_linear_backward_description* given) {
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
  in.choice(d.weight, "weight", c.weight);
  in.choice(d.weight_layout, "weight_layout", c.weight_layout);
  in.choice(d.rounding, "rounding", c.rounding);
  d.device = in.device("the description", c.device);
  d.threads = c.threads;
  in.reserved(c.reserved);
  d.kernel = text(c.kernel);
  return d;
}

QuantizeArgs convert(std::string_view function, const octile_quantize_args* given) {
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

DequantizeArgs convert(std::string_view function, const octile_dequantize_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.q = in.tensor("q", c.q),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .x = in.tensor("x", c.x)};
}

QuantizeBackwardArgs convert(std::string_view function, const octile_quantize_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy),
          .x = in.tensor("x", c.x),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .dx = in.tensor("dx", c.dx)};
}

DequantizeBackwardArgs convert(std::string_view function, const octile_dequantize_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy), .scale = in.tensor("scale", c.scale), .dq = in.tensor("dq", c.dq)};
}

FakeQuantizeArgs convert(std::string_view function, const octile_fake_quantize_args* given) {
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

FakeQuantizeBackwardArgs convert(std::string_view function, const octile_fake_quantize_backward_args* given) {
  const auto c = read_struct(function, "args", given);
  const Converter in(function);
  return {.dy = in.tensor("dy", c.dy),
          .x = in.tensor("x", c.x),
          .scale = in.tensor("scale", c.scale),
          .zero_point = in.tensor("zero_point", c.zero_point),
          .dx = in.tensor("dx", c.dx)};
}

LinearArgs convert(std::string_view function, const octile_linear_args* given) {
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

LinearBackwardArgs convert(std::string_view function, const octile_linear_backward_args* given) {
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

// ---- Plans ----

template <class Plan, class Description>
octile_status create(std::string_view function, const Description* description, octile_plan** plan) noexcept {
  return guarded([&] {
    if (plan == nullptr) fail(Status::invalid_argument, function, ": plan is NULL");
    const Plan selected = Plan::select(convert(function, description));
    *plan = new octile_plan{selected, selected.sku(), selected.explain(), selected.precision_guarantee()};
  });
}

template <class Plan>
const Plan& plan_of(std::string_view function, const octile_plan* plan) {
  if (plan == nullptr) fail(Status::invalid_argument, function, ": plan is NULL");
  const Plan* own = std::get_if<Plan>(&plan->plan);
  if (own == nullptr) {
    fail(Status::invalid_argument, function, ": the plan is of another kind, with the kernels ", plan->sku);
  }
  return *own;
}

template <class Plan, class Args>
octile_status can_implement(std::string_view function, const octile_plan* plan, const Args* args) noexcept {
  return guarded([&] {
    const Verdict verdict = plan_of<Plan>(function, plan).can_implement(convert(function, args));
    if (!verdict) throw Error(verdict.status, verdict.reason);
  });
}

struct RunContext {
  Workspace workspace;
  Stream stream;
};

template <class Plan, class Args>
octile_status run(std::string_view function, const octile_plan* plan, const Args* args,
                  const RunContext& context) noexcept {
  return guarded(
      [&] { plan_of<Plan>(function, plan).run(convert(function, args), context.workspace, context.stream); });
}

const std::vector<KernelInfo>& table() {
  static const std::vector<KernelInfo> rows = kernels();
  return rows;
}

}  // namespace

}  // namespace octile

extern "C" {

#define OCTILE_TEXT_OF(number) #number
#define OCTILE_VERSION_TEXT(major, minor, patch) \
  OCTILE_TEXT_OF(major) "." OCTILE_TEXT_OF(minor) "." OCTILE_TEXT_OF(patch)

const char* octile_version(void) {
  return OCTILE_VERSION_TEXT(OCTILE_VERSION_MAJOR, OCTILE_VERSION_MINOR, OCTILE_VERSION_PATCH);
}

int32_t octile_abi_version(void) { return OCTILE_ABI_VERSION; }

const char* octile_last_error(void) { return octile::last_error.c_str(); }

void octile_plan_destroy(octile_plan* plan) { delete plan; }

size_t octile_plan_workspace_size(const octile_plan* plan) {
  if (plan == nullptr) return 0;
  return std::visit([](const octile::Plan& any) { return any.workspace_size(); }, plan->plan);
}

const char* octile_plan_sku(const octile_plan* plan) { return plan ? plan->sku.c_str() : ""; }

const char* octile_plan_explain(const octile_plan* plan) { return plan ? plan->explanation.c_str() : ""; }

octile_status octile_plan_precision(const octile_plan* plan, octile_precision* precision) {
  return octile::guarded([&] {
    if (plan == nullptr) octile::fail(octile::Status::invalid_argument, "octile_plan_precision: plan is NULL");
    const octile::PrecisionGuarantee& guarantee = plan->guarantee;
    octile::write_struct("octile_plan_precision", "precision", precision,
                         {.struct_size = 0,
                          .error_bound = guarantee.error_bound.c_str(),
                          .deterministic = guarantee.deterministic,
                          .bit_stable = guarantee.bit_stable,
                          .accumulator = static_cast<std::int32_t>(guarantee.accumulator),
                          .reserved = 0});
  });
}

octile_status octile_quantize_description_init(octile_quantize_description* description, size_t size) {
  return octile::init_struct("octile_quantize_description_init", description, size, octile::defaults_of_quantize());
}

octile_status octile_linear_description_init(octile_linear_description* description, size_t size) {
  return octile::init_struct("octile_linear_description_init", description, size, octile::defaults_of_linear());
}

octile_status octile_linear_backward_description_init(octile_linear_backward_description* description, size_t size) {
  return octile::init_struct("octile_linear_backward_description_init", description, size,
                             octile::defaults_of_linear_backward());
}

octile_status octile_quantize_plan_create(const octile_quantize_description* description, octile_plan** plan) {
  return octile::create<octile::QuantizePlan>("octile_quantize_plan_create", description, plan);
}

octile_status octile_quantize_can_implement(const octile_plan* plan, const octile_quantize_args* args) {
  return octile::can_implement<octile::QuantizePlan>("octile_quantize_can_implement", plan, args);
}

octile_status octile_quantize_run(const octile_plan* plan, const octile_quantize_args* args, void* workspace,
                                  size_t workspace_size, void* stream) {
  return octile::run<octile::QuantizePlan>("octile_quantize_run", plan, args, {{workspace, workspace_size}, {stream}});
}

octile_status octile_dequantize_plan_create(const octile_quantize_description* description, octile_plan** plan) {
  return octile::create<octile::DequantizePlan>("octile_dequantize_plan_create", description, plan);
}

octile_status octile_dequantize_can_implement(const octile_plan* plan, const octile_dequantize_args* args) {
  return octile::can_implement<octile::DequantizePlan>("octile_dequantize_can_implement", plan, args);
}

octile_status octile_dequantize_run(const octile_plan* plan, const octile_dequantize_args* args, void* workspace,
                                    size_t workspace_size, void* stream) {
  return octile::run<octile::DequantizePlan>("octile_dequantize_run", plan, args,
                                             {{workspace, workspace_size}, {stream}});
}

octile_status octile_quantize_backward_plan_create(const octile_quantize_description* description, octile_plan** plan) {
  return octile::create<octile::QuantizeBackwardPlan>("octile_quantize_backward_plan_create", description, plan);
}

octile_status octile_quantize_backward_can_implement(const octile_plan* plan,
                                                     const octile_quantize_backward_args* args) {
  return octile::can_implement<octile::QuantizeBackwardPlan>("octile_quantize_backward_can_implement", plan, args);
}

octile_status octile_quantize_backward_run(const octile_plan* plan, const octile_quantize_backward_args* args,
                                           void* workspace, size_t workspace_size, void* stream) {
  return octile::run<octile::QuantizeBackwardPlan>("octile_quantize_backward_run", plan, args,
                                                   {{workspace, workspace_size}, {stream}});
}

octile_status octile_dequantize_backward_plan_create(const octile_quantize_description* description,
                                                     octile_plan** plan) {
  return octile::create<octile::DequantizeBackwardPlan>("octile_dequantize_backward_plan_create", description, plan);
}

octile_status octile_dequantize_backward_can_implement(const octile_plan* plan,
                                                       const octile_dequantize_backward_args* args) {
  return octile::can_implement<octile::DequantizeBackwardPlan>("octile_dequantize_backward_can_implement", plan, args);
}

octile_status octile_dequantize_backward_run(const octile_plan* plan, const octile_dequantize_backward_args* args,
                                             void* workspace, size_t workspace_size, void* stream) {
  return octile::run<octile::DequantizeBackwardPlan>("octile_dequantize_backward_run", plan, args,
                                                     {{workspace, workspace_size}, {stream}});
}

octile_status octile_fake_quantize_plan_create(const octile_quantize_description* description, octile_plan** plan) {
  return octile::create<octile::FakeQuantizePlan>("octile_fake_quantize_plan_create", description, plan);
}

octile_status octile_fake_quantize_can_implement(const octile_plan* plan, const octile_fake_quantize_args* args) {
  return octile::can_implement<octile::FakeQuantizePlan>("octile_fake_quantize_can_implement", plan, args);
}

octile_status octile_fake_quantize_run(const octile_plan* plan, const octile_fake_quantize_args* args, void* workspace,
                                       size_t workspace_size, void* stream) {
  return octile::run<octile::FakeQuantizePlan>("octile_fake_quantize_run", plan, args,
                                               {{workspace, workspace_size}, {stream}});
}

octile_status octile_fake_quantize_backward_plan_create(const octile_quantize_description* description,
                                                        octile_plan** plan) {
  return octile::create<octile::FakeQuantizeBackwardPlan>("octile_fake_quantize_backward_plan_create", description,
                                                          plan);
}

octile_status octile_fake_quantize_backward_can_implement(const octile_plan* plan,
                                                          const octile_fake_quantize_backward_args* args) {
  return octile::can_implement<octile::FakeQuantizeBackwardPlan>("octile_fake_quantize_backward_can_implement", plan,
                                                                 args);
}

octile_status octile_fake_quantize_backward_run(const octile_plan* plan, const octile_fake_quantize_backward_args* args,
                                                void* workspace, size_t workspace_size, void* stream) {
  return octile::run<octile::FakeQuantizeBackwardPlan>("octile_fake_quantize_backward_run", plan, args,
                                                       {{workspace, workspace_size}, {stream}});
}

octile_status octile_linear_plan_create(const octile_linear_description* description, octile_plan** plan) {
  return octile::create<octile::LinearPlan>("octile_linear_plan_create", description, plan);
}

octile_status octile_linear_can_implement(const octile_plan* plan, const octile_linear_args* args) {
  return octile::can_implement<octile::LinearPlan>("octile_linear_can_implement", plan, args);
}

octile_status octile_linear_run(const octile_plan* plan, const octile_linear_args* args, void* workspace,
                                size_t workspace_size, void* stream) {
  return octile::run<octile::LinearPlan>("octile_linear_run", plan, args, {{workspace, workspace_size}, {stream}});
}

octile_status octile_linear_backward_plan_create(const octile_linear_backward_description* description,
                                                 octile_plan** plan) {
  return octile::create<octile::LinearBackwardPlan>("octile_linear_backward_plan_create", description, plan);
}

octile_status octile_linear_backward_can_implement(const octile_plan* plan, const octile_linear_backward_args* args) {
  return octile::can_implement<octile::LinearBackwardPlan>("octile_linear_backward_can_implement", plan, args);
}

octile_status octile_linear_backward_run(const octile_plan* plan, const octile_linear_backward_args* args,
                                         void* workspace, size_t workspace_size, void* stream) {
  return octile::run<octile::LinearBackwardPlan>("octile_linear_backward_run", plan, args,
                                                 {{workspace, workspace_size}, {stream}});
}

size_t octile_kernel_count(void) {
  std::size_t count = 0;
  octile::guarded([&] { count = octile::table().size(); });
  return count;
}

octile_status octile_kernel_info(size_t index, octile_kernel* kernel) {
  return octile::guarded([&] {
    const auto& table = octile::table();
    if (index >= table.size()) {
      octile::fail(octile::Status::invalid_argument, "octile_kernel_info: index = ", index, ", expected less than ",
                   table.size());
    }
    const octile::KernelInfo& row = table[index];
    octile::write_struct("octile_kernel_info", "kernel", kernel,
                         {.struct_size = 0,
                          .name = row.name.c_str(),
                          .operation = row.operation.c_str(),
                          .reason = row.reason.c_str(),
                          .device_type = row.device == octile::DeviceType::cpu ? OCTILE_DEVICE_CPU : OCTILE_DEVICE_CUDA,
                          .reserved = 0});
  });
}

}  // extern "C"

// ---- The two interfaces agree ----

namespace octile {

namespace {

template <class Enum>
constexpr bool same(int c, Enum value) {
  return c == static_cast<int>(value);
}

static_assert(same(OCTILE_OK, Status::ok) && same(OCTILE_INVALID_ARGUMENT, Status::invalid_argument) &&
              same(OCTILE_SHAPE_MISMATCH, Status::shape_mismatch) && same(OCTILE_UNSUPPORTED, Status::unsupported) &&
              same(OCTILE_MISALIGNED, Status::misaligned) &&
              same(OCTILE_WORKSPACE_TOO_SMALL, Status::workspace_too_small) &&
              same(OCTILE_CUDA_ERROR, Status::cuda_error) && same(OCTILE_INTERNAL, Status::internal));
static_assert(same(OCTILE_DTYPE_F16, DType::f16) && same(OCTILE_DTYPE_BF16, DType::bf16) &&
              same(OCTILE_DTYPE_F32, DType::f32) && same(OCTILE_DTYPE_F64, DType::f64) &&
              same(OCTILE_DTYPE_S8, DType::s8) && same(OCTILE_DTYPE_U8, DType::u8) &&
              same(OCTILE_DTYPE_S4, DType::s4) && same(OCTILE_DTYPE_S32, DType::s32));
static_assert(same(OCTILE_GRANULARITY_TENSOR, Granularity::tensor) && same(OCTILE_GRANULARITY_ROW, Granularity::row) &&
              same(OCTILE_GRANULARITY_COLUMN, Granularity::column) &&
              same(OCTILE_GRANULARITY_GROUP, Granularity::group));
static_assert(same(OCTILE_SCALE_DYNAMIC, ScaleSource::dynamic) && same(OCTILE_SCALE_GIVEN, ScaleSource::given));
static_assert(same(OCTILE_MAPPING_SYMMETRIC, Mapping::symmetric) && same(OCTILE_MAPPING_AFFINE, Mapping::affine));
static_assert(same(OCTILE_ROUNDING_NEAREST, Rounding::nearest) &&
              same(OCTILE_ROUNDING_STOCHASTIC, Rounding::stochastic));
static_assert(same(OCTILE_ORIENTATION_ROW_MAJOR, Orientation::row_major) &&
              same(OCTILE_ORIENTATION_TRANSPOSED, Orientation::transposed) &&
              same(OCTILE_ORIENTATION_BOTH, Orientation::both));
static_assert(same(OCTILE_MULTIPLIER_NONE, Multiplier::none) &&
              same(OCTILE_MULTIPLIER_PER_COLUMN, Multiplier::per_column) &&
              same(OCTILE_MULTIPLIER_PER_ROW, Multiplier::per_row));
static_assert(same(OCTILE_MASK_INCLUSIVE, Mask::inclusive) && same(OCTILE_MASK_EXCLUSIVE, Mask::exclusive));
static_assert(same(OCTILE_ACTIVATION_NONE, Activation::none) &&
              same(OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN, Activation::dynamic_per_token) &&
              same(OCTILE_ACTIVATION_DYNAMIC_PER_TENSOR, Activation::dynamic_per_tensor) &&
              same(OCTILE_ACTIVATION_STATIC_PER_TENSOR, Activation::static_per_tensor));
static_assert(same(OCTILE_WEIGHT_S8_PER_CHANNEL, WeightFormat::s8_per_channel) &&
              same(OCTILE_WEIGHT_S8_PER_TENSOR, WeightFormat::s8_per_tensor) &&
              same(OCTILE_WEIGHT_S4_GROUP, WeightFormat::s4_group));
static_assert(same(OCTILE_LAYOUT_OUT_IN, WeightLayout::out_in) && same(OCTILE_LAYOUT_IN_OUT, WeightLayout::in_out));
static_assert(same(OCTILE_PRODUCT_NONE, Product::none) && same(OCTILE_PRODUCT_DEQUANTIZED, Product::dequantized) &&
              same(OCTILE_PRODUCT_INT8, Product::int8));

// No field is cut by a struct_size that is a multiple of 8, and no padding can hold rubbish that a later field would
// read.
static_assert(sizeof(void*) == 8 && sizeof(std::size_t) == 8, "the structures are laid out for 64 bits");
template <class Struct>
constexpr bool kNoPadding = std::has_unique_object_representations_v<Struct> && sizeof(Struct) % 8 == 0;
static_assert(kNoPadding<octile_quantize_description> && kNoPadding<octile_precision> && kNoPadding<octile_kernel>);
static_assert(kNoPadding<octile_quantize_args> && kNoPadding<octile_dequantize_args> &&
              kNoPadding<octile_quantize_backward_args> && kNoPadding<octile_dequantize_backward_args> &&
              kNoPadding<octile_fake_quantize_args> && kNoPadding<octile_fake_quantize_backward_args> &&
              kNoPadding<octile_linear_args> && kNoPadding<octile_linear_backward_args>);
// These two hold a double, which the trait does not count; their fields are added up instead.
static_assert(sizeof(octile_linear_description) == 6 * 8 + 12 * 4 + 8);
static_assert(sizeof(octile_linear_backward_description) == 5 * 8 + 14 * 4 + 8);
static_assert(offsetof(octile_linear_description, kernel) == 6 * 8 + 12 * 4);
static_assert(offsetof(octile_linear_backward_description, kernel) == 5 * 8 + 14 * 4);

}  // namespace

}  // namespace octile
