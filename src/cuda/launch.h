// The host side of a CUDA kernel: facts about its GPU, and how a kernel is prepared and enqueued on it. The plan has
// made the problem's GPU current.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>

#include "base/ceil_div.h"
#include "cuda/devices.h"
#include "octile/types.h"

namespace octile::cuda {

// CUDA errors throw Status::cuda_error, with the kernel's name.
void check(cudaError_t error, std::string_view kernel);

// Why a kernel for compute capabilities (10 major + minor) from `min` to below `end` cannot run on this GPU; empty: it
// can.
std::string reason_against(Device device, int min, int end = 1000);

// The GPU's facts, read once. The device exists.
const CudaDevice& properties(Device device);

inline unsigned blocks_for(std::int64_t count, std::int64_t per_block) {
  return static_cast<unsigned>(ceil_div(count, per_block));
}

struct LaunchShape {
  dim3 grid;
  dim3 block;
  unsigned shared_bytes = 0;  // dynamic
  dim3 cluster = {1, 1, 1};
  bool cooperative = false;  // all blocks are resident at once, or the launch fails; starts after all before it
};

// At select: loads the kernel onto the current GPU and raises its limit of dynamic shared memory, which run then need
// not.
void prepare(std::string_view kernel, const void* function, unsigned shared_bytes);
template <class... Parameters>
void prepare(std::string_view kernel, void (*function)(Parameters...), unsigned shared_bytes = 0) {
  prepare(kernel, reinterpret_cast<const void*>(function), shared_bytes);
}

void enqueue_pointers(std::string_view kernel, const void* function, const LaunchShape& shape, Stream stream,
                      void** arguments);

// Enqueues a kernel. On Hopper and later it may start while the kernel before it on the stream drains: see
// device/grid.cuh for what it must do then.
template <class... Parameters, class... Arguments>
void enqueue(std::string_view kernel, void (*function)(Parameters...), const LaunchShape& shape, Stream stream,
             Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  std::tuple<std::remove_cv_t<Parameters>...> values(static_cast<Arguments&&>(arguments)...);
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {static_cast<void*>(&value)..., nullptr};
        enqueue_pointers(kernel, reinterpret_cast<const void*>(function), shape, stream, pointers);
      },
      values);
}

}  // namespace octile::cuda
