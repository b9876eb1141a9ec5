// w8a8 for few rows of a, tokens: near the time of the weight's way through memory.
//
//   y (m, n) = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k), b (n, k) of s8, rows of
//   both contiguous, the sum in s32
//
// What the copy engine reads: device/skinny_tiles.cuh, whose shape is chosen here. Up to 32 tokens where a alone is not
// so: device/skinny.cuh. What neither reads: w8a8_gemm_sm80.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>

#include "base/message.h"
#include "cuda/device/skinny.cuh"
#include "cuda/device/skinny_tiles.cuh"
#include "cuda/tensor_map.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w8a8_gemm_skinny_sm90";
constexpr std::int64_t kMostTokens = 256;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Size {
  std::int64_t m, n, k;
};

// How blocks share a product.
struct TileShape {
  int groups = 0;  // of SkinnyTile, and its rows
  int rows = 0;
  int token_parts = 1;  // blocks of a cluster
  int row_parts = 1;
  int token_groups = 1;  // clusters
  int tile_rows = 0;     // of b, of a block
  int waves = 1;
  double seconds = std::numeric_limits<double>::infinity();

  int cluster() const { return token_parts * row_parts; }
};

// Fitted to an H200 whose second-level cache had been filled by reading: what must come from memory, or the products;
// what the cache hands out besides; each block more in a cluster, or cluster more that reads the same of b; and a
// launch, with the time until the first operands are there, and after the last ones.
constexpr double kMemoryBytesPerSecond = 4.2e12;
constexpr double kProductsPerSecond = 4096 * 1.5e9;  // of s8, of a multiprocessor
constexpr double kCacheBytesPerSecond = 60e12;
constexpr double kSharingSeconds = 0.5e-6;
constexpr double kWaveSeconds = 4e-6;
constexpr double kFixedSeconds = 4.8e-6;

// The best tile_rows of a shape whose other numbers are given, and its time.
template <class T>
void complete(TileShape& shape, const Size& s, Device device) {
  const int unit = shape.token_parts == 3 ? 24 : 8;
  const std::int64_t most = T::rows / unit * unit;
  const std::int64_t at_once =
      std::max<std::int64_t>(clusters_at_once(shape.cluster(), device) / shape.token_groups, 1) * shape.row_parts;
  const std::int64_t waves = std::max<std::int64_t>(ceil_div(s.n, at_once * most), 1);
  shape.waves = static_cast<int>(waves);
  const std::int64_t wanted = std::max<std::int64_t>(ceil_div(s.n, at_once * waves), 1);
  shape.tile_rows = static_cast<int>(std::min(ceil_div(wanted, unit) * unit, most));
  const auto k = static_cast<double>(s.k);
  const auto m = static_cast<double>(s.m);
  const auto clusters = static_cast<double>(ceil_div(s.n, shape.tile_rows * shape.row_parts) * shape.token_groups);
  const double memory = (static_cast<double>(s.n) + m) * k / kMemoryBytesPerSecond;
  const double cache =
      clusters * (m / shape.token_groups + shape.tile_rows * shape.row_parts) * k / kCacheBytesPerSecond;
  const double products = static_cast<double>(waves) * T::tokens * T::rows * k / kProductsPerSecond;
  const double sharing = (shape.cluster() - 1 + shape.token_groups - 1) * kSharingSeconds;
  shape.seconds =
      kFixedSeconds + std::max(memory, products) + cache + sharing + static_cast<double>(waves - 1) * kWaveSeconds;
}

// Calls body(tile) for every tile there is.
template <class Body>
void for_each_tile(const Body& body) {
  body(SkinnyTile<1, 32>());
  body(SkinnyTile<1, 64>());
  body(SkinnyTile<1, 112>());
  body(SkinnyTile<2, 64>());
  body(SkinnyTile<2, 112>());
  body(SkinnyTile<2, 224>());
}

// Calls body(tile, shape) for every shape that is thought of.
template <class Body>
void for_each_shape(const Size& s, Device device, const Body& body) {
  for_each_tile([&]<class T>(T tile) {
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
        body(tile, shape);
      }
    }
  });
}

TileShape search_shape(const Size& s, Device device) {
  TileShape best;
  for_each_shape(s, device, [&](auto, const TileShape& shape) {
    if (shape.seconds < best.seconds) best = shape;
  });
  return best;
}

