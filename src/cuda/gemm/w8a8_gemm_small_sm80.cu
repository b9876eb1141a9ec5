// w8a8_gemm_small_sm80, for products so small that the launch and memory latency take most of their time:
//
//   y (m, n) = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8 along k,
//   lines that begin anywhere
//
// A block computes 16 rows and 8 * kEights columns of y, and its warps take 64 terms in turns, from global memory
// straight into the registers of mma.sync. Which terms a lane loads does not matter, as long as it loads the same ones
// of a and of b: here 16 in a row, from two aligned units of 16 bytes. At the end the warps' sums are added in shared
// memory.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/device/bytes.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/product_tiles.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "w8a8_gemm_small_sm80";

constexpr int kRows = 16;
constexpr int kTerms = 64;  // of a warp at a time: a unit of each of the four lanes that share a row
constexpr int kMaxWarps = 16;

// kEights: columns of y, in eights.
template <int kEights_>
struct SmallTile {
  static constexpr int kEights = kEights_;
  static constexpr int kColumns = 8 * kEights;
  static constexpr int kPitch = kColumns + 8;  // of a warp's sums, without bank conflicts
};

struct Product {
  Operand a, b;
  int k;
  RowScale<float> a_scale, b_scale;
  const void* bias;
  std::int64_t bias_stride;
  void* y;
  std::int64_t y_row, y_column;  // strides
};

// 16 bytes, if `really`, without a branch. Past the L1: see RowScale.
__device__ void load_if(bool really, const std::int8_t* from, uint4& to) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n\t"
      "@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
      : "l"(from), "r"(static_cast<int>(really)));
}

// A lane's 16 terms of a row of an operand, in two units from `unit` on: rows that do not exist are the last one, and
// behind a row is what follows it. The unit in which the operand ends is not read where some of its bytes lie behind
// the end; before_end: bytes from `unit` to that one.
struct Line {
  const std::int8_t* unit;
  int before_end;
  unsigned shift;

  __device__ Line(const Operand& o, int row, int term) {
    const std::int8_t* const from = o.data + min(row, o.rows - 1) * o.pitch + term;
    shift = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from) % kChunk);
    unit = from - shift;
    before_end = static_cast<int>(min(last_unit(o) - unit, std::int64_t{1} << 30));
  }

  __device__ static const std::int8_t* last_unit(const Operand& o) {
    return o.end - reinterpret_cast<std::uintptr_t>(o.end) % kChunk;
  }

  // Beyond the end, where values do not count.
  __device__ void load(int offset, uint4 (&units)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = offset + i * kChunk;
      load_if(at < before_end, unit + at, units[i]);
    }
  }
  __device__ uint4 bytes(int offset, uint4 (&units)[2], const uint4& last_unit) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (offset + i * kChunk == before_end) units[i] = last_unit;
    }
    return shifted_bytes(units[0], units[1], shift);
  }
};

// The first `count` bytes of 16, and zeros.
__device__ uint4 first_bytes(uint4 bytes, int count) {
  const auto mask = [count](int word) {
    return __funnelshift_lc(~0u, 0u, 8u * static_cast<unsigned>(min(max(count - 4 * word, 0), 4)));
  };
  return {bytes.x & mask(0), bytes.y & mask(1), bytes.z & mask(2), bytes.w & mask(3)};
}

