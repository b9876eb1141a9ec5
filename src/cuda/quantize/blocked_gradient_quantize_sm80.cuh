// blocked_gradient_quantize_sm80 and grouped_gradient_quantize_sm80: what the int8 backward needs of dY in blocks of T
// terms of either contraction. The kernels: device/gradient_tiles.cuh.
//
//   quantize_tiles   a block of threads for each tile of 128 x 128, of an expert's rows where there are experts.
//                    T = 128 without experts: all of it in one launch that reads dY once. Otherwise one launch for the
//                    maxima of tiles, another for the levels
//   sum_tiles        the tiles' sums of columns, in the order of the tiles
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/device/gradient_tiles.cuh"
#include "plan/cost.h"

namespace octile::cuda::blocked_gradient_sm80 {

using namespace blocked_gradient;

template <bool kExperts>
bool is_fused(const QuantizeProblem& p) {
  return !kExperts && p.group == kTile;
}

// The workspace, in elements of 4 bytes: sums, and maxima where there are two passes.
struct Parts {
  std::size_t column_max, row_max, all;
};

template <bool kExperts>
Parts parts(const QuantizeProblem& p, std::int64_t rows, std::int64_t cols) {
  const std::size_t sums = sum_words(rows, cols);
  if (is_fused<kExperts>(p)) return {sums, sums, sums};
  return {sums, 2 * sums, 2 * sums + static_cast<std::size_t>(ceil_div(cols, kTile) * rows)};
}

inline std::string supports(const QuantizeProblem& p) {
  std::string reason = reason_against(p.device, 80);
  return reason.empty() ? refusal(p) : reason;
}

// On an H200, 16384 x 4096 to 16384 x 16384 and 8192 x 8192 bf16; less where dY is read twice.
template <bool kExperts>
Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, is_fused<kExperts>(p) ? 2.1e12 : 1.55e12);
  cost.seconds += is_fused<kExperts>(p) ? 6e-6 : 8e-6;
  return cost;
}

template <bool kExperts>
std::size_t workspace(const QuantizeProblem& p) {
  return parts<kExperts>(p, p.rows, p.cols).all * 4;
}

template <const std::string_view& kName, bool kExperts>
void load(const QuantizeProblem& p) {
  for (const bool whole : {false, true}) {
    with_variant(p, whole, [&]<class T, bool kWhole, bool kStochastic>() {
      prepare(kName, sum_tiles<T, kExperts>);
      if constexpr (!kExperts) {
        if (is_fused<kExperts>(p)) return prepare(kName, quantize_tiles<T, kWhole, Pass::fused, kStochastic>);
      }
      prepare(kName, quantize_tiles<T, kWhole, Pass::measure, false, kExperts>);
      prepare(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic, kExperts>);
    });
  }
}

template <const std::string_view& kName, bool kExperts>
void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_variant(p, moves_whole(p, o), [&]<class T, bool kWhole, bool kStochastic>() {
    Arguments<T> a = arguments<T>(p, o, launch.workspace.data);
    const Parts at = parts<kExperts>(p, rows_of_tiles(p, o), o.x.cols());
    auto* const words = static_cast<std::uint32_t*>(launch.workspace.data);
    a.column_max = words + at.column_max;
    a.row_max = words + at.row_max;
    const LaunchShape shape = shape_of(a, 1);
    const auto quantize = [&] {
      if constexpr (!kExperts) {
        if (is_fused<kExperts>(p)) {
          return enqueue(kName, quantize_tiles<T, kWhole, Pass::fused, kStochastic>, shape, launch.stream, a);
        }
      }
      enqueue(kName, quantize_tiles<T, kWhole, Pass::measure, false, kExperts>, shape, launch.stream, a);
      if (!a.m.q && !a.m.q_transposed) return;
      enqueue(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic, kExperts>, shape, launch.stream, a);
    };
    quantize();
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
          .cost = cost<kExperts>,
          .workspace = workspace<kExperts>,
          .launch = launch<kName, kExperts>,
          .prepare = load<kName, kExperts>};
}

}  // namespace octile::cuda::blocked_gradient_sm80
