// The measured peaks of this machine: arithmetic with operands in registers, and memory bandwidth.
#pragma once

#include <cstddef>
#include <string>

#include "cli/support/machine.h"

namespace octile::cli {

struct Peak {
  double rate = 0;  // per second
  std::string how;  // the instructions, or the traffic
};

struct Peaks {
  Peak int8;  // operations (2 per product) of exact s8 x s8 sums
  Peak f32;   // operations of f32 sums
  Peak bf16;  // the same for products of bf16; 0 where no instruction has them
  Peak read;  // bytes read from memory
  Peak copy;  // bytes read and bytes written, added
};

// The best of a dozen short bursts of `threads` threads together, in about a second. Memory is measured on buffers of
// four times the last cache.
Peaks measure_peaks(const Machine& machine, int threads);

// Reads `bytes` and writes as many, with memcpy on all threads.
void parallel_copy(int threads, void* to, const void* from, std::size_t bytes);

// Reads all of it.
void parallel_read(int threads, const void* data, std::size_t bytes);

double seconds_now();

}  // namespace octile::cli