// A search takes about a microsecond of the host, so each thread remembers what it found.
TileShape best_shape(const Size& s, Device device) {
  struct Found {
    Size size = {};
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
  p.steps = static_cast<int>(ceil_div(o.a.cols(), kTileStep));
  p.tile_rows = shape.tile_rows;
  p.token_parts = shape.token_parts;
  p.row_parts = shape.row_parts;
  p.token_groups = shape.token_groups;
  p.box_tokens = static_cast<int>(ceil_div(ceil_div(p.tokens, p.token_parts * p.token_groups), p.row_parts));
  p.tile_tokens = p.box_tokens * p.row_parts;
  p.box_rows = p.tile_rows / p.token_parts;
  p.every_part = 0;
  for (int i = 0; i < p.row_parts; ++i) p.every_part |= 1u << i * p.token_parts;
  p.stages = tile_stages<T>(p, kSkinnyShared);
  p.a_scale = row_scale<float>(o.a_scale);
  p.b_scale = row_scale<float>(o.b_scale);
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
  }
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  const auto four = static_cast<std::uintptr_t>(bits(problem.y) / 8 * 4);
  p.y_aligned =
      (reinterpret_cast<std::uintptr_t>(o.y.data) | static_cast<std::uintptr_t>(p.y_pitch) * four / 4) % four == 0;
  const std::int64_t clusters = ceil_div(p.rows, p.tile_rows * p.row_parts) * p.token_groups;
  enqueue(kName, skinny_tile_kernel<T>,
          LaunchShape{static_cast<unsigned>(clusters * shape.cluster()), T::threads, kSkinnyShared,
                      dim3(static_cast<unsigned>(shape.cluster()))},
          stream, tensor_map(kName, o.b, {p.box_rows, kTileStep, true}),
          tensor_map(kName, o.a, {p.box_tokens, kTileStep, true}), p);
}

// What the copy engine cannot read: up to 32 tokens.
template <class Body>
bool with_few(std::int64_t tokens, std::int64_t k, const Body& body) {
  if (tokens <= 8 && fits_skinny<1>(tokens, k)) return body(std::integral_constant<int, 1>()), true;
  if (tokens <= 16 && fits_skinny<2>(tokens, k)) return body(std::integral_constant<int, 2>()), true;
  if (tokens <= 32 && fits_skinny<4>(tokens, k)) return body(std::integral_constant<int, 4>()), true;
  return false;
}

Size size_of(const GemmProblem& p) { return {p.m, p.n, p.k}; }

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.grouped()) return "has no groups";
  if (p.scale != DType::f32) return "has no f64";
  if (p.a_major != Major::contraction || p.b_major != Major::contraction || p.y_major != Major::contraction) {
    return "wants rows of a, b and y contiguous";
  }
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.accumulate) return "does not add to what y holds";
  if (p.m > kMostTokens) return message("is for up to ", kMostTokens, " rows of a");
  if (p.n > kMostRows) return "takes at most 2^30 rows of b";
  return {};
}

Cost cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const bool engine_reads = p.k % kBulkAlignment == 0;
  return {2 * m * n * k, m * k + n * k + m * n * bits(p.y) / 8,
          engine_reads ? best_shape(size_of(p), p.device).seconds : w8a8_gemm_sm80.cost(p).seconds};
}

std::size_t workspace(const GemmProblem&) { return 0; }

std::string detail(const GemmProblem& p) {
  const TileShape shape = best_shape(size_of(p), p.device);
  return message("tiles of ", 64 * shape.groups, " tokens and ", shape.tile_rows, " rows of b, clusters ",
                 shape.token_parts, "x", shape.row_parts, ", ", shape.waves, shape.waves > 1 ? " waves" : " wave");
}

void load(const GemmProblem& problem) {
  prepare_skinny<std::int8_t, 1>(kName);
  prepare_skinny<std::int8_t, 2>(kName);
  prepare_skinny<std::int8_t, 4>(kName);
  for_each_tile([]<class T>(T) { prepare(kName, skinny_tile_kernel<T>, kSkinnyShared); });
  prepare_tensor_maps(kName);
}

// Rows of b that TMA cannot read are read 16 bytes at a time, beside few tokens.
bool aligned(const GemmProblem&, const GemmOperands& o) {
  if (mappable(o.a) && mappable(o.b)) return true;
  return aligned_to_16(o.b.data, o.b.strides[0]) && with_few(o.a.rows(), o.a.cols(), [](auto) {});
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const Size size = {o.a.rows(), o.b.rows(), o.a.cols()};
  if (size.m == 0 || size.n == 0) return;
  if (mappable(o.a) && mappable(o.b)) {
    const TileShape shape = best_shape(size, problem.device);
    return for_each_tile([&]<class T>(T) {
      if (shape.groups == T::groups && shape.rows == T::rows) launch_tile<T>(shape, problem, o, launch.stream);
    });
  }
  with_few(size.m, size.k, [&](auto blocks) {
    SkinnyProduct p = skinny_product(problem, o);
    launch_skinny<std::int8_t, decltype(blocks)::value>(kName, p, problem, launch.stream);
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_skinny_sm90 = {
    .name = "w8a8_gemm_skinny_sm90",
    .task = {Operation::gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
};

}  // namespace octile::cuda
