// y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]); a (m, k) f16, bf16, f32 or f64, b (n, k) s8, on every GPU from
// Ampere on, for every stride and alignment.
//
// 16-bit floats: mma.sync with sums in f32. A block multiplies a tile (kLeft rows of b, kRight rows of a), kStep terms
// at a time, through a ring of operand tiles in shared memory (device/product_tiles.cuh). b is converted to 16-bit
// floats in registers, which is exact, and multiplied by the scales there, with a rounding to 16 bits of the scale and
// of the product. With u the unit roundoff of a's type, the sum before y's rounding is off by at most
//   sum_c |a b s| * (2 u + k 2^-23) + (f16) sum_c |a| (|b| + 1) * 2^-33 * max_c |s|,
// since the tensor core truncates where it adds. f32 and f64: the ordinary arithmetic units.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/output_tiles.cuh"
#include "cuda/device/product_tiles.cuh"
#include "cuda/gemm/w8a16_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "w8a16_gemm_sm80";
constexpr double kBytesPerSecond = 25e9;  // of memory, and SM

// At 4096 cubed on an H200 this tile reaches 379 to 394 T/s, and 409 at 8192 cubed, whatever the operands'
// orientations. Warps of 64 x 64, each of which dequantizes twice as much, 336 to 383; a block of 8 warps alone on its
// SM, 256 x 128 or 128 x 256, 347 to 402, but with more shared memory than small GPUs have.
using Large = TileShape<128, 128, 64, 3, 4, 1, 2>;
using Small = TileShape<64, 64, 64, 4, 2, 2, 3>;

struct Product {
  Tiling tiling;  // left is b, right is a
  Factors c_scale;
  TileOutput output;
};

// ---- The arithmetic of a tile.

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
using HalfStage = Stage<Tile, kLeftOuter, kRightOuter, 2, TermScales<T, Tile::kStep>::kBytes>;

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
struct Work {
  using Stage = HalfStage<Tile, T, kLeftOuter, kRightOuter>;
  using Scales = TermScales<T, Tile::kStep>;
  using Pair = typename FromBytes<T>::Pair;
  static constexpr int kLeftBlocks = Tile::kWarpLeft / 16;
  static constexpr int kRightBlocks = Tile::kWarpRight / 8;
  // More than 64 rows of right are read in parts, each for as many matrix instructions: they would take all registers.
  static constexpr int kParts = kRightBlocks > 8 ? kRightBlocks / 8 : 1;
  static constexpr int kPartBlocks = kRightBlocks / kParts;
  static constexpr int kSlices = Tile::kStep / kHalfSlice * kParts;
  static_assert(kParts <= 2, "two sets of registers");
  static constexpr int kSlabPitch = std::max(Tile::kWarpLeft, Tile::kWarpRight) + 4;

  __device__ Work(const Product& p, int2 first, int lane)
      : left_reader(first.x, lane), right_reader(first.y, lane), term(lane % 4 * 4), scales(p.c_scale, p.tiling.k) {}

  __device__ void fill(int step, std::uint32_t stage) {
    scales.write(stage + Stage::kBesideTiles);
    scales.read(step + 1);
  }

  // A loop, since the compiler would make predicated instructions of a branch, which wait for all sums in every step.
  __device__ void begin() {
    if constexpr (Scales::kScaled) {
#pragma unroll 1
      while (exponent < coming_exponent) {
        const int by = min(coming_exponent - exponent, 126);
        exponent += by;
        const float down = __int_as_float(127 - by << 23);
#pragma unroll
        for (auto& row : sums) {
#pragma unroll
          for (auto& block : row) {
#pragma unroll
            for (float& sum : block) sum *= down;
          }
        }
      }
    }
  }

  __device__ void read(int to, std::uint32_t stage, int part) {
    const int slice = part / kParts;
    if (part % kParts == 0) {
#pragma unroll
      for (int i = 0; i < kLeftBlocks / 2; ++i) left_reader.load(stage, i, slice, left[to][i]);
      scale[to] = load_shared_pair(stage + Stage::kBesideTiles + (slice * kHalfSlice + term) * 2);
    }
    const int first = part % kParts * kPartBlocks / 2;
#pragma unroll
    for (int j = 0; j < kPartBlocks / 2; ++j) {
      right_reader.load(stage + Stage::kRightTile, first + j, slice, right[to][j]);
    }
    if (Scales::kScaled && part == 0) coming_exponent = Scales::exponent_at(stage + Stage::kBesideTiles);
  }

