// The GPUs that this process can use. src/cuda/launch.cu asks the CUDA runtime; a build without CUDA has
// src/cuda/none.cpp instead.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "octile/types.h"

namespace octile {

struct CudaDevice {
  std::string name;
  int major = 0;  // of the compute capability
  int minor = 0;
  std::size_t memory = 0;  // bytes
  int sms = 0;
  std::size_t l2_bytes = 0;
  std::size_t shared_memory = 0;  // bytes, of a block at most
};

struct CudaDevices {
  std::vector<CudaDevice> devices;  // in CUDA's order
  std::string reason;               // why there are none; empty if there are
};

CudaDevices cuda_devices();

namespace cuda {

// Makes a GPU current in this scope; nothing for a CPU.
class OnDevice {
 public:
  explicit OnDevice(Device device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace cuda

}  // namespace octile
