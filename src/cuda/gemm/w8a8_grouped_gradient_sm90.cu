// w8a8_grouped_gradient_sm90 on the host: cost model, launch.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/message.h"
#include "cuda/gemm/w8a8_blocked_gemm_sm90_launch.cuh"
#include "cuda/gemm/w8a8_grouped_gradient_sm90.cuh"

namespace octile::cuda {

namespace {

using namespace w8a8;

constexpr std::string_view kName = "w8a8_grouped_gradient_sm90";

constexpr int kRows = BlockedTile<128, false>::rows;  // of every tile

template <class T>
std::int64_t col_tiles(const GemmProblem& p) {
  return ceil_div(p.n, T::cols * kClusterSize);
}

// The most tiles of rows that there may be.
std::int64_t row_tiles(const GemmProblem& p, std::int64_t m) {
  return p.by_terms ? p.experts * ceil_div(p.m, kRows) : max_tiles(p, m, kRows);
}

// Calls body(cost, seconds) for the tile that is expected to be the fastest.
template <class Body>
void with_best_tile(const GemmProblem& p, const Body& body) {
  const auto experts = static_cast<double>(std::max<std::int64_t>(p.experts, 1));
  const double rows = p.by_terms ? experts * static_cast<double>(ceil_div(p.m, kRows)) : expected_tiles(p, p.m, kRows);
  const double terms = static_cast<double>(p.k) / (p.by_terms ? experts : 1);
  const int clusters = max_active_clusters(p.device, kClusterSize);
  with_cheapest_tile<false>(
      [&]<class T>(const BlockedCost<T>& tile) {
        return products_seconds(tile, p, std::ceil(rows * static_cast<double>(col_tiles<T>(p)) / clusters), terms);
      },
      body);
}

// Of b with its terms in lines, those of all experts one after the other.
std::int64_t terms_of_b(const GemmProblem& p) {
  return p.by_terms ? max_blocks(p.experts, p.k, p.a_block) * p.a_block : p.experts * p.k;
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (p.a_block == 0) return "needs dY in blocks";
  if (p.y_major == Major::outer) return "writes contiguous rows of y";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  // TMA reads 16 bytes of a line from a multiple of 16 on.
  if (!p.by_terms && p.k % kTmaAlignment != 0) return "needs N to be a multiple of 16 for dX";
  constexpr std::int64_t kMax = std::int64_t{1} << 30;  // 32-bit indices
  if (std::max({p.m * (p.by_terms ? p.experts : 1), p.n, terms_of_b(p)}) > kMax) {
    return "takes at most 2^30 rows and terms of an operand";
  }
  if (row_tiles(p, p.m) * std::max<std::int64_t>(col_tiles<BlockedTile<128, false>>(p), 1) > kMax) {
    return "takes at most 2^30 tiles of y";
  }
  return {};
}

Cost cost(const GemmProblem& p) {
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const auto experts = static_cast<double>(p.experts);
  const double of_b = n * static_cast<double>(terms_of_b(p));
  Cost cost = {2 * m * n * k,
               m * k + of_b + (p.by_terms ? experts : 1) * m * n * bits(p.y) / 8 * (p.accumulate ? 2 : 1)};
  with_best_tile(p, [&](const auto&, double seconds) { cost.seconds = seconds; });
  cost.seconds = std::max(cost.seconds, cost.bytes / kBytesPerSecond) + 2 * of_b / kBytesPerSecond + kRepackSeconds;
  return cost;
}

std::size_t workspace(const GemmProblem& p) { return repacked_size(p.n, terms_of_b(p)); }

void load(const GemmProblem& p) {
  prepare_tensor_maps(kName);
  with_narrow_type(p.y, [&]<class Y>(Y) {
    for_each_blocked_tile<false>([]<class T>(const BlockedCost<T>&) {
      static_assert(sizeof(GradientShared<T>) <= kMaxSharedBytes);
      prepare(kName, w8a8_grouped_gradient_kernel<T, Y>, sizeof(GradientShared<T>));
    });
  });
  p.by_terms ? prepare_repack_terms() : prepare_repack();
}

// Plans quantize dY into aligned rows. Experts' weights lie one after the other.
bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && o.a_scale.strides[0] == 1 && (p.by_terms || o.experts.b_stride == p.k * o.b.strides[1]) &&
         (!p.by_terms || o.experts.y_stride == p.m * o.y.strides[0]);
}

// b is that of all experts.
template <class T, class Y>
void enqueue_product(const GemmProblem& p, const GemmOperands& o, Stream stream) {
  GemmOperands of_all = o;
  if (p.by_terms) of_all.y.shape[0] = p.experts * p.m;
  GradientArguments<Y> arguments;
  const BlockedMaps maps = set_operands<T, Y>(kName, p, of_all, arguments);
  arguments.steps = static_cast<int>(ceil_div(p.k, kTileK));
  arguments.experts = experts_of(p, o);
  arguments.by_terms = p.by_terms;
  arguments.row_tiles = static_cast<int>(ceil_div(p.m, T::rows));
  arguments.col_tiles = static_cast<int>(col_tiles<T>(p));
  arguments.size = static_cast<int>(p.by_terms ? p.m : p.k);

  const std::int64_t tiles = row_tiles(p, o.y.rows()) * arguments.col_tiles;
  const int at_once = max_active_clusters(p.device, kClusterSize);
  enqueue(kName, w8a8_grouped_gradient_kernel<T, Y>,
          persistent_shape(tiles, at_once, kClusterSize, kGemmThreads, sizeof(GradientShared<T>)), stream, maps,
          arguments);
}

void launch(const GemmProblem& p, const GemmOperands& operands, const Launch& launch) {
  GemmOperands o = operands;
  if (o.y.rows() == 0 || p.n == 0 || p.experts == 0) return;
  auto* const copy = static_cast<std::byte*>(launch.workspace.data);
  if (p.by_terms) {
    repack_terms(o.b, {o.experts.offsets, p.a_block}, copy, launch.stream);
  } else {
    o.b.shape[1] = p.experts * p.k;
    repack({&o.b}, copy, launch.stream);
  }
  with_narrow_type(p.y, [&]<class Y>(Y) {
    with_best_tile(p, [&]<class T>(const BlockedCost<T>&, double) { enqueue_product<T, Y>(p, o, launch.stream); });
  });
}

}  // namespace

extern constinit const GemmKernel w8a8_grouped_gradient_sm90 = {
    .name = kName,
    .task = {Operation::grouped_gradient, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
    .aligned = aligned,
};

}  // namespace octile::cuda
