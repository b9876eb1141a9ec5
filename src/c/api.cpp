// The C interface: conversion (c_convert.h) and nothing else. The plans of octile.hpp do the work, and exceptions
// become a status and a text.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/message.h"
#include "base/thread_pool.h"
#include "c/convert.h"
#include "c/guard.h"
#include "octile/octile.h"
#include "octile/octile.hpp"

struct octile_plan {
  std::variant<octile::QuantizePlan, octile::DequantizePlan, octile::QuantizeBackwardPlan,
               octile::DequantizeBackwardPlan, octile::FakeQuantizePlan, octile::FakeQuantizeBackwardPlan,
               octile::LinearPlan, octile::LinearBackwardPlan, octile::GroupedLinearPlan,
               octile::GroupedLinearBackwardPlan>
      plan;
  // The C++ plan returns its texts by value; a C caller is given pointers that live as long as the plan.
  std::string sku;
  std::string explanation;
  octile::PrecisionGuarantee guarantee;
};

namespace octile {

namespace {

// Without destructors: a thread's destructors, and on the main thread the exit handlers, may still call the library.
thread_local constinit const char* last_error = "";
thread_local constinit char* last_copy = nullptr;

// How many bytes the UTF-8 character has that begins there; 0: none does.
std::size_t length_of_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const int first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  const int low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const int high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (second < low || second > high) return 0;
  const std::size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

// Other languages decode our texts, but the paths and names that they quote may have any bytes.
void make_utf8(std::span<char> text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = length_of_character({text.data() + i, text.size() - i});
    if (length == 0) text[i] = '?';
    i += std::max<std::size_t>(length, 1);
  }
}

struct FreesTheLastCopy {
  ~FreesTheLastCopy() {
    last_error = "";
    std::free(std::exchange(last_copy, nullptr));
  }
};

}  // namespace

// For octile_last_error.
octile_status keep_error(octile_status status, const char* text) noexcept {
  static thread_local FreesTheLastCopy at_the_end;
  char* const copy = strdup(text);
  if (copy) make_utf8({copy, std::strlen(copy)});
  std::free(std::exchange(last_copy, copy));
  last_error = copy ? copy : "out of memory";
  return status;
}

