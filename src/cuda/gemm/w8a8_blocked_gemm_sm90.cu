// w8a8_blocked_gemm_sm90 on the host: cost model, launch.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/message.h"
#include "cuda/gemm/w8a8_blocked_gemm_sm90_launch.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

using namespace w8a8;

constexpr std::string_view kName = "w8a8_blocked_gemm_sm90";

template <class T>
TileOrder order_of(const GemmSize& size) {
  return cluster_tiles<T>(size.m, size.n);
}

template <class T>
int waves(const GemmSize& size, int clusters) {
  return ceil_div(order_of<T>(size).count(), clusters);
}

// Calls body(cost, seconds) for the tile that is expected to be the fastest.
template <class Body>
void with_best_tile(const GemmProblem& p, const GemmSize& size, const Body& body) {
  const int clusters = max_active_clusters(p.device, kClusterSize);
  with_cheapest_tile<true>(
      [&]<class T>(const BlockedCost<T>& tile) {
        return products_seconds(tile, p, waves<T>(size, clusters), static_cast<double>(size.k));
      },
      body);
}

template <class T, class Y>
void enqueue_product(const GemmProblem& p, const GemmOperands& o, Stream stream) {
  BlockedArguments<Y> arguments;
  const BlockedMaps maps = set_operands<T>(kName, p, o, arguments);
  arguments.steps = static_cast<int>(ceil_div(o.a.cols(), kTileK));
  arguments.order = order_of<T>(size_of(o));
  if (!p.accumulate && arguments.y.rows >= T::rows) arguments.last.x = arguments.y.rows - T::rows;
  const int at_once = max_active_clusters(p.device, kClusterSize);
  enqueue(kName, w8a8_blocked_gemm_kernel<T, Y>,
          persistent_shape(arguments.order.count(), at_once, kClusterSize, kGemmThreads, sizeof(BlockedShared<T>)),
          stream, maps, arguments);
}

bool repacks(const GemmProblem& p) { return p.b_major == Major::outer || p.k % kTmaAlignment != 0; }

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (p.y_major == Major::outer) return "writes contiguous rows of y";
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max(p.m, p.n) > kMax) return "takes at most 2^30 rows of an operand";
  return {};
}

Cost cost(const GemmProblem& p) {
  const auto n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  Cost cost = gemm_work(p);
  if (p.accumulate) cost.bytes += static_cast<double>(p.m) * n * bits(p.y) / 8;
  with_best_tile(p, size_of(p), [&](const auto&, double seconds) { cost.seconds = seconds; });
  cost.seconds = std::max(cost.seconds, cost.bytes / kBytesPerSecond);
  if (repacks(p)) cost.seconds += 2 * n * k / kBytesPerSecond + kRepackSeconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const GemmSize size = size_of(p);
  std::string text;
  with_best_tile(p, size, [&]<class T>(const BlockedCost<T>&, double) {
    const TileOrder order = order_of<T>(size);
    text = message("blocks of ", p.a_block, ", tile ", T::rows, "x", T::cols, ", clusters ", T::cluster_rows, "x",
                   T::cluster_cols, ", ", T::stages, " stages, bands of ", order.band, " rows of ", order.rows, "x",
                   order.cols, " clusters, ", waves<T>(size, max_active_clusters(p.device, kClusterSize)), " waves");
  });
  return text;
}

std::size_t workspace(const GemmProblem& p) { return repacks(p) ? repacked_size(p.n, p.k) : 0; }

void load(const GemmProblem& p) {
  prepare_tensor_maps(kName);
  with_narrow_type(p.y, [&]<class Y>(Y) {
    for_each_blocked_tile<true>([]<class T>(const BlockedCost<T>&) {
      prepare(kName, w8a8_blocked_gemm_kernel<T, Y>, sizeof(BlockedShared<T>));
    });
  });
  prepare_repack();
}

// Operands that the workspace has no room to copy must suit TMA as they are. Plans quantize dY into aligned rows.
bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && o.a_scale.strides[0] == 1 && (mappable(o.b) || repacks(p));
}

void launch(const GemmProblem& p, const GemmOperands& operands, const Launch& launch) {
  GemmOperands o = operands;
  if (o.a.rows() == 0 || o.b.rows() == 0) return;
  if (!mappable(o.b)) repack({&o.b}, static_cast<std::byte*>(launch.workspace.data), launch.stream);
  with_narrow_type(p.y, [&]<class Y>(Y) {
    with_best_tile(p, size_of(o),
                   [&]<class T>(const BlockedCost<T>&, double) { enqueue_product<T, Y>(p, o, launch.stream); });
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_blocked_gemm_sm90 = {
    .name = "w8a8_blocked_gemm_sm90",
    .task = {Operation::blocked_gemm},
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
