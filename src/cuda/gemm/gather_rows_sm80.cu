// A warp copies a row, 16 bytes a lane at a time.
#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/gemm/gather_rows.h"
#include "cuda/gemm/repack.h"
#include "cuda/launch.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "gather_rows_sm80";
constexpr int kThreads = 256;
constexpr int kRows = kThreads / 32;  // of a block
constexpr int kInFlight = 4;

struct Gather {
  Experts experts;
  const std::uint8_t* from;
  std::int64_t from_pitch;  // bytes
  std::uint8_t* to;
  std::int64_t to_pitch;
  int units;  // of 16 bytes, of a row
};

__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ Gather p) {
  wait_for_previous();
  let_next_start();
  const int row = static_cast<int>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / 32;
  if (row < p.experts.offset(0) || row >= p.experts.offset(p.experts.count)) return;
  const auto* const from = reinterpret_cast<const uint4*>(p.from + p.experts.row_of_a(row) * p.from_pitch);
  auto* const to = reinterpret_cast<uint4*>(p.to + row * p.to_pitch);
  for (int first = static_cast<int>(threadIdx.x) % 32; first < p.units; first += 32 * kInFlight) {
    uint4 values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + 32 * i < p.units) values[i] = __ldcg(from + first + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + 32 * i < p.units) to[first + 32 * i] = values[i];
    }
  }
}

std::int64_t row_bytes(const GemmProblem& p) { return p.k * bits(p.a) / 8; }

}  // namespace

std::size_t gathered_size(const GemmProblem& p) { return p.gather ? repacked_size(p.m, row_bytes(p)) : 0; }

double gather_seconds(const GemmProblem& p) {
  constexpr double kLaunch = 2e-6, kBytesPerSecond = 3e12;
  return p.gather ? kLaunch + 2 * static_cast<double>(p.m * row_bytes(p)) / kBytesPerSecond : 0;
}

void prepare_gather_rows() { prepare(kName, gather_rows_kernel); }

void gather_rows(const GemmProblem& problem, GemmOperands& o, const Launch& launch) {
  Gather p;
  p.experts = experts_of(problem, o);
  p.from = static_cast<const std::uint8_t*>(o.a.data);
  p.from_pitch = o.a.strides[0] * (bits(problem.a) / 8);
  p.to = static_cast<std::uint8_t*>(launch.workspace.data);
  p.to_pitch = repacked_pitch(row_bytes(problem));
  p.units = static_cast<int>(row_bytes(problem) / 16);
  const std::int64_t m = o.y.rows();
  enqueue(kName, gather_rows_kernel, LaunchShape{blocks_for(m, kRows), kThreads}, launch.stream, p);
  o.a = matrix(p.to, problem.a, problem.device, m, problem.k, p.to_pitch / (bits(problem.a) / 8));
}

}  // namespace octile::cuda
