// w8a8_gemm_sm90, for many rows, on the host: tiles, cost model, launch.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/device/floats.cuh"
#include "cuda/dispatch.h"
#include "cuda/gemm/repack.h"
#include "cuda/gemm/w8a8_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8;

constexpr std::string_view kName = "w8a8_gemm_sm90";

// The tiles and their cost on an H200, the first four fitted to 152 timings (M from 129 to 14336: 2.3 % root mean
// square), the others to 84 (M from 128 to 1536; 3 to 5 %, and the choice is within 4 % of the best). The clock is what
// the power limit allows at first; the larger the tile, the less data moves, the higher the clock.
template <class T_>
struct Measured {
  using T = T_;
  double gigahertz;
  double tile_seconds;  // besides the products, with 16-bit y; twice that with 32-bit y
  double later;         // slowdown after kBurstSeconds, when the power limit acts
};

using Tile128 = Tile<128, 128, false, 6, 2, Schedule::ping_pong>;
using Tile176 = Tile<128, 176, true, 5, 1, Schedule::ping_pong>;
using Tile192 = Tile<128, 192, true, 5, 1, Schedule::ping_pong>;
using Tile224 = Tile<128, 224, true, 4, 1, Schedule::cooperative>;
using Tile256 = Tile<128, 256, true, 4, 2, Schedule::cooperative>;
using Tile192x128 = Tile<192, 128, false, 5, 1, Schedule::cooperative, 3>;
using Tile192x192 = Tile<192, 192, false, 4, 1, Schedule::cooperative, 3>;
// Of y^T. 16 rows of y more than 128, where 192 would be too many.
using Transposed128x144 = Tile<128, 144, false, 5, 2, Schedule::ping_pong, 2, true>;
using Transposed64x144 = Tile<64, 144, true, 7, 2, Schedule::ping_pong, 2, true>;

// Calls body(measured) for every tile.
template <class Body>
void for_each_tile(const Body& body) {
  body(Measured<Tile128>{1.692, 0.05e-6, 0.103});
  body(Measured<Tile176>{1.726, 0.34e-6, 0.058});
  body(Measured<Tile192>{1.730, 0.36e-6, 0.037});
  body(Measured<Tile224>{1.850, 1.85e-6, 0.093});
  body(Measured<Tile256>{1.850, 1.85e-6, 0.093});
  body(Measured<Tile192x128>{1.937, 2.52e-6, 0.08});
  body(Measured<Tile192x192>{1.941, 3.15e-6, 0.08});
  body(Measured<Transposed128x144>{1.767, 0.56e-6, 0.08});
  body(Measured<Transposed64x144>{1.230, -0.42e-6, 0.08});
}

constexpr double kProductsPerCycle = 4096;       // int8 multiply-adds of an SM
constexpr double kAroundSeconds = 6.4e-6;        // launch, prologue and epilogue
constexpr double kHiddenBytesPerSecond = 12e12;  // of operands, while the tensor cores are busy
constexpr double kBurstSeconds = 100e-6;
constexpr double kBytesPerSecond = 4e12;   // of memory, alone
constexpr double kRepackSeconds = 2.3e-6;  // besides its bytes

struct Size {
  std::int64_t m, n, k;
  bool transposable = false;  // tiles of y^T are possible
};

template <class T>
TileOrder order_of(const Size& size) {
  return T::transposed ? cluster_tiles<T>(size.n, size.m) : cluster_tiles<T>(size.m, size.n);
}

template <class T>
int waves(const Size& size, int clusters) {
  const TileOrder order = order_of<T>(size);
  return static_cast<int>(ceil_div(static_cast<std::int64_t>(order.rows) * order.cols, clusters));
}

template <class T>
double expected_seconds(const Measured<T>& measured, const Size& size, DType y, int clusters) {
  if (T::transposed && !size.transposable) return std::numeric_limits<double>::infinity();
  const double tile_cycles =
      static_cast<double>(ceil_div(size.k, kTileK)) * kTileK * T::rows * T::cols / kProductsPerCycle;
  const double tile_seconds = tile_cycles / (measured.gigahertz * 1e9) + measured.tile_seconds * bits(y) / 16;
  const double products = waves<T>(size, clusters) * tile_seconds;
  const double operands = static_cast<double>(size.m + size.n) * static_cast<double>(size.k);
  return kAroundSeconds + operands / kHiddenBytesPerSecond + products +
         measured.later * std::max(0.0, products - kBurstSeconds);
}