  __device__ void multiply(int from, int part) {
    const int first = part % kParts * kPartBlocks;
#pragma unroll
    for (int i = 0; i < kLeftBlocks; ++i) {
      if (first == 0) dequantize(from, i);
#pragma unroll
      for (int j = 0; j < kPartBlocks; ++j)
        multiply_add_16(T(), sums[i][first + j], terms[i], right[from][j / 2][j % 2]);
    }
  }

  // 16 rows of left to 16-bit floats.
  __device__ void dequantize(int from, int block) {
    const FromBytes<T> one(left[from][block / 2][block % 2 * 2]);
    const FromBytes<T> other(left[from][block / 2][block % 2 * 2 + 1]);
    Pair pairs[4];
    if constexpr (kLeftOuter) {
      pairs[0] = one.template pair<0, 2>(), pairs[1] = one.template pair<1, 3>();
      pairs[2] = other.template pair<0, 2>(), pairs[3] = other.template pair<1, 3>();
    } else {
      pairs[0] = one.template pair<0, 1>(), pairs[1] = other.template pair<0, 1>();
      pairs[2] = one.template pair<2, 3>(), pairs[3] = other.template pair<2, 3>();
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Pair scaled = __hmul2(pairs[e], reinterpret_cast<const Pair&>(e < 2 ? scale[from].x : scale[from].y));
      terms[block][e] = reinterpret_cast<const std::uint32_t&>(scaled);
    }
  }

  // Of 16 rows of sums a lane has two: of the two halves, or outer-major neighbours.
  __device__ static int row_of(int lane, int e) { return kLeftOuter ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8; }
  __device__ static int column_of(int lane, int block, int e) { return block * 8 + lane % 4 * 2 + e % 2; }
  __device__ float result(int i, int j, int e) const { return sums[i][j][e]; }
  __device__ float result_scale() const { return Scales::kScaled ? Scales::scale_of(exponent) : 1.0f; }

  const ByteReader<Tile, Tile::kLeft, kLeftOuter> left_reader;
  const HalfReader<Tile, Tile::kRight, kRightOuter> right_reader;
  const int term;
  Scales scales;
  int exponent = Scales::kMinExponent, coming_exponent;
  float sums[kLeftBlocks][kRightBlocks][4] = {};
  std::uint32_t left[2][kLeftBlocks / 2][4];
  std::uint32_t terms[kLeftBlocks][4];
  uint2 right[2][kPartBlocks / 2][2];
  uint2 scale[2];
};

// ---- The kernel.

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) w8a16_gemm_kernel(const __grid_constant__ Product p) {
  using Work = Work<Tile, T, kLeftOuter, kRightOuter>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int2 tile = first_of_tile<Tile>(p.tiling);
  const int2 part = first_of_warp<Tile>();
  Work work(p, part, static_cast<int>(threadIdx.x) % 32);
  wait_for_previous();
  let_next_start();
  work.scales.read(0);
  multiply_tile<Tile, typename Work::Stage>(p.tiling, tile, shared_address(shared), work);

  const int2 first = {tile.x + part.x, tile.y + part.y};
  float* const slabs = reinterpret_cast<float*>(shared);
  if (p.output.type == DType::f32) {
    store_tile<float, Tile>(p.output, p.tiling, work, first, slabs);
  } else {
    store_tile<T, Tile>(p.output, p.tiling, work, first, slabs);
  }
}

// ---- The launch.

template <class Tile, class T, bool kLeftOuter, bool kRightOuter>
constexpr TileKernel<Product> kKernel = {w8a16_gemm_kernel<Tile, T, kLeftOuter, kRightOuter>,
                                         Tile::kStages* HalfStage<Tile, T, kLeftOuter, kRightOuter>::kBytes};

template <class Tile, class T>
TileKernel<Product> kernel_of(const GemmProblem& problem) {
  const bool right_outer = problem.a_major == Major::outer;
  if (problem.b_major == Major::outer)
    return right_outer ? kKernel<Tile, T, true, true> : kKernel<Tile, T, true, false>;
  return right_outer ? kKernel<Tile, T, false, true> : kKernel<Tile, T, false, false>;
}

template <class Tile>
TileKernel<Product> kernel_for(const GemmProblem& problem) {
  return problem.a == DType::f16 ? kernel_of<Tile, __half>(problem) : kernel_of<Tile, __nv_bfloat16>(problem);
}

