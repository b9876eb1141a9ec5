// From a problem to a row of the kernel table: every row of the operation is asked, the cheapest that can is taken, and
// what each other one answered is kept for explain().
#pragma once

#include <cstdio>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/message.h"
#include "plan/kernel.h"

namespace octile {

// One step of a plan: a row, the problem it was chosen for, and its scratch within the plan's workspace.
template <class Problem, class Operands>
struct Step {
  Problem problem;
  const Kernel<Problem, Operands>* kernel = nullptr;
  Cost cost;
  std::size_t workspace = 0;
  std::string refused;  // a line for each row of the operation that was not chosen
};

// "w8a8_gemm_avx2" matches itself and its arch, what stands behind the last underscore.
inline bool matches(std::string_view kernel, std::string_view wish) {
  return kernel == wish || kernel.substr(kernel.rfind('_') + 1) == wish;
}

// Throws unless some row of the table matches the wish, so that a misspelt name is not taken for "no restriction". The
// text lists the rows of these operations on this device.
struct KernelWish {
  std::string_view wish;
  Device device;
  std::initializer_list<Operation> operations;
};
void check_kernel_wish(std::string_view function, const KernelWish& wish);

// Whether `wish` restricts the rows of this operation: a full name of another operation's row does not.
template <class Problem, class Operands>
bool restricts(std::span<const Kernel<Problem, Operands>> table, Operation operation, std::string_view wish) {
  if (wish.empty()) return false;
  for (const auto& kernel : table) {
    if (kernel.operation == operation && matches(kernel.name, wish)) return true;
  }
  return false;
}

inline std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
  return text;
}

// The cheapest row that can do it; without one the step has no kernel, and `refused` says why of each.
template <class Problem, class Operands>
Step<Problem, Operands> ask(std::span<const Kernel<Problem, Operands>> table, Operation operation,
                            const Problem& problem, std::string_view wish) {
  Step<Problem, Operands> step{problem, nullptr, {}, 0, {}};
  const bool restricted = restricts(table, operation, wish);
  std::string slower;
  for (const auto& kernel : table) {
    if (kernel.operation != operation) continue;
    std::string reason;
    if (kernel.device != problem.device.type) {
      reason = message("runs on ", name(kernel.device), ", the plan is for ", problem.device);
    } else if (restricted && !matches(kernel.name, wish)) {
      reason = message("the description asks for ", wish);
    } else {
      reason = kernel.supports(problem);
    }
    if (!reason.empty()) {
      step.refused += message("  not ", kernel.name, ": ", reason, "\n");
      continue;
    }
    const Cost cost = kernel.cost(problem);
    if (step.kernel && cost.seconds >= step.cost.seconds) {
      slower += message("  not ", kernel.name, ": expected ", milliseconds(cost.seconds), "\n");
      continue;
    }
    if (step.kernel)
      slower += message("  not ", step.kernel->name, ": expected ", milliseconds(step.cost.seconds), "\n");
    step.kernel = &kernel;
    step.cost = cost;
  }
  step.refused += slower;
  if (step.kernel) step.workspace = step.kernel->workspace(problem);
  return step;
}

// Of a product: the rows of the table that are the fastest for fewer rows of a than `all` was chosen for, each with the
// number of rows up to which it is, in rising order. Only where sums are exact, so that the choice changes no bit, and
// on the CPU, where it costs a comparison.
struct FewerRows {
  std::int64_t rows = 0;
  Step<GemmProblem, GemmOperands> step;
};
std::vector<FewerRows> choose_fewer_rows(const Step<GemmProblem, GemmOperands>& all, std::string_view wish);

// Throws where `ask` found no kernel.
template <class Problem, class Operands>
void require(const Step<Problem, Operands>& step, Operation operation, std::string_view function) {
  if (step.kernel) return;
  fail(Status::unsupported, function, ": no kernel for ", name(operation), " on ", step.problem.device, ":\n",
       step.refused);
}

template <class Problem, class Operands>
Step<Problem, Operands> choose(std::span<const Kernel<Problem, Operands>> table, Operation operation,
                               const Problem& problem, std::string_view function, std::string_view wish) {
  Step<Problem, Operands> step = ask(table, operation, problem, wish);
  require(step, operation, function);
  return step;
}

}  // namespace octile
