#include <cuda_runtime.h>

#include "puzzles/cuda_trial.h"
#include "puzzles/device.h"
#include "puzzles/solutions.h"

namespace octile::tile::puzzles {

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

DeviceBytes::DeviceBytes(std::size_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "cudaMalloc");
  data_ = static_cast<std::byte*>(data);
}
DeviceBytes::~DeviceBytes() { cudaFree(data_); }
void DeviceBytes::upload(const std::byte* from) const {
  check(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
}
void DeviceBytes::download(std::byte* to) const {
  check(cudaDeviceSynchronize(), "a kernel");
  check(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

std::string no_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(error);
  }
  return count > 0 ? "" : "there is no GPU";
}

Outcome on_device(const Facts& facts, const Case& a_case) {
  CudaTrial trial(a_case);
  run_solution(facts.number, trial);
  return std::move(trial.outcome);
}

}  // namespace octile::tile::puzzles
