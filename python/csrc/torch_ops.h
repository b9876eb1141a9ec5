// The ops torch.ops.octile.*, for CPU and CUDA tensors. Their schemas, and what they mean, are in
// python/octile/_ops.py; python/octile/_ctypes_ops.py does the same in Python.
//
// Each takes its arguments over from the stack, and leaves its results there unless it returns an error.
#pragma once

#include "torch_shim.h"
#include "torch_tensor.h"

namespace octile_torch {

Error quantize(Value* stack);
Error dequantize(Value* stack);
Error linear(Value* stack);
Error linear_int8(Value* stack);
Error linear_s4(Value* stack);
Error linear_packed(Value* stack);
Error linear_backward(Value* stack);

}  // namespace octile_torch
