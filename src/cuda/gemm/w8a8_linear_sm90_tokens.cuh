// X for the kernel of w8a8_linear_sm90: s8 in the shared memory of every block, copied, or quantized from floats. Each
// block of a cluster quantizes a part of the tokens and writes it to all blocks.
//
//   s[i] = max(max_c |x[i, c] * multiplier[c]| / 127, 1e-8), or given
//   xq[i, c] = clamp(rint(x[i, c] * multiplier[c] / s[i]), -127, 127)
//
// A row with a NaN or an infinity becomes zeros with scale NaN.
#pragma once

#include <cstdint>

#include "cuda/device/floats.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/operands.h"

namespace octile::cuda {

inline constexpr int kSkinnyWarps = 16;  // consumers: they quantize, then multiply
inline constexpr int kSkinnyConsumers = kSkinnyWarps * 32;
inline constexpr int kStepBytes = 64;  // of k, a warp's at a time: 16 per lane

// X as given. Strides of vectors may be 0.
struct Tokens {
  const void* data = nullptr;
  std::int64_t pitch = 0;  // elements
  bool aligned = false;    // rows start at multiples of 16 bytes
  int count = 0;           // m
  int k = 0;
  int cluster = 1;       // blocks that share the quantization
  bool dynamic = false;  // quantized with its own scales, not with `scale`
  bool multiplied = false;
  RowScale<float> scale;
  RowScale<float> multiplier;
};

// Bytes between rows in shared memory: an odd multiple of 64 avoids bank conflicts between 16-byte loads of 8 rows.
__host__ __device__ constexpr int padded(int bytes) { return ((bytes + 63) / 64 | 1) * 64; }

// The first `bytes` of 16 at p, then zeros; any alignment.
static __device__ __noinline__ uint4 load_bytes(const std::int8_t* p, int bytes) {
  std::uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = 0;
#pragma unroll 1
    for (int i = 0; i < 4 && 4 * w + i < bytes; ++i) {
      words[w] |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(__ldcg(p + 4 * w + i))) << (i * 8);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ inline void sync_consumers() { ptx::bar_sync<1, kSkinnyConsumers>(); }

// Rare paths are functions of their own: the rest of the code is shorter then, and loads faster from a cold cache.

template <class T>
static __device__ __noinline__ uint4 load_elements(const T* p, int count) {
  const Vector<T> v = load_vector(p, count, false);
  return *reinterpret_cast<const uint4*>(&v);
}

// Of columns c .. c + 3; 1 beyond k.
static __device__ __noinline__ float4 load_multipliers(const RowScale<float> multiplier, int c, int k) {
  float four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = c + i < k ? multiplier[c + i] : 1.0f;
  return {four[0], four[1], four[2], four[3]};
}

// Float elements of X, times their columns' multipliers.
template <class T>
struct FloatRow {
  const T* data;
  bool aligned;
  int k;
  RowScale<float> multiplier;
  bool multiplied;

  // Elements c .. of a vector, zeros beyond k.
  __device__ Vector<T> raw(int c) const {
    Vector<T> v;
    uint4& bits = *reinterpret_cast<uint4*>(&v);
    if (aligned && c + kVectorSize<T> <= k) {
      bits = __ldcg(reinterpret_cast<const uint4*>(data + c));
    } else {
      bits = load_elements(data + c, k - c);
    }
    return v;
  }
  __device__ void widened(const Vector<T>& v, int c, float (&x)[kVectorSize<T>]) const {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) x[i] = widen(v.at[i]);
    if (!multiplied) return;
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; i += 4) {
      const float4 by = load_multipliers(multiplier, c + i, k);
      x[i] = __fmul_rn(x[i], by.x);
      x[i + 1] = __fmul_rn(x[i + 1], by.y);
      x[i + 2] = __fmul_rn(x[i + 2], by.z);
      x[i + 3] = __fmul_rn(x[i + 3], by.w);
    }
  }
};

// Warps of a block that share a row of X: a power of two.
__device__ inline int warps_per_row(int tokens) {
  int rows = 1;
  while (rows < tokens) rows *= 2;
  return max(kSkinnyWarps / rows, 1);
}

// Quantizes the elements of a row.
struct RowScaler {
  float s = 0;
  float inverse = 0;
  float limit = 0;  // given scale: larger magnitudes saturate
  float factor =
      1;  // given scale: a power of two that keeps both sides of the quotient away from the ends of the range
  bool given = false;
  bool good = false;

  // `peak`: the largest magnitude of the row, NaN if there is one.
  __device__ RowScaler(float peak, bool dynamic, float given_scale) : given(!dynamic) {
    s = dynamic ? fmaxf(quotient(peak, 127.0f), 1e-8f) : given_scale;
    good = isfinite(peak) && isfinite(s);
    if (given) factor = s < 0x1p-60f ? 0x1p64f : s > 0x1p60f ? 0x1p-64f : 1;
    scaled = s * factor;
    limit = 128 * scaled;
    inverse = quotient(1.0f, scaled);
  }

