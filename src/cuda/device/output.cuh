// Elements whose type is known at run time: y's, and the bias's, which has y's type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

__device__ inline float load_float(const void* data, std::int64_t i, DType type) {
  switch (type) {
    case DType::f16:
      return widen(__ldcg(static_cast<const __half*>(data) + i));
    case DType::bf16:
      return widen(__ldcg(static_cast<const __nv_bfloat16*>(data) + i));
    default:
      return __ldcg(static_cast<const float*>(data) + i);
  }
}

__device__ inline void store_float(void* data, std::int64_t i, DType type, float value) {
  switch (type) {
    case DType::f16:
      static_cast<__half*>(data)[i] = narrow<__half>(value);
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(data)[i] = narrow<__nv_bfloat16>(value);
      break;
    default:
      static_cast<float*>(data)[i] = value;
  }
}

// Two neighbours in 32 bits.
template <class Y>
__device__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Y, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

struct Bias {
  const void* data = nullptr;
  std::int64_t stride = 0;
  DType type = DType::f32;

  // Of one of `count` channels; `none` without a bias and beyond them.
  __device__ float at(int channel, int count, float none) const {
    return data == nullptr || channel >= count ? none : load_float(data, channel * stride, type);
  }
  // The same where the type is f32 (wide) or T.
  template <class T>
  __device__ float at(int channel, int count, bool wide) const {
    if (data == nullptr || channel >= count) return 0;
    const std::int64_t i = channel * stride;
    return wide ? __ldcg(static_cast<const float*>(data) + i) : widen(__ldcg(static_cast<const T*>(data) + i));
  }
};

inline Bias bias_of(const GemmProblem& problem, const GemmOperands& o) {
  if (!problem.bias) return {nullptr, 0, problem.y};
  return {o.bias.data, o.bias.strides[0], problem.y};
}

// Whether `count` neighbouring elements of y can be stored at once.
inline bool aligned_for(const Tensor& y, int count) {
  const std::int64_t bytes = bits(y.dtype) / 8;
  return aligned_rows(y.data, y.strides[0] * bytes, bytes * count);
}

// Stores two neighbouring elements of y, as far as `count` of them exist. whole: both do or neither, and one store
// does.
template <class Y, bool whole>
__device__ void put_pair(Y* to, const Y (&values)[2], int count) {
  if constexpr (whole) {
    using Pair = std::conditional_t<sizeof(Y) == 4, std::uint64_t, std::uint32_t>;
    if (count > 0) *reinterpret_cast<Pair*>(to) = *reinterpret_cast<const Pair*>(values);
  } else {
    if (count > 0) to[0] = values[0];
    if (count > 1) to[1] = values[1];
  }
}

}  // namespace octile::cuda
