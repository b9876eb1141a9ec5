// The contract's logistic function and what prologues make of it: base/sigmoid.h, instruction by instruction.
#pragma once

#include "base/sigmoid.h"
#include "cuda/device/floats.cuh"
#include "octile/types.h"

namespace octile::cuda {

// sigma(t) of z = -t log2(e).
__device__ inline float sigmoid(float z) {
  constexpr float kRounder = 0x1.8p23f;
  const float limited = fminf(fmaxf(z, kMinExponent), kMaxExponent);
  const float sum = __fadd_rn(limited, kRounder);  // its low bits are the integer
  const float f = __fsub_rn(limited, __fsub_rn(sum, kRounder));
  constexpr float c1 = kExp2[0], c2 = kExp2[1], c3 = kExp2[2], c4 = kExp2[3], c5 = kExp2[4];
  float p = __fmaf_rn(c5, f, c4);
  p = __fmaf_rn(p, f, c3);
  p = __fmaf_rn(p, f, c2);
  p = __fmaf_rn(p, f, c1);
  p = __fmaf_rn(p, f, 1.0f);
  const float power = __int_as_float(__float_as_int(p) + (__float_as_int(sum) << 23));
  return __frcp_rn(__fadd_rn(1.0f, power));
}

// z of x.
template <Prologue prologue>
__device__ float exponent(float x) {
  return prologue == Prologue::silu ? __fmul_rn(x, kSilu) : __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), kGeluCubic, kGelu));
}

template <Prologue prologue>
__device__ float activated(float x) {
  return __fmul_rn(x, sigmoid(exponent<prologue>(x)));
}

template <class T>
__device__ Vector<T> narrowed(const float (&x)[kVectorSize<T>]) {
  Vector<T> v;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; i += 2) pairs[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) v.at[i] = narrow<T>(x[i]);
  }
  return v;
}

// prologue(x) or prologue(x) up.
template <Prologue prologue, bool gated>
__device__ float activated_by(float x, float up) {
  const float y = activated<prologue>(x);
  return gated ? __fmul_rn(y, up) : y;
}

// The same, to be rounded to bf16. That keeps 8 bits of 24, so powers and reciprocals of the special function unit
// decide nearly all of them. Both ways to the f32 are within 2^-22.4 (the power), 2^-22.5 (ex2.approx), 2^-23
// (rcp.approx) and the roundings of three to five instructions: 13 units in the last place. Within 14 of a tie, where
// the reciprocal could be subnormal (z beyond 90), or where a product before the last could be (gated, |x| below
// 2^-30), the exact way decides.
template <Prologue prologue, bool gated, int n>
__device__ void activate_for_bf16(const float (&x)[n], const float (&up)[n], float (&y)[n]) {
  constexpr unsigned kNear = 14;
  const auto distance = [](float v) { return (__float_as_uint(v) + 0x8000u + kNear) & 0xffffu; };
  unsigned nearest = 2 * kNear + 1;
  float highest = 0;
  float smallest = 1;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float z = exponent<prologue>(x[i]);
    float power;
    float inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(1.0f, power)));
    y[i] = __fmul_rn(x[i], inverse);
    if constexpr (gated) y[i] = __fmul_rn(y[i], up[i]);
    highest = fmaxf(highest, z);
    if constexpr (gated) smallest = fminf(smallest, fabsf(x[i]));
    nearest = min(nearest, distance(y[i]));
  }
  if (nearest > 2 * kNear && highest < 90.0f && smallest > 0x1p-30f) return;
  const bool all = !(highest < 90.0f && smallest > 0x1p-30f);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (all || distance(y[i]) <= 2 * kNear) y[i] = activated_by<prologue, gated>(x[i], up[i]);
  }
}

// h = round(prologue(x)) or round(prologue(x) up).
template <class T, Prologue prologue, bool gated>
__device__ Vector<T> activation(const Vector<T>& x, const Vector<T>& up) {
  constexpr int n = kVectorSize<T>;
  float values[n];
  float by[n] = {};
  float y[n];
  widen(x, values);
  if constexpr (gated) widen(up, by);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    activate_for_bf16<prologue, gated>(values, by, y);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) y[i] = activated_by<prologue, gated>(values[i], by[i]);
  }
  return narrowed<T>(y);
}

// Calls body.operator()<prologue, gated>() with those of a problem that has a prologue.
template <class Body>
void with_prologue(Prologue prologue, bool gated, const Body& body) {
  using enum Prologue;
  if (prologue == silu) return gated ? body.template operator()<silu, true>() : body.template operator()<silu, false>();
  gated ? body.template operator()<gelu_tanh, true>() : body.template operator()<gelu_tanh, false>();
}

}  // namespace octile::cuda
