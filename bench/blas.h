// The BLAS behind the f32 baselines of `octile bench` and examples/digits. It is loaded on first use: OpenBLAS makes
// its threads while it is loaded, and ends the process where it gets none.
#pragma once

#include <cblas.h>

#include <algorithm>

namespace octile {

struct Blas {
  decltype(&cblas_sgemm) sgemm;
  // OpenBLAS's own; null in others.
  void (*set_num_threads)(int);
  char* (*get_config)();
  int max_threads;  // that the system gives: OpenBLAS would wait for others for ever

  void use_threads(int threads) const {
    if (set_num_threads) set_num_threads(std::min(threads, max_threads));
  }
};

// Throws std::runtime_error where it cannot be loaded.
const Blas& blas();

}  // namespace octile
