// quantize_unaligned_rows: the rows of quantize_rows.cuh, to nearest, at any address and of any length. Vectors of 16
// bytes are assembled from the aligned ones that they overlap. 8192 x 8191 f16: 82 us, 120 with loads of elements.
#pragma once

#include "cuda/device/bytes.cuh"
#include "cuda/device/elementwise.cuh"
#include "cuda/device/plain.cuh"

namespace octile::cuda {

constexpr int kUnalignedThreads = 1024;
constexpr int kUnalignedVectors = 4;  // of a thread

template <class T>
struct UnalignedArguments {
  Input<T> x;
  const T* end;  // of the last row
  std::uint8_t* q;
  std::int64_t q_stride;
  bool q_aligned;
  int length;
  PlainRules rules;
  RowScale<float> given_scale;
  float* scale;  // may be null
  std::int64_t scale_stride;
};

// The aligned 16 bytes at p, or what is before `end` of them, if they hold any of `first` .. `last`. No allocation
// begins within 16 such bytes, so that what is before `first` may be read too.
template <class T>
__device__ uint4 load_unit(const T* p, const T* first, const T* last, const T* end) {
  if (p >= last || p + kVectorSize<T> <= first) return {};
  if (p + kVectorSize<T> <= end) return __ldcg(reinterpret_cast<const uint4*>(p));
  Vector<T> v = {};
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) {
    if (p + i < end) v.at[i] = __ldcg(p + i);
  }
  return *reinterpret_cast<const uint4*>(&v);
}

// A block keeps a row.
template <class T>
__global__ void __launch_bounds__(kUnalignedThreads)
    quantize_unaligned_rows(const __grid_constant__ UnalignedArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  constexpr int kVectors = kUnalignedVectors;
  __shared__ float warp_max[kUnalignedThreads / 32];
  const std::int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  const PlainRules rules = a.rules;
  wait_for_previous();
  let_next_start();
  const T* const row = a.x.x.at(r, 0);
  const auto shift = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(row) % 16);
  const T* const base = row - shift / sizeof(T);
  // All loads are under way before the first is waited for: 82 us instead of 114.
  uint4 unit[kVectors];
  uint4 behind[kVectors];  // the unit of the next lane; the last lane fetches it
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const T* const p = base + (k * width + thread) * n;
    unit[k] = load_unit(p, row, row + a.length, a.end);
    behind[k] = thread % 32 == 31 && shift != 0 ? load_unit(p + n, row, row + a.length, a.end) : uint4{};
  }
  Vector<T> v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const uint4 next = {__shfl_down_sync(~0u, unit[k].x, 1), __shfl_down_sync(~0u, unit[k].y, 1),
                        __shfl_down_sync(~0u, unit[k].z, 1), __shfl_down_sync(~0u, unit[k].w, 1)};
    *reinterpret_cast<uint4*>(&v[k]) = shifted_bytes(unit[k], thread % 32 == 31 ? behind[k] : next, shift);
    const int left = a.length - (k * width + thread) * n;
    if (left < n) {
#pragma unroll
      for (int i = 0; i < n; ++i) v[k].at[i] = i < left ? v[k].at[i] : T(0.0f);
    }
  }
  float largest = 0;
  if (a.x.multiplier == Multiplier::none) {
    Magnitude<T> magnitude;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) magnitude.include(v[k]);
    largest = magnitude.value();
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = (k * width + thread) * n;
      float x[n];
      a.x.widen_all(v[k], r, c, a.length - c, x);
#pragma unroll
      for (int i = 0; i < n; ++i) largest = max_nan(largest, c + i < a.length ? fabsf(x[i]) : 0.0f);
    }
  }
  largest = max_of_warp(largest);
  if (thread % 32 == 0) warp_max[thread / 32] = largest;
  __syncthreads();
  largest = max_of_warp(thread % 32 < width / 32 ? warp_max[thread % 32] : 0.0f);
  const Divisor g = divisor(rules, largest, rules.given ? a.given_scale[r] : 0.0f);
  if (thread == 0 && a.scale) a.scale[r * a.scale_stride] = g.s;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int c = (k * width + thread) * n;
    if (c >= a.length) break;
    float x[n];
    std::int32_t levels[n];
    a.x.widen_all(v[k], r, c, a.length - c, x);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float ratio = g.inv != 0 ? quotient_by<2>(x[i], g.s, g.inv) : divided(x[i], g.s);
      levels[i] = low_bits(clamped(plus_rounder<false>(ratio, 0), rules));
    }
    std::uint8_t* const q = a.q + r * a.q_stride + c;
    if (a.q_aligned && c + n <= a.length) {
      LevelBytes<n>(levels, g.s == g.s).store(q);
      continue;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (c + i < a.length) q[i] = static_cast<std::uint8_t>(g.s == g.s ? levels[i] : 0);
    }
  }
}

}  // namespace octile::cuda