namespace {

using namespace c_interface;

// ---- Plans ----

template <class Plan, class Description, class C>
octile_status create(std::string_view function, const C* description, octile_plan** plan) noexcept {
  return guarded([&] {
    if (plan == nullptr) fail(Status::invalid_argument, function, ": plan is NULL");
    const Plan selected = Plan::select(convert<Description>(function, description));
    std::string explanation = selected.explain();  // with the path of the tuning file
    make_utf8(explanation);
    *plan = new octile_plan{selected, selected.sku(), std::move(explanation), selected.precision_guarantee()};
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

template <class Plan, class Args, class C>
octile_status can_implement(std::string_view function, const octile_plan* plan, const C* args) noexcept {
  return guarded([&] {
    const Verdict verdict = plan_of<Plan>(function, plan).can_implement(convert<Args>(function, args));
    if (!verdict) throw Error(verdict.status, verdict.reason);
  });
}

struct RunContext {
  Workspace workspace;
  Stream stream;
};

template <class Plan, class Args, class C>
octile_status run(std::string_view function, const octile_plan* plan, const C* args,
                  const RunContext& context) noexcept {
  return guarded(
      [&] { plan_of<Plan>(function, plan).run(convert<Args>(function, args), context.workspace, context.stream); });
}

void write_precision(std::string_view function, octile_precision* precision, const PrecisionGuarantee& guarantee) {
  write_struct(function, "precision", precision,
               {.struct_size = 0,
                .error_bound = guarantee.error_bound.c_str(),
                .deterministic = guarantee.deterministic,
                .bit_stable = guarantee.bit_stable,
                .accumulator = static_cast<std::int32_t>(guarantee.accumulator),
                .reserved = 0});
}

// Never destroyed, as its strings live as long as the library.
const std::vector<KernelInfo>& table() {
  static const auto& rows = *new std::vector<KernelInfo>(kernels());
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

const char* octile_last_error(void) { return octile::last_error; }

void octile_plan_destroy(octile_plan* plan) { delete plan; }

size_t octile_plan_workspace_size(const octile_plan* plan) {
  if (plan == nullptr) return 0;
  return std::visit([](const octile::Plan& any) { return any.workspace_size(); }, plan->plan);
}

const char* octile_plan_sku(const octile_plan* plan) { return plan ? plan->sku.c_str() : ""; }

const char* octile_plan_explain(const octile_plan* plan) { return plan ? plan->explanation.c_str() : ""; }

octile_status octile_plan_precision(const octile_plan* plan, octile_precision* precision) {
  return octile::guarded([&, function = __func__] {
    if (plan == nullptr) octile::fail(octile::Status::invalid_argument, function, ": plan is NULL");
    octile::write_precision(function, precision, plan->guarantee);
  });
}

octile_status octile_linear_backward_precision(const octile_plan* plan, int32_t gradient, octile_precision* precision) {
  return octile::guarded([&, function = __func__] {
    const auto& backward = octile::plan_of<octile::LinearBackwardPlan>(function, plan);
    octile::Gradient which{};
    octile::c_interface::Converter(function).choice(which, "gradient", gradient);
    octile::write_precision(function, precision, backward.precision_guarantee(which));
  });
}

OCTILE_DESCRIPTION(quantize, Quantize)
OCTILE_DESCRIPTION(linear, Linear)
OCTILE_DESCRIPTION(linear_backward, LinearBackward)
OCTILE_DESCRIPTION(grouped_linear, GroupedLinear)
OCTILE_DESCRIPTION(grouped_linear_backward, GroupedLinearBackward)

// The three functions of a kind of plan, octile_linear_plan_create, octile_linear_can_implement and octile_linear_run,
// by its name here and in C++, and those of its description.
#define OCTILE_PLAN(name, Cpp, described, CppDescribed)                                                                \
  octile_status octile_##name##_plan_create(const octile_##described##_description* description, octile_plan** plan) { \
    return octile::create<octile::Cpp##Plan, octile::CppDescribed##Description>(__func__, description, plan);          \
  }                                                                                                                    \
  octile_status octile_##name##_can_implement(const octile_plan* plan, const octile_##name##_args* args) {             \
    return octile::can_implement<octile::Cpp##Plan, octile::Cpp##Args>(__func__, plan, args);                          \
  }                                                                                                                    \
  octile_status octile_##name##_run(const octile_plan* plan, const octile_##name##_args* args, void* workspace,        \
                                    size_t workspace_size, void* stream) {                                             \
    return octile::run<octile::Cpp##Plan, octile::Cpp##Args>(__func__, plan, args,                                     \
                                                             {{workspace, workspace_size}, {stream}});                 \
  }
OCTILE_PLAN(quantize, Quantize, quantize, Quantize)
OCTILE_PLAN(dequantize, Dequantize, quantize, Quantize)
OCTILE_PLAN(quantize_backward, QuantizeBackward, quantize, Quantize)
OCTILE_PLAN(dequantize_backward, DequantizeBackward, quantize, Quantize)
OCTILE_PLAN(fake_quantize, FakeQuantize, quantize, Quantize)
OCTILE_PLAN(fake_quantize_backward, FakeQuantizeBackward, quantize, Quantize)
OCTILE_PLAN(linear, Linear, linear, Linear)
OCTILE_PLAN(linear_backward, LinearBackward, linear_backward, LinearBackward)
OCTILE_PLAN(grouped_linear, GroupedLinear, grouped_linear, GroupedLinear)
OCTILE_PLAN(grouped_linear_backward, GroupedLinearBackward, grouped_linear_backward, GroupedLinearBackward)

// What a plan with packed weights has beside them.
#define OCTILE_PACKING(name, Cpp)                                                                      \
  octile_status octile_##name##_packed_weight_size(const octile_plan* plan, size_t* size) {            \
    return octile::guarded([&, function = __func__] {                                                  \
      if (size == nullptr) octile::fail(octile::Status::invalid_argument, function, ": size is NULL"); \
      *size = octile::plan_of<octile::Cpp##Plan>(function, plan).packed_weight_size();                 \
    });                                                                                                \
  }                                                                                                    \
  octile_status octile_##name##_pack(const octile_plan* plan, const octile_linear_pack_args* args) {   \
    return octile::guarded([&, function = __func__] {                                                  \
      octile::plan_of<octile::Cpp##Plan>(function, plan)                                               \
          .pack(octile::c_interface::convert<octile::LinearPackArgs>(function, args));                 \
    });                                                                                                \
  }
OCTILE_PACKING(linear, Linear)
OCTILE_PACKING(grouped_linear, GroupedLinear)

octile_status octile_use_tuning(const char* file) {
  return octile::guarded([&] { octile::use_tuning(file ? file : ""); });
}

octile_status octile_use_task_runner(octile_task_runner run) {
  return octile::guarded([&] { octile::cpu::use_task_runner(run); });
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
    octile::c_interface::write_struct(
        "octile_kernel_info", "kernel", kernel,
        {.struct_size = 0,
         .name = row.name.c_str(),
         .operation = row.operation.c_str(),
         .reason = row.reason.c_str(),
         .device_type = row.device == octile::DeviceType::cpu ? OCTILE_DEVICE_CPU : OCTILE_DEVICE_CUDA,
         .reserved = 0});
  });
}

}  // extern "C"
