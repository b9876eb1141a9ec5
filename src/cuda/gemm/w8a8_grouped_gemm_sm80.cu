// w8a8_gemm_sm80 of each expert's rows: y[i, j] = fma(Real(sum_c a[t, c] * b[e, j, c]), a_scale[t] * b_scale[e, j],
// bias[e, j]) for the rows i of expert e, t the row of a that i is of; on every GPU from Ampere on, for every stride
// and alignment.
//
// A block finds its tile among the experts' (device/experts.cuh), and then is a block of the dense kernel. Rows of a
// are gathered on the way into shared memory. Consecutive blocks have the tiles of one expert's weight.
#include <cstdint>
#include <limits>
#include <string>

#include "base/message.h"
#include "cuda/device/bands.cuh"
#include "cuda/device/experts.cuh"
#include "cuda/gemm/w8a8_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8_sm80;

constexpr char kName[] = "w8a8_grouped_gemm_sm80";

// Rows of y, which may be others of a.
struct GatheredOperand : Operand {
  const std::int32_t* token;
  std::int64_t token_stride;

  __device__ int row_of_a(int row) const { return token ? __ldcg(token + row * token_stride) : row; }
};

struct Arguments {
  Experts experts;
  GatheredOperand a;  // rows: none
  Operand b;          // of expert 0
  int k, right_tiles;
  Factors a_scale, b_scale, bias;
  DType scale_type, bias_type;
  void* y;
  std::int64_t y_pitch;
  DType y_type;
  bool y_aligned;
};

// One expert's product, as the dense kernel's Product: rows of left are those of y.
struct ExpertProduct {
  struct {
    GatheredOperand left;
    Operand right;
    int k;
  } tiling;
  Factors left_scale, right_scale, bias;
  void* y;
  std::int64_t y_pitch;
  DType y_type, type_of_bias;
  bool y_aligned;
  int part_terms;
  static constexpr bool bias_of_left = false;
  static constexpr bool accumulate = false;
  static constexpr int parts = 1;
  static constexpr std::int32_t* sums = nullptr;
  static constexpr std::int64_t sums_pitch = 0;

  template <class Real>
  __device__ Real left_scale_of(int row) const {
    return left_scale.at<Real>(tiling.left.row_of_a(row));
  }
  __device__ DType bias_type() const { return type_of_bias; }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    w8a8_grouped_gemm_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  wait_for_previous();
  const ExpertTile t = find_tile<Tile::kLeft>(p.experts, static_cast<int>(blockIdx.x) / p.right_tiles);
  if (t.expert < 0) return;
  const std::int64_t e = t.expert;
  ExpertProduct product = {{p.a, p.b, p.k},
                           p.a_scale,
                           moved(p.b_scale, e * p.experts.b_scale),
                           moved(p.bias, e * p.experts.bias),
                           p.y,
                           p.y_pitch,
                           p.y_type,
                           p.bias_type,
                           p.y_aligned,
                           p.k};
  product.tiling.left.rows = t.end;
  product.tiling.right.data += e * p.experts.b;
  const int of_expert = t.tile * p.right_tiles + static_cast<int>(blockIdx.x) % p.right_tiles;
  const int2 tile = tile_in_bands(of_expert, t.tiles, p.right_tiles);
  multiply_and_store<Tile, false, false, true>(product, {t.first + tile.x * Tile::kLeft, tile.y * Tile::kRight}, 0,
                                               shared);
}

// ---- The host's side.

// Of few rows, more blocks than the dense kernel's tiles: each begins with a search, and with copies that it waits for.
using Narrow = TileShape<16, 64, 128, 5, 1, 2, 4, 2, false>;
using Short = TileShape<32, 64, 128, 5, 1, 2, 3, 2, false>;

// The dense kernel's tiles, without those of 64 terms, which are for operands that are never experts'; and more.
template <class Body>
void for_each_grouped_tile(const Body& body) {
  for_each_tile([&]<class Tile, bool kOuter>(const Candidate<Tile, kOuter>& candidate) {
    if constexpr (Tile::kStep >= 128) body.template operator()<Tile>(candidate.times);
  });
  body.template operator()<Narrow>(TileTimes{2.4e-6, 0.5e-6, 6.5e-6});
  body.template operator()<Short>(TileTimes{3.2e-6, 1.2e-6, 8.5e-6});
}

