// w4a16 for every GPU from Ampere on, every type, stride and alignment: plain arithmetic in f32, or in f64.
//
//   y (m, n) = round_to_y(sum_c a[i, c] * ((q[j, c] - z[j, c / g]) * s[j, c / g]) + bias[j])
//
// A block of 16 x 16 threads multiplies kTile rows of a by kTile rows of the weight, whose pieces lie in shared memory
// along the rows; the next ones are on their way in registers.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/gemm/nibble_weight.h"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemm_sm80";
constexpr int kTile = 64;
constexpr int kStep = 32;  // terms
constexpr int kSide = 16;  // threads of a block, in both directions
constexpr int kThreads = kSide * kSide;
constexpr int kRun = kTile * kStep / kThreads;  // terms of one row that a thread brings
constexpr int kPitch = kTile + 4;
static_assert(kRun == 8, "within one group, and one lane of a packed weight");

struct Arguments {
  NibbleWeight weight;
  const void* a = nullptr;
  std::int64_t a_row = 0;
  std::int64_t a_col = 0;
  int m = 0;
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* y = nullptr;
  std::int64_t y_row = 0;
  std::int64_t y_col = 0;
  DType y_type = DType::f32;
};

// A thread's terms of a piece.
template <class T>
struct Pieces {
  using Real = RealOf<T>;
  const Arguments& p;
  int row = static_cast<int>(threadIdx.x) / (kStep / kRun);
  int term = static_cast<int>(threadIdx.x) % (kStep / kRun) * kRun;
  int a_row;
  int b_row;
  Real a[kRun];
  Real b[kRun];

  __device__ void read(int first) {
    const NibbleWeight& w = p.weight;
    const int c = first + term;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const bool inside = a_row < p.m && c + i < w.terms;
      a[i] = inside ? widen(__ldcg(static_cast<const T*>(p.a) + a_row * p.a_row + (c + i) * p.a_col)) : Real(0);
    }
    const bool inside = b_row < w.rows && c < w.terms;
    const int group = inside ? c / w.group : 0;
    const int offset = inside ? w.offset(b_row, group) : 0;
    const Real scale = inside ? __ldcg(static_cast<const Real*>(w.scales) + w.scale.at(b_row, group)) : Real(0);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      b[i] = inside && c + i < w.terms ? static_cast<Real>(w.nibble(b_row, c + i) - offset) * scale : Real(0);
    }
  }

  __device__ void write(Real (&a_piece)[kStep][kPitch], Real (&b_piece)[kStep][kPitch]) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      a_piece[term + i][row] = a[i];
      b_piece[term + i][row] = b[i];
    }
  }
};

template <class Y>
__device__ void store_as(const Arguments& p, std::int64_t row, std::int64_t col, RealOf<Y> sum) {
  if (p.bias != nullptr) sum += widen(__ldcg(static_cast<const Y*>(p.bias) + col * p.bias_stride));
  static_cast<Y*>(p.y)[row * p.y_row + col * p.y_col] = narrow<Y>(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads) w4a16_gemm_kernel(const __grid_constant__ Arguments p) {
  using Real = RealOf<T>;
  __shared__ __align__(16) Real a_piece[kStep][kPitch];
  __shared__ __align__(16) Real b_piece[kStep][kPitch];
  const int tiles = (p.weight.rows + kTile - 1) / kTile;
  const int first_row = static_cast<int>(blockIdx.x) / tiles * kTile;
  const int first_col = static_cast<int>(blockIdx.x) % tiles * kTile;
  const int down = static_cast<int>(threadIdx.x) / kSide * 4;
  const int across = static_cast<int>(threadIdx.x) % kSide * 4;
  Pieces<T> next = {p};
  next.a_row = first_row + next.row;
  next.b_row = first_col + next.row;
  Real sums[4][4] = {};

  wait_for_previous();
  let_next_start();
  next.read(0);
#pragma unroll 1
  for (int term = 0; term < p.weight.terms; term += kStep) {
    next.write(a_piece, b_piece);
    __syncthreads();
    if (term + kStep < p.weight.terms) next.read(term + kStep);
#pragma unroll 8
    for (int c = 0; c < kStep; ++c) {
      Real a[4];
      Real b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = a_piece[c][down + i];
        b[i] = b_piece[c][across + i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fma(a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + down + i;
      const int col = first_col + across + j;
      if (row >= p.m || col >= p.weight.rows) continue;
      if constexpr (sizeof(Real) == 8) {
        store_as<double>(p, row, col, sums[i][j]);
      } else if (p.y_type == DType::f16) {
        store_as<__half>(p, row, col, sums[i][j]);
      } else if (p.y_type == DType::bf16) {
        store_as<__nv_bfloat16>(p, row, col, sums[i][j]);
      } else {
        store_as<float>(p, row, col, sums[i][j]);
      }
    }
  }
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::string supports(const GemmProblem& p) {
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  if (ceil_div(p.m, kTile) * ceil_div(p.n, kTile) > std::int64_t{1} << 30) return "takes at most 2^30 tiles of y";
  return reason_against(p.device, 80);
}

// On an H200.
Cost cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const std::int64_t rounds =
      ceil_div(ceil_div(p.m, kTile) * ceil_div(p.n, kTile), 4 * properties(p.device).multiprocessors);
  const double seconds =
      static_cast<double>(rounds) * k * 4 * kTile * kTile * 2 / (p.scale == DType::f64 ? 0.06e12 : 0.12e12);
  return {2 * m * n * k, m * k * bits(p.a) / 8 + n * k / 2 + m * n * bits(p.y) / 8, 5e-6 + seconds};
}

void load(const GemmProblem& p) {
  with_float_type(p.a, []<class T>(T) { prepare(kName, w4a16_gemm_kernel<T>); });
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  Arguments p;
  p.weight = nibble_weight(problem, o);
  p.a = o.a.data;
  p.a_row = o.a.strides[0];
  p.a_col = o.a.strides[1];
  p.m = static_cast<int>(o.a.rows());
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
  }
  p.y = o.y.data;
  p.y_row = o.y.strides[0];
  p.y_col = o.y.strides[1];
  p.y_type = problem.y;
  const auto blocks = static_cast<unsigned>(ceil_div(p.m, kTile) * ceil_div(problem.n, kTile));
  with_float_type(problem.a, [&]<class T>(T) {
    enqueue(kName, w4a16_gemm_kernel<T>, LaunchShape{blocks, kThreads}, launch.stream, p);
  });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_sm80 = {
    .name = "w4a16_gemm_sm80",
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .bound = Bound::sum,
};

}  // namespace octile::cuda
