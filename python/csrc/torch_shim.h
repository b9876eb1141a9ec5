// torch's stable C shim, as far as the ops need it. Declared here, and looked up in the libtorch that the process has
// loaded: so this library is built without torch, and one binary serves every torch from 2.11 on. For an older torch
// python/octile/_ctypes_ops.py stands in.
//
// What holds for all of it:
//   - A function that returns Status gives 0, or another number when it failed. Then it has written nothing. It lets
//     no exception out; `check` alone is there to throw.
//   - A TensorHandle is either owned, and has to be given to delete_tensor once, or borrowed.
//   - Element types, device types and layouts are numbers that only the functions below interpret.
//
// How torch calls a kernel: it passes a stack of max(inputs, outputs) values, one for each argument of the schema,
// and takes back one for each result.
//   Tensor        a TensorHandle. Those of the inputs are the kernel's to delete, those of the outputs torch's
//   Tensor?       0, or a pointer to a Value with the TensorHandle. The pointer is the kernel's to free, with
//                 delete_value where there is one (torch 2.13), with operator delete before
//   int           an int64_t
//   float         a double
//   float?        0, or a pointer to a Value with the double, which is the kernel's to free in the same way
//   bool          in the lowest byte
//   ScalarType    one of the dtype numbers, as an int32_t
#pragma once

#include <cstdint>

namespace octile_torch {

using Status = std::int32_t;
using Value = std::uint64_t;  // StableIValue
using TensorHandle = struct OpaqueTensor*;
using LibraryHandle = struct OpaqueLibrary*;
using Kernel = void (*)(Value* stack, std::uint64_t inputs, std::uint64_t outputs);

// 0 of the lower bytes: patch and tag. A kernel registered with this number is called as torch 2.11 would call it.
inline constexpr std::uint64_t kTorchVersion = (std::uint64_t{2} << 56) | (std::uint64_t{11} << 48);

struct Shim {
  // torch's own version, in the form of kTorchVersion.
  std::uint64_t (*abi_version)();

  // A torch::Library of implementations of the namespace's ops for one dispatch key. The strings are copied.
  Status (*library_init_impl)(const char* space, const char* key, const char* file, std::uint32_t line,
                              LibraryHandle* library);
  Status (*library_impl)(LibraryHandle library, const char* name, Kernel kernel, std::uint64_t version);
  // Takes back what was registered with it.
  Status (*delete_library)(LibraryHandle library);

  // Throws torch's own error, which Python sees as a RuntimeError with this message. It passes through the frame of its
  // caller, which therefore should own nothing.
  void (*check)(bool condition, const char* function, const char* file, std::uint32_t line, const char* message);

  Status (*delete_tensor)(TensorHandle tensor);
  // Pointers to sizes and strides are borrowed: they live as long as the handle.
  Status (*get_dim)(TensorHandle tensor, std::int64_t* dimensions);
  Status (*get_sizes)(TensorHandle tensor, std::int64_t** sizes);
  Status (*get_strides)(TensorHandle tensor, std::int64_t** strides);
  Status (*get_dtype)(TensorHandle tensor, std::int32_t* dtype);
  Status (*get_device_type)(TensorHandle tensor, std::int32_t* type);
  Status (*get_device_index)(TensorHandle tensor, std::int32_t* index);
  // The first element. The const one does not make a lazy copy real.
  Status (*get_const_data)(TensorHandle tensor, const void** data);
  Status (*get_mutable_data)(TensorHandle tensor, void** data);

  // A new tensor, owned, from the device's allocator and, on a GPU, for its current stream. Nothing is written to it.
  Status (*empty_strided)(std::int64_t dimensions, const std::int64_t* sizes, const std::int64_t* strides,
                          std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                          TensorHandle* tensor);
  // to = from, of the same sizes, on the current stream.
  Status (*copy)(TensorHandle to, TensorHandle from, std::int32_t non_blocking);

  // Another reference to the same tensor, owned.
  Status (*new_tensor)(TensorHandle tensor, TensorHandle* same);
  // Calls an operator of torch's. The stack is as a kernel's, seen from the caller: the inputs become torch's to
  // delete, the outputs the caller's.
  Status (*call)(const char* name, const char* overload, Value* stack, std::uint64_t version);

  // torch.cuda.current_device().
  Status (*get_current_device)(std::int32_t* device_index);
  // torch.get_num_threads().
  Status (*get_num_threads)(std::uint32_t* threads);

  // at::parallel_for: function(begin, end, context) for parts of the range, on torch's threads. May be NULL.
  Status (*parallel_for)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                         void (*function)(std::int64_t begin, std::int64_t end, void* context), void* context);
  // May be NULL.
  Status (*delete_value)(Value* value);
  // May be NULL. Why the last function on this thread failed: borrowed, until the next one fails.
  const char* (*last_error)();

  // The numbers of this torch.
  std::int32_t cpu, cuda;
  std::int32_t f16, bf16, f32, f64, s8, u8, s32, boolean;
};

// Filled by load_shim; what comes before it must not call.
extern Shim shim;

// Finds the libtorch that is loaded and fills `shim`. NULL, or why it cannot serve.
const char* load_shim();

// The same for libtorch_cuda.
struct CudaShim {
  // The stream that torch's work on this GPU is put on, a cudaStream_t.
  Status (*current_stream)(std::int32_t device_index, void** stream);
  // Memory of torch's cache, of the current GPU and for its current stream. Given back, it serves what is put on that
  // stream later.
  Status (*allocate)(std::uint64_t size, void** memory);
  Status (*deallocate)(void* memory);
};

// Looked up in the first call, so that no GPU is needed before there is a tensor on one. Incomplete (every pointer
// NULL) where libtorch_cuda is not loaded or lacks a function.
const CudaShim& cuda_shim();

// Instead of load_shim: what _ctypes_ops.py gives. A TensorHandle then points to one of these, which Python keeps until
// the op returns; element and device types are those of octile.h.
struct DescribedTensor {
  void* data;
  std::int64_t dimensions;
  std::int64_t *sizes, *strides;
  std::int32_t dtype, device_type, device_index;
};
struct Callbacks {
  decltype(Shim::empty_strided) empty_strided;
  decltype(Shim::copy) copy;
  decltype(Shim::call) call;
  decltype(Shim::get_num_threads) get_num_threads;
  decltype(CudaShim::current_stream) current_stream;
};
void use_callbacks(const Callbacks& callbacks);

// NULL, or what went wrong.
using Error = const char*;

// A message, kept until the next one on this thread. It needs no memory.
[[gnu::format(printf, 1, 2)]] const char* message(const char* format, ...);

// What an op throws: a message.
struct Failure {
  Error error;
};
template <class... Values>
[[noreturn]] void fail(const char* format, Values... values) {
  throw Failure{message(format, values...)};
}

}  // namespace octile_torch
