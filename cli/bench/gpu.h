// Timing on a GPU: with its own clock, on data in its own memory.
#pragma once

#include <functional>

#include "check/gpu.h"
#include "cli/bench/peaks.h"

namespace octile::cli {

using check::Gpu;
using check::GpuBytes;

struct GpuTiming {
  double seconds = 0;  // medians: on the GPU,
  double host = 0;     // and of the call itself, which enqueues
  int runs = 0;
};

// The runs and what empties the caches before each are enqueued well ahead, so that the host's time does not show.
GpuTiming time_on(const Gpu& gpu, const std::function<void()>& work, int runs, bool cold);

// int8 as specified, memory as measured; f32 is what the f16 tensor cores do, half of int8.
Peaks peaks_of(const Gpu& gpu);

}  // namespace octile::cli
