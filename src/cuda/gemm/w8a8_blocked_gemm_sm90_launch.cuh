// What the launches and cost models of w8a8_blocked_gemm_sm90 and w8a8_grouped_gradient_sm90 share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "base/ceil_div.h"
#include "cuda/clusters.h"
#include "cuda/device/floats.cuh"
#include "cuda/gemm/repack.h"
#include "cuda/gemm/w8a8_blocked_gemm_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda::w8a8 {

// On an H200, by the throughput at 8192 cubed in blocks of 128 to 512, at the clock that 700 W leave.
constexpr double kCyclesPerSecond = 1.7e9;
constexpr double kStepCycles = 575;        // of kTileK terms of a tile
constexpr double kFoldCycles = 180;        // of a block, besides
constexpr double kTileSeconds = 0.6e-6;    // besides the products, with 16-bit y; twice that with 32-bit y
constexpr double kAroundSeconds = 6.4e-6;  // launch, prologue and epilogue
constexpr double kBytesPerSecond = 4e12;
constexpr double kRepackSeconds = 2.3e-6;  // besides its bytes

// Of waves of tiles of so many terms.
inline double products_seconds(const GemmProblem& p, double waves, double terms) {
  const auto block = static_cast<double>(std::max<std::int64_t>(p.a_block, 1));
  const double cycles = std::ceil(terms / kTileK) * kStepCycles + std::ceil(terms / block) * kFoldCycles;
  return kAroundSeconds + waves * (cycles / kCyclesPerSecond + kTileSeconds * bits(p.y) / 16);
}

struct BlockedMaps {
  CUtensorMap a, b, y;
};

// All arguments but those that say which tiles there are. b and y are those of all experts.
template <class Y>
BlockedMaps set_operands(std::string_view kernel, const GemmProblem& p, const GemmOperands& o,
                         BlockedArguments<Y>& arguments) {
  using T = BlockedTile;
  using Store = typename BlockedShared<Y>::Store;
  BlockedMaps maps;
  maps.a = maps.y = tensor_map(kernel, o.a, {T::rows / T::cluster_cols, kTileK, true});
  maps.b = tensor_map(kernel, o.b, {T::cols / T::cluster_rows, kTileK, true});
  const bool by_tma = mappable(o.y);
  if (by_tma) maps.y = tensor_map(kernel, o.y, {Store::rows, Store::cols, Store::swizzled});
  arguments.block_steps = static_cast<int>(p.a_block / kTileK);
  arguments.a_scale = static_cast<const float*>(o.a_scale.data);
  arguments.a_scale_pitch = o.a_scale.strides[1];
  arguments.y = {static_cast<Y*>(o.y.data), o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  // TMA writes 16 bytes at a time: where a row ends within them, the last column of tiles is left to store_edge.
  const bool whole = o.y.cols() * static_cast<std::int64_t>(sizeof(Y)) % 16 == 0;
  arguments.tma_cols = !by_tma ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;
  arguments.accumulate = p.accumulate;
  // A tile that would reach beyond y begins earlier instead, and overlaps its neighbour: TMA is slow to fill in zeros.
  if (!p.accumulate && arguments.y.cols >= T::cols && whole) arguments.last.y = arguments.y.cols - T::cols;
  return maps;
}

}  // namespace octile::cuda::w8a8
