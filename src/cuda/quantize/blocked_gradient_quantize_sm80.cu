// What the int8 backward needs of dY (m, n) in blocks of T terms of either contraction:
//
//   s1[m, g] = max(max_{n in g} |dY[m, n] w[n]| / 127, min_scale)    q1[m, n] = rint(dY[m, n] w[n] / s1[m, g])
//   s2[g, n] = max(max_{m in g} |dY[m, n] x[m]| / 127, min_scale)    q2[n, m] = rint(dY[m, n] x[m] / s2[g, n])
//   dB[n] = sum_m dY[m, n]
//
//   quantize_tiles   a block of threads for each tile of 128 x 128. T = 128: all of it in one launch that reads dY
//                    once. Longer blocks: one launch for the maxima of tiles, another for the levels
//   sum_tiles        the tiles' sums of columns, in the order of the tiles
#include <cstdint>
#include <string>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/quantize/blocked_gradient_quantize_sm80.cuh"
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
  const auto sums = static_cast<std::size_t>(ceil_div(rows, kTile) * cols);
  if (is_fused(p)) return {sums, sums, sums};
  return {sums, 2 * sums, 2 * sums + static_cast<std::size_t>(ceil_div(cols, kTile) * rows)};
}

template <class T>
Arguments<T> arguments(const QuantizeProblem& p, const QuantizeOperands& o, void* workspace) {
  const Parts at = parts(p, o.x.rows(), o.x.cols());
  auto* const words = static_cast<std::uint32_t*>(workspace);
  Arguments<T> a = {};
  a.m = tiles::matrices<T>(o);
  if (o.q.present()) {
    a.column_factor = row_scale<float>(o.multiplier);
    a.row_scale = static_cast<float*>(o.scale.data);
    a.row_scale_stride = o.scale.row_stride;
    a.row_scale_block_stride = o.scale.col_stride;
  }
  if (o.q_transposed.present()) {
    a.row_factor = row_scale<float>(o.row_multiplier);
    a.column_scale = static_cast<float*>(o.column_scale.data);
    a.column_scale_stride = o.column_scale.col_stride;
    a.column_scale_block_stride = o.column_scale.row_stride;
  }
  if (o.y.present()) a.partial_sums = reinterpret_cast<float*>(words);
  a.column_max = words + at.column_max;
  a.row_max = words + at.row_max;
  a.tiles_down = static_cast<int>(ceil_div(o.x.rows(), kTile));
  a.tiles_across = static_cast<int>(ceil_div(o.x.cols(), kTile));
  for (std::int64_t length = kTile; length < p.group; length *= 2) ++a.block_shift;
  a.q_min = static_cast<float>(p.q_min);
  a.q_max = static_cast<float>(p.q_max);
  a.min_scale = static_cast<float>(p.min_scale);
  a.seed = o.seed;
  return a;
}

std::string supports(const QuantizeProblem& p) {
  if (std::string reason = reason_against(p.device, 80); !reason.empty()) return reason;
  if (p.x == DType::f64 || p.q != DType::s8) return "does f16, bf16 and f32 to s8";
  if (p.mapping != Mapping::symmetric || p.scale != ScaleSource::dynamic || p.q_min > -p.q_max) {
    return "does symmetric dynamic scales with nothing to clamp";
  }
  if (p.rows > kMaxDown * kTile || p.cols > kMaxDown * kTile) {
    return message("does at most ", kMaxDown * kTile, " rows and columns");
  }
  return {};
}

// By estimate, not by timings: bytes at the speed of the copy, less where dY is read twice.
Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, is_fused(p) ? 3.5e12 : 2.2e12);
  cost.seconds += is_fused(p) ? 4e-6 : 7e-6;
  return cost;
}

std::size_t workspace(const QuantizeProblem& p) { return parts(p, p.rows, p.cols).all * 4; }

// Calls body.operator()<T, kWhole, kStochastic>().
template <class Body>
void with_variant(const QuantizeProblem& p, bool whole, const Body& body) {
  with_narrow_type(p.x, [&](auto x) {
    with_flags([&]<bool kWhole, bool kStochastic>() { body.template operator()<decltype(x), kWhole, kStochastic>(); },
               whole, p.rounding == Rounding::stochastic);
  });
}

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
    const Arguments<T> a = arguments<T>(p, o, launch.workspace.data);
    const int bands = ceil_div(a.tiles_across, kBand);
    const int width = ceil_div(a.tiles_across, bands);
    const LaunchShape shape = {
        dim3(static_cast<unsigned>(width), static_cast<unsigned>(a.tiles_down), static_cast<unsigned>(bands)),
        dim3(kThreads)};
    if (is_fused(p)) {
      enqueue(kName, quantize_tiles<T, kWhole, Pass::fused, kStochastic>, shape, launch.stream, a);
    } else {
      enqueue(kName, quantize_tiles<T, kWhole, Pass::measure, false>, shape, launch.stream, a);
      enqueue(kName, quantize_tiles<T, kWhole, Pass::levels, kStochastic>, shape, launch.stream, a);
    }
    if (!o.y.present()) return;
    const SumArguments<T> s = {a.partial_sums, a.m.cols, a.tiles_down, static_cast<T*>(o.y.data), o.y.strides[0]};
    enqueue(kName, sum_tiles<T>, {dim3(blocks_for(s.cols, 32)), dim3(32, kSumLines)}, launch.stream, s);
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
