#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

#include "base/message.h"
#include "check/gpu.h"
#include "cuda/devices.h"

namespace octile::check {

namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 8;  // twice what is resident: 4.55 TB/s on an H200, half as many 4.5
constexpr int kLoads = 4;        // in flight per thread
constexpr std::size_t kTraffic = std::size_t{2} << 30;
constexpr int kBursts = 12;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(message(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

cudaStream_t handle(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// Reads data[0 .. count), count a multiple of kLoads * threads in the grid.
__global__ void __launch_bounds__(kThreads) read_all(const uint4* data, std::size_t count, unsigned* never) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * kThreads;
  unsigned sum = 0;
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < count; i += kLoads * step) {
    uint4 v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x9e3779b9u) *never = sum;  // or the loads would be left out
}

double best(const std::vector<double>& seconds) { return *std::min_element(seconds.begin(), seconds.end()); }

// A pair of events per run, made before the first.
class Events {
 public:
  explicit Events(int runs) : events_(static_cast<std::size_t>(2 * runs)) {
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Events() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  cudaEvent_t begin(int run) const { return events_[static_cast<std::size_t>(2 * run)]; }
  cudaEvent_t end(int run) const { return events_[static_cast<std::size_t>(2 * run + 1)]; }

 private:
  std::vector<cudaEvent_t> events_;
};

}  // namespace

Gpu::Gpu(int index) : index_(index) {
  const CudaDevices found = cuda_devices();
  if (found.devices.empty()) throw std::runtime_error(found.reason);
  if (index < 0 || static_cast<std::size_t>(index) >= found.devices.size()) {
    throw std::runtime_error(message("there is no cuda:", index, ", the last is cuda:", found.devices.size() - 1));
  }
  check(cudaSetDevice(index), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = {stream, [](void* s) { cudaStreamDestroy(static_cast<cudaStream_t>(s)); }};
}

CudaDevice Gpu::facts() const { return cuda_devices().devices[static_cast<std::size_t>(index_)]; }

GpuBytes Gpu::allocate(std::size_t bytes) const {
  void* data = nullptr;
  check(cudaMalloc(&data, std::max<std::size_t>(bytes, 1)), "cudaMalloc");
  return {static_cast<std::byte*>(data), [](std::byte* p) { cudaFree(p); }};
}

GpuBytes Gpu::allocate_on_host(std::size_t bytes) const {
  void* data = nullptr;
  check(cudaMallocHost(&data, std::max<std::size_t>(bytes, 1)), "cudaMallocHost");
  return {static_cast<std::byte*>(data), [](std::byte* p) { cudaFreeHost(p); }};
}

void Gpu::copy(void* to, const void* from, std::size_t bytes) const {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle(stream())), "cudaMemcpyAsync");
}

void Gpu::fill(void* to, std::byte value, std::size_t bytes) const {
  check(cudaMemsetAsync(to, static_cast<int>(value), bytes, handle(stream())), "cudaMemsetAsync");
}

void Gpu::wait() const { check(cudaStreamSynchronize(handle(stream())), "cudaStreamSynchronize"); }

void Gpu::run_as_graph(const std::function<void()>& work) const {
  // The mode that refuses most: an allocation or a wait inside `work` is an error.
  check(cudaStreamBeginCapture(handle(stream()), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(handle(stream()), &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(handle(stream()), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t ready = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiate");
  const cudaError_t launched = cudaGraphLaunch(ready, handle(stream()));
  const cudaError_t finished = cudaStreamSynchronize(handle(stream()));
  cudaGraphExecDestroy(ready);
  check(launched, "cudaGraphLaunch");
  check(finished, "a graph");
}

std::vector<double> Gpu::time(int runs, const std::function<void()>& before, const std::function<void()>& work) const {
  const Events events(runs);
  for (int i = 0; i < runs; ++i) {
    before();
    check(cudaEventRecord(events.begin(i), handle(stream())), "cudaEventRecord");
    work();
    check(cudaEventRecord(events.end(i), handle(stream())), "cudaEventRecord");
  }
  wait();
  std::vector<double> seconds;
  for (int i = 0; i < runs; ++i) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events.begin(i), events.end(i)), "cudaEventElapsedTime");
    seconds.push_back(milliseconds * 1e-3);
  }
  return seconds;
}

double Gpu::read_rate() const {
  const GpuBytes data = allocate(kTraffic);
  fill(data.get(), std::byte{1}, kTraffic);
  const unsigned blocks = static_cast<unsigned>(facts().sms * kBlocksPerSm);
  constexpr std::size_t kBytes = sizeof(uint4);
  const std::size_t stride = std::size_t{blocks} * kThreads * kLoads;
  const std::size_t count = kTraffic / kBytes / stride * stride;
  const std::vector<double> seconds = time(
      kBursts, [] {},
      [&] {
        read_all<<<blocks, kThreads, 0, handle(stream())>>>(reinterpret_cast<const uint4*>(data.get()), count,
                                                            reinterpret_cast<unsigned*>(data.get()));
        check(cudaGetLastError(), "read_all");
      });
  return static_cast<double>(count * kBytes) / best(seconds);
}

double Gpu::copy_rate() const {
  constexpr std::size_t kHalf = kTraffic / 2;
  const GpuBytes data = allocate(kTraffic);
  fill(data.get(), std::byte{1}, kTraffic);
  const std::vector<double> seconds = time(
      kBursts, [] {}, [&] { copy(data.get() + kHalf, data.get(), kHalf); });
  return static_cast<double>(kTraffic) / best(seconds);
}

// Operations (2 per product) per clock and SM of the dense s8 matrix instructions, from the peak rates in
// NVIDIA's architecture papers over the clock and the number of SMs given there.
double Gpu::int8_rate(std::string& how) const {
  struct Rate {
    int capability;
    int operations;
  };
  static constexpr std::array<Rate, 6> kRates = {
      {{80, 4096}, {86, 2048}, {87, 2048}, {89, 2048}, {90, 8192}, {120, 2048}}};
  const CudaDevice gpu = facts();
  int kilohertz = 0;
  check(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, index_), "cudaDeviceGetAttribute");
  for (const Rate& rate : kRates) {
    if (rate.capability != 10 * gpu.major + gpu.minor) continue;
    how = message(rate.operations, " per clock and SM, ", gpu.sms, " of them at ", kilohertz / 1000, " MHz: specified");
    return 1e3 * kilohertz * gpu.sms * rate.operations;
  }
  how = "not known for this GPU";
  return 0;
}

}  // namespace octile::check
