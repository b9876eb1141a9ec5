// y[i, j] = bias[j], or 0: the products whose contraction is empty. And bias[e, j] for the rows of expert e;
// clear_rest: 0 for the rows of no expert.
#include <algorithm>
#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/output.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "empty_sum_sm80";
constexpr int kThreads = 256;
constexpr unsigned kMaxBlocks = 65535;  // along y; rows beyond are taken in turns

// y (rows, cols) of bits the size of Bits, strides in elements. bias: null for 0.
template <class Bits>
struct Sum {
  Bits* y;
  std::int64_t row_stride, col_stride;
  std::int64_t rows, cols;
  const Bits* bias;
  std::int64_t bias_stride;
};

template <class Bits>
__global__ void __launch_bounds__(kThreads) empty_sum_kernel(const __grid_constant__ Sum<Bits> s) {
  wait_for_previous();
  let_next_start();
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= s.cols) return;
  const Bits value = s.bias ? __ldcg(s.bias + col * s.bias_stride) : Bits{};
  for (std::int64_t row = blockIdx.y; row < s.rows; row += gridDim.y) {
    s.y[row * s.row_stride + col * s.col_stride] = value;
  }
}

struct ExpertSum {
  Experts experts;
  void* y;
  std::int64_t row_stride;
  DType y_type;
  int rows, cols;
  const void* bias;  // null: none
  std::int64_t bias_stride;
  DType bias_type;
};

__global__ void __launch_bounds__(kThreads) expert_empty_sum_kernel(const __grid_constant__ ExpertSum s) {
  wait_for_previous();
  let_next_start();
  const int col = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (col >= s.cols) return;
  for (int row = static_cast<int>(blockIdx.y); row < s.rows; row += static_cast<int>(gridDim.y)) {
    if (row < s.experts.offset(0)) continue;
    // The row belongs to the last expert that begins at it or before, or to none.
    int expert = 0;
    for (int last = s.experts.count; expert < last;) {
      const int middle = (expert + last + 1) / 2;
      s.experts.offset(middle) <= row ? static_cast<void>(expert = middle) : static_cast<void>(last = middle - 1);
    }
    if (expert == s.experts.count) continue;
    const auto* const bias = static_cast<const std::uint8_t*>(s.bias) + expert * s.experts.bias;
    const std::int64_t from = col * s.bias_stride, to = row * s.row_stride + col;
    if (s.y_type == DType::f64) {
      static_cast<double*>(s.y)[to] = s.bias ? __ldcg(reinterpret_cast<const double*>(bias) + from) : 0;
    } else {
      store_float(s.y, to, s.y_type, s.bias ? load_float(bias, from, s.bias_type) : 0);
    }
  }
}

void launch_expert_empty_sum(const GemmOperands& o, Stream stream) {
  ExpertSum s = {};
  s.experts = experts_at(o.experts.offsets);
  s.y = o.y.data;
  s.row_stride = o.y.strides[0];
  s.y_type = o.y.dtype;
  s.rows = static_cast<int>(o.y.rows());
  s.cols = static_cast<int>(o.y.cols());
  if (o.bias.present()) {
    s.experts.bias = o.experts.bias_stride * (bits(o.bias.dtype) / 8);
    s.bias = o.bias.data;
    s.bias_stride = o.bias.strides[0];
    s.bias_type = o.bias.dtype;
  }
  const auto rows = static_cast<unsigned>(std::min<std::int64_t>(s.rows, kMaxBlocks));
  enqueue(kName, expert_empty_sum_kernel, LaunchShape{{blocks_for(s.cols, kThreads), rows}, kThreads}, stream, s);
}

struct Rest {
  void* y;
  std::int64_t row_stride, col_stride;
  DType y_type;
  int rows, cols;
  const std::int32_t* offsets;  // the first and the last one
  std::int64_t last_offset;
};

__global__ void __launch_bounds__(kThreads) clear_rest_kernel(const __grid_constant__ Rest p) {
  wait_for_previous();
  let_next_start();
  const int begin = __ldcg(p.offsets), end = __ldcg(p.offsets + p.last_offset);
  const int rest = p.rows - (end - begin);
  for (int i = static_cast<int>(blockIdx.x); i < rest; i += static_cast<int>(gridDim.x)) {
    const std::int64_t row = i < begin ? i : i + (end - begin);
    for (int col = static_cast<int>(threadIdx.x); col < p.cols; col += kThreads) {
      const std::int64_t to = row * p.row_stride + col * p.col_stride;
      if (p.y_type == DType::f64) {
        static_cast<double*>(p.y)[to] = 0;
      } else {
        store_float(p.y, to, p.y_type, 0);
      }
    }
  }
}

template <class Bits>
void launch_empty_sum(const GemmOperands& o, Stream stream) {
  const Sum<Bits> s{static_cast<Bits*>(o.y.data),
                    o.y.strides[0],
                    o.y.strides[1],
                    o.y.rows(),
                    o.y.cols(),
                    static_cast<const Bits*>(o.bias.present() ? o.bias.data : nullptr),
                    o.bias.strides[0]};
  const auto columns = blocks_for(s.cols, kThreads);
  const auto rows = static_cast<unsigned>(std::min<std::int64_t>(s.rows, kMaxBlocks));
  enqueue(kName, empty_sum_kernel<Bits>, LaunchShape{{columns, rows}, kThreads}, stream, s);
}

}  // namespace

void prepare_clear_rest() { prepare(kName, clear_rest_kernel); }

void clear_rest(const ConstTensor& offsets, const Tensor& y, Stream stream) {
  const Rest p{y.data,
               y.strides[0],
               y.strides[1],
               y.dtype,
               static_cast<int>(y.rows()),
               static_cast<int>(y.cols()),
               static_cast<const std::int32_t*>(offsets.data),
               (offsets.rows() - 1) * offsets.strides[0]};
  constexpr int kRestBlocks = 264;  // most calls have no such row
  enqueue(kName, clear_rest_kernel, LaunchShape{static_cast<unsigned>(std::min(p.rows, kRestBlocks)), kThreads}, stream,
          p);
}

// The bias has y's type, so that bits are copied: all that matters of a type is its size.
void write_empty_sum(const GemmOperands& o, Stream stream) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  if (o.experts.offsets.present()) return launch_expert_empty_sum(o, stream);
  switch (bits(o.y.dtype)) {
    case 16:
      return launch_empty_sum<std::uint16_t>(o, stream);
    case 32:
      return launch_empty_sum<std::uint32_t>(o, stream);
    default:
      return launch_empty_sum<unsigned long long>(o, stream);
  }
}

}  // namespace octile::cuda