// Calls body.operator()<Tile>() for the tile with this number.
template <class Body>
void with_grouped_tile(int number, const Body& body) {
  int i = 0;
  for_each_grouped_tile([&]<class Tile>(const TileTimes&) {
    if (i++ == number) body.template operator()<Tile>();
  });
}

constexpr double kFromL2 = 3;  // times as fast as from memory

struct Choice {
  int tile = -1;
  double seconds = std::numeric_limits<double>::infinity();
};

Choice choose(const GemmProblem& p, bool shifted) {
  const CudaDevice& gpu = properties(p.device);
  const double bytes_per_second = kTileBytesPerSecond * gpu.sms;
  const double weight = static_cast<double>(p.n) * static_cast<double>(p.k);  // of an expert
  Choice best;
  int number = 0;
  for_each_grouped_tile([&]<class Tile>(const TileTimes& times) {
    const int tile = number++;
    if (!fits<Tile>(gpu) || (shifted && !Tile::kShifts)) return;
    const double row_tiles = expected_tiles(p, p.m, Tile::kLeft);
    const double blocks = row_tiles * static_cast<double>(ceil_div(p.n, Tile::kRight));
    // Another tile of an expert's rows reads its weight again, from L2.
    const double again = (row_tiles - experts_with_rows(p, p.m)) * weight / (kFromL2 * bytes_per_second);
    const double memory = grouped_work(p).bytes / bytes_per_second + again;
    const double tiles = block_seconds<Tile>(times, blocks, p.k, shifted, gpu);
    const double seconds = launch_seconds(tiles, memory);
    if (seconds < best.seconds) best = {tile, seconds};
  });
  return best;
}

bool is_shifted(const GemmProblem& p) { return p.k % kChunk != 0; }

std::string supports(const GemmProblem& p) {
  if (p.grouped()) return "takes a scale per channel or tensor, not groups";
  if (std::string reason = reason_against_product(p); !reason.empty()) return reason;
  const int lowest = Lowest::kLeft;
  if (max_tiles(p, p.m, lowest) > (std::int64_t{1} << 30) / std::max<std::int64_t>(ceil_div(p.n, Deep::kRight), 1)) {
    return "takes at most 2^30 tiles of y";
  }
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = choose(p, is_shifted(p)).seconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  std::string text;
  with_grouped_tile(choose(p, is_shifted(p)).tile, [&]<class Tile>() {
    text = message("tile ", Tile::kLeft, "x", Tile::kRight, ", steps of ", Tile::kStep);
  });
  return text;
}

void load(const GemmProblem& p) {
  for_each_grouped_tile([&]<class Tile>(const TileTimes&) {
    if (fits<Tile>(properties(p.device))) prepare(kName, w8a8_grouped_gemm_kernel<Tile>, kSharedBytes<Tile>);
  });
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const std::int64_t m = o.y.rows();
  if (m == 0 || problem.n == 0 || problem.experts == 0) return;
  Arguments p = {};
  p.experts = experts_of(problem, o);
  static_cast<Operand&>(p.a) = operand_of(o.a, false);
  p.a.token = p.experts.token;
  p.a.token_stride = p.experts.token_stride;
  p.b = operand_of(o.b, false);
  p.b.end += (problem.experts - 1) * p.experts.b;
  p.b.shifted = !aligned_rows(p.b.data, p.b.pitch | p.experts.b, kChunk);
  p.k = static_cast<int>(problem.k);
  p.a_scale = factors_of(o.a_scale, problem.scale);
  p.b_scale = factors_of(o.b_scale, problem.scale);
  if (problem.bias) p.bias = {o.bias.data, o.bias.strides[0], 0};
  p.bias_type = o.bias.dtype;
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  const std::int64_t element = bits(problem.y) / 8;
  p.y_aligned = aligned_rows(p.y, p.y_pitch * element, std::min<std::int64_t>(4 * element, 16));
  GemmProblem run = problem;
  run.m = m;
  with_grouped_tile(choose(run, p.a.shifted || p.b.shifted).tile, [&]<class Tile>() {
    p.right_tiles = static_cast<int>(ceil_div(problem.n, Tile::kRight));
    const auto blocks = static_cast<unsigned>(max_tiles(problem, m, Tile::kLeft) * p.right_tiles);
    enqueue(kName, w8a8_grouped_gemm_kernel<Tile>, LaunchShape{blocks, Tile::kThreads, kSharedBytes<Tile>},
            launch.stream, p);
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_grouped_gemm_sm80 = {
    .name = kName,
    .task = {Operation::grouped_gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
};

}  // namespace octile::cuda