template <class Tile, class Y>
__global__ void __launch_bounds__(32 * kMaxWarps) small_gemm_kernel(const __grid_constant__ Product p) {
  constexpr int kEights = Tile::kEights;
  extern __shared__ std::int32_t shared[];
  __shared__ __align__(16) std::uint8_t ends[kMaxWarps][2][kChunk];
  wait_for_previous();
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  const int row = static_cast<int>(blockIdx.x) * kRows;
  const int column = static_cast<int>(blockIdx.y) * Tile::kColumns;

  // Each half of the warp brings the last unit of an operand, byte by byte.
  const std::int8_t* const end = lane < kChunk ? p.a.end : p.b.end;
  const std::int8_t* const byte = Line::last_unit(lane < kChunk ? p.a : p.b) + lane % kChunk;
  const std::int8_t end_byte = byte < end ? __ldcg(byte) : std::int8_t{0};

  const int first_term = warp * kTerms + lane % 4 * kChunk;
  const Line a[2] = {{p.a, row + lane / 4, first_term}, {p.a, row + lane / 4 + 8, first_term}};
  const auto b_lines = [&]<int... i>(std::integer_sequence<int, i...>) {
    struct Lines {
      Line at[kEights];
    };
    return Lines{{Line(p.b, column + lane / 4 + 8 * i, first_term)...}};
  };
  const auto b = b_lines(std::make_integer_sequence<int, kEights>());

  const int y_column = column + lane % Tile::kColumns;
  float a_scale = 0, b_scale = 0, bias = 0;  // of row `lane`, and of this thread's column
  uint4 a_end = {}, b_end = {};
  std::int32_t sums[kEights][4] = {};
  const int all_warps = threads / 32 * kTerms;
#pragma unroll 1
  for (int offset = 0; offset + warp * kTerms < p.k; offset += all_warps) {
    uint4 a_units[2][2], b_units[kEights][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) a[r].load(offset, a_units[r]);
#pragma unroll
    for (int e = 0; e < kEights; ++e) b.at[e].load(offset, b_units[e]);
    if (offset == 0) {  // behind the loads, which everything waits for
      a_scale = p.a_scale[min(row + lane % kRows, p.a.rows - 1)];
      b_scale = p.b_scale[min(y_column, p.b.rows - 1)];
      const Y* const biases = static_cast<const Y*>(p.bias);
      bias = biases ? widen(__ldcg(biases + min(y_column, p.b.rows - 1) * p.bias_stride)) : -0.0f;
      ends[warp][lane / kChunk][lane % kChunk] = static_cast<std::uint8_t>(end_byte);
      __syncwarp();
      a_end = *reinterpret_cast<const uint4*>(ends[warp][0]);
      b_end = *reinterpret_cast<const uint4*>(ends[warp][1]);
    }
    uint4 left[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // What follows a row of a is taken as zeros; what follows one of b then does not count.
      left[r] = first_bytes(a[r].bytes(offset, a_units[r], a_end), p.k - first_term - offset);
    }
    const std::uint32_t first[4] = {left[0].x, left[1].x, left[0].y, left[1].y};
    const std::uint32_t second[4] = {left[0].z, left[1].z, left[0].w, left[1].w};
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const uint4 right = b.at[e].bytes(offset, b_units[e], b_end);
      multiply_add_s8(sums[e], first, right.x, right.y);
      multiply_add_s8(sums[e], second, right.z, right.w);
    }
  }

  constexpr int kSums = kRows * Tile::kPitch;
  std::int32_t* const own = shared + warp * kSums + lane / 4 * Tile::kPitch + lane % 4 * 2;
#pragma unroll
  for (int e = 0; e < kEights; ++e) {
    *reinterpret_cast<int2*>(own + 8 * e) = {sums[e][0], sums[e][1]};
    *reinterpret_cast<int2*>(own + 8 * e + 8 * Tile::kPitch) = {sums[e][2], sums[e][3]};
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < kRows * Tile::kColumns; i += threads) {  // the same number of times in all of a warp
    const int in_tile = i / Tile::kColumns;
    const std::int32_t* from = shared + in_tile * Tile::kPitch + i % Tile::kColumns;
    std::int32_t sum = 0;
#pragma unroll 2
    for (int w = 0; w < threads / 32; ++w) sum += from[w * kSums];
    const float row_scale = __shfl_sync(~0u, a_scale, in_tile);
    const float value = __fmaf_rn(__int2float_rn(sum), __fmul_rn(row_scale, b_scale), bias);
    if (row + in_tile < p.a.rows && y_column < p.b.rows) {
      static_cast<Y*>(p.y)[(row + in_tile) * p.y_row + y_column * p.y_column] = narrow<Y>(value);
    }
  }
}

// ---- The host's side.

// Seconds: of a block's first terms, from its launch to its end, and of each of the next that a warp takes.
struct TileTimes {
  double first, next;
};

// Calls body.operator()<Tile>(columns, times) for every tile. Fitted to 120 timings on an H200 (9 % root mean square).
template <class Body>
void for_each_tile(const Body& body) {
  body.template operator()<SmallTile<4>>(32, TileTimes{3.36e-6, 1.26e-6});
  body.template operator()<SmallTile<2>>(16, TileTimes{2.67e-6, 0.91e-6});
}

