// Rows in the common case: symmetric, in whole aligned vectors of 16 bytes. x is read once and stays in registers until
// the scale of its row is known; then it becomes bytes, or (fake quantize) floats again.
#pragma once

#include "cuda/device/elementwise.cuh"
#include "cuda/device/plain.cuh"

namespace octile::cuda {

constexpr int kRowThreads = 512;                // at most
constexpr int kVectorsOfMany = 4;               // that a thread keeps where there are rows enough
constexpr int kVectorsOfLong = 8;               // and of a long row
constexpr int kFactorBlocks = 5;                // of an SM
constexpr std::int64_t kMaxFactors = 24 << 10;  // of columns, that fit shared memory twice

template <bool kFactors, bool kStochastic, bool kFake>
struct RowKind {
  static constexpr bool factors = kFactors;
  static constexpr bool stochastic = kStochastic;
  static constexpr bool fake = kFake;
};
using PlainRows = RowKind<false, false, false>;
using FakeRows = RowKind<false, false, true>;

template <class T>
struct RowsArguments {
  const T* x;
  std::int64_t x_stride;
  void* out;  // bytes; fake: T
  std::int64_t out_stride;
  std::int64_t rows;
  int vectors;  // of a row
  PlainRules rules;
  RowScale<float> given_scale;
  float* scale;  // may be null
  std::int64_t scale_stride;
  const float* factors;  // of the columns
  std::uint64_t seed;
  bool next_reads_early;  // QuantizeOperands
};

// Of elements index .. index + n - 1, in [0, 1): index is a multiple of n.
template <int n>
__device__ inline void noise_of(std::uint64_t index, std::uint64_t seed, float (&u)[n]) {
  std::uint32_t words[4];
  philox_4x32_10(index / 8, seed, words);
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const std::uint32_t word = n == 8 || index % 8 == 0 ? words[i / 2] : words[(i / 2 + 2) % 4];
    u[i] = __uint_as_float(0x3f800000u | (word & 0xffffu) << 7) - 1.0f;
    u[i + 1] = __uint_as_float(0x3f800000u | word >> 16 << 7) - 1.0f;
  }
}

// Of one element.
__device__ inline float noise_at(std::uint64_t index, std::uint64_t seed) {
  std::uint32_t words[4];
  philox_4x32_10(index / 8, seed, words);
  const std::uint32_t word = index & 4 ? (index & 2 ? words[3] : words[2]) : (index & 2 ? words[1] : words[0]);
  return static_cast<float>(index & 1 ? word >> 16 : word & 0xffffu) * 0x1p-16f;
}

// Blocks of kRowThreads on an SM, which bounds the registers.
template <int kVectors, class Kind>
constexpr int kRowBlocks = kVectors > 4 || Kind::factors || Kind::stochastic ? 2 : 3;

// A row of the block, a power of two up to 32 threads or whole warps, keeps a row: kVectors vectors for each thread.
// With factors a block loops over rows, so that it loads them once: into shared memory, (n / 4, vectors, 4).
// Prefetching its next row costs registers and time (74 us instead of 69 at 8192 x 8192 f16).
template <class T, int kVectors, class Kind>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<kVectors, Kind>) quantize_rows(const RowsArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  constexpr int kCorrections = sizeof(T) == 2 && !Kind::factors ? 1 : 2;
  __shared__ float warp_max[kRowThreads / 32];
  __shared__ Divisor of_block;
  extern __shared__ float4 factors[];
  const int lane = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  std::int64_t r = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;

  if (!a.next_reads_early) let_next_start();
  wait_for_previous();
  let_next_start();
  if constexpr (Kind::factors) {
    for (int i = static_cast<int>(threadIdx.y) * width + lane; i < a.vectors * (n / 4); i += width * blockDim.y) {
      factors[i % (n / 4) * a.vectors + i / (n / 4)] = __ldcg(reinterpret_cast<const float4*>(a.factors) + i);
    }
    __syncthreads();
  }
  const auto widen_at = [&](const Vector<T>& v, int vector, float(&x)[n]) {
    widen(v, x);
    if constexpr (Kind::factors) {
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        const float4 f = factors[i / 4 * a.vectors + vector];
        x[i] = __fmul_rn(x[i], f.x);
        x[i + 1] = __fmul_rn(x[i + 1], f.y);
        x[i + 2] = __fmul_rn(x[i + 2], f.z);
        x[i + 3] = __fmul_rn(x[i + 3], f.w);
      }
    }
  };
  const auto store = [&](const float(&x)[n], int vector, const Divisor& g) {
    float sum[n];
    float u[n];
    if (Kind::stochastic) noise_of(static_cast<std::uint64_t>((r * a.vectors + vector) * n), a.seed, u);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      sum[i] = plus_rounder<Kind::stochastic>(quotient_by<kCorrections>(x[i], g.s, g.inv), u[i]);
    }
    if (!a.rules.fits) {
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] = clamped(sum[i], a.rules);
    }
    if constexpr (Kind::fake) {
      Vector<T> y;
#pragma unroll
      for (int i = 0; i < n; ++i) y.at[i] = narrow<T>((sum[i] - rounder(x[i])) * g.s);
      store_vector(static_cast<T*>(a.out) + r * a.out_stride + vector * n, y, n, true);
    } else {
      std::int32_t levels[n];
#pragma unroll
      for (int i = 0; i < n; ++i) levels[i] = low_bits(sum[i]);
      LevelBytes<n>(levels, true).store(static_cast<std::uint8_t*>(a.out) + r * a.out_stride + vector * n);
    }
  };

  for (; r - threadIdx.y < a.rows; r += std::int64_t{gridDim.x} * blockDim.y) {
    const int vectors = r < a.rows ? a.vectors : 0;
    const T* const row = a.x + r * a.x_stride;
    Vector<T> v[kVectors] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * width + lane < vectors) v[k] = load_vector(row + (k * width + lane) * n, n, true);
    }

    float largest = 0;
    if constexpr (Kind::factors) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (k * width + lane >= vectors) break;
        float x[n];
        widen_at(v[k], k * width + lane, x);
