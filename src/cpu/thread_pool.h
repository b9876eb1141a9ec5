// The library's threads. One pool for the process, made at the first parallel run and kept.
#pragma once

#include <cstdint>

namespace octile::cpu {

// Threads of this machine that the process may use.
int hardware_threads();

// Calls function(context, part) for part = 0 .. parts - 1 on up to `threads` threads (0: hardware_threads()), the
// caller's among them, and returns when all are done. Which thread runs a part is not fixed, so a part's result must
// depend on nothing but its number. Allocates nothing after the first call with so many threads. If the pool is busy
// with another caller's work, the caller does all parts itself. `function` must not throw.
void parallel_for(int threads, std::int64_t parts, void (*function)(const void*, std::int64_t), const void* context);

template <class Body>
void parallel_for(int threads, std::int64_t parts, const Body& body) {
  parallel_for(
      threads, parts, [](const void* context, std::int64_t part) { (*static_cast<const Body*>(context))(part); },
      &body);
}

}  // namespace octile::cpu
