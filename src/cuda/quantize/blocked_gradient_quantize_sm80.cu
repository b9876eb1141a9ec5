// What the int8 backward needs of dY in blocks of T terms of either contraction: device/gradient_tiles.cuh.
//
//   quantize_tiles   a block of threads for each tile of 128 x 128. T = 128: all of it in one launch that reads dY
//                    once. Longer blocks: one launch for the maxima of tiles, another for the levels
//   sum_tiles        the tiles' sums of columns, in the order of the tiles
#include <cstdint>
#include <string>

#include "cuda/device/gradient_tiles.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

using namespace blocked_gradient;

constexpr std::string_view kName = "blocked_gradient_quantize_sm80";

bool is_fused(const QuantizeProblem& p) { return p.group == kTile; }

// The workspace, in elements of 4 bytes: sums, and maxima where there are two passes.
struct Parts {
  std::size_t column_max, row_max, all;
};

Parts parts(const QuantizeProblem& p, std::int64_t rows, std::int64_t cols) {
  const std::size_t sums = sum_words(rows, cols);
  if (is_fused(p)) return {sums, sums, sums};
  return {sums, 2 * sums, 2 * sums + static_cast<std::size_t>(ceil_div(cols, kTile) * rows)};
}

std::string supports(const QuantizeProblem& p) {
  std::string reason = reason_against(p.device, 80);
  return reason.empty() ? refusal(p) : reason;
}

// On an H200, 16384 x 4096 to 16384 x 16384 and 8192 x 8192 bf16; less where dY is read twice.
Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, is_fused(p) ? 2.1e12 : 1.55e12);
  cost.seconds += is_fused(p) ? 6e-6 : 8e-6;
  return cost;
}

std::size_t workspace(const QuantizeProblem& p) { return parts(p, p.rows, p.cols).all * 4; }

void load(const QuantizeProblem& p) {
  for (const bool whole : {false, true}) {
    with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
      prepare(kName, sum_tiles<T>);
      if (is_fused(p)) return prepare(kName, quantize_tiles<T, kWhole, Pass::fused, kStochastic>);
      prepare(kName, quantize_tiles<T, kWhole, Pass::measure, false>);
      prepare(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic>);
    });
  }
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const bool whole = with_narrow_type(p.x, [&](auto x) { return tiles::moves_whole<decltype(x)>(o); });
  with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
    Arguments<T> a = arguments<T>(p, o, launch.workspace.data);
    const Parts at = parts(p, o.x.rows(), o.x.cols());
    auto* const words = static_cast<std::uint32_t*>(launch.workspace.data);
    a.column_max = words + at.column_max;
    a.row_max = words + at.row_max;
    const LaunchShape shape = shape_of(a, 1);
    if (is_fused(p)) {
      enqueue(kName, quantize_tiles<T, kWhole, Pass::fused, kStochastic>, shape, launch.stream, a);
    } else {
      enqueue(kName, quantize_tiles<T, kWhole, Pass::measure, false>, shape, launch.stream, a);
      enqueue(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic>, shape, launch.stream, a);
    }
    if (o.y.present()) enqueue_sums(kName, a, o.y, launch.stream);
  });
}

}  // namespace

extern constinit const QuantizeKernel blocked_gradient_quantize_sm80 = {
    .name = "blocked_gradient_quantize_sm80",
    .task = {Operation::blocked_gradient_quantize},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
