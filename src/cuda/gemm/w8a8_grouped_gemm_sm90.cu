// w8a8_grouped_gemm_sm90, on the host: tiles, cost model, launch.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/device/floats.cuh"
#include "cuda/forms.h"
#include "cuda/gemm/w8a8_grouped_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8_experts;

constexpr std::string_view kName = "w8a8_grouped_gemm_sm90";

// The times of a tile on an H200, fitted to those of Qwen3's and Mixtral's experts, 1 to 16384 tokens.
struct TileTimes {
  double step, end;  // seconds of kTileK terms, and of what a tile takes besides
};

// Calls body.operator()<T>(number, times) for every tile. Experts with few rows have their weight stream past 64 of
// them.
template <class Y, class Body>
void for_each_tile(const Body& body) {
  constexpr bool kWide = sizeof(Y) == 4;
  constexpr int kStages = kWide ? 4 : 5, kBuffers = kWide ? 3 : 1;
  body.template operator()<Tile<128, 192, 2, kStages, kBuffers>>(0, TileTimes{0.525e-6, 1.0e-6});
  body.template operator()<Tile<128, 192, 1, kStages, kBuffers>>(1, TileTimes{0.57e-6, 1.0e-6});
  body.template operator()<Tile<64, 256, 1, kStages, kBuffers>>(2, TileTimes{0.65e-6, 0.6e-6});
  body.template operator()<Tile<64, 128, 1, kWide ? 7 : 8, kBuffers>>(3, TileTimes{0.4e-6, 0.6e-6});
}

constexpr double kAroundSeconds = 5e-6;
constexpr double kBytesPerSecond = 4.1e12;
constexpr double kHidden = 0.85;  // of the shorter one of arithmetic and memory

template <class T>
int clusters_of(const GemmProblem& p) {  // that run at once
  return T::cluster == 1 ? properties(p.device).sms : max_active_clusters(p.device, T::cluster);
}

template <class T>
double expected_seconds(const GemmProblem& p, const TileTimes& times) {
  const double tiles = expected_tiles(p, p.m, T::rows * T::cluster) * static_cast<double>(ceil_div(p.n, T::cols));
  const auto steps = static_cast<double>(ceil_div(p.k, kTileK));
  const double products = std::ceil(tiles / clusters_of<T>(p)) * (steps * times.step + times.end);
  const double memory = grouped_work(p).bytes / kBytesPerSecond;
  return kAroundSeconds + std::max(products, memory) + (1 - kHidden) * std::min(products, memory);
}

struct Choice {
  int tile = -1;
  double seconds = std::numeric_limits<double>::infinity();
};

Choice choose(const GemmProblem& p) {
  Choice best;
  double least = std::numeric_limits<double>::infinity();
  for_each_tile<float>([&]<class T>(int number, const TileTimes& times) {
    const double seconds = expected_seconds<T>(p, times);
    const double rank = ranked(seconds, number);
    if (rank < least) least = rank, best = {number, seconds};
  });
  return best;
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.grouped()) return "takes a scale per channel or tensor, not groups";
  if (p.scale != DType::f32) return "has no f64";
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.k % kTmaAlignment != 0) return "needs K to be a multiple of 16";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max(p.m, p.experts * p.n) > kMax) return "takes at most 2^30 rows of an operand";
  if (max_tiles(p, p.m, 64) * ceil_div(p.n, 128) > kMax) return "takes at most 2^30 tiles of y";
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = choose(p).seconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  std::string text;
  for_each_tile<float>([&, chosen = choose(p).tile]<class T>(int number, const TileTimes&) {
    if (number != chosen) return;
    text = message("tile ", T::rows, "x", T::cols, " ping-pong, clusters ", T::cluster, "x1",
                   p.gather ? ", rows gathered by cp.async" : "");
  });
  return text;
}

template <class T, class Y>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  static_assert(sizeof(Shared<T, Y>) <= kMaxSharedBytes);
  using Store = typename Shared<T, Y>::Store;
  ConstTensor all = o.b;
  all.shape[0] = problem.experts * problem.n;
  const CUtensorMap b = tensor_map(kName, all, {T::cols / T::cluster, kTileK, true});
  const CUtensorMap a = problem.gather ? b : tensor_map(kName, o.a, {T::rows, kTileK, true});
  const bool by_tma = mappable(o.y);
  const CUtensorMap y = by_tma ? tensor_map(kName, o.y, {Store::rows, Store::cols, Store::swizzled}) : b;

  Arguments<Y> p;
  p.experts = experts_of(problem, o);
  p.a = static_cast<const std::uint8_t*>(o.a.data);
  p.a_pitch = o.a.strides[0];
  p.k = static_cast<int>(problem.k);
  p.steps = static_cast<int>(ceil_div(problem.k, kTileK));
  p.col_tiles = static_cast<int>(ceil_div(problem.n, T::cols));
  p.a_scale = row_scale<float>(o.a_scale);
  p.b_scale = row_scale<float>(o.b_scale);
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
    p.bias_type = o.bias.dtype;
  }
  p.y = {static_cast<Y*>(o.y.data), o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  // TMA writes 16 bytes at a time: where a row ends within them, the last column of tiles is left to store_edge.
  const bool whole = o.y.cols() * static_cast<std::int64_t>(sizeof(Y)) % 16 == 0;
  p.tma_cols = !by_tma ? 0 : whole ? std::numeric_limits<int>::max() : p.y.cols;
  const std::int64_t tiles = max_tiles(problem, o.y.rows(), T::rows * T::cluster) * p.col_tiles;
  enqueue(kName, w8a8_grouped_gemm_kernel<T, Y>,
          persistent_shape(tiles, clusters_of<T>(problem), T::cluster, kGemmThreads, sizeof(Shared<T, Y>)), stream, a,
          b, y, p);
}

void load(const GemmProblem& p) {
  prepare_tensor_maps(kName);
  with_narrow_type(p.y, [&]<class Y>(Y) {
    for_each_tile<Y>(
        [&]<class T>(int, const TileTimes&) { prepare(kName, w8a8_grouped_gemm_kernel<T, Y>, sizeof(Shared<T, Y>)); });
  });
}

bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && mappable(o.b) && o.experts.b_stride == p.n * o.b.strides[0];
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || problem.n == 0 || problem.experts == 0) return;
  GemmProblem p = problem;
  p.m = o.y.rows();
  with_narrow_type(p.y, [&, chosen = choose(p).tile]<class Y>(Y) {
    for_each_tile<Y>([&]<class T>(int number, const TileTimes&) {
      if (number == chosen) launch_tile<T, Y>(p, o, launch.stream);
    });
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_grouped_gemm_sm90 = {
    .name = kName,
    .task = {Operation::grouped_gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
};

}  // namespace octile::cuda
