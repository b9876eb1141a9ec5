// w8a8_gemm_skinny_sm90, for few rows of a, tokens: close to the time of reading the weight from memory.
//
//   y (m, n) = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k), b (n, k) s8, rows of both
//   contiguous, sums in s32
//
// Where TMA can read both operands: w8a8_gemm_skinny_sm90.cuh, whose shape is chosen here. Up to 32 tokens where it can
// read b only: w8a8_gemm_skinny_sm90_unaligned.cuh.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/gemm/w8a8_gemm_skinny_sm90.cuh"
#include "cuda/gemm/w8a8_gemm_skinny_sm90_unaligned.cuh"
#include "cuda/tensor_map.h"
#include "plan/cost.h"

namespace octile::cuda {

extern const GemmKernel w8a8_gemm_sm80;  // whose cost is expected where TMA cannot read the weight

namespace {

constexpr std::string_view kName = "w8a8_gemm_skinny_sm90";
constexpr std::int64_t kMaxTokens = 512;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;  // of b: 32-bit indices

// How blocks share the work.
struct TileShape {
  int groups = 0;  // of SkinnyTile, as `rows`
  int rows = 0;
  int token_parts = 1;  // blocks of a cluster
  int row_parts = 1;
  int token_groups = 1;  // clusters
  int tile_rows = 0;     // of b, of a block
  int waves = 1;
  double seconds = std::numeric_limits<double>::infinity();

  int cluster() const { return token_parts * row_parts; }
};

// Fitted to an H200, L2 filled by reads: memory or tensor cores, whichever is slower; reads from L2; each further block
// in a cluster, or cluster that reads the same rows of b; each wave; and launch, prologue and epilogue.
constexpr double kMemoryBytesPerSecond = 4.2e12;
constexpr double kProductsPerSecond = 4096 * 1.5e9;  // int8 multiply-adds of an SM
constexpr double kCacheBytesPerSecond = 60e12;
constexpr double kSharingSeconds = 0.5e-6;
constexpr double kWaveSeconds = 4e-6;
constexpr double kFixedSeconds = 4.8e-6;
// Of more than 128 tokens, up to 256 fitted to 120 timings with L2 filled by writes (8 % root mean square): beside
// these, each step of k where blocks with other rows share tokens, and for each further cluster that reads the same
// rows. Above 256: 5 to 30 % more than all that was measured, in clusters of three 40 %.
constexpr double kManyFixedSeconds = 6.8e-6;
constexpr double kOneWave = 0.85;
constexpr double kMoreWaves = 0.95;
constexpr double kSharedStepSeconds = 40e-9;
constexpr double kGroupStepSeconds = 20e-9;
constexpr double kManyTokens = 1.15;
constexpr double kThreeParts = 1.35;

// The best tile_rows of a shape that is otherwise given, and its time.
template <class T>
void complete(TileShape& shape, const GemmSize& s, Device device) {
  const int unit = shape.token_parts == 3 ? 24 : 8;
  const std::int64_t max_rows = T::rows / unit * unit;
  const std::int64_t at_once =
      std::max<std::int64_t>(max_active_clusters(device, shape.cluster()) / shape.token_groups, 1) * shape.row_parts;
  const std::int64_t waves = std::max<std::int64_t>(ceil_div(s.n, at_once * max_rows), 1);
  shape.waves = static_cast<int>(waves);
  const std::int64_t wanted = std::max<std::int64_t>(ceil_div(s.n, at_once * waves), 1);
  shape.tile_rows = static_cast<int>(std::min(ceil_div(wanted, unit) * unit, max_rows));
  const auto k = static_cast<double>(s.k);
  const auto m = static_cast<double>(s.m);
  const auto clusters = static_cast<double>(ceil_div(s.n, shape.tile_rows * shape.row_parts) * shape.token_groups);
  const double memory = (static_cast<double>(s.n) + m) * k / kMemoryBytesPerSecond;
  const double cache =
      clusters * (m / shape.token_groups + shape.tile_rows * shape.row_parts) * k / kCacheBytesPerSecond;
  const double products = static_cast<double>(waves) * T::tokens * T::rows * k / kProductsPerSecond;
  const double sharing = (shape.cluster() - 1 + shape.token_groups - 1) * kSharingSeconds;
  const double work = std::max(memory, products) + cache + sharing + static_cast<double>(waves - 1) * kWaveSeconds;
  if (s.m <= 128 || s.m > 256) {
    shape.seconds = kFixedSeconds + work * (s.m <= 128 ? 1 : shape.token_parts == 3 ? kThreeParts : kManyTokens);
    return;
  }
  const double of_step = (shape.row_parts > 1 ? kSharedStepSeconds : 0) + (shape.token_groups - 1) * kGroupStepSeconds;
  const double factor = shape.token_parts == 3 ? kThreeParts : waves == 1 ? kOneWave : kMoreWaves;
  shape.seconds = kManyFixedSeconds + factor * (work + of_step * k / kTileK);
}

// Calls body(tile) for every tile.
template <class Body>
void for_each_tile(const Body& body) {
  body(SkinnyTile<1, 32>());
  body(SkinnyTile<1, 64>());
  body(SkinnyTile<1, 112>());
  body(SkinnyTile<2, 64>());
  body(SkinnyTile<2, 112>());
  body(SkinnyTile<2, 176>());
  body(SkinnyTile<2, 224>());
}

TileShape search_shape(const GemmSize& s, Device device) {
  TileShape best;
  for_each_tile([&]<class T>(T) {
    const int parts = static_cast<int>(ceil_div(s.m, T::tokens));
    for (int token_parts = 1; token_parts <= parts; ++token_parts) {
      if (parts % token_parts != 0) continue;
      for (int row_parts = 1; row_parts * token_parts <= 4; row_parts *= 2) {
        TileShape shape;
        shape.groups = T::groups;
        shape.rows = T::rows;
        shape.token_parts = token_parts;
        shape.row_parts = row_parts;
        shape.token_groups = parts / token_parts;
        complete<T>(shape, s, device);
        if (shape.seconds < best.seconds) best = shape;
      }
    }
  });
  return best;
}

// A search takes the host about a microsecond, so each thread caches its results.
TileShape best_shape(const GemmSize& s, Device device) {
  struct Found {
    GemmSize size = {};
    Device device = {};
    TileShape shape;
  };
  constexpr std::size_t kRemembered = 64;
  static thread_local Found found[kRemembered];
  Found& f = found[static_cast<std::size_t>(s.m * 31 + s.n * 7 + s.k / 64) % kRemembered];
  if (f.size.m != s.m || f.size.n != s.n || f.size.k != s.k || f.device != device) {
    f = {s, device, search_shape(s, device)};
  }
  return f.shape;
}

template <class T>
void launch_tile(const TileShape& shape, const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  TiledProduct p;
  p.rows = static_cast<int>(o.b.rows());
  p.tokens = static_cast<int>(o.a.rows());
  p.steps = static_cast<int>(ceil_div(o.a.cols(), kTileK));
  p.tile_rows = shape.tile_rows;
  p.token_parts = shape.token_parts;
  p.row_parts = shape.row_parts;
  p.token_groups = shape.token_groups;
  p.load_tokens = static_cast<int>(ceil_div(ceil_div(p.tokens, p.token_parts * p.token_groups), p.row_parts));
  p.tile_tokens = p.load_tokens * p.row_parts;
  p.load_rows = p.tile_rows / p.token_parts;
  p.every_part = 0;
  for (int i = 0; i < p.row_parts; ++i) p.every_part |= 1u << i * p.token_parts;
  p.stages = tile_stages<T>(p, kSkinnyShared);
  p.a_scale = row_scale<float>(o.a_scale);
  p.b_scale = row_scale<float>(o.b_scale);
  p.bias = bias_of(problem, o);
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  p.y_aligned = aligned_for(o.y, 4);
  const std::int64_t clusters = ceil_div(p.rows, p.tile_rows * p.row_parts) * p.token_groups;
  enqueue(kName, w8a8_gemm_skinny_kernel<T>,
          LaunchShape{static_cast<unsigned>(clusters * shape.cluster()), T::threads, kSkinnyShared,
                      dim3(static_cast<unsigned>(shape.cluster()))},
          stream, tensor_map(kName, o.b, {p.load_rows, kTileK, true}),
          tensor_map(kName, o.a, {p.load_tokens, kTileK, true}), p);
}

// Calls body(token blocks) where a fits into shared memory; false: it does not.
template <class Body>
bool with_few(std::int64_t tokens, std::int64_t k, const Body& body) {
  if (tokens <= 8 && fits_skinny<1>(tokens, k)) return body(std::integral_constant<int, 1>()), true;
  if (tokens <= 16 && fits_skinny<2>(tokens, k)) return body(std::integral_constant<int, 2>()), true;
  if (tokens <= 32 && fits_skinny<4>(tokens, k)) return body(std::integral_constant<int, 4>()), true;
  return false;
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.grouped()) return "has no groups";
  if (p.scale != DType::f32) return "has no f64";
  if (p.a_major != Major::contraction || p.b_major != Major::contraction || p.y_major != Major::contraction) {
    return "needs contiguous rows of a, b and y";
  }
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.accumulate) return "cannot add to y";
  if (p.m > kMaxTokens) return message("is for up to ", kMaxTokens, " rows of a");
  if (p.n > kMaxRows) return "takes at most 2^30 rows of b";
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = gemm_work(p);
  const bool tma_reads = p.k % kTmaAlignment == 0;
  cost.seconds = tma_reads ? best_shape(size_of(p), p.device).seconds : w8a8_gemm_sm80.cost(p).seconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const TileShape shape = best_shape(size_of(p), p.device);
  return message("tiles of ", 64 * shape.groups, " tokens and ", shape.tile_rows, " rows of b, clusters ",
                 shape.token_parts, "x", shape.row_parts, ", ", shape.waves, shape.waves > 1 ? " waves" : " wave");
}

