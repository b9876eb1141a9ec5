// y[i, j] = bias[j], or 0: the products whose contraction is empty.
#include <algorithm>
#include <cstdint>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
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

// The bias has y's type, so that bits are copied: all that matters of a type is its size.
void write_empty_sum(const GemmOperands& o, Stream stream) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
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
