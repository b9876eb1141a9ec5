#include "torch_tensor.h"

#include <algorithm>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace octile_torch {

namespace {

// Memory that glibc maps again each time. Touching 64 MB takes 28 ms in pages of 4 KB, 5 in huge ones (EPYC, 2 MB).
void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t size) {
#ifdef __linux__
  constexpr std::size_t kMappedAnew = std::size_t{32} << 20, kPage = std::size_t{2} << 20;
  if (size < kMappedAnew) return;
  const std::size_t before = (kPage - reinterpret_cast<std::uintptr_t>(data) % kPage) % kPage;
  madvise(static_cast<std::byte*>(data) + before, (size - before) / kPage * kPage, MADV_HUGEPAGE);  // a hint
#endif
}

struct Type {
  const char* name;
  std::int32_t dtype;
  octile_element element;
};

const Type& type_of(std::int32_t torch_dtype) {
  static constexpr Type kUnknown = {"a type that no plan takes", -1, {}};
  static constexpr Type kF16 = {"float16", OCTILE_DTYPE_F16, {OCTILE_CODE_FLOAT, 16, 1}};
  static constexpr Type kBf16 = {"bfloat16", OCTILE_DTYPE_BF16, {OCTILE_CODE_BFLOAT, 16, 1}};
  static constexpr Type kF32 = {"float32", OCTILE_DTYPE_F32, {OCTILE_CODE_FLOAT, 32, 1}};
  static constexpr Type kF64 = {"float64", OCTILE_DTYPE_F64, {OCTILE_CODE_FLOAT, 64, 1}};
  static constexpr Type kS8 = {"int8", OCTILE_DTYPE_S8, {OCTILE_CODE_INT, 8, 1}};
  static constexpr Type kU8 = {"uint8", OCTILE_DTYPE_U8, {OCTILE_CODE_UINT, 8, 1}};
  static constexpr Type kS32 = {"int32", OCTILE_DTYPE_S32, {OCTILE_CODE_INT, 32, 1}};
  static constexpr Type kBool = {"bool", OCTILE_DTYPE_U8, {OCTILE_CODE_UINT, 8, 1}};
  if (torch_dtype == shim.bf16) return kBf16;
  if (torch_dtype == shim.f16) return kF16;
  if (torch_dtype == shim.s8) return kS8;
  if (torch_dtype == shim.f32) return kF32;
  if (torch_dtype == shim.u8) return kU8;
  if (torch_dtype == shim.s32) return kS32;
  if (torch_dtype == shim.f64) return kF64;
  if (torch_dtype == shim.boolean) return kBool;
  return kUnknown;
}

// Torch 2.13 and later say more. The first words are what programs look for that try again with less.
[[noreturn]] void no_memory(octile_device device) {
  const char* why = shim.last_error != nullptr ? shim.last_error() : "out of memory";
  if (device.type == OCTILE_DEVICE_CPU) fail("torch cannot allocate on the CPU: %s", why);
  fail("CUDA out of memory. Torch cannot allocate on cuda:%d: %s", device.id, why);
}

// The strides of a dense tensor, as torch counts them: a size of 0 counts as 1.
void dense_strides(std::int64_t dimensions, const std::int64_t* sizes, std::int64_t* strides) {
  std::int64_t step = 1;
  for (std::int64_t i = dimensions - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<std::int64_t>(sizes[i], 1);
  }
}

}  // namespace

std::int32_t dtype_of(std::int32_t torch_dtype) { return type_of(torch_dtype).dtype; }
const char* name_of(std::int32_t torch_dtype) { return type_of(torch_dtype).name; }

std::optional<Value> take_optional(Value value) {
  auto* given = reinterpret_cast<Value*>(value);
  if (given == nullptr) return std::nullopt;
  const Value content = *given;
  if (shim.delete_value != nullptr) {
    shim.delete_value(given);
  } else {
    ::operator delete(given);
  }
  return content;
}

