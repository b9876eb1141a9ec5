// Autotuning: of several executors and block sizes, a launch takes the one that was the fastest for this kernel, device
// and class of sizes. It is measured once, and kept in a file.
//
//   autotuned({.name = "matmul", .sizes = {n0, n1, middle}},
//             [&](auto executor, auto b0, auto b1, auto b2) {
//               launch(executor, Grid{cdiv(n0, b0), cdiv(n1, b1)}, Matmul{}, x, y, z, n0, n1, middle, b0, b1, b2);
//             },
//             choice(Cuda<Warpgroups<2>>{stream}, c<128>, c<256>, c<64>),
//             choice(Cuda<Warpgroups<2>>{.stream = stream, .band = 8}, c<256>, c<128>, c<64>));
//
// A measurement repeats the launch, so the kernel must not read what it writes.
#pragma once

#include <chrono>
#include <string>

#include "octile/tile/cuda.h"
#include "octile/tile/fast.h"
#include "octile/tile/tuning.h"

namespace octile::tile {

// A launch's executor, and the constants that it is called with.
template <class E, int... kBlocks>
struct Choice {
  using Executor = E;
  E executor;
};
template <class E, int... kBlocks>
Choice<E, kBlocks...> choice(E executor, Constant<kBlocks>...) {
  return {executor};
}

namespace tuning {

// ---- In words ----

template <int R, int C, int V, int B>
std::string text(Threads<R, C, V, B>) {
  return "Threads<" + std::to_string(R) + "," + std::to_string(C) + "," + std::to_string(V) + "," + std::to_string(B) +
         ">";
}
template <int R, int C, int V, int B>
std::string text(Warps<R, C, V, B>) {
  return "Warps<" + std::to_string(R) + "," + std::to_string(C) + "," + std::to_string(V) + "," + std::to_string(B) +
         ">";
}
inline std::string text(NoFallback) { return "NoFallback"; }
template <int n, class Other, bool kTf32>
std::string text(Warpgroups<n, Other, kTf32>) {
  return "Warpgroups<" + std::to_string(n) + "," + text(Other{}) + (kTf32 ? ",tf32>" : ">");
}
template <class L, Math kMath>
std::string text(const Cuda<L, kMath>& executor) {
  std::string words = text(L{}) + (kMath == Math::fast ? " fast" : "");
  if (L::kWgmma) {
    words += " band=" + std::to_string(executor.band) + " cluster=" + std::to_string(executor.cluster);
    if (!executor.persistent) words += " not-persistent";
  }
  return words;
}
inline std::string text(const FastCpu& executor) { return "FastCpu threads=" + std::to_string(executor.threads); }
template <class E, int... kBlocks>
std::string text(const Choice<E, kBlocks...>& choice) {
  std::string words = text(choice.executor);
  ((words += " " + std::to_string(kBlocks)), ...);
  return words;
}

// ---- Where a choice runs, and how it is timed ----

#if defined(__CUDACC__)
template <class L, Math kMath>
std::string device_of(const Cuda<L, kMath>&) {
  int device = 0;
  cudaDeviceProp properties = {};
  gpu::check(cudaGetDevice(&device), "device");
  gpu::check(cudaGetDeviceProperties(&properties, device), "device");
  return std::string("cuda ") + properties.name;
}
template <class L, Math kMath>
bool may_measure(const Cuda<L, kMath>& executor) {  // not while a graph is made
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  gpu::check(cudaStreamIsCapturing(static_cast<cudaStream_t>(executor.stream), &status), "stream");
  return status == cudaStreamCaptureStatusNone;
}

// Runs with what they read no longer in L2.
class GpuTimer {
 public:
  explicit GpuTimer(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {
    bytes_ = 2 * static_cast<std::size_t>(gpu::device_attribute(cudaDevAttrL2CacheSize));
    gpu::check(cudaMalloc(&memory_, bytes_), "memory for timing");
    gpu::check(cudaEventCreate(&begin_), "event");
    gpu::check(cudaEventCreate(&end_), "event");
  }
  ~GpuTimer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaFree(memory_);
  }
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;

  template <class Run>
  double operator()(Run run) const {
    gpu::check(cudaMemsetAsync(memory_, 0, bytes_, stream_), "timing");
    gpu::check(cudaEventRecord(begin_, stream_), "timing");
    run();
    gpu::check(cudaEventRecord(end_, stream_), "timing");
    gpu::check(cudaEventSynchronize(end_), "a choice of autotuned()");
    float milliseconds = 0;
    gpu::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "timing");
    return milliseconds * 1e-3;
  }

 private:
  cudaStream_t stream_;
  std::size_t bytes_ = 0;
  void* memory_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};
template <class L, Math kMath>
GpuTimer timer_of(const Cuda<L, kMath>& executor) {
  return GpuTimer(executor.stream);
}
#endif

struct CpuTimer {
  template <class Run>
  double operator()(Run run) const {
    const auto begin = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
};
template <class E>
std::string device_of(const E&) {
  return cpu_device();
}
template <class E>
bool may_measure(const E&) {
  return true;
}
template <class E>
CpuTimer timer_of(const E&) {
  return {};
}

template <class Launch, class E, int... kBlocks>
Candidate candidate(const Launch& launch, const Choice<E, kBlocks...>& choice) {
  const auto run = [&launch, executor = choice.executor] { launch(executor, c<kBlocks>...); };
  return {text(choice), run, [run, executor = choice.executor] { return timer_of(executor)(run); }};
}

}  // namespace tuning

// launch(executor, blocks...) of the fastest choice. All choices are of one device. The first is taken if nothing
// can be measured, such as while a CUDA graph is captured. A choice that cannot run (its tiles may need more shared
// memory than there is) is skipped; if none can run, this throws std::runtime_error with the reason for each.
template <class Launch, class First, class... More>
TunedLaunch autotuned(const Autotune& autotune, const Launch& launch, const First& first, const More&... more) {
  return tuning::run(autotune, tuning::device_of(first.executor), tuning::may_measure(first.executor),
                     {tuning::candidate(launch, first), tuning::candidate(launch, more)...});
}

}  // namespace octile::tile
