#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string_view>
#include <vector>

#include "cuda/clusters.h"
#include "cuda/launch.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "max_active_clusters";
constexpr int kMaxSize = 8;               // that every GPU with clusters runs
constexpr int kSharedBytes = 227 * 1024;  // all that a block can have: one block to an SM
using Counts = std::array<std::atomic<int>, kMaxSize + 1>;

__global__ void occupy() {}

int ask_driver(Device device, int size) {
  const OnDevice current(device);
  check(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), kName);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(size));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, occupy, &config), kName);
  return std::max(count, 1);
}

std::vector<Counts>& known_counts() {
  static std::vector<Counts> counts(cuda_devices().devices.size());
  return counts;
}

}  // namespace

int max_active_clusters(Device device, int size) {
  if (size == 1) return properties(device).sms;
  std::atomic<int>& known =
      known_counts().at(static_cast<std::size_t>(device.index)).at(static_cast<std::size_t>(size));
  int count = known.load(std::memory_order_relaxed);
  if (count == 0) known.store(count = ask_driver(device, size), std::memory_order_relaxed);
  return count;
}

}  // namespace octile::cuda
