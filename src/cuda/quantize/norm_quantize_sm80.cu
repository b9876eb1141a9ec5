// h = round_to_x((x' - mean) rstd weight (+ bias)) of each row, x' = x or round_to_x(x + residual), which is written;
// s = max(max|h| / 127, min_scale); q = rint(h / s). base/norm.h has the order of the sums.
//
//   normalize_rows       x is read once, and x' and h stay in registers; a block keeps the weight for all its rows
//   normalize_any_rows   rows that are long, odd or unaligned: x' and h are computed again in each of their passes
#include <algorithm>

#include "base/norm.h"
#include "cuda/quantize/prologue_quantize_sm80.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kRows = "norm_quantize_sm80";
constexpr std::string_view kAnyRows = "norm_quantize_sm80 (any rows)";

// Threads of a row, each of which has the lanes of one vector.
template <class T>
constexpr int kNormThreads = kNormLanes / kVectorSize<T>;

// A weight or bias of the columns, f32 or T.
template <class T>
struct Coefficients {
  const void* data;
  std::int64_t stride;
  bool wide;     // f32
  bool aligned;  // whole vectors of 16 bytes

  // Those of columns c .. c + n - 1, `count` of them valid.
  __device__ void load(std::int64_t c, int count, float (&w)[kVectorSize<T>]) const {
    constexpr int n = kVectorSize<T>;
    if (aligned && count >= n && !wide) {
      widen(load_vector(static_cast<const T*>(data) + c, n, true), w);
    } else if (aligned && count >= n) {
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(data) + c + i));
        w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const std::int64_t at = (c + i) * stride;
        w[i] = i >= count ? 0.0f
               : wide     ? __ldcg(static_cast<const float*>(data) + at)
                          : widen(__ldcg(static_cast<const T*>(data) + at));
      }
    }
  }
};

template <class T>
Coefficients<T> coefficients(const ConstTensor& t) {
  const bool wide = t.dtype == DType::f32;
  return {t.data, t.strides[0], wide, t.strides[0] == 1 && aligned_rows(t.data, 0, 16)};
}

template <class T>
struct NormArguments : PrologueArguments {
  Rows<const T> x, residual;  // residual.data may be null
  Rows<T> sum;
  Coefficients<T> weight, bias;
  float* mean;  // may be null, as rstd
  float* rstd;
  std::int64_t mean_stride, rstd_stride;
  float terms, epsilon;

  // `count` values of x', which are written to `sum` where they are one.
  __device__ Vector<T> load(std::int64_t r, std::int64_t c, int count, bool store) const {
    const Vector<T> v = load_vector(x.at(r, c), count, x.aligned);
    if (residual.data == nullptr) return v;
    const Vector<T> total = added(v, load_vector(residual.at(r, c), count, residual.aligned));
    if (store) store_vector(sum.at(r, c), total, count, sum.aligned);
    return total;
  }

  __device__ static Vector<T> added(Vector<T> v, const Vector<T>& other) {
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) v.at[i] = narrow<T>(__fadd_rn(widen(v.at[i]), widen(other.at[i])));
    return v;
  }
};

// The sum over all lanes, those of `width` threads of a row. Each call of a kernel has a `place` of its own.
template <int place, int n>
__device__ float sum_of_lanes(float (&lanes)[n], int lane, int width) {
  constexpr int kWarps = kNormLanes / n / 32;
  __shared__ float of_warps[kWarps];
#pragma unroll
  for (int i = 1; i < n; i *= 2) {
#pragma unroll
    for (int j = 0; j < n; j += 2 * i) lanes[j] = __fadd_rn(lanes[j], lanes[j + i]);
  }
  float sum = lanes[0];
  for (int i = 1; i < min(width, 32); i *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, i));
  if (width <= 32) return sum;
  if (lane % 32 == 0) of_warps[lane / 32] = sum;
  __syncthreads();
  float warps[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) warps[i] = i < width / 32 ? of_warps[i] : 0.0f;
#pragma unroll
  for (int i = 1; i < kWarps; i *= 2) {
#pragma unroll
    for (int j = 0; j < kWarps; j += 2 * i) warps[j] = __fadd_rn(warps[j], warps[j + i]);
  }
  return warps[0];
}

struct RowNorm {
  float mean, rstd;
};

// `visit(body)` calls body(values) with each vector of this thread, and how many of its values count.
template <bool centred, int n, class Visit>
__device__ RowNorm norm_of_row(const Visit& visit, float terms, float epsilon, int lane, int width) {
  float mean = 0;
  if constexpr (centred) {
    float lanes[n] = {};
    visit([&](const float(&x)[n], int count) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (i < count) lanes[i] = __fadd_rn(lanes[i], x[i]);
      }
    });
    mean = __fdiv_rn(sum_of_lanes<0>(lanes, lane, width), terms);
  }
  float lanes[n] = {};
  visit([&](const float(&x)[n], int count) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float d = centred ? __fsub_rn(x[i], mean) : x[i];
      if (i < count) lanes[i] = __fmaf_rn(d, d, lanes[i]);
    }
  });
  const float square = __fdiv_rn(sum_of_lanes<1>(lanes, lane, width), terms);
  return {mean, __frcp_rn(__fsqrt_rn(__fadd_rn(square, epsilon)))};
}

