// Octile: what every plan reports about itself.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "octile/error.h"
#include "octile/types.h"

namespace octile {

struct PrecisionGuarantee {
  bool deterministic = true;       // the same bits on every run on one device
  bool bit_stable = true;          // the same bits on every device, thread count and batch size
  DType accumulator = DType::s32;  // s32 sums are exact
  std::string error_bound;         // in words, for sums in float; "exact" where every rounding is in the contract
};

// The common part of all plans: immutable, cheap to copy, safe to use from several threads at once. They compute
// with rounding to nearest, subnormal numbers and masked exceptions, whatever the calling thread's floating-point
// environment is, and restore that environment, including its sticky flags.
//
// Each kind of plan has three functions of its own:
//   select         chooses the kernels for a description. Throws Error: invalid_argument for a description that no plan
//                  accepts, unsupported if no kernel on this machine can do it
//   can_implement  whether `run` would take these tensors, or why not
//   run            writes the outputs; throws Error, and writes nothing, if can_implement says no or the workspace is
//                  too small. Allocates nothing once the pool's threads run. On a GPU it enqueues the work on `stream` and
//                  returns. An empty matrix is legal
class OCTILE_API Plan {
 public:
  // Bytes of scratch that `run` needs, at any alignment; the same for every run of the plan.
  std::size_t workspace_size() const;
  // The kernels chosen, in the order they run, joined by " + ": "quantize_portable + w8a8_gemm_portable".
  std::string sku() const;
  // The guarantee for all outputs of the plan. LinearBackwardPlan also has one for each output.
  PrecisionGuarantee precision_guarantee() const;
  // For people: the problem, the kernels chosen with their expected bytes and time, and why each other one was not.
  // The times are the cost model's estimates for cold caches, good for ranking kernels; they are not measurements. If
  // a measurement decided (octile/tuning.h), a line says so, with its times and its file.
  std::string explain() const;

  struct Impl;

 protected:
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// A row of the kernel table, and whether it can run on this machine.
struct KernelInfo {
  std::string name;       // <format>_<operation>_<arch>
  std::string operation;  // what it computes, the same for all rows that may stand in for each other
  DeviceType device = DeviceType::cpu;
  std::string reason;  // why it cannot run here; empty: it can
};

OCTILE_API std::vector<KernelInfo> kernels();

}  // namespace octile
