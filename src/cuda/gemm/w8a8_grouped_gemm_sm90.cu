// w8a8_grouped_gemm_sm90, on the host: tiles, cost model, launch.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/device/floats.cuh"
#include "cuda/gemm/w8a8_grouped_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8_experts;

constexpr std::string_view kName = "w8a8_grouped_gemm_sm90";

// Of experts with many rows, and of those with few, whose weight has to stream.
template <class Y>
using Many = Tile<128, 192, sizeof(Y) == 4 ? 4 : 5, sizeof(Y) == 4 ? 3 : 1>;
template <class Y>
using Few = Tile<64, 256, sizeof(Y) == 4 ? 4 : 5, sizeof(Y) == 4 ? 3 : 1>;

constexpr double kProductsPerCycle = 4096;  // int8 multiply-adds of an SM
constexpr double kCopiedPerCycle = 56;      // bytes from L2 to an SM
constexpr double kGigahertz = 1.7;
constexpr double kTileSeconds = 0.4e-6;  // besides its terms
constexpr double kAroundSeconds = 7.5e-6;
constexpr double kBytesPerSecond = 4.1e12;
constexpr double kHidden = 0.85;  // of the shorter one of arithmetic and memory

struct Size {
  int rows, cols;
};
constexpr Size kTiles[] = {{128, 192}, {64, 256}};

double expected_seconds(const GemmProblem& p, const Size& tile) {
  const int sms = properties(p.device).sms;
  const double tiles = expected_tiles(p, p.m, tile.rows) * static_cast<double>(ceil_div(p.n, tile.cols));
  const auto terms = static_cast<double>(ceil_div(p.k, kTileK) * kTileK);
  const double cycles = terms * std::max(tile.rows * tile.cols / kProductsPerCycle,
                                         (tile.rows + tile.cols) / kCopiedPerCycle);
  const double products = std::ceil(tiles / sms) * (cycles / (kGigahertz * 1e9) + kTileSeconds);
  const double memory = grouped_work(p).bytes / kBytesPerSecond;
  return kAroundSeconds + std::max(products, memory) + (1 - kHidden) * std::min(products, memory);
}

bool few_rows(const GemmProblem& p) { return expected_seconds(p, kTiles[1]) < expected_seconds(p, kTiles[0]); }

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.grouped()) return "takes a scale per channel or tensor, not groups";
  if (p.scale != DType::f32) return "has no f64";
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.k % kTmaAlignment != 0) return "needs K to be a multiple of 16";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max(p.m, p.experts * p.n) > kMax) return "takes at most 2^30 rows of an operand";
  if (max_tiles(p, p.m, 64) * ceil_div(p.n, 192) > kMax) return "takes at most 2^30 tiles of y";
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = std::min(expected_seconds(p, kTiles[0]), expected_seconds(p, kTiles[1]));
  return cost;
}

std::string detail(const GemmProblem& p) {
  const Size& tile = kTiles[few_rows(p)];
  return message("tile ", tile.rows, "x", tile.cols, " ping-pong", p.gather ? ", rows gathered by cp.async" : "");
}

template <class T, class Y, bool kGathers>
void launch_tile(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  static_assert(sizeof(Shared<T, Y>) <= kMaxSharedBytes);
  using Store = typename Shared<T, Y>::Store;
  ConstTensor all = o.b;
  all.shape[0] = problem.experts * problem.n;
  const CUtensorMap b = tensor_map(kName, all, {T::cols, kTileK, true});
  const CUtensorMap a = kGathers ? b : tensor_map(kName, o.a, {T::rows, kTileK, true});
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
  const std::int64_t tiles = max_tiles(problem, o.y.rows(), T::rows) * p.col_tiles;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(properties(problem.device).sms, tiles));
  enqueue(kName, w8a8_grouped_gemm_kernel<T, Y, kGathers>, LaunchShape{blocks, kGemmThreads, sizeof(Shared<T, Y>)},
          stream, a, b, y, p);
}

// Calls body.operator()<T, Y, gathers>() for both tiles.
template <class Body>
void with_tiles(const GemmProblem& p, const Body& body) {
  with_narrow_type(p.y, [&]<class Y>(Y) {
    const auto both = [&]<class T>(int number) {
      p.gather ? body.template operator()<T, Y, true>(number) : body.template operator()<T, Y, false>(number);
    };
    both.template operator()<Many<Y>>(0);
    both.template operator()<Few<Y>>(1);
  });
}

void load(const GemmProblem& p) {
  prepare_tensor_maps(kName);
  with_tiles(p, [&]<class T, class Y, bool kGathers>(int) {
    prepare(kName, w8a8_grouped_gemm_kernel<T, Y, kGathers>, sizeof(Shared<T, Y>));
  });
}

bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && mappable(o.b) && o.experts.b_stride == p.n * o.b.strides[0];
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.y.rows() == 0 || problem.n == 0 || problem.experts == 0) return;
  GemmProblem p = problem;
  p.m = o.y.rows();
  const int chosen = few_rows(p);
  with_tiles(p, [&]<class T, class Y, bool kGathers>(int number) {
    if (number == chosen) launch_tile<T, Y, kGathers>(p, o, launch.stream);
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
