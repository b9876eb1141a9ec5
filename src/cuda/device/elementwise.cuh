// The elementwise walk of kernels whose scales are known, 16 bytes of a row at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/bytes.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/levels.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

// A row-major matrix of T. `aligned`: every 16 bytes of a row, counted from its start, are aligned.
template <class T>
struct Rows {
  T* data;
  std::int64_t stride;
  bool aligned;

  __device__ T* at(std::int64_t r, std::int64_t c) const { return data + r * stride + c; }
};

template <class T>
Rows<const T> rows_of(const ConstTensor& t) {
  const std::int64_t pitch = t.strides[0] * static_cast<std::int64_t>(sizeof(T));
  return {static_cast<const T*>(t.data), t.strides[0], aligned_rows(t.data, pitch, 16)};
}

template <class T>
Rows<T> rows_of(const Tensor& t) {
  const std::int64_t pitch = t.strides[0] * static_cast<std::int64_t>(sizeof(T));
  return {static_cast<T*>(t.data), t.strides[0], aligned_rows(t.data, pitch, 16)};
}

// A matrix of s8, u8 or s4. `aligned`: every `n` elements of a row, counted from its start, are aligned to their size.
struct IntegerRows {
  std::uint8_t* data;
  std::int64_t stride;
  DType dtype;
  bool aligned;

  // n elements from an even column on, `count` of them valid. The odd last column of an s4 row leaves its nibble 0.
  template <int n>
  __device__ void put(std::int64_t r, std::int64_t c, const std::int32_t (&q)[n], int count) const {
    if (dtype == DType::s4) return put_nibbles(data + (r * stride + c) / 2, q, count);
    std::uint8_t* const p = data + r * stride + c;
    if (aligned && count >= n) {
      if constexpr (n == 8) {
        *reinterpret_cast<uint2*>(p) = {low_bytes(q[0], q[1], q[2], q[3]), low_bytes(q[4], q[5], q[6], q[7])};
      } else if constexpr (n == 4) {
        *reinterpret_cast<unsigned*>(p) = low_bytes(q[0], q[1], q[2], q[3]);
      } else {
        *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(low_bytes(q[0], q[1], 0, 0));
      }
      return;
    }
    put_bytes(r, c, q, count);
  }
  // The same at any alignment.
  template <int n>
  __device__ void put_bytes(std::int64_t r, std::int64_t c, const std::int32_t (&q)[n], int count) const {
    if (dtype == DType::s4) return put_nibbles(data + (r * stride + c) / 2, q, count);
    std::uint8_t* const p = data + r * stride + c;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i < count) p[i] = static_cast<std::uint8_t>(q[i]);
    }
  }

  // n elements as they are in memory, the first in the lowest bits; `count` of them valid.
  template <int n>
  __device__ std::uint64_t load(std::int64_t r, std::int64_t c, int count) const {
    const bool nibbles = dtype == DType::s4;
    const std::uint8_t* const p = data + (nibbles ? (r * stride + c) / 2 : r * stride + c);
    if (aligned && count >= n && !nibbles) {
      if constexpr (n == 8) {
        const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
        return v.x | std::uint64_t{v.y} << 32;
      } else if constexpr (n == 4) {
        return __ldcg(reinterpret_cast<const unsigned*>(p));
      } else {
        return __ldcg(reinterpret_cast<const unsigned short*>(p));
      }
    }
    const int bytes = nibbles ? (count + 1) / 2 : count;
    std::uint64_t all = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i < bytes) all |= std::uint64_t{__ldcg(p + i)} << (8 * i);
    }
    return all;
  }
  template <int n>
  __device__ void unpack(std::uint64_t all, std::int32_t (&q)[n]) const {
    const auto low = static_cast<std::uint32_t>(all);
    const auto high = static_cast<std::uint32_t>(all >> 32);
    if (dtype == DType::s4) {
#pragma unroll
      for (int i = 0; i < n; ++i) q[i] = static_cast<std::int32_t>(low << (28 - 4 * i)) >> 28;
      return;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const std::int32_t top = static_cast<std::int32_t>((i < 4 ? low : high) << (24 - i % 4 * 8));
      q[i] = dtype == DType::s8 ? top >> 24 : static_cast<std::int32_t>(static_cast<std::uint32_t>(top) >> 24);
    }
  }

 private:
  template <int n>
  __device__ static void put_nibbles(std::uint8_t* p, const std::int32_t (&q)[n], int count) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const int high = i + 1 < count ? q[i + 1] : 0;
      if (i < count) p[i / 2] = static_cast<std::uint8_t>((q[i] & 15) | high << 4);
    }
  }
};

