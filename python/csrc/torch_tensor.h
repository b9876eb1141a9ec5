// torch's tensors as the ops receive them, and views of them for the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>

#include "octile/octile.h"
#include "torch_shim.h"

namespace octile_torch {

// A tensor that we own, or none.
class Owned {
 public:
  Owned() = default;
  explicit Owned(TensorHandle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr) shim.delete_tensor(handle_);
  }

  TensorHandle get() const { return handle_; }
  TensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  TensorHandle handle_ = nullptr;
};

// torch's own elementwise kernels take no more.
inline constexpr std::int64_t kMaxDimensions = 64;

struct Shape {
  std::int64_t rows, columns, row_stride;
};

// OCTILE_DTYPE_... of a type of torch's, -1 if it has none, and for the texts its name.
std::int32_t dtype_of(std::int32_t torch_dtype);
const char* name_of(std::int32_t torch_dtype);

// The Value of a Tensor? or a float?, or none. Frees what `value` points to.
std::optional<Value> take_optional(Value value);

// An argument of an op. Every argument is taken over from the stack before anything can fail, so that none leaks.
class Input {
 public:
  Input(const char* name, Value value) : name_(name), handle_(reinterpret_cast<TensorHandle>(value)) {}
  // Of a Tensor?.
  static Input optional(const char* name, Value value) { return Input(name, take_optional(value).value_or(0)); }

  bool present() const { return handle_.get() != nullptr; }

  void may_be_bool() { may_be_bool_ = true; }  // else bool is refused

  // Queries torch. Everything below is valid afterwards.
  void look();

  std::int64_t dimensions() const { return dimensions_; }
  std::int64_t size(std::int64_t dimension) const { return sizes_[dimension]; }
  std::int64_t elements() const;
  std::int32_t torch_dtype() const { return torch_dtype_; }
  octile_device device() const { return device_; }

  void require_dimensions(int dimensions) const;

  // Requires a vector (a number counts as one element), or a matrix whose rows a plan can read, which may take a copy.
  // as_rows() merges all dimensions but the last, as_scales() takes a matrix for groups and a vector for channels.
  // rows() and columns() are valid of a matrix. An absent one is fine, and stays absent; as_rows() needs one.
  void as_vector();
  void as_matrix();
  void as_rows();
  void as_scales() { dimensions_ == 2 ? as_matrix() : as_vector(); }
  std::int64_t rows() const { return shape_.rows; }
  std::int64_t columns() const { return shape_.columns; }

 private:
  friend class View;
  friend class Views;

  void copy();
  // Fills shape_ if the rows can be read in place.
  bool collapse();

  const char* name_;
  Owned handle_;
  const void* data_ = nullptr;
  std::int64_t* sizes_ = nullptr;
  std::int64_t* strides_ = nullptr;
  std::int64_t dimensions_ = 0;
  enum class Form : std::uint8_t { none, vector, matrix } form_ = Form::none;
  Shape shape_ = {};
  std::int32_t torch_dtype_ = 0;
  bool may_be_bool_ = false;
  octile_device device_ = {};
};

// A result of an op, or scratch.
class Output {
 public:
  Output(std::int32_t torch_dtype, octile_device device) : torch_dtype_(torch_dtype), device_(device) {}

  void create_vector(std::int64_t size);
  void create_matrix(Shape shape);
  void create_dense(std::initializer_list<std::int64_t> sizes);
  // (the sizes of `input` but the last, columns)
  void create_rows(const Input& input, std::int64_t columns);
  // Of f32 or f64.
  void fill(double value);

  void* data() const { return data_; }
  std::int32_t torch_dtype() const { return torch_dtype_; }
  octile_device device() const { return device_; }
  Value release() { return reinterpret_cast<Value>(handle_.release()); }

 private:
  void create(std::int64_t dimensions, const std::int64_t* sizes, const std::int64_t* strides);

  Owned handle_;
  void* data_ = nullptr;
  std::int32_t torch_dtype_;
  octile_device device_;
};

// Scratch for one run. On a GPU, work that torch puts on the stream later may reuse it.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace();

  // At a multiple of 64 on the CPU, of 512 on a GPU.
  void create(std::size_t size, octile_device device);
  void* data() const { return data_; }

 private:
  Owned tensor_;            // either this
  void* memory_ = nullptr;  // or this
  void* data_ = nullptr;
};

// An octile_tensor with its sizes and strides; holds pointers to itself.
class View {
 public:
  View() = default;
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // After as_vector; after as_matrix or as_rows; the same for bytes of several values each.
  const octile_tensor* vector(const Input& input);
  const octile_tensor* matrix(const Input& input);
  const octile_tensor* packed(const Input& input, std::int64_t columns, std::int64_t per_byte);
  const octile_tensor* vector(const Output& output, std::int64_t size);
  const octile_tensor* matrix(const Output& output, Shape shape);
  // Of these dimensions of an input as it is; of a dense output of these sizes.
  const octile_tensor* dimensions(const Input& input, std::initializer_list<int> dimensions);
  const octile_tensor* dense(const Output& output, std::initializer_list<std::int64_t> sizes);

 private:
  const octile_tensor* fill(const void* data, std::int32_t torch_dtype, octile_device device, Shape shape);

  octile_tensor tensor_ = {};
  std::int64_t shape_[4] = {};
  std::int64_t strides_[4] = {};
};

// The views of one call. An input is the vector or matrix that as_...() made of it; without that it is NULL, as an
// absent one is.
class Views {
 public:
  const octile_tensor* operator()(const Input& input) {
    if (!input.present() || input.form_ == Input::Form::none) return nullptr;
    return input.form_ == Input::Form::vector ? next().vector(input) : next().matrix(input);
  }
  const octile_tensor* operator()(const Output& output, std::int64_t size) { return next().vector(output, size); }
  const octile_tensor* operator()(const Output& output, Shape shape) { return next().matrix(output, shape); }
  const octile_tensor* packed(const Input& input, std::int64_t columns, std::int64_t per_byte) {
    return next().packed(input, columns, per_byte);
  }

 private:
  View& next() { return views_[count_++]; }

  View views_[11];
  std::size_t count_ = 0;
};

}  // namespace octile_torch
