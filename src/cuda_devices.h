// The GPUs that this process can use. src/cuda/device.cu asks the CUDA runtime; src/no_cuda.cpp stands in for it where
// Octile is built without CUDA.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace octile {

struct CudaDevice {
  std::string name;
  int major = 0;  // of the compute capability
  int minor = 0;
  std::size_t memory = 0;  // bytes
  int multiprocessors = 0;
};

struct CudaDevices {
  std::vector<CudaDevice> devices;  // in CUDA's order
  std::string reason;               // why there are none; empty if there are
};

CudaDevices cuda_devices();

}  // namespace octile