constexpr double kLaunchSeconds = 2.87e-6;
constexpr double kRowSeconds = 11e-9;  // of an SM that has many warps: 64 terms of eight rows of b, or of 3 of a
constexpr double kLeftRows = 5.4;
// Where lines are aligned, the other rows take less time than they expect: 5.4 in place of 7.4 us (128 x 256 x 1024).
constexpr double kAlignedSeconds = 2.5e-6;

struct Choice {
  int columns = 0;
  int warps = 1;
  double seconds = std::numeric_limits<double>::infinity();
};

Choice choose(const GemmProblem& p) {
  const int turns = static_cast<int>(std::max<std::int64_t>(ceil_div(p.k, kTerms), 1));
  const int sms = properties(p.device).sms;
  Choice best;
  for_each_tile([&]<class Tile>(int columns, const TileTimes& times) {
    const double blocks = static_cast<double>(ceil_div(p.m, kRows) * ceil_div(p.n, columns));
    const double work = blocks * turns * (kLeftRows + Tile::kEights) * kRowSeconds / sms;
    for (int most = kMaxWarps; most >= 1; most /= 2) {
      const int warps = std::min(most, turns);
      const double alone = times.first + (ceil_div(turns, warps) - 1) * times.next;
      const double waves = std::ceil(blocks / (sms * (kMaxWarps / warps)));
      const double seconds = kLaunchSeconds + std::max(waves * alone, work + alone);
      if (seconds < best.seconds) best = {columns, warps, seconds};
    }
  });
  if (p.k % kChunk == 0) best.seconds += kAlignedSeconds;
  return best;
}

std::string supports(const GemmProblem& p) {
  if (p.grouped()) return "has no groups";
  if (p.scale != DType::f32) return "has no f64";
  if (p.accumulate) return "does not add to y";
  if (p.a_major != Major::contraction || p.b_major != Major::contraction) return "takes operands along the contraction";
  constexpr std::int64_t kMaxSize = std::int64_t{1} << 18;
  if (std::max({p.m, p.n, p.k}) > kMaxSize) return "takes at most 2^18 rows, columns or terms";
  return reason_against_product(p);
}

Cost cost(const GemmProblem& p) {
  Cost cost = gemm_work(p);
  cost.seconds = choose(p).seconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const Choice choice = choose(p);
  return message("tile ", kRows, "x", choice.columns, ", ", choice.warps,
                 choice.warps == 1 ? " warp" : " warps along k");
}

template <class Tile>
unsigned shared_bytes(int warps) {
  return static_cast<unsigned>(warps) * kRows * Tile::kPitch * sizeof(std::int32_t);
}

void load(const GemmProblem& p) {
  with_narrow_type(p.y, [&]<class Y>(Y) {
    for_each_tile(
        [&]<class Tile>(int, TileTimes) { prepare(kName, small_gemm_kernel<Tile, Y>, shared_bytes<Tile>(kMaxWarps)); });
  });
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  GemmProblem now = problem;
  now.m = o.a.rows();
  now.k = o.a.cols();
  const Choice choice = choose(now);
  Product p = {};
  p.a = operand_of(o.a, false);
  p.b = operand_of(o.b, false);
  p.k = static_cast<int>(o.a.cols());
  p.a_scale = row_scale<float>(o.a_scale);
  p.b_scale = row_scale<float>(o.b_scale);
  if (problem.bias) p.bias = o.bias.data;
  p.bias_stride = problem.bias ? o.bias.strides[0] : 0;
  p.y = o.y.data;
  p.y_row = o.y.strides[0];
  p.y_column = o.y.strides[1];
  with_narrow_type(problem.y, [&]<class Y>(Y) {
    for_each_tile([&]<class Tile>(int columns, TileTimes) {
      if (columns != choice.columns) return;
      const dim3 grid(blocks_for(o.a.rows(), kRows), blocks_for(o.b.rows(), Tile::kColumns));
      const LaunchShape shape{grid, static_cast<unsigned>(32 * choice.warps), shared_bytes<Tile>(choice.warps)};
      enqueue(kName, small_gemm_kernel<Tile, Y>, shape, launch.stream, p);
    });
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_small_sm80 = {
    .name = kName,
    .task = {Operation::gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
};

}  // namespace octile::cuda
