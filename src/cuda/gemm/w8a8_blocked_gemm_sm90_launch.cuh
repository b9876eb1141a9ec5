// What the launches and cost models of w8a8_blocked_gemm_sm90 and w8a8_grouped_gradient_sm90 share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "base/ceil_div.h"
#include "cuda/clusters.h"
#include "cuda/device/floats.cuh"
#include "cuda/device/output.cuh"
#include "cuda/dispatch.h"
#include "cuda/gemm/repack.h"
#include "cuda/gemm/w8a8_blocked_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda::w8a8 {

constexpr double kAroundSeconds = 6.4e-6;  // launch, prologue and epilogue
constexpr double kBytesPerSecond = 4e12;
constexpr double kRepackSeconds = 2.3e-6;  // besides its bytes

// Of a tile, in seconds: a step, and besides each block, each block of a single step, in which no other one's sums can
// be folded, and the rest of it with 16-bit and with 32-bit y. On an H200, by the throughput of 8192 cubed in blocks of
// 128 to 1024 and of 4096 terms in blocks of 256, at the clock that 700 W leave.
template <class T>
struct BlockedCost {
  double step, block, short_block, tile, wide_tile;
};

template <bool share_b, class Body>
void for_each_blocked_tile(const Body& body) {
  body(BlockedCost<BlockedTile<128, share_b>>{0.415e-6, 0.103e-6, 0.237e-6, 0.25e-6, 1.5e-6});
  body(BlockedCost<BlockedTile<192, share_b>>{0.588e-6, 0.01e-6, 0.21e-6, 0.9e-6, 4.3e-6});
  body(BlockedCost<BlockedTile<208, share_b>>{0.628e-6, 0.0, 0.197e-6, 1.6e-6, 4.1e-6});
}

// Of waves of tiles of this many terms.
template <class T>
double products_seconds(const BlockedCost<T>& cost, const GemmProblem& p, double waves, double terms) {
  const auto block = static_cast<double>(std::max<std::int64_t>(p.a_block, 1));
  const double of_block = block <= kTileK ? cost.short_block : cost.block;
  const double tile = std::ceil(terms / kTileK) * cost.step + std::ceil(terms / block) * of_block +
                      (bits(p.y) == 32 ? cost.wide_tile : cost.tile);
  return kAroundSeconds + waves * tile;
}

// Calls body(cost, seconds) for the tile whose seconds(cost) are the fewest.
template <bool share_b, class Seconds, class Body>
void with_cheapest_tile(const Seconds& seconds, const Body& body) {
  with_cheapest([](const auto& visit) { for_each_blocked_tile<share_b>(visit); }, seconds, body);
}

// All arguments but those that say which tiles there are. b and y are those of all experts.
template <class T, class Y>
BlockedMaps set_operands(std::string_view kernel, const GemmProblem& p, const GemmOperands& o,
                         BlockedArguments<Y>& arguments) {
  static_assert(sizeof(BlockedShared<T>) <= kMaxSharedBytes);
  arguments.block_steps = static_cast<int>(p.a_block / kTileK);
  arguments.a_scale = static_cast<const float*>(o.a_scale.data);
  arguments.a_scale_pitch = o.a_scale.strides[1];
  arguments.y = {static_cast<Y*>(o.y.data), o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  arguments.accumulate = p.accumulate;
  constexpr int kNeighbours = BlockedConsumer<T, Y>::kNeighbours;
  arguments.lines = aligned_for(o.y, kNeighbours) && arguments.y.cols % kNeighbours == 0;
  // A tile that would reach beyond y begins earlier instead, and overlaps its neighbour: TMA is slow to fill in zeros.
  if (!p.accumulate && arguments.y.cols >= T::cols) arguments.last.y = arguments.y.cols - T::cols;
  return {tensor_map(kernel, o.a, {T::rows / T::cluster_cols, kTileK, true}),
          tensor_map(kernel, o.b, {T::cols / T::cluster_rows, kTileK, true})};
}

}  // namespace octile::cuda::w8a8
