// blocked_gradient_quantize_sm90 and grouped_gradient_quantize_sm90: what the int8 backward needs of dY in blocks of
// 256 or 512 terms of either contraction, from one reading of dY. The kernels: device/gradient_tiles.cuh.
//
//   quantize_tiles   a block of threads for each tile of 128 x 128, of an expert's rows where there are experts, and a
//                    cluster for each block of both contractions: 2 x 2 or 4 x 4 tiles, which exchange their maxima
//                    through shared memory
//   sum_tiles        the tiles' sums of columns, in the order of the tiles
#pragma once

#include <string>
#include <string_view>

#include "cuda/clusters.h"
#include "cuda/device/gradient_tiles.cuh"
#include "plan/cost.h"

namespace octile::cuda::blocked_gradient_sm90 {

using namespace blocked_gradient;

inline int side_of(const QuantizeProblem& p) { return static_cast<int>(p.group) / kTile; }

inline std::string supports(const QuantizeProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.group != 2 * kTile && p.group != kMaxSide * kTile) return "does blocks of 256 and 512 terms";
  if (side_of(p) == kMaxSide && !runs_clusters_of_16(p.device)) return "needs clusters of 16 blocks";
  return refusal(p);
}

// On an H200, 16384 x 4096 to 16384 x 16384 and 8192 x 8192 bf16.
inline Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, 1.85e12);
  cost.seconds += 7e-6;
  return cost;
}

inline std::size_t workspace(const QuantizeProblem& p) { return sum_words(p.rows, p.cols) * 4; }

template <const std::string_view& kName, bool kExperts>
void load(const QuantizeProblem& p) {
  for (const bool whole : {false, true}) {
    with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
      constexpr auto kKernel = quantize_tiles<T, kWhole, Pass::clustered, kStochastic, kExperts>;
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), kName);
      prepare(kName, kKernel);
      prepare(kName, sum_tiles<T, kExperts>);
    });
  }
}

template <const std::string_view& kName, bool kExperts>
void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_variant(p, moves_whole(p, o), [&]<class T, bool kWhole, bool kStochastic>() {
    const Arguments<T> a = arguments<T>(p, o, launch.workspace.data);
    enqueue(kName, quantize_tiles<T, kWhole, Pass::clustered, kStochastic, kExperts>, shape_of(a, side_of(p)),
            launch.stream, a);
    if (o.y.present()) enqueue_sums<kExperts>(kName, a, o.y, launch.stream);
  });
}

// kExperts: of each expert's rows, and each expert's dB.
template <const std::string_view& kName, bool kExperts>
constexpr QuantizeKernel row() {
  return {.name = kName,
          .task = {kExperts ? Operation::grouped_gradient_quantize : Operation::blocked_gradient_quantize},
          .device = DeviceType::cuda,
          .supports = supports,
          .cost = cost,
          .workspace = workspace,
          .launch = launch<kName, kExperts>,
          .prepare = load<kName, kExperts>};
}

}  // namespace octile::cuda::blocked_gradient_sm90