#pragma unroll
        for (int i = 0; i < n; ++i) largest = max_nan(largest, fabsf(x[i]));
      }
    } else {
      Magnitude<T> magnitude;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) magnitude.include(v[k]);
      largest = magnitude.value();
    }
    Divisor g;
    if (width <= 32) {
      g = divisor(a.rules, max_of_lanes(largest, width), a.rules.given ? a.given_scale[vectors > 0 ? r : 0] : 0.0f);
    } else {
      // One warp resolves for all: the divisions cost as much as rounding a dozen elements.
      largest = max_of_warp(largest);
      if (lane % 32 == 0) warp_max[lane / 32] = largest;
      __syncthreads();
      if (lane < 32) {
        largest = max_of_warp(lane < width / 32 ? warp_max[lane] : 0.0f);
        g = divisor(a.rules, largest, a.rules.given ? a.given_scale[r] : 0.0f);
        if (lane == 0) of_block = g;
      }
      __syncthreads();
      g = of_block;
    }
    if (lane == 0 && vectors > 0 && a.scale) a.scale[r * a.scale_stride] = g.s;

    if (g.inv != 0) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (k * width + lane >= vectors) break;
        float x[n];
        widen_at(v[k], k * width + lane, x);
        store(x, k * width + lane, g);
      }
    } else {
      // A scale so small or so large is rare, and so is a bad row: element by element.
#pragma unroll 1
      for (int c = lane; c < vectors * n; c += width) {
        float x = widen(__ldcg(row + c));
        if (Kind::factors) x = __fmul_rn(x, __ldcg(a.factors + c));
        const float u = Kind::stochastic ? noise_at(static_cast<std::uint64_t>(r * a.vectors * n + c), a.seed) : 0.0f;
        const float sum = clamped(plus_rounder<Kind::stochastic>(divided(x, g.s), u), a.rules);
        if constexpr (Kind::fake) {
          *(static_cast<T*>(a.out) + r * a.out_stride + c) = narrow<T>((sum - rounder(x)) * g.s);
        } else {
          *(static_cast<std::uint8_t*>(a.out) + r * a.out_stride + c) =
              static_cast<std::uint8_t>(g.s == g.s ? low_bits(sum) : 0);
        }
      }
    }

    if (!Kind::factors) return;
  }
}

// Threads for a segment of this many vectors: a power of two, or whole warps.
inline unsigned width_for(std::int64_t vectors, int each) {
  const auto threads = blocks_for(vectors, each);
  unsigned width = (threads + 31) / 32 * 32;
  while (width <= 32 && width / 2 >= threads) width /= 2;
  return width;
}

// Of those threads, and of as many segments as make 256.
inline dim3 block_for(std::int64_t vectors, int each) {
  const unsigned width = width_for(vectors, each);
  return {width, width <= 32 ? 256 / width : 1};
}

template <class T, int kVectors, class Kind>
void enqueue_rows_as(std::string_view kernel, const RowsArguments<T>& a, int sms, Stream stream) {
  const dim3 block = block_for(a.vectors, kVectors);
  std::int64_t blocks = ceil_div(a.rows, block.y);
  if (Kind::factors) blocks = std::min<std::int64_t>(blocks, kFactorBlocks * sms);
  const unsigned shared = Kind::factors ? static_cast<unsigned>(a.vectors) * kVectorSize<T> * 4 : 0;
  enqueue(kernel, quantize_rows<T, kVectors, Kind>, {dim3(static_cast<unsigned>(blocks)), block, shared}, stream, a);
}

// Rows of up to this many vectors.
template <class Kind>
constexpr std::int64_t kMaxVectors = Kind::factors ? kRowThreads* kVectorsOfMany : kRowThreads* kVectorsOfLong;

template <class T, class Kind>
void enqueue_rows(std::string_view kernel, const RowsArguments<T>& a, Device device, Stream stream) {
  const int sms = properties(device).sms;
  if constexpr (!Kind::factors && !Kind::stochastic && !Kind::fake) {
    if (a.rows <= 2 * sms && a.vectors <= kRowThreads) {
      return enqueue_rows_as<T, 1, Kind>(kernel, a, sms, stream);
    }
  }
  if (Kind::factors || a.vectors <= kRowThreads * kVectorsOfMany) {
    return enqueue_rows_as<T, kVectorsOfMany, Kind>(kernel, a, sms, stream);
  }
  if constexpr (!Kind::factors) enqueue_rows_as<T, kVectorsOfLong, Kind>(kernel, a, sms, stream);
}

template <class T, class Kind>
void prepare_rows(std::string_view kernel) {
  prepare(kernel, quantize_rows<T, kVectorsOfMany, Kind>, Kind::factors ? kMaxFactors * sizeof(float) : 0);
  if constexpr (!Kind::factors) prepare(kernel, quantize_rows<T, kVectorsOfLong, Kind>);
  if constexpr (!Kind::factors && !Kind::stochastic && !Kind::fake) prepare(kernel, quantize_rows<T, 1, Kind>);
}

}  // namespace octile::cuda
