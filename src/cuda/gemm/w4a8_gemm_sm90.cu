// w4a8 on Hopper's matrix unit: which tiles the kernel of device/folded_nibbles.cuh has for a problem, what it is
// expected to cost, and its launch.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "base/message.h"
#include "cuda/device/folded_nibbles.cuh"
#include "cuda/gemm/nibble_maps.h"
#include "cuda/gemm/nibble_weight.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace folded;

constexpr std::string_view kName = "w4a8_gemm_sm90";

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr double kGigahertz = 1.77;
constexpr double kGridCycles = 6000;
constexpr double kTileCycles = 4500;
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 3.5e12;
constexpr int kBand = 11;  // pairs of tiles of b: with six tiles of a, 66 clusters

TileOrder order_of(std::int64_t m, std::int64_t n, int rows_a) {
  return {static_cast<int>(ceil_div(n, kRowsB * kPair)), static_cast<int>(ceil_div(m, rows_a)), kBand, true};
}

int steps_of(std::int64_t k) { return static_cast<int>(ceil_div(k, kStep)); }

int clusters_at_once(Device device) { return std::max(properties(device).multiprocessors / kPair, 1); }

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  static_assert(sizeof(Shared<F>) <= kSharedBytes);
  Arguments arguments;
  arguments.weight = nibble_weight(problem, o);
  Maps maps;
  maps.a = tensor_map(kName, o.a, {F::rows_a / kPair, kStep, true});
  if (F::packed) {
    maps.b = maps.b_odd = tensor_map(kName, panels(arguments.weight, problem.device), {kRowsB / 16, kStep * 2, false});
  } else {
    maps.b = tensor_map(kName, every_second_row(arguments.weight, 0, problem.device), {kRowsB / 2, kStep / 2, true});
    maps.b_odd =
        tensor_map(kName, every_second_row(arguments.weight, 1, problem.device), {kRowsB / 2, kStep / 2, true});
  }
  const bool by_engine = mappable(o.y);
  const bool wide = problem.y == DType::f32;
  maps.y = by_engine ? tensor_map(kName, o.y, TransposedBoxes<F::rows_a>::box(wide, false)) : maps.a;

  arguments.steps = steps_of(problem.k);
  arguments.order = order_of(o.a.rows(), problem.n, F::rows_a);
  arguments.a = static_cast<const std::int8_t*>(o.a.data);
  arguments.a_pitch = o.a.strides[0];
  arguments.a_scale = row_scale<float>(o.a_scale);
  if (problem.bias) {
    arguments.bias = o.bias.data;
    arguments.bias_stride = o.bias.strides[0];
  }
  arguments.type = problem.y;
  arguments.y = {o.y.data, o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  arguments.y.wide = wide;
  const bool whole = o.y.cols() * (bits(o.y.dtype) / 8) % 16 == 0;
  arguments.y.engine_cols = !by_engine ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;

  const int clusters = std::min(clusters_at_once(problem.device), arguments.order.count());
  enqueue(kName, w4a8_gemm_kernel<F>,
          LaunchShape{static_cast<unsigned>(clusters * kPair), kThreads, sizeof(Shared<F>), dim3(kPair)}, stream, maps,
          arguments);
}

// Calls body(form) for the problem's, with so many rows of a to a tile.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, const Body& body) {
  const auto with_zeros = [&]<int rows, bool packed, bool zero_points>() {
    if (p.b.group == 32) return body(Form<rows, packed, zero_points, 1>());
    if (p.b.group == 64) return body(Form<rows, packed, zero_points, 2>());
    if (p.b.group == 128) return body(Form<rows, packed, zero_points, 4>());
    body(Form<rows, packed, zero_points, 0>());
  };
  const auto with_rows = [&]<int rows>() {
    if (p.b_packed && p.b.zero_point) return with_zeros.template operator()<rows, true, true>();
    if (p.b_packed) return with_zeros.template operator()<rows, true, false>();
    if (p.b.zero_point) return with_zeros.template operator()<rows, false, true>();
    with_zeros.template operator()<rows, false, false>();
  };
  rows_a == kWide ? with_rows.template operator()<kWide>() : with_rows.template operator()<kNarrow>();
}

// What is expected of tiles with so many rows of a.
double expected_seconds(const GemmProblem& p, std::int64_t m, int rows_a) {
  const auto waves = static_cast<double>(ceil_div(order_of(m, p.n, rows_a).count(), clusters_at_once(p.device)));
  const double folds = p.b.group == p.k ? 0 : 128.0 / static_cast<double>(p.b.group);
  const double step_cycles = 250 + rows_a * (3.2 + 1.9 * folds);
  return (waves * (steps_of(p.k) * step_cycles + kTileCycles) + kGridCycles) / (kGigahertz * 1e9);
}

int best_rows(const GemmProblem& p, std::int64_t m) {
  return expected_seconds(p, m, kNarrow) < expected_seconds(p, m, kWide) ? kNarrow : kWide;
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (p.k % 32 != 0) return "wants rows of a multiple of 32 terms";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  return {};
}

Cost cost(const GemmProblem& p) {
  const auto m = static_cast<double>(p.m);
  const auto n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k);
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = m * k + n * k / 2 + m * n * bits(p.y) / 8;
  const double seconds = expected_seconds(p, p.m, best_rows(p, p.m));
  cost.seconds = std::max(seconds, cost.bytes / kBytesPerSecond) + kLaunchSeconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const int rows = best_rows(p, p.m);
  const TileOrder order = order_of(p.m, p.n, rows);
  return message("y^T = b * a^T, tile ", kRowsB, "x", rows, ", clusters of ", kPair, ", ", order.rows, "x", order.cols,
                 " of them");
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  for (const int rows_a : {kNarrow, kWide}) {
    with_form(problem, rows_a, []<class F>(F) { prepare(kName, w4a8_gemm_kernel<F>, sizeof(Shared<F>)); });
  }
}

bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(o.a) && (p.b_packed || mappable_nibbles(o.b));
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  with_form(problem, best_rows(problem, o.a.rows()), [&]<class F>(F) { launch_form<F>(problem, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_sm90 = {
    .name = "w4a8_gemm_sm90",
    .task = {Operation::gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
};

}  // namespace octile::cuda
