// The CUDA executor on a GPU against the fast CPU executor: the kernels and sizes of tile_cuda_cases.h, with guards
// around every tensor. TILE_LAYOUT picks one of four layouts and TILE_PART one group of cases, so that the programs
// compile side by side; without them everything is in one. bench/tile_cuda.sh builds and runs them all.
#include <cuda_runtime.h>

#include "tile_cuda_cases.h"

namespace octile::tile {
namespace {

// Copies the arrays of a launch to the GPU and back.
class Device {
 public:
  Device() { gpu::check(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes), "memory"); }
  ~Device() { cudaFree(memory_); }
  Device(const Device&) = delete;

  int overwritten() const { return overwritten_; }

  template <class L, class Kernel, class... Args>
  void launch(Grid grid, const Kernel& kernel, Args&&... args) {
    used_ = 0;
    gpu::check(cudaMemset(memory_, 0x5A, kBytes), "memory");
    const auto run = [&](auto... a) {
      octile::tile::launch(Cuda<L>{}, grid, kernel, a...);
      gpu::check(cudaDeviceSynchronize(), "kernel");
      used_ = 0;
      (fetch(args, a), ...);
    };
    run(place(args)...);
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{4} << 20, kGuard = 4096;

  template <class T>
  Tensor<T> place(Array<T>& array) {
    const std::size_t bytes = static_cast<std::size_t>(array.size()) * sizeof(T);
    unsigned char* const at = memory_ + used_ + kGuard;
    used_ += (bytes + 255) / 256 * 256 + kGuard;
    if (used_ + kGuard > kBytes) throw std::runtime_error("the arrays of this case are too large");
    gpu::check(cudaMemcpy(at, array.data(), bytes, cudaMemcpyHostToDevice), "copy");
    return {array.name(), reinterpret_cast<T*>(at), array.shape()};
  }
  template <class A>
  A place(A a) {
    return a;
  }

  template <class T>
  void fetch(Array<T>& array, const Tensor<T>& tensor) {
    const std::size_t bytes = static_cast<std::size_t>(array.size()) * sizeof(T);
    gpu::check(cudaMemcpy(array.data(), tensor.data, bytes, cudaMemcpyDeviceToHost), "copy");
    auto* const at = reinterpret_cast<unsigned char*>(tensor.data);
    std::vector<unsigned char> guards(2 * kGuard);
    gpu::check(cudaMemcpy(guards.data(), at - kGuard, kGuard, cudaMemcpyDeviceToHost), "copy");
    gpu::check(cudaMemcpy(guards.data() + kGuard, at + bytes, (256 - bytes % 256) % 256 + 256, cudaMemcpyDeviceToHost),
               "copy");
    for (std::size_t i = kGuard - 256; i < kGuard + (256 - bytes % 256) % 256 + 256; ++i) {
      if (guards[i] == 0x5A) continue;
      ++overwritten_;
      std::printf("WRONG %s: a byte outside of it was written\n", array.name().c_str());
      return;
    }
  }
  template <class A>
  void fetch(const A&, const A&) {}

  unsigned char* memory_ = nullptr;
  std::size_t used_ = 0;
  int overwritten_ = 0;
};

template <class L>
int run(const char* layout) {
  Device device;
  cuda_cases::Cases<L, Device> cases(device);
#if defined(TILE_PART)
  cases.TILE_PART();
#else
  cases.all();
#endif
  std::printf("%s: %d launches, %d wrong, %d outside of their tensors\n", layout, cases.runs(), cases.wrong(),
              device.overwritten());
  return cases.wrong() + device.overwritten();
}

}  // namespace
}  // namespace octile::tile

int main() try {
  using namespace octile::tile;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: there is no GPU\n");
    return 77;
  }
  int wrong = 0;
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 0
  wrong += run<Threads<4, 32>>("Threads<4, 32>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 1
  wrong += run<Threads<1, 128>>("Threads<1, 128>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 2
  wrong += run<Warps<2, 2>>("Warps<2, 2>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 3
  wrong += run<Warps<2, 2, 4>>("Warps<2, 2, 4>");
#endif
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