void Input::look() {
  std::int32_t device_type = -1;
  TensorHandle handle = handle_.get();
  const bool failed = shim.get_dim(handle, &dimensions_) != 0 || shim.get_sizes(handle, &sizes_) != 0 ||
                      shim.get_strides(handle, &strides_) != 0 || shim.get_dtype(handle, &torch_dtype_) != 0 ||
                      shim.get_device_type(handle, &device_type) != 0 ||
                      shim.get_device_index(handle, &device_.id) != 0 || shim.get_const_data(handle, &data_) != 0;
  if (failed) fail("torch does not say what %s is", name_);
  if (dimensions_ > kMaxDimensions) {
    fail("%s has %lld dimensions, %lld is the maximum", name_, static_cast<long long>(dimensions_),
         static_cast<long long>(kMaxDimensions));
  }
  if (device_type == shim.cpu) {
    device_ = {OCTILE_DEVICE_CPU, 0};
  } else if (device_type == shim.cuda) {
    device_.type = OCTILE_DEVICE_CUDA;
  } else {
    fail("%s is neither on the CPU nor on a GPU", name_);
  }
  if (dtype_of(torch_dtype_) < 0 || (torch_dtype_ == shim.boolean && !may_be_bool_)) {
    fail("%s is of %s", name_, name_of(torch_dtype_));
  }
}

std::int64_t Input::elements() const {
  std::int64_t count = 1;
  for (std::int64_t i = 0; i < dimensions_; ++i) count *= sizes_[i];
  return count;
}

void Input::as_vector() {
  if (dimensions_ > 1) fail("%s has %d dimensions, expected 1", name_, static_cast<int>(dimensions_));
  form_ = Form::vector;
}

void Input::require_dimensions(int dimensions) const {
  if (dimensions_ == dimensions) return;
  fail("%s has %d dimensions, expected %d", name_, static_cast<int>(dimensions_), dimensions);
}

void Input::as_matrix() {
  if (!present()) return;
  require_dimensions(2);
  as_rows();
}

void Input::as_rows() {
  if (dimensions_ == 0) fail("%s has no dimensions", name_);
  form_ = Form::matrix;
  if (collapse()) return;
  copy();
  collapse();
}

bool Input::collapse() {
  const std::int64_t last = dimensions_ - 1;
  shape_ = {1, sizes_[last], sizes_[last]};
  if (strides_[last] != 1 && shape_.columns > 1) return false;
  for (std::int64_t i = last - 1; i >= 0; --i) {
    if (sizes_[i] != 1) {
      // The stride of all rows is that of the innermost dimension which has several; the others have to continue it.
      const std::int64_t step = shape_.rows == 1 ? strides_[i] : shape_.row_stride * shape_.rows;
      if (shape_.rows == 1) shape_.row_stride = step;
      if (strides_[i] != step && shape_.rows != 0) return false;
    }
    shape_.rows *= sizes_[i];
  }
  if (shape_.rows <= 1 || shape_.columns == 0) shape_.row_stride = shape_.columns;
  return shape_.row_stride >= shape_.columns || shape_.row_stride == 0;
}

void Input::copy() {
  std::int64_t strides[kMaxDimensions];
  dense_strides(dimensions_, sizes_, strides);
  TensorHandle dense = nullptr;
  const std::int32_t type = device_.type == OCTILE_DEVICE_CPU ? shim.cpu : shim.cuda;
  const std::int32_t index = device_.type == OCTILE_DEVICE_CPU ? -1 : device_.id;
  if (shim.empty_strided(dimensions_, sizes_, strides, torch_dtype_, type, index, &dense) != 0) {
    no_memory(device_);
  }
  Owned owned(dense);
  if (shim.copy(dense, handle_.get(), 0) != 0) fail("torch cannot copy %s", name_);
  handle_ = std::move(owned);
  look();
}

void Output::create_vector(std::int64_t size) {
  const std::int64_t stride = 1;
  create(1, &size, &stride);
}

void Output::create_matrix(Shape shape) {
  const std::int64_t sizes[] = {shape.rows, shape.columns};
  const std::int64_t strides[] = {shape.row_stride, 1};
  create(2, sizes, strides);
}

void Output::create_dense(std::initializer_list<std::int64_t> sizes) {
  std::int64_t strides[kMaxDimensions];
  const auto dimensions = static_cast<std::int64_t>(sizes.size());
  dense_strides(dimensions, sizes.begin(), strides);
  create(dimensions, sizes.begin(), strides);
}

void Output::create_rows(const Input& input, std::int64_t columns) {
  std::int64_t sizes[kMaxDimensions], strides[kMaxDimensions];
  const std::int64_t dimensions = input.dimensions();
  for (std::int64_t i = 0; i + 1 < dimensions; ++i) sizes[i] = input.size(i);
  sizes[dimensions - 1] = columns;
  dense_strides(dimensions, sizes, strides);
  create(dimensions, sizes, strides);
}

