// The CUDA executor on a GPU against the fast CPU executor: the kernels and sizes of cuda_cases.h, with guards
// around every tensor. TILE_LAYOUT picks one of seven layouts and TILE_PART one group of cases, so that the programs
// can be compiled in parallel; without them everything is in one. Layout 7 is products large enough to keep every stage
// busy. tile/bench/cuda.sh builds and runs them all.
#include <cuda_runtime.h>

#include "bench/gradients.h"
#include "cuda_cases.h"

namespace octile::tile {
namespace {

// Copies the arrays of a launch to the GPU and back.
class Device {
 public:
  Device() { gpu::check(cudaMalloc(reinterpret_cast<void**>(&memory_), kBytes), "memory"); }
  ~Device() { cudaFree(memory_); }
  Device(const Device&) = delete;

  int overwritten() const { return overwritten_; }
  [[maybe_unused]] int by_wgmma() const { return by_wgmma_; }

  template <class L, Math kMath = Math::exact, class Kernel, class... Args>
  void launch(Grid grid, const Kernel& kernel, Args&&... args) {
    used_ = 0;
    gpu::check(cudaMemset(memory_, 0x5A, kBytes), "memory");
    const auto run = [&](auto... a) {
      if constexpr (L::kWgmma) {
        Cuda<L, kMath> executor;
        executor.persistent = ++launches_ % 2 == 0;
        executor.band = 1 + launches_ % 3;
        executor.cluster = 1 + launches_ / 2 % 2;
        by_wgmma_ += octile::tile::launch(executor, grid, kernel, a...).by_wgmma();
      } else {
        octile::tile::launch(Cuda<L, kMath>{}, grid, kernel, a...);
      }
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
  int overwritten_ = 0, launches_ = 0, by_wgmma_ = 0;
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
  if (L::kWgmma) {
    std::printf("%s: %d of them by WGMMA\n", layout, device.by_wgmma());
    if (device.by_wgmma() == 0) return 1;
  }
  return cases.wrong() + device.overwritten();
}

struct FastMath {  // z = exp2(x), w = x / y: a block of x for each y
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, auto w, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i);
    t.store(z + i, exp2(v));
    t.store(w + i, v / t.load(y + t.program_id(0)));
  }
};

// Math::fast against its stated bounds: numbers of all sizes up to 150, and divisors from 2^-120 to 2^120.
[[maybe_unused]] int fast_math() {
  constexpr int kBlock = 1024, kBlocks = 160, kCount = kBlock * kBlocks;
  Array<f32> x("x", {kCount}), y("y", {kBlocks}), z("z", {kCount}), w("w", {kCount});
  std::mt19937 random(3);
  for (int i = 0; i < kCount; ++i) {
    const float spread = std::ldexp(static_cast<float>(random() >> 8), -24);
    x.set(i, i % 2 == 0 ? 300.0f * spread - 150.0f : std::ldexp(1.0f + spread, static_cast<int>(random() % 40) - 32));
  }
  for (int i = 0; i < kBlocks; ++i)
    y.set(i, std::ldexp(1.0f + static_cast<float>(i) / kBlocks, i * 240 / kBlocks - 120));
  Device device;
  device.launch<Threads<1, 128>, Math::fast>({kBlocks}, FastMath{}, x, y, z, w, c<kBlock>);
  constexpr double kMin = 0x1p-126;
  int wrong = 0;
  double worst = 0;
  for (int i = 0; i < kCount; ++i) {
    const double power = std::exp2(static_cast<double>(x[i])), quotient = static_cast<double>(x[i]) / y[i / kBlock];
    const double bound = std::ldexp(power, -22) + (power < 1.01 * kMin ? kMin : 0.0);
    const bool range = power < 0x1p128 && std::fabs(quotient) >= kMin && std::fabs(quotient) < 0x1p127;
    if (power < 0x1p127 && !(std::fabs(z[i] - power) <= bound)) ++wrong;
    if (power >= 0x1.01p128 && !(z[i] > 0x1p127f)) ++wrong;
    if (power >= kMin && power < 0x1p127) worst = std::fmax(worst, std::fabs(z[i] - power) / power);
    if (range && !(std::fabs(w[i] - quotient) <= std::ldexp(std::fabs(quotient), -23) * 1.01)) ++wrong;
  }
  std::printf("Math::fast: %d numbers, %d wrong, %d outside of their tensors; exp2 within 2^%.2f\n", kCount, wrong,
              device.overwritten(), std::log2(worst));
  return wrong + device.overwritten();
}

template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    gpu::check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), "memory");
    gpu::check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "copy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;

  Tensor<T> tensor() const { return {"", data_, {}}; }
  void poison() { gpu::check(cudaMemset(data_, 0xff, bytes()), "memory"); }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    gpu::check(cudaMemcpy(result.data(), data_, bytes(), cudaMemcpyDeviceToHost), "copy");
    return result;
  }

 private:
  std::size_t bytes() const { return count_ * sizeof(T); }
  std::size_t count_;
  T* data_ = nullptr;
};

