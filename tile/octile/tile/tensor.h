// Tensors on the host, and the grid of a launch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "octile/tile/types.h"

namespace octile::tile {

// An argument of a launch: memory it does not own, its shape, and its name in reports. On a GPU `data` is device
// memory.
template <class T>
struct Tensor {
  std::string name;
  T* data = nullptr;
  std::vector<std::int64_t> shape;
  std::uint8_t* written = nullptr;  // one per element, 0 if not yet written; none: all are written

  std::int64_t size() const {
    std::int64_t n = 1;
    for (const std::int64_t side : shape) n *= side;
    return n;
  }
};

// A tensor that owns its memory, at an address that is a multiple of 256 bytes, as a GPU's allocator gives.
template <class T>
class Array {
 public:
  // Not written yet: every byte is 0xA5, and the checker reports a load of it.
  Array(std::string name, std::vector<std::int64_t> shape) : tensor_{std::move(name), nullptr, std::move(shape)} {
    for (const std::int64_t side : tensor_.shape) {
      if (side < 0) {
        throw std::invalid_argument("octile: " + tensor_.name + " has a side of length " + std::to_string(side));
      }
    }
    const auto n = static_cast<std::size_t>(tensor_.size());
    memory_.reset(static_cast<T*>(::operator new(n * sizeof(T) + 1, kAlignment)));
    memset(static_cast<void*>(memory_.get()), 0xA5, n * sizeof(T));
    written_.assign(n, 0);
  }
  Array(std::string name, std::vector<std::int64_t> shape, const std::vector<T>& values)
      : Array(std::move(name), std::move(shape)) {
    if (values.size() != index(size())) {
      throw std::invalid_argument("octile: " + tensor_.name + " has " + std::to_string(size()) + " elements, not " +
                                  std::to_string(values.size()));
    }
    for (std::int64_t i = 0; i < size(); ++i) set(i, values[index(i)]);
  }

  std::int64_t size() const { return tensor_.size(); }
  const std::string& name() const { return tensor_.name; }
  const std::vector<std::int64_t>& shape() const { return tensor_.shape; }
  T* data() { return memory_.get(); }
  const T* data() const { return memory_.get(); }
  T operator[](std::int64_t i) const { return memory_.get()[i]; }
  void set(std::int64_t i, T value) {
    memory_.get()[i] = value;
    written_[index(i)] = 1;
  }
  bool written(std::int64_t i) const { return written_[index(i)] != 0; }
  void fill(T value) {
    for (std::int64_t i = 0; i < size(); ++i) set(i, value);
  }
  void all_written() { written_.assign(written_.size(), 1); }

  Tensor<T> tensor() { return {tensor_.name, memory_.get(), tensor_.shape, written_.data()}; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
  struct Delete {
    void operator()(T* p) const { ::operator delete(static_cast<void*>(p), kAlignment); }
  };

  Tensor<T> tensor_;
  std::unique_ptr<T, Delete> memory_;
  std::vector<std::uint8_t> written_;
};

struct Grid {
  int x = 1, y = 1, z = 1;
  std::int64_t size() const { return std::int64_t{x} * y * z; }
};

// Throws std::invalid_argument where a side is negative.
inline void check_grid(const Grid& grid) {
  if (grid.x >= 0 && grid.y >= 0 && grid.z >= 0) return;
  throw std::invalid_argument("octile: a grid has sides from 0, and not (" + std::to_string(grid.x) + ", " +
                              std::to_string(grid.y) + ", " + std::to_string(grid.z) + ")");
}

// Throws std::invalid_argument where a grid has no such axis.
inline std::size_t grid_axis(int axis) {
  if (axis >= 0 && axis <= 2) return static_cast<std::size_t>(axis);
  throw std::invalid_argument("octile: a grid has the axes 0, 1 and 2, and no axis " + std::to_string(axis));
}

// What the kernel sees of an argument: a pointer of the executor's for a tensor, anything else as it is.
template <class E, class T>
auto argument(E& executor, Tensor<T> tensor) {
  return executor.pointer(tensor);
}
template <class E, class T>
auto argument(E& executor, Array<T>& array) {
  return executor.pointer(array.tensor());
}
template <class E, class A>
requires std::is_arithmetic_v<A> || std::is_empty_v<A> || is_float_type<A>
auto argument(E&, A value) { return value; }

// After an executor without records: everything that the launch may have written counts as written.
template <class T>
void assume_written(const Tensor<T>& tensor) {
  if (tensor.written != nullptr) memset(tensor.written, 1, static_cast<std::size_t>(tensor.size()));
}
template <class T>
void assume_written(Array<T>& array) {
  array.all_written();
}
template <class A>
requires std::is_arithmetic_v<A> || std::is_empty_v<A> || is_float_type<A>
void assume_written(A) {}

}  // namespace octile::tile
