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

using T = BlockedTile;

TileOrder order_of(const GemmSize& size) { return cluster_tiles<T>(size.m, size.n); }

int waves(const GemmSize& size, int clusters) { return ceil_div(order_of(size).count(), clusters); }

template <class Y>
void enqueue_product(const GemmProblem& p, const GemmOperands& o, Stream stream) {
  using Shared = BlockedShared<Y>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  BlockedArguments<Y> arguments;
  const BlockedMaps maps = set_operands(kName, p, o, arguments);
  arguments.steps = static_cast<int>(ceil_div(o.a.cols(), kTileK));
  arguments.order = order_of(size_of(o));
  if (!p.accumulate && arguments.y.rows >= T::rows) arguments.last.x = arguments.y.rows - T::rows;
  const int at_once = max_active_clusters(p.device, kClusterSize);
  enqueue(kName, w8a8_blocked_gemm_kernel<Y>,
          persistent_shape(arguments.order.count(), at_once, kClusterSize, kGemmThreads, sizeof(Shared)), stream,
          maps.a, maps.b, maps.y, arguments);
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
  const double products = products_seconds(p, waves(size_of(p), max_active_clusters(p.device, kClusterSize)), k);
  cost.seconds = std::max(products, cost.bytes / kBytesPerSecond);
  if (repacks(p)) cost.seconds += 2 * n * k / kBytesPerSecond + kRepackSeconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const GemmSize size = size_of(p);
  const TileOrder order = order_of(size);
  return message("blocks of ", p.a_block, ", tile ", T::rows, "x", T::cols, ", clusters ", T::cluster_rows, "x",
                 T::cluster_cols, ", ", T::stages, " stages, bands of ", order.band, " columns of ", order.rows, "x",
                 order.cols, " clusters, ", waves(size, max_active_clusters(p.device, kClusterSize)), " waves");
}

std::size_t workspace(const GemmProblem& p) { return repacks(p) ? repacked_size(p.n, p.k) : 0; }

void load(const GemmProblem& p) {
  prepare_tensor_maps(kName);
  with_narrow_type(p.y, [&]<class Y>(Y) { prepare(kName, w8a8_blocked_gemm_kernel<Y>, sizeof(BlockedShared<Y>)); });
  prepare_repack();
}

// What the workspace has no room to copy must suit TMA as it is. Plans quantize dY into aligned rows.
bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && o.a_scale.strides[0] == 1 && (mappable(o.b) || repacks(p));
}

void launch(const GemmProblem& p, const GemmOperands& operands, const Launch& launch) {
  GemmOperands o = operands;
  if (o.a.rows() == 0 || o.b.rows() == 0) return;
  if (!mappable(o.b)) repack({&o.b}, static_cast<std::byte*>(launch.workspace.data), launch.stream);
  with_narrow_type(p.y, [&]<class Y>(Y) { enqueue_product<Y>(p, o, launch.stream); });
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
