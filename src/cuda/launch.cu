// The GPUs of this machine, or why there are none. Without a GPU or a driver, the CUDA runtime says so.
#include <cuda.h>  // types only: the library is not linked with the driver

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/message.h"
#include "cuda/devices.h"
#include "cuda/launch.h"

namespace octile {

CudaDevices cuda_devices() {
  CudaDevices found;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  for (int i = 0; i < count && error == cudaSuccess; ++i) {
    cudaDeviceProp p;
    error = cudaGetDeviceProperties(&p, i);
    if (error != cudaSuccess) break;
    found.devices.push_back({p.name, p.major, p.minor, p.totalGlobalMem, p.multiProcessorCount,
                             static_cast<std::size_t>(p.l2CacheSize), p.sharedMemPerBlockOptin});
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // the next caller must not find our error
    found.devices.clear();
    int driver = 0;
    const bool no_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    found.reason = no_driver ? "there is no CUDA driver" : cudaGetErrorString(error);
  } else if (found.devices.empty()) {
    found.reason = "the CUDA driver lists no GPU";
  }
  return found;
}

namespace cuda {

namespace {

const CudaDevices& known_devices() {
  static const CudaDevices devices = cuda_devices();
  return devices;
}

}  // namespace

void check(cudaError_t error, std::string_view kernel) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(Status::cuda_error, kernel, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error),
       "; see docs/how-to/errors.md#cuda-errors");
}

std::string reason_against(Device device, int min, int end) {
  const CudaDevices& known = known_devices();
  if (known.devices.empty()) return known.reason;
  const auto index = static_cast<std::size_t>(device.index);
  if (index >= known.devices.size()) {
    return message("there is no ", device, ", the last is cuda:", known.devices.size() - 1);
  }
  const CudaDevice& gpu = known.devices[index];
  const int capability = 10 * gpu.major + gpu.minor;
  if (min <= capability && capability < end) return {};
  return message("is for compute capability ", min / 10, ".", min % 10, end == 1000 ? " or later" : " alone", ", ",
                 device, " (", gpu.name, ") has ", gpu.major, ".", gpu.minor);
}

const CudaDevice& properties(Device device) {
  return known_devices().devices.at(static_cast<std::size_t>(device.index));
}

OnDevice::OnDevice(Device device) {
  if (device.type != DeviceType::cuda) return;
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device.index) return;
  check(cudaSetDevice(device.index), "cudaSetDevice");
  previous_ = current;
}

OnDevice::~OnDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

namespace {

// The driver's handle of each kernel on each GPU, and its launch: 2.3 us of the host, where a handle for all GPUs takes
// 2.45 and the runtime's launch 3.0 (H200, Sapphire Rapids). Written at select, read by every run.
class KernelHandles {
 public:
  void add(const void* function, int device) {
    const std::lock_guard lock(mutex_);
    if (find(function, device)) return;
    cudaFunction_t handle = nullptr;
    if (count_ == kMax) return;
    if (cudaGetFuncBySymbol(&handle, function) != cudaSuccess) {
      cudaGetLastError();  // the next caller must not find our error
      return;
    }
    std::size_t i = slot(function);
    while (entries_[i].function.load(std::memory_order_relaxed)) i = (i + 1) % kSlots;
    entries_[i].device = device;
    entries_[i].handle = handle;
    entries_[i].function.store(function, std::memory_order_release);
    ++count_;
  }

  // Null: not added.
  cudaFunction_t find(const void* function, int device) const {
    for (std::size_t i = slot(function);; i = (i + 1) % kSlots) {
      const void* const there = entries_[i].function.load(std::memory_order_acquire);
      if (there == function && entries_[i].device == device) return entries_[i].handle;
      if (!there) return nullptr;
    }
  }

 private:
  struct Entry {
    std::atomic<const void*> function = nullptr;
    int device = 0;
    cudaFunction_t handle = nullptr;
  };
  static constexpr std::size_t kSlots = 4096;
  static constexpr std::size_t kMax = kSlots / 2;
  static std::size_t slot(const void* function) { return reinterpret_cast<std::uintptr_t>(function) / 16 % kSlots; }

  std::array<Entry, kSlots> entries_;
  std::size_t count_ = 0;
  std::mutex mutex_;
};

KernelHandles kernel_handles;

int current_device(std::string_view kernel) {
  int device = 0;
  check(cudaGetDevice(&device), kernel);
  return device;
}

using DriverLaunch = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

DriverLaunch driver_launch() {
  static const DriverLaunch launch = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    constexpr unsigned kSince = 12000;  // the version of CUDA
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, kSince, cudaEnableDefault, &found);
    if (error != cudaSuccess) cudaGetLastError();
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return DriverLaunch{};
    return reinterpret_cast<DriverLaunch>(entry);
  }();
  return launch;
}

bool launched_by_driver(const cudaLaunchConfig_t& c, cudaFunction_t kernel, void** arguments) {
  const DriverLaunch launch = driver_launch();
  if (!kernel || !launch) return false;
  CUlaunchConfig config = {};
  config.gridDimX = c.gridDim.x;
  config.gridDimY = c.gridDim.y;
  config.gridDimZ = c.gridDim.z;
  config.blockDimX = c.blockDim.x;
  config.blockDimY = c.blockDim.y;
  config.blockDimZ = c.blockDim.z;
  config.sharedMemBytes = static_cast<unsigned>(c.dynamicSmemBytes);
  config.hStream = c.stream;
  config.attrs = reinterpret_cast<CUlaunchAttribute*>(c.attrs);  // the runtime's attributes are the driver's
  config.numAttrs = c.numAttrs;
  return launch(&config, reinterpret_cast<CUfunction>(kernel), arguments, nullptr) == CUDA_SUCCESS;
}

}  // namespace

void prepare(std::string_view kernel, const void* function, unsigned shared_bytes) {
  // Plans may need different limits of one kernel: the highest stays.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  // Querying the attributes loads a kernel.
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, function), kernel);
  constexpr unsigned kWithoutAsking = 48 * 1024;
  if (shared_bytes + attributes.sharedSizeBytes > kWithoutAsking) {
    const int limit = std::max(static_cast<int>(shared_bytes), attributes.maxDynamicSharedSizeBytes);
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, limit), kernel);
  }
  kernel_handles.add(function, current_device(kernel));
}

void enqueue_pointers(std::string_view kernel, const void* function, const LaunchShape& shape, Stream stream,
                      void** arguments) {
  cudaLaunchAttribute attributes[2];
  if (shape.cooperative) {
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
  } else {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
  }
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  const int device = current_device(kernel);
  if (shape.cooperative || properties(Device::cuda(device)).major >= 9) {
    config.attrs = attributes;
    config.numAttrs = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1 ? 2 : 1;
  }
  // The driver refuses a thread without a current context; the runtime creates one, and words errors.
  if (launched_by_driver(config, kernel_handles.find(function, device), arguments)) return;
  check(cudaLaunchKernelExC(&config, function, arguments), kernel);
}

}  // namespace cuda

}  // namespace octile
