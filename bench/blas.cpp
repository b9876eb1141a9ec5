#include "bench/blas.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace octile {

namespace {

// How many more threads the system gives this process, at most `wanted`.
int threads_to_be_had(int wanted) {
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  try {
    while (static_cast<int>(threads.size()) < wanted) threads.emplace_back([&] { done.wait(false); });
  } catch (const std::system_error&) {
  }
  done = true;
  done.notify_all();
  for (std::thread& thread : threads) thread.join();
  return static_cast<int>(threads.size());
}

template <class Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

Blas load() {
  const int others = static_cast<int>(std::max(1u, std::thread::hardware_concurrency())) - 1;
  const int threads = threads_to_be_had(others) + 1;
  if (threads <= others) setenv("OPENBLAS_NUM_THREADS", std::to_string(threads).c_str(), 1);
  // By its name, as the linker would have it, or where it was found when this was built.
  void* library = dlopen(OCTILE_BLAS_NAME, RTLD_NOW);
  if (!library) library = dlopen(OCTILE_BLAS_PATH, RTLD_NOW);
  if (!library) throw std::runtime_error(std::string("the BLAS cannot be loaded: ") + dlerror());
  const Blas found{find<decltype(&cblas_sgemm)>(library, "cblas_sgemm"),
                   find<void (*)(int)>(library, "openblas_set_num_threads"),
                   find<char* (*)()>(library, "openblas_get_config"), threads};
  if (!found.sgemm) throw std::runtime_error(std::string(OCTILE_BLAS_NAME) + " has no cblas_sgemm");
  return found;
}

}  // namespace

const Blas& blas() {
  static const Blas loaded = load();
  return loaded;
}

}  // namespace octile