template <class Void>
IntegerRows integer_rows(const BasicTensor<Void>& t, int n) {
  return {static_cast<std::uint8_t*>(const_cast<void*>(static_cast<const void*>(t.data))), t.strides[0], t.dtype,
          aligned_rows(t.data, t.strides[0], n)};
}

// The scales of a matrix, one value or one per segment.
template <class Real>
struct SegmentScales {
  const Real* scale;
  const std::int32_t* zero;  // null: 0
  std::int64_t row_stride, col_stride, zero_row_stride, zero_col_stride;
  std::int64_t group;
  Real value;  // where `scale` is null

  __device__ Segment<Real> at(std::int64_t r, std::int64_t c) const {
    std::int64_t g = c;
    if (group != 1 && (col_stride | zero_col_stride) != 0) {
      g = c >> 32 || group >> 32 ? c / group : static_cast<std::uint32_t>(c) / static_cast<std::uint32_t>(group);
    }
    return {scale ? __ldcg(scale + r * row_stride + g * col_stride) : value,
            zero ? __ldcg(zero + r * zero_row_stride + g * zero_col_stride) : 0};
  }
  // Where those of column c begin: the division by the group is done once for all rows.
  struct Place {
    const Real* scale;
    const std::int32_t* zero;
  };
  __device__ Place place(std::int64_t c) const {
    const std::int64_t g = (col_stride | zero_col_stride) != 0 ? c / group : 0;
    return {scale ? scale + g * col_stride : nullptr, zero ? zero + g * zero_col_stride : nullptr};
  }
  __device__ Segment<Real> at(const Place& p, std::int64_t r) const {
    return {p.scale ? __ldcg(p.scale + r * row_stride) : value, p.zero ? __ldcg(p.zero + r * zero_row_stride) : 0};
  }
  // Elements c .. c + n - 1 for c a multiple of n have one.
  __host__ __device__ bool shared_by(int n) const { return (col_stride | zero_col_stride) == 0 || group % n == 0; }
};

template <class Real>
SegmentScales<Real> given_scales(const QuantizeOperands& o) {
  const Scales& s = o.given_scale;
  const Scales& z = o.given_zero_point;
  SegmentScales<Real> scales = {static_cast<const Real*>(s.data),
                                static_cast<const std::int32_t*>(z.data),
                                s.row_stride,
                                s.col_stride,
                                z.row_stride,
                                z.col_stride,
                                s.group,
                                Real(1)};
  if (s.on_host) {
    scales.value = *scales.scale;
    scales.scale = nullptr;
  }
  return scales;
}

// What a quantizer reads: x, times a factor of its column or row, rounded once.
template <class T>
struct Input {
  using Real = RealOf<T>;

  Rows<const T> x;
  Multiplier multiplier;
  RowScale<Real> factor;

  // Zeros beyond `count`. c is a multiple of the vector's size, if x is aligned.
  __device__ void get(std::int64_t r, std::int64_t c, int count, Real (&out)[kVectorSize<T>]) const {
    widen_all(load_vector(x.at(r, c), count, x.aligned), r, c, count, out);
  }
  __device__ Real get_one(std::int64_t r, std::int64_t c) const {
    const Real value = widen(__ldcg(x.at(r, c)));
    if (multiplier == Multiplier::none) return value;
    return product(value, factor[multiplier == Multiplier::per_column ? c : r]);
  }
  __device__ void widen_all(const Vector<T>& v, std::int64_t r, std::int64_t c, int count,
                            Real (&out)[kVectorSize<T>]) const {
    widen(v, out);
    if (multiplier == Multiplier::none) return;
    const bool columns = multiplier == Multiplier::per_column;
    const Real of_row = columns || count <= 0 ? Real(0) : factor[r];
#pragma unroll
    for (int i = 0; i < kVectorSize<T>; ++i) {
      if (i < count) out[i] = product(out[i], columns ? factor[c + i] : of_row);
    }
  }

