// w8a8_blocked_gemm_sm90 on the host: cost model, launch.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/device/floats.cuh"
#include "cuda/gemm/repack.h"
#include "cuda/gemm/w8a8_blocked_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8;

constexpr std::string_view kName = "w8a8_blocked_gemm_sm90";

// On an H200, by the throughput at 8192 cubed in blocks of 128 to 512, at the clock that 700 W leave.
constexpr double kCyclesPerSecond = 1.7e9;
constexpr double kStepCycles = 575;        // of kTileK terms of a tile
constexpr double kFoldCycles = 180;        // of a block, besides
constexpr double kTileSeconds = 0.6e-6;    // besides the products, with 16-bit y; twice that with 32-bit y
constexpr double kAroundSeconds = 6.4e-6;  // launch, prologue and epilogue
constexpr double kBytesPerSecond = 4e12;
constexpr double kRepackSeconds = 2.3e-6;  // besides its bytes
constexpr std::int64_t kBandRows = 2048;   // of an operand that a band of tiles keeps in L2

using T = BlockedTile;

struct Size {
  std::int64_t m, n, k;
};

TileOrder order_of(const Size& size) {
  constexpr int kRows = T::rows * T::cluster_rows;
  constexpr int kCols = T::cols * T::cluster_cols;
  return {static_cast<int>(ceil_div(size.m, kRows)), static_cast<int>(ceil_div(size.n, kCols)),
          static_cast<int>(kBandRows / kCols), false};
}

int waves(const Size& size, int clusters) { return ceil_div(order_of(size).count(), clusters); }

double expected_seconds(const GemmProblem& p, int clusters) {
  const double steps = static_cast<double>(ceil_div(p.k, kTileK));
  const double blocks = static_cast<double>(ceil_div(p.k, p.a_block));
  const double cycles = steps * kStepCycles + blocks * kFoldCycles;
  return kAroundSeconds +
         waves({p.m, p.n, p.k}, clusters) * (cycles / kCyclesPerSecond + kTileSeconds * bits(p.y) / 16);
}

template <class Y>
void enqueue_product(const GemmProblem& p, const GemmOperands& o, Stream stream) {
  using Shared = BlockedShared<Y>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  using Store = typename Shared::Store;
  const CUtensorMap a = tensor_map(kName, o.a, {T::rows / T::cluster_cols, kTileK, true});
  const CUtensorMap b = tensor_map(kName, o.b, {T::cols / T::cluster_rows, kTileK, true});
  const bool by_tma = mappable(o.y);
  const CUtensorMap y = by_tma ? tensor_map(kName, o.y, {Store::rows, Store::cols, Store::swizzled}) : a;

  BlockedArguments<Y> arguments;
  arguments.steps = static_cast<int>(ceil_div(o.a.cols(), kTileK));
  arguments.block_steps = static_cast<int>(p.a_block / kTileK);
  arguments.a_scale = static_cast<const float*>(o.a_scale.data);
  arguments.a_scale_pitch = o.a_scale.strides[1];
  arguments.order = order_of({o.a.rows(), o.b.rows(), o.a.cols()});
  arguments.y = {static_cast<Y*>(o.y.data), o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  // TMA writes 16 bytes at a time: where a row ends within them, the last column of tiles is left to store_edge.
  const bool whole = o.y.cols() * static_cast<std::int64_t>(sizeof(Y)) % 16 == 0;
  arguments.tma_cols = !by_tma ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;
  arguments.accumulate = p.accumulate;
  // A tile that would reach beyond y begins earlier instead, and overlaps its neighbour: TMA is slow to fill in zeros.
  if (!p.accumulate && arguments.y.rows >= T::rows) arguments.last.x = arguments.y.rows - T::rows;
  if (!p.accumulate && arguments.y.cols >= T::cols && whole) arguments.last.y = arguments.y.cols - T::cols;

  const int clusters = std::min(max_active_clusters(p.device, kClusterSize), arguments.order.count());
  enqueue(kName, w8a8_blocked_gemm_kernel<Y>,
          LaunchShape{static_cast<unsigned>(clusters * kClusterSize), kGemmThreads, sizeof(Shared), kClusterSize},
          stream, a, b, y, arguments);
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
  const auto m = static_cast<double>(p.m);
  const auto n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k);
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = (m + n) * k + m * n * bits(p.y) / 8 * (p.accumulate ? 2 : 1);
  cost.seconds =
      std::max(expected_seconds(p, max_active_clusters(p.device, kClusterSize)), cost.bytes / kBytesPerSecond);
  if (repacks(p)) cost.seconds += 2 * n * k / kBytesPerSecond + kRepackSeconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const Size size = {p.m, p.n, p.k};
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
