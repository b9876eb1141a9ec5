// parallel_for for parts that may throw: an exception reaches the caller.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>

#include "base/thread_pool.h"

namespace octile {

template <class Body>
void parallel_parts(int threads, std::int64_t parts, const Body& body) {
  std::mutex mutex;
  std::exception_ptr first;
  cpu::parallel_for(threads, parts, [&](std::int64_t part) {
    try {
      body(part);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace octile
