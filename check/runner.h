// How a case's plan is made and run on its tensors, on the CPU and on a GPU, for the files that make trials.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "base/message.h"
#include "check/bounds.h"
#include "check/operands.h"
#include "check/trial.h"

namespace octile::check {

struct Packed {
  std::vector<std::byte> memory;
  std::span<std::byte> bytes;  // of it
};

template <class Plan, class Args>
void pack(const Plan& plan, Args& args, Packed& packed) {
  const std::size_t size = plan.packed_weight_size();
  constexpr std::size_t kAlignment = 64;
  constexpr std::byte kGuard{0xa5};
  std::vector<std::byte>& memory = packed.memory;
  memory.assign(size + 2 * kAlignment, kGuard);
  void* begin = memory.data();
  std::size_t space = memory.size();
  auto* data = static_cast<std::byte*>(std::align(kAlignment, size, begin, space));
  const auto bytes = vector(reinterpret_cast<std::uint8_t*>(data), static_cast<std::int64_t>(size));
  plan.pack({args.weight, args.weight_scale, args.weight_zero_point, bytes});
  const auto guard = [](std::byte b) { return b == kGuard; };
  if (!std::all_of(memory.data(), data, guard) || !std::all_of(data + size, memory.data() + memory.size(), guard)) {
    throw std::runtime_error(message("pack wrote outside of its ", size, " bytes"));
  }
  packed.bytes = {data, size};
  args.weight = bytes;
  args.weight_scale = args.weight_zero_point = {};
}

// The arguments of a run: the caller's own, but a packed weight, which is packed first.
template <class Description, class Plan, class Args>
Args prepared(const Description& d, const Plan& plan, Args args, Packed& packed) {
  if constexpr (requires { plan.packed_weight_size(); }) {
    if (d.packed_weight) pack(plan, args, packed);
  }
  return args;
}

template <class Plan, class Args>
void run_on_host(const Plan& plan, const Args& args) {
  GuardedWorkspace workspace(plan.workspace_size());
  plan.run(args, workspace.get());
  if (!workspace.intact())
    throw std::runtime_error(message("wrote outside of its workspace of ", plan.workspace_size(), " bytes"));
}

template <class Plan, class Args>
void run_on_gpu(const Plan& plan, Args args, Tensors& tensors, const Packed& packed, const Attempt& attempt) {
  DeviceTensors& gpu = *attempt.gpu;
  gpu.place(tensors, plan.workspace_size(), packed.bytes);
  visit_tensors(args, [&](auto&... view) { ((view = gpu.there(view)), ...); });
  gpu.run([&] { plan.run(args, gpu.workspace(), gpu.stream()); }, attempt.as_graph);
}

template <class Args, class Description>
auto runner(const std::shared_ptr<Tensors>& tensors, Description description, const Args& args) {
  return [tensors, description, args](const Attempt& attempt) mutable -> Choice {
    description.kernel = attempt.kernel;
    description.threads = attempt.threads;
    if (attempt.gpu) description.device = attempt.gpu->device();
    const auto plan = Kind<Args>::Plan::select(description);
    Packed packed;
    const Args ready = prepared(description, plan, args, packed);
    if (attempt.gpu) {
      run_on_gpu(plan, ready, *tensors, packed, attempt);
    } else {
      run_on_host(plan, ready);
    }
    return {plan.sku(), plan.explain()};
  };
}

// The outputs as the contract has them, or, for a large case, as the CPU's fastest rows compute them.
template <class Args, class Description>
void expect(Tensors& tensors, const CaseBase& c, const Description& d, const Args& args,
            void (*oracle)(const Description&, const Args&)) {
  if (c.large) {
    const auto plan = Kind<Args>::Plan::select(d);
    run_on_host(plan, args);
    return tensors.keep_expected(bounds_of(plan.sku()));
  }
  oracle(d, args);
  tensors.keep_expected();
}

// One file per family.
Trial trial_of(const QuantizerCase& c, std::uint64_t seed);
Trial trial_of(const LinearCase& c, std::uint64_t seed);
Trial trial_of(const LinearBackwardCase& c, std::uint64_t seed);
Trial trial_of(const GroupedLinearCase& c, std::uint64_t seed);
Trial trial_of(const GroupedLinearBackwardCase& c, std::uint64_t seed);

}  // namespace octile::check