template <class Tile>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  Product p = {};
  p.tiling = tiling_of<Tile>(operand_of(o.b, problem.b_major == Major::outer),
                             operand_of(o.a, problem.a_major == Major::outer), o.a.cols());
  p.c_scale = factors_of(o.b_scale, problem.scale);
  p.output = output_of(problem, o.y, problem.y_major == Major::contraction);
  const unsigned blocks = static_cast<unsigned>(p.tiling.left_tiles) * static_cast<unsigned>(p.tiling.right_tiles);
  const TileKernel<Product> kernel = kernel_for<Tile>(problem);
  enqueue(kName, kernel.function, LaunchShape{blocks, Tile::kThreads, kernel.shared_bytes}, launch.stream, p);
}

constexpr int kWideTile = 128;

template <class Real>
void launch_wide(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  WideProduct<Real> p = {};
  p.a = {static_cast<const Real*>(o.a.data), o.a.strides[0], o.a.strides[1]};
  p.b = {static_cast<const std::int8_t*>(o.b.data), o.b.strides[0], o.b.strides[1]};
  p.y = {static_cast<Real*>(o.y.data), o.y.strides[0], o.y.strides[1]};
  p.c_scale = factors_of(o.b_scale, problem.scale);
  p.m = static_cast<int>(o.y.rows());
  p.n = static_cast<int>(o.y.cols());
  p.k = static_cast<int>(o.a.cols());
  p.accumulate = problem.accumulate;
  const unsigned blocks = blocks_for(p.m, kWideTile) * blocks_for(p.n, kWideTile);
  enqueue(kName, wide_product_kernel<Real, kWideTile>, LaunchShape{blocks, kWideThreads}, launch.stream, p);
}

bool is_half(const GemmProblem& problem) { return problem.a == DType::f16 || problem.a == DType::bf16; }

// The smaller tile serves products of few large ones.
template <class Tile>
constexpr TileCost kCost = Tile::kLeft == Large::kLeft ? TileCost{44e-6, 59e-6, 10e-6} : TileCost{18e-6, 37e-6, 9e-6};

template <class Tile>
double seconds(double m, double n, const GemmProblem& problem) {
  return seconds_of<Tile>(kCost<Tile>, m, n, problem);
}

double wide_seconds(double m, double n, const GemmProblem& problem) {
  const bool f64 = problem.a == DType::f64;
  constexpr double tile = kWideTile;
  const double rounds = std::ceil(std::ceil(m / tile) * std::ceil(n / tile) / properties(problem.device).sms);
  const double per_second = f64 ? 0.12e12 : 0.26e12;  // of an SM
  return 2 * tile * tile * static_cast<double>(problem.k) * rounds / per_second + 7e-6;
}

std::string supports(const GemmProblem& problem) {
  if (problem.grouped()) return "has no groups";
  return reason_against_product(problem);
}

Cost cost(const GemmProblem& problem) {
  const auto m = static_cast<double>(problem.m);
  const auto n = static_cast<double>(problem.n);
  const auto k = static_cast<double>(problem.k);
  const double bytes = m * k * bits(problem.a) / 8 + n * k + m * n * bits(problem.y) / 8;
  const double arithmetic = is_half(problem) ? std::min(seconds<Large>(m, n, problem), seconds<Small>(m, n, problem))
                                             : wide_seconds(m, n, problem);
  const double memory = bytes / (kBytesPerSecond * properties(problem.device).sms);
  return {2 * m * n * k, bytes, std::max(arithmetic, memory)};
}

void load(const GemmProblem& problem) {
  if (problem.a == DType::f32) return prepare(kName, wide_product_kernel<float, kWideTile>);
  if (problem.a == DType::f64) return prepare(kName, wide_product_kernel<double, kWideTile>);
  for (const TileKernel<Product>& kernel : {kernel_for<Large>(problem), kernel_for<Small>(problem)}) {
    prepare(kName, kernel.function, kernel.shared_bytes);
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  if (problem.a == DType::f32) return launch_wide<float>(problem, o, launch);
  if (problem.a == DType::f64) return launch_wide<double>(problem, o, launch);
  const auto m = static_cast<double>(o.y.rows());
  const auto n = static_cast<double>(o.y.cols());
  const bool large = seconds<Large>(m, n, problem) < seconds<Small>(m, n, problem);
  (large ? launch_tile<Large> : launch_tile<Small>)(problem, o, launch);
}

}  // namespace

extern constinit const GemmKernel w8a16_gemm_sm80 = {
    .name = "w8a16_gemm_sm80",
    .task = {Operation::gemm, kW8A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .bound = Bound::rounded_scale,
};

}  // namespace octile::cuda