// Calls body(measured) for the tile that is expected to be the fastest.
template <class Body>
void with_best_tile(const Size& size, DType y, int clusters, const Body& body) {
  with_cheapest([](const auto& visit) { for_each_tile(visit); },
                [&](const auto& tile) { return expected_seconds(tile, size, y, clusters); },
                [&](const auto& tile, double) { body(tile); });
}

// Whether the workspace has room for a K-major, aligned copy of this operand. TMA reads neither rows of k bytes that
// are not a multiple of 16 and not padded, nor an operand that is not K-major.
bool repacks(Major major, std::int64_t k) { return major == Major::outer || k % kTmaAlignment != 0; }

template <class T, class Y>
constexpr bool kStores = !T::transposed || sizeof(Y) == 2;  // y of this type

struct Order {
  int clusters;
  bool accumulate;
  Stream stream;
};

template <class T, class Y>
void launch_tile(const GemmOperands& o, const Order& order) {
  static_assert(sizeof(Shared<T, Y>) <= kMaxSharedBytes);
  using Store = typename Shared<T, Y>::Store;
  const ConstTensor& left = T::transposed ? o.b : o.a;
  const ConstTensor& right = T::transposed ? o.a : o.b;
  const CUtensorMap a = tensor_map(kName, left, {T::rows / T::cluster_cols, kTileK, true});
  const CUtensorMap b = tensor_map(kName, right, {T::cols / T::cluster_rows, kTileK, true});
  const bool by_tma = mappable(o.y);
  // TMA writes 16 bytes at a time: where a row ends within them, the last column of tiles is left to store_edge.
  const bool whole = o.y.cols() * static_cast<std::int64_t>(sizeof(Y)) % 16 == 0;
  CUtensorMap y = a;

  Arguments<Y> arguments;
  arguments.steps = static_cast<int>(ceil_div(o.a.cols(), kTileK));
  arguments.order = order_of<T>({o.a.rows(), o.b.rows(), o.a.cols()});
  arguments.a_scale = row_scale<float>(T::transposed ? o.b_scale : o.a_scale);
  arguments.b_scale = row_scale<float>(T::transposed ? o.a_scale : o.b_scale);
  if (o.bias.present()) {
    arguments.bias = static_cast<const Y*>(o.bias.data);
    arguments.bias_stride = o.bias.strides[0];
  }
  arguments.y = {static_cast<Y*>(o.y.data), o.y.strides[0], static_cast<int>(left.rows()),
                 static_cast<int>(right.rows())};
  if constexpr (T::transposed) {
    y = tensor_map(kName, o.y, {Store::cols, Store::rows, true});
  } else {
    if (by_tma) y = tensor_map(kName, o.y, {Store::rows, Store::cols, Store::swizzled});
    arguments.tma_cols = !by_tma ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;
  }

  // A tile that would reach beyond y begins earlier instead, and overlaps its neighbour: TMA is slow to fill in zeros.
  // M = 257 took 50.9 us where M = 384 took 40.0 (K 4096, N 14336).
  arguments.accumulate = order.accumulate;
  if (!order.accumulate && arguments.y.rows >= T::rows) arguments.last.x = arguments.y.rows - T::rows;
  if (!order.accumulate && arguments.y.cols >= T::cols && whole) arguments.last.y = arguments.y.cols - T::cols;

  enqueue(kName, w8a8_gemm_kernel<T, Y>,
          persistent_shape(arguments.order.count(), order.clusters, kClusterSize, T::threads, sizeof(Shared<T, Y>)),
          order.stream, a, b, y, arguments);
}

// y^T = b * a^T: where y is column-major, a and b change places.
bool exchanges(const GemmProblem& problem) { return problem.y_major == Major::outer; }

GemmProblem exchanged(GemmProblem p) {
  if (!exchanges(p)) return p;
  std::swap(p.m, p.n);
  std::swap(p.a_major, p.b_major);
  p.y_major = Major::contraction;
  return p;
}

GemmOperands exchanged(GemmOperands o) {
  std::swap(o.a, o.b);
  std::swap(o.a_scale, o.b_scale);
  std::swap(o.y.shape[0], o.y.shape[1]);
  std::swap(o.y.strides[0], o.y.strides[1]);
  return o;
}

// TMA writes 16 bytes at a time, and tiles of y^T can be stored only by TMA.
Size size_of(const GemmProblem& problem) {
  const GemmProblem p = exchanged(problem);
  return {p.m, p.n, p.k, !exchanges(problem) && bits(p.y) == 16 && p.n % 8 == 0};
}