  // The quotient x / s, rounded as IEEE division rounds: a correctly rounded reciprocal and two corrections, the last
  // one of a quotient that is off by less than an ulp (Markstein; Handbook of Floating-Point Arithmetic, section 4.7).
  // Where a correction could underflow, the quotient rounds to 0 anyway. There is no branch: rare code is slow to load
  // from a cold cache.
  template <int n>
  __device__ void quantize(const float (&x)[n], std::uint32_t (&words)[n / 4]) const {
    constexpr float kRounder = 0x1.8p23f;  // the sum's low bits are the nearest integer
    std::uint32_t q[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float v = given ? fminf(fmaxf(__fmul_rn(x[i], factor), -limit), limit) : x[i];
      float ratio = __fmul_rn(v, inverse);
      ratio = __fmaf_rn(__fmaf_rn(-scaled, ratio, v), inverse, ratio);
      ratio = __fmaf_rn(__fmaf_rn(-scaled, ratio, v), inverse, ratio);
      float rounded = __fadd_rn(ratio, kRounder);
      if (given) rounded = fminf(fmaxf(rounded, kRounder - 127), kRounder + 127);
      q[i] = good ? __float_as_uint(rounded) : 0;
    }
#pragma unroll
    for (int i = 0; i < n / 4; ++i) {
      words[i] = __byte_perm(__byte_perm(q[4 * i], q[4 * i + 1], 0x0040),
                             __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x0040), 0x5410);
    }
  }

 private:
  float scaled = 0;
};

// NaN if either is.
__device__ inline float greater_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Quantizes X per row into `xq` and `scales`, by all consumers, at most 16 tokens. Each lane keeps a batch of a row's
// vectors between the two passes; the rest is loaded from L2 again.
template <class T>
__device__ void quantize_tokens(const Tokens& x, std::uint32_t xq, float* scales, float* scratch, std::uint32_t ready) {
  constexpr int kSize = kVectorSize<T>;
  constexpr int kBatch = 4;  // vectors
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tokens = (x.count + x.cluster - 1) / x.cluster;  // of this block
  const int share = warps_per_row(tokens);
  const int token = (x.cluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0) * tokens + warp / share;
  const bool busy = warp / share < tokens && token < x.count;
  const FloatRow<T> row = {static_cast<const T*>(x.data) + token * x.pitch, x.aligned, x.k, x.multiplier, x.multiplied};
  const int first = (warp % share * 32 + lane) * kSize;
  const int stride = share * 32 * kSize;
  const int end = (x.k + kStepBytes - 1) / kStepBytes * kStepBytes;  // zeros beyond k, where b holds anything
  Vector<T> kept[kBatch];
  float peak = 0;
  const auto measure = [&](const Vector<T>& v, int c) {
    float values[kSize];
    row.widened(v, c, values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) peak = greater_nan(peak, fabsf(values[i]));
  };
  const auto load_batch = [&](Vector<T>(&batch)[kBatch], int c) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (c + i * stride < end) batch[i] = row.raw(c + i * stride);
    }
  };
  const auto measure_batch = [&](const Vector<T>(&batch)[kBatch], int c) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (c + i * stride < end) measure(batch[i], c + i * stride);
    }
  };
  if (busy) {
    load_batch(kept, first);
    measure_batch(kept, first);
#pragma unroll 1
    for (int c = first + kBatch * stride; c < end; c += kBatch * stride) {
      Vector<T> batch[kBatch];
      load_batch(batch, c);
      measure_batch(batch, c);
    }
  }
  for (int i = 16; i > 0; i /= 2) peak = greater_nan(peak, __shfl_xor_sync(~0u, peak, i));
  if (share > 1) {
    if (lane == 0) scratch[warp] = peak;
    sync_consumers();
#pragma unroll 1
    for (int i = 0; i < share; ++i) peak = greater_nan(peak, scratch[warp / share * share + i]);
  }

  if (x.cluster > 1) ptx::cluster_wait();  // all blocks have started
  if (busy) {
    const RowScaler scaler(peak, x.dynamic, x.dynamic ? 0 : x.scale[token]);
    if (warp % share == 0 && lane < x.cluster) {
      const float scale = scaler.good ? scaler.s : not_a_number(0.0f);
      ptx::store_cluster(ptx::mapa(shared_address(scales + token), static_cast<unsigned>(lane)), scale);
    }
    const std::uint32_t to = xq + static_cast<unsigned>(token * padded(x.k));
    const auto quantize_batch = [&](const Vector<T>(&batch)[kBatch], int c) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (c + i * stride >= end) break;
        float values[kSize];
        std::uint32_t words[kSize / 4];
        row.widened(batch[i], c + i * stride, values);
        scaler.quantize(values, words);
#pragma unroll 1
        for (int block = 0; block < x.cluster; ++block) {
          ptx::store_cluster(ptx::mapa(to + static_cast<unsigned>(c + i * stride), static_cast<unsigned>(block)),
                             words);
        }
      }
    };
    quantize_batch(kept, first);
#pragma unroll 1
    for (int c = first + kBatch * stride; c < end; c += kBatch * stride) {
      Vector<T> batch[kBatch];
      load_batch(batch, c);
      quantize_batch(batch, c);
    }
  }
  __syncwarp();
  if (lane < x.cluster) ptx::mbarrier_arrive_cluster_release(ptx::mapa(ready, static_cast<unsigned>(lane)));
}

// Copies X, which is s8, into `xq`; the caller commits the copies.
__device__ inline void copy_tokens(const Tokens& x, std::uint32_t xq) {
  const int chunks = (x.k + kStepBytes - 1) / kStepBytes * (kStepBytes / 16);  // zeros beyond k, where b holds anything
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < x.count * chunks; i += kSkinnyConsumers) {
    const int token = i / chunks;
    const int c = (i - token * chunks) * 16;
    const std::int8_t* const from = static_cast<const std::int8_t*>(x.data) + token * x.pitch + c;
    const std::uint32_t to = xq + static_cast<unsigned>(token * padded(x.k) + c);
    // cp.async of fewer bytes would do, but memcheck takes it for 16.
    if (x.aligned && x.k - c >= 16) {
      copy_async(to, from);
    } else {
      store_shared(to, load_bytes(from, x.k - c));
    }
  }
}

}  // namespace octile::cuda
