// What the int8 gradients of experts need of dY, in blocks of T terms of either contraction, and each expert's dB:
// device/gradient_tiles.cuh.
//
//   quantize_tiles   a block of threads for each tile of 128 x 128 of an expert's rows: one launch for the maxima of
//                    tiles and their sums of columns, another for the levels
//   sum_tiles        those sums, of each expert, in the order of its tiles
#include <cstdint>
#include <string>

#include "cuda/device/gradient_tiles.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

using namespace blocked_gradient;

constexpr std::string_view kName = "grouped_gradient_quantize_sm80";

// The workspace, in elements of 4 bytes.
struct Parts {
  std::size_t column_max, row_max, all;
};

Parts parts(std::int64_t rows, std::int64_t cols) {
  const std::size_t sums = sum_words(rows, cols);
  return {sums, 2 * sums, 2 * sums + static_cast<std::size_t>(ceil_div(cols, kTile) * rows)};
}

std::string supports(const QuantizeProblem& p) {
  std::string reason = reason_against(p.device, 80);
  return reason.empty() ? refusal(p) : reason;
}

Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, 1.55e12);
  cost.seconds += 8e-6;
  return cost;
}

std::size_t workspace(const QuantizeProblem& p) { return parts(p.rows, p.cols).all * 4; }

void load(const QuantizeProblem& p) {
  for (const bool whole : {false, true}) {
    with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
      prepare(kName, sum_tiles<T, true>);
      prepare(kName, quantize_tiles<T, kWhole, Pass::measure, false, true>);
      prepare(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic, true>);
    });
  }
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const bool whole = with_narrow_type(p.x, [&](auto x) { return tiles::moves_whole<decltype(x)>(o); });
  with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
    Arguments<T> a = arguments<T>(p, o, launch.workspace.data);
    const Parts at = parts(rows_of_tiles(p, o), o.x.cols());
    auto* const words = static_cast<std::uint32_t*>(launch.workspace.data);
    a.column_max = words + at.column_max;
    a.row_max = words + at.row_max;
    const LaunchShape shape = shape_of(a, 1);
    enqueue(kName, quantize_tiles<T, kWhole, Pass::measure, false, true>, shape, launch.stream, a);
    if (a.m.q || a.m.q_transposed) {
      enqueue(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic, true>, shape, launch.stream, a);
    }
    if (o.y.present()) enqueue_sums_of_experts(kName, a, o.y, launch.stream);
  });
}

}  // namespace

extern constinit const QuantizeKernel grouped_gradient_quantize_sm80 = {
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