std::string supports(const GemmProblem& problem) {
  if (std::string reason = reason_against(problem.device, 90, 91); !reason.empty()) return reason;
  if (problem.grouped()) return "has no groups";
  if (problem.scale != DType::f32) return "has no f64";
  if (problem.b_packed) return "takes the weight as it is, not packed";
  if (exchanges(problem) && problem.bias) return "needs contiguous rows of y where there is a bias";
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max(problem.m, problem.n) > kMax) return "takes at most 2^30 rows of an operand";
  return {};
}

Cost cost(const GemmProblem& problem) {
  const GemmProblem p = exchanged(problem);
  const Size size = size_of(problem);
  const auto m = static_cast<double>(size.m), n = static_cast<double>(size.n), k = static_cast<double>(size.k);
  Cost cost = gemm_work(p);
  if (p.accumulate) cost.bytes += m * n * bits(p.y) / 8;
  const int clusters = max_active_clusters(p.device, kClusterSize);
  with_best_tile(size, p.y, clusters, [&](const auto& tile) {
    cost.seconds = std::max(expected_seconds(tile, size, p.y, clusters), cost.bytes / kBytesPerSecond);
  });
  // Plans quantize X into aligned rows, whatever k is.
  if (p.a_major == Major::outer) cost.seconds += 2 * m * k / kBytesPerSecond + kRepackSeconds;
  if (repacks(p.b_major, p.k)) cost.seconds += 2 * n * k / kBytesPerSecond + kRepackSeconds;
  return cost;
}

std::string detail(const GemmProblem& problem) {
  const GemmProblem p = exchanged(problem);
  const int clusters = max_active_clusters(p.device, kClusterSize);
  std::string text;
  const Size size = size_of(problem);
  with_best_tile(size, p.y, clusters, [&]<class T>(const Measured<T>&) {
    const TileOrder order = order_of<T>(size);
    text = message(exchanges(problem) || T::transposed ? "y^T = b * a^T, " : "", "tile ", T::rows, "x", T::cols,
                   T::ping_pong ? " ping-pong" : " cooperative", ", clusters ", T::cluster_rows, "x", T::cluster_cols,
                   ", ", T::stages, " stages, bands of ", order.band, order.bands_of_rows ? " rows" : " columns",
                   " of ", order.rows, "x", order.cols, " clusters, ", waves<T>(size, clusters), " waves");
  });
  return text;
}

std::size_t workspace(const GemmProblem& problem) {
  const GemmProblem p = exchanged(problem);
  return (repacks(p.a_major, p.k) ? repacked_size(p.m, p.k) : 0) +
         (repacks(p.b_major, p.k) ? repacked_size(p.n, p.k) : 0);
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  with_narrow_type(problem.y, [&]<class Y>(Y) {
    for_each_tile([&]<class T>(const Measured<T>&) {
      if constexpr (kStores<T, Y>) prepare(kName, w8a8_gemm_kernel<T, Y>, sizeof(Shared<T, Y>));
    });
  });
  prepare_repack();
}

// Operands that the workspace has no room to copy must suit TMA as they are.
bool aligned(const GemmProblem& problem, const GemmOperands& operands) {
  const GemmProblem p = exchanged(problem);
  const GemmOperands o = exchanges(problem) ? exchanged(operands) : operands;
  return (mappable(o.a) || repacks(p.a_major, p.k)) && (mappable(o.b) || repacks(p.b_major, p.k));
}

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  const GemmProblem p = exchanged(problem);
  GemmOperands o = exchanges(problem) ? exchanged(operands) : operands;
  const Size size = {o.a.rows(), o.b.rows(), o.a.cols(), size_of(problem).transposable && mappable(o.y)};
  if (size.m == 0 || size.n == 0) return;
  repack({mappable(o.a) ? nullptr : &o.a, mappable(o.b) ? nullptr : &o.b},
         static_cast<std::byte*>(launch.workspace.data), launch.stream);
  const int clusters = max_active_clusters(p.device, kClusterSize);
  with_narrow_type(p.y, [&]<class Y>(Y) {
    with_best_tile(size, p.y, clusters, [&]<class T>(const Measured<T>&) {
      if constexpr (kStores<T, Y>) launch_tile<T, Y>(o, {clusters, p.accumulate, launch.stream});
    });
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_sm90 = {
    .name = "w8a8_gemm_sm90",
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