void Output::create(std::int64_t dimensions, const std::int64_t* sizes, const std::int64_t* strides) {
  const bool on_cpu = device_.type == OCTILE_DEVICE_CPU;
  TensorHandle made = nullptr;
  if (shim.empty_strided(dimensions, sizes, strides, torch_dtype_, on_cpu ? shim.cpu : shim.cuda,
                         on_cpu ? -1 : device_.id, &made) != 0) {
    no_memory(device_);
  }
  handle_ = Owned(made);
  if (shim.get_mutable_data(made, &data_) != 0) fail("torch does not say where an output is");
  if (!on_cpu) return;
  auto size = static_cast<std::size_t>(type_of(torch_dtype_).element.bits / 8);
  for (std::int64_t i = 0; i < dimensions; ++i) size *= static_cast<std::size_t>(sizes[i]);
  ask_for_huge_pages(data_, size);
}

void Output::fill(double value) {
  // A number on the CPU, which torch reads at once.
  Output number(torch_dtype_, {OCTILE_DEVICE_CPU, 0});
  number.create(0, nullptr, nullptr);
  if (torch_dtype_ == shim.f64) {
    *static_cast<double*>(number.data_) = value;
  } else {
    *static_cast<float*>(number.data_) = static_cast<float>(value);
  }
  TensorHandle same = nullptr;
  if (shim.new_tensor(handle_.get(), &same) != 0) fail("torch cannot share a tensor");
  Value stack[] = {reinterpret_cast<Value>(same), number.release()};
  if (shim.call("aten::fill_", "Tensor", stack, kTorchVersion) != 0) fail("torch cannot fill a tensor");
  Owned filled(reinterpret_cast<TensorHandle>(stack[0]));
}

Workspace::~Workspace() {
  if (memory_ != nullptr) cuda_shim().deallocate(memory_);
}

void Workspace::create(std::size_t size, octile_device device) {
  if (size == 0) return;
  std::int32_t current = -1;
  // Making a tensor takes longer, but it can be on a GPU that is not the current one.
  if (device.type == OCTILE_DEVICE_CUDA && shim.get_current_device(&current) == 0 && current == device.id) {
    if (cuda_shim().allocate(size, &memory_) != 0) no_memory(device);
    data_ = memory_;
    return;
  }
  Output bytes(shim.u8, device);
  bytes.create_vector(static_cast<std::int64_t>(size));
  data_ = bytes.data();
  tensor_ = Owned(reinterpret_cast<TensorHandle>(bytes.release()));
}

const octile_tensor* View::fill(const void* data, std::int32_t torch_dtype, octile_device device, Shape shape) {
  shape_[0] = shape.rows;
  shape_[1] = shape.columns;
  strides_[0] = shape.row_stride;
  strides_[1] = 1;
  tensor_ = {const_cast<void*>(data), device, 2, type_of(torch_dtype).element, shape_, strides_, 0};
  return &tensor_;
}

const octile_tensor* View::matrix(const Input& input) {
  return fill(input.data_, input.torch_dtype_, input.device_, input.shape_);
}

const octile_tensor* View::packed(const Input& input, std::int64_t columns, std::int64_t per_byte) {
  fill(input.data_, input.torch_dtype_, input.device_, {input.rows(), columns, per_byte * input.shape_.row_stride});
  tensor_.dtype = {OCTILE_CODE_INT, static_cast<std::uint8_t>(8 / per_byte), 1};
  return &tensor_;
}

const octile_tensor* View::vector(const Input& input) {
  const bool number = input.dimensions_ == 0;
  fill(input.data_, input.torch_dtype_, input.device_, {number ? 1 : input.size(0), 1, number ? 1 : input.strides_[0]});
  tensor_.ndim = 1;
  return &tensor_;
}

const octile_tensor* View::vector(const Output& output, std::int64_t size) {
  fill(output.data(), output.torch_dtype(), output.device(), {size, 1, 1});
  tensor_.ndim = 1;
  return &tensor_;
}

const octile_tensor* View::matrix(const Output& output, Shape shape) {
  return fill(output.data(), output.torch_dtype(), output.device(), shape);
}

const octile_tensor* View::dimensions(const Input& input, std::initializer_list<int> dimensions) {
  if (!input.present()) return nullptr;
  fill(input.data_, input.torch_dtype_, input.device_, {});
  tensor_.ndim = 0;
  for (int i : dimensions) {
    shape_[tensor_.ndim] = input.sizes_[i];
    strides_[tensor_.ndim++] = input.strides_[i];
  }
  return &tensor_;
}

const octile_tensor* View::dense(const Output& output, std::initializer_list<std::int64_t> sizes) {
  fill(output.data(), output.torch_dtype(), output.device(), {});
  tensor_.ndim = static_cast<std::int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), shape_);
  tensor_.strides = nullptr;
  return &tensor_;
}

}  // namespace octile_torch