void load(const GemmProblem& problem) {
  prepare_clusters(problem.device);
  prepare_skinny<1>(kName);
  prepare_skinny<2>(kName);
  prepare_skinny<4>(kName);
  for_each_tile([]<class T>(T) { prepare(kName, w8a8_gemm_skinny_kernel<T>, kSkinnyShared); });
  prepare_tensor_maps(kName);
}

// Rows of b that TMA cannot read are read 16 bytes at a time, beside few tokens.
bool aligned(const GemmProblem&, const GemmOperands& o) {
  if (mappable(o.a) && mappable(o.b)) return true;
  return aligned_rows(o.b.data, o.b.strides[0], 16) && with_few(o.a.rows(), o.a.cols(), [](auto) {});
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const GemmSize size = size_of(o);
  if (size.m == 0 || size.n == 0) return;
  if (mappable(o.a) && mappable(o.b)) {
    const TileShape shape = best_shape(size, problem.device);
    return for_each_tile([&]<class T>(T) {
      if (shape.groups == T::groups && shape.rows == T::rows) launch_tile<T>(shape, problem, o, launch.stream);
    });
  }
  with_few(size.m, size.k, [&](auto blocks) {
    SkinnyProduct p = skinny_product(problem, o);
    launch_skinny<decltype(blocks)::value>(kName, p, problem, launch.stream);
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_skinny_sm90 = {
    .name = "w8a8_gemm_skinny_sm90",
    .task = {Operation::gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
};

}  // namespace octile::cuda