 private:
  __device__ static float product(float a, float b) { return __fmul_rn(a, b); }
  __device__ static double product(double a, double b) { return __dmul_rn(a, b); }
};

template <class T>
Input<T> input_of(const QuantizeProblem& p, const QuantizeOperands& o) {
  Input<T> input = {rows_of<T>(o.x), p.multiplier, {}};
  if (p.multiplier != Multiplier::none) input.factor = row_scale<RealOf<T>>(o.multiplier);
  return input;
}

template <class Real>
Rules<Real> rules_of(const QuantizeProblem& p, const QuantizeOperands& o) {
  Rules<Real> rules;
  rules.q_min = static_cast<Real>(p.q_min);
  rules.q_max = static_cast<Real>(p.q_max);
  rules.min_scale = static_cast<Real>(p.min_scale);
  rules.given = p.scale == ScaleSource::given;
  rules.symmetric = rules.given || p.mapping == Mapping::symmetric;
  rules.stochastic = p.rounding == Rounding::stochastic;
  rules.seed = o.seed;
  return rules;
}

inline constexpr int kWalkThreads = 256;
inline constexpr std::int64_t kMaxDown = 65535;  // blocks of a grid along y

// Over all elements, 16 bytes of floats at a time where they share a scale, otherwise two elements at a time:
//   Op::Loaded load(r, c, count), then finish(loaded, r, c, count), for op.kElements, the last ones of a row fewer;
//   Op::kBatch loads of a thread are under way together
//   pair(r, c, count)   1 or 2 elements, c even
template <class Op>
__global__ void __launch_bounds__(kWalkThreads) walk_elements(std::int64_t rows, std::int64_t cols, Op op) {
  constexpr int n = Op::kElements;
  wait_for_previous();
  let_next_start();
  const std::int64_t block_col = std::int64_t{blockIdx.x} * blockDim.x * n;
  const std::int64_t first_row = std::int64_t{blockIdx.y} * blockDim.y * Op::kBatch + threadIdx.y;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y * Op::kBatch;
  if (!op.scales.shared_by(n)) {
    for (std::int64_t row = first_row; row < rows; row += step) {
      for (std::int64_t r = row; r < row + Op::kBatch * blockDim.y && r < rows; r += blockDim.y) {
        for (int i = 0; i < n / 2; ++i) {
          const std::int64_t c = block_col + (i * blockDim.x + threadIdx.x) * 2;
          if (c < cols) op.pair(r, c, cols - c < 2 ? 1 : 2);
        }
      }
    }
    return;
  }
  const std::int64_t c = block_col + threadIdx.x * n;
  if (c >= cols) return;
  const int count = static_cast<int>(cols - c < n ? cols - c : n);
  for (std::int64_t r = first_row; r < rows; r += step) {
    typename Op::Loaded loaded[Op::kBatch];
#pragma unroll
    for (int k = 0; k < Op::kBatch; ++k) {
      if (r + k * blockDim.y < rows) loaded[k] = op.load(r + k * blockDim.y, c, count);
    }
#pragma unroll
    for (int k = 0; k < Op::kBatch; ++k) {
      if (r + k * blockDim.y < rows) op.finish(loaded[k], r + k * blockDim.y, c, count);
    }
  }
}

// For at most about `max_blocks` blocks, which loop over rows.
template <class Op>
LaunchShape walk_shape(const ConstTensor& matrix, std::int64_t max_blocks) {
  const std::int64_t vectors = ceil_div(matrix.cols(), Op::kElements);
  unsigned width = kWalkThreads;
  while (width > 1 && width / 2 >= vectors) width /= 2;
  const unsigned height = kWalkThreads / width;
  const unsigned high = height * Op::kBatch;
  const auto across = blocks_for(vectors, width);
  const std::int64_t down = std::min({ceil_div(matrix.rows(), high), ceil_div(max_blocks, across), kMaxDown});
  return {dim3(across, static_cast<unsigned>(down)), dim3(width, height)};
}

template <class Op>
void enqueue_walk(std::string_view kernel, const ConstTensor& matrix, const Op& op, Stream stream) {
  enqueue(kernel, walk_elements<Op>, walk_shape<Op>(matrix, INT32_MAX), stream, matrix.rows(), matrix.cols(), op);
}

}  // namespace octile::cuda
