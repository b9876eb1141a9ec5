// What the command needs of the CUDA runtime: one GPU, memory on it, a stream of its own, graphs and clocks. gpu.cu
// asks the runtime; no_gpu.cpp replaces it in builds without CUDA.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/devices.h"
#include "octile/types.h"

namespace octile::check {

// Memory of a GPU, or host memory that it copies to and from; from a multiple of 256 bytes on.
using GpuBytes = std::unique_ptr<std::byte, void (*)(std::byte*)>;

// Everything is enqueued on the stream, in order. CUDA errors throw std::runtime_error.
class Gpu {
 public:
  // Makes it current. Throws std::runtime_error where there is no such GPU, with the reason.
  explicit Gpu(int index);

  Device device() const { return Device::cuda(index_); }
  CudaDevice facts() const;
  // Neither waits for the default stream nor is waited for by it.
  Stream stream() const { return {stream_.get()}; }

  GpuBytes allocate(std::size_t bytes) const;
  GpuBytes allocate_on_host(std::size_t bytes) const;

  // Between host and device, either way, or on the device.
  void copy(void* to, const void* from, std::size_t bytes) const;
  void fill(void* to, std::byte value, std::size_t bytes) const;
  void wait() const;

  // Records what `work` enqueues on the stream in a graph, and launches that on the stream. Waits for it.
  void run_as_graph(const std::function<void()>& work) const;

  // Seconds that each of `runs` calls of `work` takes on the GPU. `before` is enqueued ahead of each, and not counted.
  std::vector<double> time(int runs, const std::function<void()>& before, const std::function<void()>& work) const;

  // Bytes per second, on two GiB.
  double read_rate() const;  // read
  double copy_rate() const;  // read and written, added
  // Operations per second of s8 products summed in s32, at the GPU's highest clock: as specified, not measured. 0 where
  // this GPU's rate is not known.
  double int8_rate(std::string& how) const;

 private:
  int index_;
  std::unique_ptr<void, void (*)(void*)> stream_{nullptr, nullptr};  // cudaStream_t
};

}  // namespace octile::check