template <class T, bool centred>
__device__ Vector<T> normalized(const float (&x)[kVectorSize<T>], const RowNorm& norm,
                                const float (&weight)[kVectorSize<T>], const float (&bias)[kVectorSize<T>]) {
  Vector<T> h;
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) {
    const float z = __fmul_rn(centred ? __fsub_rn(x[i], norm.mean) : x[i], norm.rstd);
    h.at[i] = narrow<T>(centred ? __fmaf_rn(z, weight[i], bias[i]) : __fmul_rn(z, weight[i]));
  }
  return h;
}

template <class T>
__device__ void store_facts(const NormArguments<T>& a, std::int64_t r, const RowNorm& norm, float scale) {
  a.scale[r * a.scale_stride] = scale;
  if (a.mean) a.mean[r * a.mean_stride] = norm.mean;
  if (a.rstd) a.rstd[r * a.rstd_stride] = norm.rstd;
}

// A row of the block, a power of two up to 32 threads or whole warps, keeps a row of x: kVectors vectors a thread. The
// block's next row is on its way meanwhile.
template <class T, int kVectors, bool centred>
__global__ void __launch_bounds__(256) normalize_rows(const NormArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  const int lane = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  const int in_row = static_cast<int>(a.cols / n);
  const VectorsAhead<T> ahead;
  const auto request = [&](std::int64_t r, int k) {
    if (r >= a.rows || k * width + lane >= in_row) return;
    ahead.request(k, a.x.at(r, (k * width + lane) * n));
    if (a.residual.data) ahead.request(kVectors + k, a.residual.at(r, (k * width + lane) * n));
  };
  std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.y;
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int k = 0; k < kVectors; ++k) request(first + threadIdx.y, k);
  float weight[kVectors][n];
  float bias[centred ? kVectors : 1][n];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * width + lane >= in_row) break;
    a.weight.load((k * width + lane) * n, n, weight[k]);
    if constexpr (centred) a.bias.load((k * width + lane) * n, n, bias[k]);
  }
  for (; first < a.rows; first += step) {
    const std::int64_t r = first + threadIdx.y;
    const int vectors = r < a.rows ? in_row : 0;
    Vector<T> h[kVectors] = {};
    ahead.wait();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * width + lane >= vectors) break;
      h[k] = ahead.take(k);
      if (a.residual.data) {
        h[k] = a.added(h[k], ahead.take(kVectors + k));
        store_vector(a.sum.at(r, (k * width + lane) * n), h[k], n, true);
      }
      request(r + step, k);
    }
    const auto visit = [&](const auto& body) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        float x[n];
        widen(h[k], x);
        if (k * width + lane < vectors) body(x, n);
      }
    };
    const RowNorm norm = norm_of_row<centred, n>(visit, a.terms, a.epsilon, lane, width);
    Magnitude<T> magnitude;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * width + lane >= vectors) break;
      float x[n];
      widen(h[k], x);
      h[k] = normalized<T, centred>(x, norm, weight[k], bias[centred ? k : 0]);
      magnitude.include(h[k]);
    }
    const PlainScale g = scale_of_row(a.rules, magnitude.value(), lane, width);
    if (lane == 0 && vectors > 0) store_facts(a, r, norm, g.s);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * width + lane >= vectors) break;
      plain_bytes(h[k], g, a.rules).store(a.q + r * a.q_stride + (k * width + lane) * n);
    }
  }
}

// A block has a row, at any address and of any length.
template <class T, bool centred>
__global__ void __launch_bounds__(kNormThreads<T>) normalize_any_rows(const NormArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  const std::int64_t r = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  let_next_start();
  wait_for_previous();
  // Calls body(c, count, x') with the vectors of this thread.
  const auto for_each = [&](bool store, const auto& body) {
    for (std::int64_t c = lane * n; c < a.cols; c += kNormThreads<T> * n) {
      const int count = static_cast<int>(min(std::int64_t{n}, a.cols - c));
      float x[n];
      widen(a.load(r, c, count, store), x);
      body(c, count, x);
    }
  };
  bool store = true;
  const auto visit = [&](const auto& body) {
    for_each(store, [&](std::int64_t, int count, const float(&x)[n]) { body(x, count); });
    store = false;
  };
  const RowNorm norm = norm_of_row<centred, n>(visit, a.terms, a.epsilon, lane, kNormThreads<T>);
  const auto for_each_h = [&](const auto& body) {
    for_each(false, [&](std::int64_t c, int count, const float(&x)[n]) {
      float weight[n];
      float bias[n] = {};
      a.weight.load(c, count, weight);
      if constexpr (centred) a.bias.load(c, count, bias);
      Vector<T> h = normalized<T, centred>(x, norm, weight, bias);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (i >= count) h.at[i] = T(0.0f);
      }
      body(c, h);
    });
  };
  Magnitude<T> magnitude;
  for_each_h([&](std::int64_t, const Vector<T>& h) { magnitude.include(h); });
  const PlainScale g = scale_of_row(a.rules, magnitude.value(), lane, kNormThreads<T>);
  if (lane == 0) store_facts(a, r, norm, g.s);
  for_each_h([&](std::int64_t c, const Vector<T>& h) {
    const LevelBytes<n> bytes = plain_bytes(h, g, a.rules);
    a.put_bytes(r, c, bytes);
  });
}

