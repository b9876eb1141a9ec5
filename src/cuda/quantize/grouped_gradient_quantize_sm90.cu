// What the int8 gradients of experts need of dY, in blocks of 256 or 512 terms of either contraction, from one reading
// of dY, and each expert's dB: device/gradient_tiles.cuh.
//
//   quantize_tiles   a block of threads for each tile of 128 x 128 of an expert's rows, a cluster for each block of both
//                    contractions: 2 x 2 or 4 x 4 tiles, which exchange their maxima through shared memory
//   sum_tiles        the tiles' sums of columns, of each expert, in the order of its tiles
#include <cstdint>
#include <string>

#include "cuda/clusters.h"
#include "cuda/device/gradient_tiles.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

using namespace blocked_gradient;

constexpr std::string_view kName = "grouped_gradient_quantize_sm90";

int side_of(const QuantizeProblem& p) { return static_cast<int>(p.group) / kTile; }

std::string supports(const QuantizeProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.group != 2 * kTile && p.group != kMaxSide * kTile) return "does blocks of 256 and 512 terms";
  if (side_of(p) == kMaxSide && !runs_clusters_of_16(p.device)) return "needs clusters of 16 blocks";
  return refusal(p);
}

Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, 1.85e12);
  cost.seconds += 7e-6;
  return cost;
}

std::size_t workspace(const QuantizeProblem& p) { return sum_words(p.rows, p.cols) * 4; }

void load(const QuantizeProblem& p) {
  for (const bool whole : {false, true}) {
    with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
      constexpr auto kKernel = quantize_tiles<T, kWhole, Pass::clustered, kStochastic, true>;
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), kName);
      prepare(kName, kKernel);
      prepare(kName, sum_tiles<T, true>);
    });
  }
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const bool whole = with_narrow_type(p.x, [&](auto x) { return tiles::moves_whole<decltype(x)>(o); });
  with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
    const Arguments<T> a = arguments<T>(p, o, launch.workspace.data);
    enqueue(kName, quantize_tiles<T, kWhole, Pass::clustered, kStochastic, true>, shape_of(a, side_of(p)),
            launch.stream, a);
    if (o.y.present()) enqueue_sums_of_experts(kName, a, o.y, launch.stream);
  });
}

}  // namespace

extern constinit const QuantizeKernel grouped_gradient_quantize_sm90 = {
    .name = kName,
    .task = {Operation::grouped_gradient_quantize},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
