// The ops torch.ops.octile.*, for CPU and CUDA tensors. Their schemas, and what they mean, are in
// python/octile/_ops.py.
//
// Each takes its arguments over from the stack, and leaves its results there. What they throw: Failure, std::bad_alloc.
#pragma once

#include "torch_shim.h"
#include "torch_tensor.h"

namespace octile_torch {

void quantize(Value* stack);
void norm_quantize(Value* stack);
void dequantize(Value* stack);
void linear(Value* stack);
void linear_int8(Value* stack);
void linear_s4(Value* stack);
void linear_packed(Value* stack);
void attend_one_query(Value* stack);  // on the CPU
void linear_backward(Value* stack);
void grouped_linear(Value* stack);
void grouped_linear_backward(Value* stack);

}  // namespace octile_torch