constexpr int kFew = 1, kMany = 4, kLong = 8;  // vectors of a thread
constexpr int kBlocks = 6;                     // of normalize_rows on an SM, where rows are many

template <class T, bool centred>
void launch_rows(const NormArguments<T>& a, bool whole, int sms, Stream stream) {
  constexpr int n = kVectorSize<T>;
  constexpr int threads = kNormThreads<T>;
  const std::int64_t vectors = a.cols / n;
  if (!whole || a.cols % n != 0 || vectors > threads * kLong) {
    const LaunchShape shape = {dim3(static_cast<unsigned>(a.rows)), dim3(threads)};
    return enqueue(kAnyRows, normalize_any_rows<T, centred>, shape, stream, a);
  }
  const unsigned width = std::min<unsigned>(width_for(vectors, 1), threads);
  const unsigned height = width <= 32 ? 128 / width : 1;
  const unsigned blocks = std::min(blocks_for(a.rows, height), static_cast<unsigned>(kBlocks * sms));
  const dim3 block(width, height);
  const auto as = [&](auto* kernel, int each) {
    const unsigned shared = VectorsAhead<T>::bytes(block, a.residual.data ? 2 * each : each);
    enqueue(kRows, kernel, {dim3(blocks), block, shared}, stream, a);
  };
  vectors <= threads* kFew    ? as(normalize_rows<T, kFew, centred>, kFew)
  : vectors <= threads* kMany ? as(normalize_rows<T, kMany, centred>, kMany)
                              : as(normalize_rows<T, kLong, centred>, kLong);
}

template <class Body>
void with_norm(const QuantizeProblem& p, const Body& body) {
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    p.prologue == Prologue::layer_norm ? body.template operator()<T, true>() : body.template operator()<T, false>();
  });
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const Tensor q = row_major_q(p, o, launch);
  with_norm(p, [&]<class T, bool centred>() {
    NormArguments<T> a = {prologue_arguments(p, o, q), rows_of<T>(o.x)};
    bool whole = a.x.aligned && integer_rows(q, kVectorSize<T>).aligned;
    if (p.residual) {
      a.residual = rows_of<T>(o.residual);
      a.sum = rows_of<T>(o.sum);
      whole = whole && a.residual.aligned && a.sum.aligned;
    }
    a.weight = coefficients<T>(o.norm_weight);
    if (centred) a.bias = coefficients<T>(o.norm_bias);
    a.mean = static_cast<float*>(o.mean.data);
    a.mean_stride = o.mean.strides[0];
    a.rstd = static_cast<float*>(o.rstd.data);
    a.rstd_stride = o.rstd.strides[0];
    a.terms = static_cast<float>(a.cols);
    a.epsilon = static_cast<float>(p.epsilon);
    launch_rows<T, centred>(a, whole, properties(p.device).sms, launch.stream);
  });
  transpose_q(q, o.q_transposed, launch.stream);
}

std::string supports(const QuantizeProblem& p) {
  if (!is_norm(p.prologue)) return "has norms alone";
  return prologue_sm80_supports(p);
}

Cost cost(const QuantizeProblem& p) { return prologue_cost(p, 10, p.residual ? 3 : 1); }

void load(const QuantizeProblem& p) {
  with_norm(p, [&]<class T, bool centred>() {
    // At most 64 KiB of shared memory.
    constexpr dim3 block(kNormThreads<T>);
    prepare(kRows, normalize_rows<T, kFew, centred>, VectorsAhead<T>::bytes(block, 2 * kFew));
    prepare(kRows, normalize_rows<T, kMany, centred>, VectorsAhead<T>::bytes(block, 2 * kMany));
    prepare(kRows, normalize_rows<T, kLong, centred>, VectorsAhead<T>::bytes(block, 2 * kLong));
    prepare(kAnyRows, normalize_any_rows<T, centred>);
  });
  prepare_transpose_q();
}

}  // namespace

extern constinit const QuantizeKernel norm_quantize_sm80 = {
    .name = "norm_quantize_sm80",
    .task = {Operation::prologue_quantize},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = row_major_workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
