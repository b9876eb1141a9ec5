// w4a8 for every GPU from Ampere on, every type, stride and alignment: four terms an instruction, s8 by s8.
//
//   t = fma(f32(sum_{c in g} a[i, c] * (q[j, c] - z[j, g])), s[j, g], t) over the groups g in order, from t = 0
//   y[i, j] = round_to_y(fma(t, a_scale[i], bias[j]))
//
// A block of 16 x 16 threads multiplies kTile rows of a by kTile rows of the weight, whose pieces lie in shared memory,
// four terms a word; the next ones are on their way in registers. A piece lies within one group.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/gemm/nibble_weight.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a8_gemm_sm80";
constexpr int kTile = 64;
constexpr int kStep = 32;  // terms
constexpr int kWords = kStep / 4;
constexpr int kSide = 16;  // threads of a block, in both directions
constexpr int kThreads = kSide * kSide;
constexpr int kRun = kTile * kStep / kThreads;  // terms of one row that a thread brings
constexpr int kPitch = kTile + 4;
static_assert(kRun == 8);

template <class Real>
struct Arguments {
  NibbleWeight weight;
  const std::int8_t* a = nullptr;
  std::int64_t a_row = 0;
  std::int64_t a_col = 0;
  RowScale<Real> a_scale;
  int m = 0;
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* y = nullptr;
  std::int64_t y_row = 0;
  std::int64_t y_col = 0;
  DType y_type = DType::f32;
};

// A thread's terms of a piece.
template <class Real>
struct Pieces {
  const Arguments<Real>& p;
  int row = static_cast<int>(threadIdx.x) / (kStep / kRun);
  int term = static_cast<int>(threadIdx.x) % (kStep / kRun) * kRun;
  int a_row;
  int b_row;
  unsigned a[kRun / 4];
  unsigned b[kRun / 4];

  __device__ void read(int first) {
    const NibbleWeight& w = p.weight;
    const bool has_b = b_row < w.rows && first < w.terms;
    const int offset = has_b ? w.offset(b_row, first / w.group) : 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int c = first + term + i;
      const bool inside = c < w.terms;
      const int value = inside && a_row < p.m ? __ldcg(p.a + a_row * p.a_row + c * p.a_col) : 0;
      const int weight = inside && has_b ? w.nibble(b_row, c) - offset : 0;
      if (i % 4 == 0) a[i / 4] = b[i / 4] = 0;
      a[i / 4] |= (value & 255u) << i % 4 * 8;
      b[i / 4] |= (weight & 255u) << i % 4 * 8;
    }
  }

  __device__ void write(int (&a_piece)[kWords][kPitch], int (&b_piece)[kWords][kPitch]) const {
#pragma unroll
    for (int i = 0; i < kRun / 4; ++i) {
      a_piece[term / 4 + i][row] = static_cast<int>(a[i]);
      b_piece[term / 4 + i][row] = static_cast<int>(b[i]);
    }
  }
};

template <class Y, class Real>
__device__ void store_as(const Arguments<Real>& p, std::int64_t row, std::int64_t col, Real total) {
  const Real scale = p.a_scale[row];
  if (p.bias == nullptr) {
    total *= scale;
  } else {
    total = fma(total, scale, Real(widen(__ldcg(static_cast<const Y*>(p.bias) + col * p.bias_stride))));
  }
  static_cast<Y*>(p.y)[row * p.y_row + col * p.y_col] = narrow<Y>(total);
}

template <class Real>
__global__ void __launch_bounds__(kThreads) w4a8_gemm_kernel(const __grid_constant__ Arguments<Real> p) {
  __shared__ __align__(16) int a_piece[kWords][kPitch];
  __shared__ __align__(16) int b_piece[kWords][kPitch];
  const NibbleWeight& w = p.weight;
  const int tiles = (w.rows + kTile - 1) / kTile;
  const int first_row = static_cast<int>(blockIdx.x) / tiles * kTile;
  const int first_col = static_cast<int>(blockIdx.x) % tiles * kTile;
  const int down = static_cast<int>(threadIdx.x) / kSide * 4;
  const int across = static_cast<int>(threadIdx.x) % kSide * 4;
  Pieces<Real> next = {p};
  next.a_row = first_row + next.row;
  next.b_row = first_col + next.row;
  int sums[4][4] = {};
  Real totals[4][4] = {};

  wait_for_previous();
  let_next_start();
  next.read(0);
#pragma unroll 1
  for (int term = 0; term < w.terms; term += kStep) {
    next.write(a_piece, b_piece);
    __syncthreads();
    if (term + kStep < w.terms) next.read(term + kStep);
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = __dp4a(a_piece[c][down + i], b_piece[c][across + j], sums[i][j]);
      }
    }
    if (term + kStep >= w.terms || (term + kStep) % w.group == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = min(first_col + across + j, w.rows - 1);
        const Real scale = __ldcg(static_cast<const Real*>(w.scales) + w.scale.at(row, term / w.group));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          totals[i][j] = fma(static_cast<Real>(sums[i][j]), scale, totals[i][j]);
          sums[i][j] = 0;
        }
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
      if (row >= p.m || col >= w.rows) continue;
      if constexpr (sizeof(Real) == 8) {
        store_as<double>(p, row, col, totals[i][j]);
      } else if (p.y_type == DType::f16) {
        store_as<__half>(p, row, col, totals[i][j]);
      } else if (p.y_type == DType::bf16) {
        store_as<__nv_bfloat16>(p, row, col, totals[i][j]);
      } else {
        store_as<float>(p, row, col, totals[i][j]);
      }
    }
  }
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class Real>
void launch_as(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  Arguments<Real> p;
  p.weight = nibble_weight(problem, o);
  p.a = static_cast<const std::int8_t*>(o.a.data);
  p.a_row = o.a.strides[0];
  p.a_col = o.a.strides[1];
  p.a_scale = row_scale<Real>(o.a_scale);
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
  enqueue(kName, w4a8_gemm_kernel<Real>, LaunchShape{blocks, kThreads}, stream, p);
}

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
  const double seconds = static_cast<double>(rounds) * k * 4 * kTile * kTile * 2 / 0.12e12;
  return {2 * m * n * k, m * k + n * k / 2 + m * n * bits(p.y) / 8, 5e-6 + seconds};
}

void load(const GemmProblem& p) {
  p.scale == DType::f64 ? prepare(kName, w4a8_gemm_kernel<double>) : prepare(kName, w4a8_gemm_kernel<float>);
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  problem.scale == DType::f64 ? launch_as<double>(problem, o, launch.stream)
                              : launch_as<float>(problem, o, launch.stream);
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_sm80 = {
    .name = "w4a8_gemm_sm80",
    .task = {Operation::gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
