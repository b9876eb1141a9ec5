// A trial on a GPU: each launch gets its tensors in device memory, between guards that it must not change. Compiled by
// anything but nvcc, the GPU is the emulated one.
#pragma once

#include <stdexcept>
#include <tuple>

#include "octile/tile/cuda.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/trial.h"

namespace octile::tile::puzzles {

// Memory of a GPU, from a multiple of 256 bytes on.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  void upload(const std::byte* from) const;
  void download(std::byte* to) const;  // after all that was launched
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// A copy of an array on the device.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(Array<T>& array) : array_(array), host_(bytes() + 2 * kGuard, kPoison), device_(host_.size()) {
    if (bytes() != 0) memcpy(host_.data() + kGuard, array.data(), bytes());
    device_.upload(host_.data());
  }
  Tensor<T> argument() const {
    return {array_.name(), reinterpret_cast<T*>(device_.data() + kGuard), array_.shape(), nullptr};
  }
  void back() {
    device_.download(host_.data());
    if (bytes() != 0) memcpy(static_cast<void*>(array_.data()), host_.data() + kGuard, bytes());
    array_.all_written();
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (host_[i] != kPoison || host_[host_.size() - 1 - i] != kPoison) {
        throw std::runtime_error("octile: on the device, something was written before or after " + array_.name());
      }
    }
  }

 private:
  static constexpr std::size_t kGuard = 1024;
  static constexpr std::byte kPoison{0xA5};
  std::size_t bytes() const { return static_cast<std::size_t>(array_.size()) * sizeof(T); }

  Array<T>& array_;
  std::vector<std::byte> host_;
  DeviceBytes device_;
};

template <class A>
class Passed {  // a number
 public:
  explicit Passed(A value) : value_(value) {}
  A argument() const { return value_; }
  void back() {}

 private:
  A value_;
};
template <class T>
OnDevice<T> on_device(Array<T>& array) {
  return OnDevice<T>(array);
}
template <class A>
Passed<A> on_device(const A& value) {
  return Passed<A>(value);
}

// Most kernels have short rows, one per warp. One product has operands for tensor cores, 16 x 16 per block.
template <class Kernel>
struct LayoutOf {
  using Type = Threads<4, 32>;
};
template <>
struct LayoutOf<linear::Forward> {
  using Type = Warps<1, 1, 4>;
};

struct CudaTrial : Trial {
  using Trial::Trial;
  template <class Kernel, class... Args>
  void launch(Grid grid, const Kernel& kernel, Args&&... args) {
    const auto go = [&](auto&&... passed) {
      tile::launch(Cuda<typename LayoutOf<Kernel>::Type>{}, grid, kernel, passed.argument()...);
      (passed.back(), ...);
    };
    go(on_device(args)...);
  }
};

}  // namespace octile::tile::puzzles
