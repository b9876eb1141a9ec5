#include "torch_shim.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "octile/octile.h"

namespace octile_torch {

Shim shim = {};

namespace {

constexpr std::size_t kMessageSize = 4096;
thread_local char message_text[kMessageSize];

// A library that the process has loaded already, or NULL.
void* loaded(const char* name) { return dlopen(name, RTLD_NOW | RTLD_NOLOAD); }

template <class Function>
bool find(void* library, const char* symbol, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return *function != nullptr;
}

// The symbol that is missing, or NULL.
const char* fill(void* torch) {
  const char* missing = nullptr;
  auto need = [&](const char* symbol, auto** function) {
    if (!find(torch, symbol, function) && missing == nullptr) missing = symbol;
  };
  need("aoti_torch_abi_version", &shim.abi_version);
  need("aoti_torch_library_init_impl", &shim.library_init_impl);
  need("torch_library_impl", &shim.library_impl);
  need("aoti_torch_delete_library_object", &shim.delete_library);
  need("aoti_torch_check", &shim.check);
  need("aoti_torch_delete_tensor_object", &shim.delete_tensor);
  need("aoti_torch_get_dim", &shim.get_dim);
  need("aoti_torch_get_sizes", &shim.get_sizes);
  need("aoti_torch_get_strides", &shim.get_strides);
  need("aoti_torch_get_dtype", &shim.get_dtype);
  need("aoti_torch_get_device_type", &shim.get_device_type);
  need("aoti_torch_get_device_index", &shim.get_device_index);
  need("torch_get_const_data_ptr", &shim.get_const_data);
  need("torch_get_mutable_data_ptr", &shim.get_mutable_data);
  need("aoti_torch_empty_strided", &shim.empty_strided);
  need("aoti_torch_copy_", &shim.copy);
  need("aoti_torch_new_tensor_handle", &shim.new_tensor);
  need("torch_call_dispatcher", &shim.call);
  need("aoti_torch_get_current_device_index", &shim.get_current_device);
  need("torch_get_num_threads", &shim.get_num_threads);
  find(torch, "torch_parallel_for", &shim.parallel_for);
  find(torch, "torch_delete_stable_ivalue", &shim.delete_value);
  find(torch, "torch_exception_get_what_without_backtrace", &shim.last_error);

  auto number = [&](const char* symbol, std::int32_t* value) {
    std::int32_t (*function)() = nullptr;
    need(symbol, &function);
    if (function != nullptr) *value = function();
  };
  number("aoti_torch_device_type_cpu", &shim.cpu);
  number("aoti_torch_device_type_cuda", &shim.cuda);
  number("aoti_torch_dtype_float16", &shim.f16);
  number("aoti_torch_dtype_bfloat16", &shim.bf16);
  number("aoti_torch_dtype_float32", &shim.f32);
  number("aoti_torch_dtype_float64", &shim.f64);
  number("aoti_torch_dtype_int8", &shim.s8);
  number("aoti_torch_dtype_uint8", &shim.u8);
  number("aoti_torch_dtype_int32", &shim.s32);
  number("aoti_torch_dtype_bool", &shim.boolean);
  return missing;
}

decltype(CudaShim::current_stream) stream_callback = nullptr;

template <auto kField, class Value>
Status described(TensorHandle tensor, Value* value) {
  *value = reinterpret_cast<const DescribedTensor*>(tensor)->*kField;
  return 0;
}

}  // namespace

const char* load_shim() {
  void* torch = loaded("libtorch_cpu.so");
  if (torch == nullptr) return "libtorch_cpu.so is not loaded";
  if (const char* missing = fill(torch)) return message("this torch has no %s: it is older than 2.11", missing);
  const std::uint64_t version = shim.abi_version();
  if (version < kTorchVersion) {
    return message("this torch is %d.%d, older than 2.11", static_cast<int>(version >> 56),
                   static_cast<int>(version >> 48 & 0xff));
  }
  return nullptr;
}

const CudaShim& cuda_shim() {
  static const CudaShim found = [] {
    CudaShim cuda = {};
    if (stream_callback != nullptr) return CudaShim{stream_callback, nullptr, nullptr};
    void* torch = loaded("libtorch_cuda.so");
    const bool complete = torch != nullptr && find(torch, "aoti_torch_get_current_cuda_stream", &cuda.current_stream) &&
                          find(torch, "aoti_torch_cuda_caching_allocator_raw_alloc", &cuda.allocate) &&
                          find(torch, "aoti_torch_cuda_caching_allocator_raw_delete", &cuda.deallocate);
    return complete ? cuda : CudaShim{};
  }();
  return found;
}

void use_callbacks(const Callbacks& callbacks) {
  shim.empty_strided = callbacks.empty_strided;
  shim.copy = callbacks.copy;
  shim.call = callbacks.call;
  shim.get_num_threads = callbacks.get_num_threads;
  stream_callback = callbacks.current_stream;
  shim.get_dim = described<&DescribedTensor::dimensions>;
  shim.get_sizes = described<&DescribedTensor::sizes>;
  shim.get_strides = described<&DescribedTensor::strides>;
  shim.get_dtype = described<&DescribedTensor::dtype>;
  shim.get_device_type = described<&DescribedTensor::device_type>;
  shim.get_device_index = described<&DescribedTensor::device_index>;
  shim.get_const_data = described<&DescribedTensor::data, const void*>;
  shim.get_mutable_data = described<&DescribedTensor::data>;
  shim.new_tensor = [](TensorHandle tensor, TensorHandle* same) -> Status { return *same = tensor, 0; };
  shim.delete_tensor = [](TensorHandle) -> Status { return 0; };
  shim.delete_value = [](Value*) -> Status { return 0; };
  shim.get_current_device = [](std::int32_t*) -> Status { return 1; };  // so that workspaces are tensors
  shim.cpu = OCTILE_DEVICE_CPU, shim.cuda = OCTILE_DEVICE_CUDA;
  shim.f16 = OCTILE_DTYPE_F16, shim.bf16 = OCTILE_DTYPE_BF16, shim.f32 = OCTILE_DTYPE_F32, shim.f64 = OCTILE_DTYPE_F64;
  shim.s8 = OCTILE_DTYPE_S8, shim.u8 = OCTILE_DTYPE_U8, shim.s32 = OCTILE_DTYPE_S32;
  shim.boolean = OCTILE_DTYPE_S32 + 1;  // _ctypes_ops.py
}

const char* message(const char* format, ...) {
  char text[kMessageSize];  // the last message may be among the values
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, kMessageSize, format, values);
  va_end(values);
  return std::strcpy(message_text, text);
}

}  // namespace octile_torch
