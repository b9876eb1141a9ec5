// Float elements: widening, rounding, and 16 bytes of them at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "octile/types.h"

namespace octile::cuda {

// What a float type is computed in.
template <class T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <class T>
__device__ T narrow(RealOf<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

__device__ inline float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline double quotient(double a, double b) { return __ddiv_rn(a, b); }

__device__ inline float not_a_number(float) { return __int_as_float(0x7fc00000); }
__device__ inline double not_a_number(double) { return __longlong_as_double(0x7ff8000000000000ll); }

// The elements of 16 bytes.
template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <class T>
inline constexpr int kVectorSize = Vector<T>::kSize;

template <class T>
__device__ void widen(const Vector<T>& v, RealOf<T> (&x)[kVectorSize<T>]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // The upper half of a float is a bf16: one instruction each.
    const auto* words = reinterpret_cast<const unsigned*>(&v);
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; i += 2) {
      x[i] = __uint_as_float(words[i / 2] << 16);
      x[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) x[i] = widen(v.at[i]);
  }
}

// `count` elements at p, zeros after them. `aligned`: p is a multiple of 16 bytes. Loads go past the L1:
// nothing is read twice, and a grid that started early must not meet its stale lines.
template <class T>
__device__ Vector<T> load_vector(const T* p, int count, bool aligned) {
  Vector<T> v;
  if (aligned && count >= kVectorSize<T>) {
    *reinterpret_cast<uint4*>(&v) = __ldcg(reinterpret_cast<const uint4*>(p));
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) v.at[i] = i < count ? __ldcg(p + i) : T(0.0f);
  }
  return v;
}

template <class T>
__device__ void store_vector(T* p, const Vector<T>& v, int count, bool aligned) {
  if (aligned && count >= kVectorSize<T>) {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&v);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) {
      if (i < count) p[i] = v.at[i];
    }
  }
}

// Calls body(T()) with the type of `dtype`, which is not f64.
template <class Body>
auto with_narrow_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f16:
      return body(__half());
    case DType::bf16:
      return body(__nv_bfloat16());
    default:
      return body(float());
  }
}

// Calls body(T()) with the type of `dtype`.
template <class Body>
auto with_float_type(DType dtype, const Body& body) {
  return dtype == DType::f64 ? body(double()) : with_narrow_type(dtype, body);
}

}  // namespace octile::cuda