// dX and dW of 4,096 cubed: registers or stages that are reused too early, which the small sizes above do not show,
// give wrong results in many places here. A sample of the elements is compared, and all of them with those of other
// launches.
[[maybe_unused]] int large() {
  constexpr int n = 4096, kSamples = 20000, kLaunches = 6;
  constexpr std::size_t kCount = std::size_t{n} * n;
  std::mt19937 random(11);
  std::vector<s8> bytes(kCount);
  std::vector<f16> halves(kCount);
  std::vector<f32> scales(n);
  for (auto& v : bytes) v = static_cast<s8>(static_cast<int>(random() % 255) - 127);
  for (auto& v : halves) v = f16(std::ldexp(static_cast<float>(static_cast<int>(random() % 2001) - 1000), -9));
  for (auto& v : scales) v = std::ldexp(1.0f + static_cast<float>(random() % 1000) / 1000, -8);
  OnDevice<s8> q(bytes);
  OnDevice<f16> d(halves), out(halves);
  OnDevice<f32> s(scales);
  int wrong = 0;
  const auto check = [&](const char* name, const auto& launch_one, const auto& factors) {
    std::vector<f16> first;
    for (int i = 0; i < kLaunches; ++i) {
      out.poison();
      const LaunchReport report = launch_one(Cuda<Warpgroups<2, NoFallback>>{.band = 8 + i, .cluster = 1 + i % 2});
      gpu::check(cudaDeviceSynchronize(), name);
      if (!report.by_wgmma()) return std::printf("%s: %s\n", name, report.text().c_str()), void(++wrong);
      const std::vector<f16> values = out.values();
      if (i == 0) first = values;
      if (std::memcmp(values.data(), first.data(), kCount * sizeof(f16)) != 0) {
        return std::printf("%s: launch %d has other bits than the first\n", name, i), void(++wrong);
      }
    }
    int bad = 0;
    for (int i = 0; i < kSamples; ++i) {
      const int row = static_cast<int>(random() % n), column = static_cast<int>(random() % n);
      double exact = 0, size = 0;
      for (int k = 0; k < n; ++k) {
        const double product = factors(row, column, k);
        exact += product;
        size += std::fabs(product);
      }
      const double found = static_cast<float>(first[static_cast<std::size_t>(row) * n + column]);
      bad += !(std::fabs(found - exact) <= 0x1p-10 * std::fabs(exact) + 2 * n * 0x1p-24 * size + 0x1p-20 * size);
    }
    std::printf("%s: %d samples of %d launches, %d wrong\n", name, kSamples, kLaunches, bad);
    wrong += bad;
  };
  const auto at = [](int i, int j) { return static_cast<std::size_t>(i) * n + j; };
  check(
      "dX 4096",
      [&](const auto& executor) {
        return launch(executor, Grid{n / 128, n / 256}, BackwardDxHalf{}, d.tensor(), q.tensor(), s.tensor(),
                      out.tensor(), n, n, n, c<128>, c<256>, c<64>);
      },
      [&](int i, int j, int k) {
        const f16 weight(bytes[at(j, k)] * scales[static_cast<std::size_t>(k)]);
        return static_cast<double>(static_cast<float>(halves[at(i, k)])) * static_cast<float>(weight);
      });
  check(
      "dW 4096",
      [&](const auto& executor) {
        return launch(executor, Grid{n / 128, n / 256}, BackwardDwHalf{}, q.tensor(), s.tensor(), d.tensor(),
                      out.tensor(), n, n, n, c<128>, c<256>, c<64>);
      },
      [&](int i, int j, int k) {
        return static_cast<double>(bytes[at(k, i)]) * scales[0] * static_cast<float>(halves[at(k, j)]);
      });
  return wrong;
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
  wrong += fast_math();
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 2
  wrong += run<Warps<2, 2>>("Warps<2, 2>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 3
  wrong += run<Warps<2, 2, 4>>("Warps<2, 2, 4>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 4
  wrong += run<Warpgroups<2>>("Warpgroups<2>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 6
  wrong += run<Warpgroups<2, Warps<4, 2>, true>>("Warpgroups<2>, tf32");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 5
  wrong += run<Warpgroups<1>>("Warpgroups<1>");
#endif
#if !defined(TILE_LAYOUT) || TILE_LAYOUT == 7
  wrong += large();
#endif
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
