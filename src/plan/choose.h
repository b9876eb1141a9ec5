// From a problem to a row of the kernel table: every row of the task is considered. Of those that support it, the one
// that was measured to be the fastest (tuning.h) is chosen, else the cheapest. The answers of the others are kept for
// explain().
#pragma once

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/message.h"
#include "cuda/devices.h"
#include "plan/kernel.h"
#include "plan/tuning.h"

namespace octile {

// One step of a plan: a row, the problem it was chosen for, and its scratch within the plan's workspace.
template <class Problem, class Operands>
struct Step {
  using Row = Kernel<Problem, Operands>;

  Problem problem;
  const Row* kernel = nullptr;
  const Row* unaligned = nullptr;  // runs where the operands' addresses or strides do not suit `kernel`
  Cost cost;
  std::size_t workspace = 0;
  std::string refused;     // a line for each row of the task that was not chosen
  TunedChoice tuned = {};  // what was measured for this problem; it need not be able to do it

  bool is_tuned() const { return kernel && kernel->name == tuned.kernel; }

  // The row that runs these operands.
  const Row& row(const Operands& operands) const {
    return unaligned && !kernel->aligned(problem, operands) ? *unaligned : *kernel;
  }
};

template <class Problem, class Operands>
std::string refusal(const Kernel<Problem, Operands>& kernel, const Problem& problem) {
  return kernel.supports ? kernel.supports(problem) : std::string();
}

template <class Problem, class Operands>
std::size_t scratch_size(const Kernel<Problem, Operands>& kernel, const Problem& problem) {
  return kernel.workspace ? kernel.workspace(problem) : 0;
}

// "w8a8_gemm_avx2" matches itself and its arch, the part after the last underscore.
inline bool matches(std::string_view kernel, std::string_view requested) {
  return kernel == requested || kernel.substr(kernel.rfind('_') + 1) == requested;
}

// The `kernel` of a description. An unknown name or arch throws, so that a misspelt one is not taken for "no
// restriction"; the text lists the rows of these tasks on this device.
struct RequestedKernel {
  std::string_view name;
  Device device;
  std::initializer_list<Task> tasks;
};
void check_requested_kernel(std::string_view function, const RequestedKernel& requested);

// Whether `requested` restricts the rows of this task: a full name of another task's row does not.
template <class Problem, class Operands>
bool restricts(std::span<const Kernel<Problem, Operands>* const> table, Task task, std::string_view requested) {
  if (requested.empty()) return false;
  return std::any_of(table.begin(), table.end(),
                     [&](const auto* kernel) { return kernel->task == task && matches(kernel->name, requested); });
}

inline std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
  return text;
}

// The cheapest row that takes operands of any alignment; null: none does.
template <class Problem, class Operands>
const Kernel<Problem, Operands>* cheapest_for_any_alignment(std::span<const Kernel<Problem, Operands>* const> table,
                                                            Task task, const Problem& problem) {
  const Kernel<Problem, Operands>* cheapest = nullptr;
  double seconds = 0;
  for (const auto* kernel : table) {
    if (kernel->task != task || kernel->device != problem.device.type || kernel->aligned) continue;
    if (!refusal(*kernel, problem).empty()) continue;
    const double expected = kernel->cost(problem).seconds;
    if (cheapest && expected >= seconds) continue;
    cheapest = kernel;
    seconds = expected;
  }
  return cheapest;
}

// The row that was measured to be the fastest, where one was and it can do it; else the cheapest that can. Without one
// the step has no kernel, and `refused` says why of each.
template <class Problem, class Operands>
Step<Problem, Operands> ask(std::span<const Kernel<Problem, Operands>* const> table, Task task, const Problem& problem,
                            std::string_view requested) {
  Step<Problem, Operands> step{problem, nullptr, nullptr, {}, 0, {}, {}};
  const bool restricted = restricts(table, task, requested);
  if constexpr (std::is_same_v<Problem, GemmProblem>) {
    const std::shared_ptr<const TunedRows> measured = requested.empty() ? tuned_rows(problem) : nullptr;
    const TunedChoice* const choice = measured ? tuned_at(*measured, problem.m) : nullptr;
    if (choice) step.tuned = *choice;
  }
  std::string slower;
  for (const auto* kernel : table) {
    if (kernel->task != task) continue;
    std::string reason;
    if (kernel->device != problem.device.type) {
      reason = message("runs on ", name(kernel->device), ", the plan is for ", problem.device);
    } else if (restricted && !matches(kernel->name, requested)) {
      reason = message("the description asks for ", requested);
    } else {
      reason = refusal(*kernel, problem);
    }
    if (!reason.empty()) {
      step.refused += message("  not ", kernel->name, ": ", reason, "\n");
      continue;
    }
    const Cost cost = kernel->cost(problem);
    const bool slower_than_chosen = step.kernel && (step.is_tuned() || cost.seconds >= step.cost.seconds);
    if (slower_than_chosen && kernel->name != step.tuned.kernel) {
      slower += message("  not ", kernel->name, ": expected ", milliseconds(cost.seconds), "\n");
      continue;
    }
    if (step.kernel)
      slower += message("  not ", step.kernel->name, ": expected ", milliseconds(step.cost.seconds), "\n");
    step.kernel = kernel;
    step.cost = cost;
  }
  step.refused += slower;
  if (!step.kernel) return step;
  step.workspace = scratch_size(*step.kernel, problem);
  if (!step.kernel->aligned) return step;
  step.unaligned = cheapest_for_any_alignment(table, task, problem);
  if (!step.unaligned) fail(Status::internal, step.kernel->name, ": no row for operands that are not aligned for it");
  step.workspace = std::max(step.workspace, scratch_size(*step.unaligned, problem));
  return step;
}

// Of a product: the rows of the table that are the fastest for fewer rows of a than `all` was chosen for, each with the
// number of rows up to which it is, in rising order. Only where sums are exact, so that the choice changes no bit, and
// on the CPU, where it costs a comparison.
struct FewerRows {
  std::int64_t rows = 0;
  Step<GemmProblem, GemmOperands> step;
};
std::vector<FewerRows> choose_fewer_rows(const Step<GemmProblem, GemmOperands>& all, std::string_view requested);

// Throws where `ask` found no kernel.
template <class Problem, class Operands>
void require(const Step<Problem, Operands>& step, Task task, std::string_view function) {
  if (step.kernel) return;
  std::string no_gpu = step.problem.device.type == DeviceType::cuda ? cuda_devices().reason : "";
  if (!no_gpu.empty()) no_gpu = " (" + no_gpu + ")";
  fail(Status::unsupported, function, ": no kernel for ", name(task), " on ", step.problem.device, no_gpu,
       ", see docs/how-to/errors.md#no-kernel:\n", step.refused);
}

template <class Problem, class Operands>
Step<Problem, Operands> choose(std::span<const Kernel<Problem, Operands>* const> table, Task task,
                               const Problem& problem, std::string_view function, std::string_view requested) {
  Step<Problem, Operands> step = ask(table, task, problem, requested);
  require(step, task, function);
  return step;
}

}  // namespace octile
