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
constexpr int kMaxSize = 8;                                 // that every GPU with clusters runs
constexpr int kSharedBytes = 227 * 1024;                    // all that a block can have: one block to an SM
constexpr int kHalfShared = 112 * 1024;                     // two blocks to an SM
using Counts = std::array<std::atomic<int>, kMaxSize + 1>;  // [0]: of 16 blocks, plus 1

__global__ void occupy() {}

cudaError_t ask_driver(Device device, int size, int shared_bytes, int& count) {
  const OnDevice current(device);
  check(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), kName);
  check(cudaFuncSetAttribute(occupy, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), kName);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(size));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&count, occupy, &config);
}

int count_clusters(Device device, int size) {
  if (size == 1) return properties(device).sms;
  int count = 0;
  check(ask_driver(device, size, kSharedBytes, count), kName);
  return std::max(count, 1);
}

std::vector<Counts>& known_counts() {
  static std::vector<Counts> counts = [] {
    int devices = 0;
    check(cudaGetDeviceCount(&devices), kName);
    return std::vector<Counts>(static_cast<std::size_t>(devices));
  }();
  return counts;
}

}  // namespace

int max_active_clusters(Device device, int size) {
  Counts& known = known_counts().at(static_cast<std::size_t>(device.index));
  std::atomic<int>& count = known.at(static_cast<std::size_t>(size));
  if (count.load(std::memory_order_relaxed) == 0) {
    for (int i = 1; i <= kMaxSize; ++i) known[static_cast<std::size_t>(i)] = count_clusters(device, i);
  }
  return count.load(std::memory_order_relaxed);
}

bool runs_clusters_of_16(Device device) {
  std::atomic<int>& known = known_counts().at(static_cast<std::size_t>(device.index)).front();
  if (known.load(std::memory_order_relaxed) == 0) {
    int count = 0;
    if (ask_driver(device, 16, kHalfShared, count) != cudaSuccess) {
      cudaGetLastError();  // the next caller must not find our error
      count = 0;
    }
    known.store(count + 1, std::memory_order_relaxed);
  }
  return known.load(std::memory_order_relaxed) > 1;
}

void prepare_clusters(Device device) { max_active_clusters(device, 1); }

}  // namespace octile::cuda
