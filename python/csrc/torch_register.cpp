// The exported functions: they register the ops with torch.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "octile/octile.h"
#include "plan_cache.h"
#include "torch_ops.h"
#include "torch_shim.h"

namespace octile_torch {

namespace {

using Op = void (*)(Value* stack);

struct Registration {
  const char* name;
  Op op;
  std::uint64_t inputs, outputs;
  bool on_gpus = true;  // else CUDA tensors have another implementation, or none
};

constexpr Registration kOps[] = {
    {"quantize", quantize, 6, 3},
    {"norm_quantize", norm_quantize, 7, 6},
    {"dequantize", dequantize, 5, 1},
    {"linear", linear, 8, 1},
    {"linear_int8", linear_int8, 7, 1},
    {"linear_s4", linear_s4, 6, 1},
    {"linear_packed", linear_packed, 10, 1},
    {"linear_backward", linear_backward, 15, 3},
    {"grouped_linear", grouped_linear, 16, 1},
    {"grouped_linear_backward", grouped_linear_backward, 13, 3},
    {"attend_one_query", attend_one_query, 5, 1, false},
};
// Reported to torch; __FILE__ would name a folder of the build machine.
constexpr const char* kFile = "octile/python/csrc/torch_register.cpp";
constexpr std::size_t kOpCount = sizeof kOps / sizeof *kOps;

// NULL, or the error message.
Error run_op(const Registration& op, Value* stack) {
  try {
    op.op(stack);
    return nullptr;
  } catch (const Failure& failure) {
    return failure.error;
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

// Turns an error message into torch's exception, which passes through this frame: nothing here has a destructor.
template <std::size_t index>
void boxed(Value* stack, std::uint64_t inputs, std::uint64_t outputs) {
  constexpr const Registration& op = kOps[index];
  Error error = "the schema and _octile_torch.so have different versions";
  if (inputs == op.inputs && outputs == op.outputs) error = run_op(op, stack);
  if (error != nullptr) shim.check(false, op.name, kFile, __LINE__, message("octile::%s: %s", op.name, error));
}

template <std::size_t... index>
Error register_all(LibraryHandle library, bool gpu, std::index_sequence<index...>) {
  for (auto [op, kernel] : {std::pair<const Registration*, Kernel>{&kOps[index], boxed<index>}...}) {
    if (gpu && !op->on_gpus) continue;
    if (shim.library_impl(library, op->name, kernel, kTorchVersion) != 0) {
      return message("torch refused octile::%s", op->name);
    }
  }
  return nullptr;
}

Error register_for(const char* key, bool gpu, LibraryHandle* library) {
  if (shim.library_init_impl("octile", key, kFile, __LINE__, library) != 0) {
    return message("torch refused implementations for %s", key);
  }
  return register_all(*library, gpu, std::make_index_sequence<kOpCount>());
}

struct Tasks {
  std::int32_t count;
  octile_task task;
  void* context;
};

// On torch's threads, always on all of them: OpenMP ends those that a smaller team leaves out, and makes new ones.
void run_tasks(std::int32_t count, octile_task task, void* context) {
  std::uint32_t threads = 1;
  shim.get_num_threads(&threads);
  Tasks tasks = {count, task, context};
  const auto some = [](std::int64_t begin, std::int64_t end, void* given) {
    const Tasks& all = *static_cast<const Tasks*>(given);
    for (std::int64_t i = begin; i < std::min<std::int64_t>(end, all.count); ++i) {
      all.task(all.context, static_cast<std::int32_t>(i));
    }
  };
  shim.parallel_for(0, std::max<std::int64_t>(threads, count), 1, some, &tasks);
}

}  // namespace

}  // namespace octile_torch

// Implements the ops in the loaded torch, for good. Their schemas must be defined already. Returns NULL, or the reason
// why not; then nothing is registered.
extern "C" [[gnu::visibility("default")]] const char* octile_torch_register() {
  using namespace octile_torch;
  if (octile_abi_version() != OCTILE_ABI_VERSION) return "liboctile.so and _octile_torch.so have different versions";
  if (Error error = load_shim()) return error;
  LibraryHandle cpu = nullptr, cuda = nullptr;
  Error error = register_for("CPU", false, &cpu);
  if (error == nullptr) error = register_for("CUDA", true, &cuda);
  if (error != nullptr) {
    for (LibraryHandle library : {cpu, cuda}) {
      if (library != nullptr) shim.delete_library(library);
    }
  } else if (shim.parallel_for != nullptr) {
    octile_use_task_runner(run_tasks);
  }
  return error;
}

// For a torch that lacks the interface: the caller implements the ops by octile_torch_call, with these callbacks.
extern "C" [[gnu::visibility("default")]] const char* octile_torch_use(const octile_torch::Callbacks* callbacks) {
  if (octile_abi_version() != OCTILE_ABI_VERSION) return "liboctile.so and _octile_torch.so have different versions";
  octile_torch::use_callbacks(*callbacks);
  return nullptr;
}

// Runs an op. The stack holds its arguments, and then its results. Returns NULL, or the error message, for this thread.
extern "C" [[gnu::visibility("default")]] const char* octile_torch_call(const char* name, octile_torch::Value* stack) {
  for (const octile_torch::Registration& op : octile_torch::kOps) {
    if (std::strcmp(name, op.name) == 0) return octile_torch::run_op(op, stack);
  }
  return "is not known to _octile_torch.so";
}

// For the tests.
extern "C" [[gnu::visibility("default")]] void octile_torch_plan_counts(std::size_t* held, std::size_t* made) {
  const octile_torch::CacheCounts counts = octile_torch::cache_counts();
  *held = counts.held;
  *made = counts.made;
}
