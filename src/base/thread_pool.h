// The library's threads: one pool for the process, made at the first parallel run and kept. Or another pool's, which
// the program provides.
#pragma once

#include <cstdint>
#include <type_traits>

namespace octile::cpu {

// Of one job. More are never useful.
inline constexpr int kMaxThreads = 256;

// Threads of this machine that the process may use.
int hardware_threads();

// One part of a job, on thread 0 <= thread < threads of it: no two parts with the same thread run at once.
using PartFunction = void (*)(const void* context, std::int64_t part, int thread);

// Calls function(context, part, thread) for part = 0 .. parts - 1 on up to `threads` threads (0: hardware_threads()),
// the caller's among them, and returns when all are done. Which thread runs a part is not fixed, so a part's result
// must depend on nothing but its number. Allocates nothing after the first call with this many threads. If the pool is
// busy with another caller's work, or the system gives no threads, the caller does all parts itself. `function` must
// not throw.
void parallel_for(int threads, std::int64_t parts, PartFunction function, const void* context);

// run(tasks, task, context) calls task(context, i) once for each 0 <= i < tasks, at once as far as it has threads, and
// returns when all have returned.
using Task = void (*)(void* context, std::int32_t index);
using TaskRunner = void (*)(std::int32_t tasks, Task task, void* context);

// Whose threads run jobs from now on. NULL: the library's own, as in a child after fork(). Two pools in one process
// spin on the same cores, each while the other has work.
void use_task_runner(TaskRunner runner);

// body(part) or body(part, thread).
template <class Body>
void parallel_for(int threads, std::int64_t parts, const Body& body) {
  const PartFunction function = [](const void* context, std::int64_t part, int thread) {
    const Body& call = *static_cast<const Body*>(context);
    if constexpr (std::is_invocable_v<const Body&, std::int64_t, int>) {
      call(part, thread);
    } else {
      call(part);
    }
  };
  parallel_for(threads, parts, function, &body);
}

}  // namespace octile::cpu
