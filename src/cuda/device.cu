// Which GPUs there are, and why not. Runs on machines without a GPU or a driver too: the runtime then says so.
#include <cuda_runtime_api.h>

#include "cuda_devices.h"

namespace octile {

CudaDevices cuda_devices() {
  CudaDevices found;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  for (int i = 0; i < count && error == cudaSuccess; ++i) {
    cudaDeviceProp properties;
    error = cudaGetDeviceProperties(&properties, i);
    if (error != cudaSuccess) break;
    found.devices.push_back({properties.name, properties.major, properties.minor, properties.totalGlobalMem,
                             properties.multiProcessorCount});
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // the next caller is not to find our error
    found.devices.clear();
    int driver = 0;
    const bool no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    found.reason = no_driver ? "there is no CUDA driver" : cudaGetErrorString(error);
  } else if (found.devices.empty()) {
    found.reason = "the CUDA driver lists no GPU";
  }
  return found;
}

}  // namespace octile
