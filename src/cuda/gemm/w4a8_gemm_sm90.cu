// w4a8_gemm_sm90 on the host: tiles, cost model.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/clusters.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/w4a8_gemm_sm90_launch.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a8;

constexpr std::string_view kName = "w4a8_gemm_sm90";

TileOrder order_of(std::int64_t m, std::int64_t n, int rows_a) {
  return transposed_order(m, n, rows_a, rows_b_of(rows_a));
}

// Whether there are so few tiles that each block has an SM.
bool one_an_sm(const GemmProblem& p, std::int64_t m, int rows_a) {
  return order_of(m, p.n, rows_a).count() <= max_active_clusters(p.device, kClusterSize);
}

// Calls body(form) with the problem's form of this many rows of a.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, bool turns, const Body& body) {
  const auto with_rows = [&]<int rows>(std::integral_constant<int, rows>) {
    constexpr bool kFewRows = rows <= kFew;
    const auto with = [&]<bool packed, bool zero_points, bool takes_turns>() {
      if constexpr (packed || !kFewRows) {
        if (p.b.group == 32) return body(Form < rows, packed, zero_points, 1, takes_turns && kFewRows > ());
        if (p.b.group == 64) return body(Form < rows, packed, zero_points, 2, takes_turns && kFewRows > ());
        if (p.b.group == 128) return body(Form < rows, packed, zero_points, 4, takes_turns && kFewRows > ());
        body(Form < rows, packed, zero_points, 0, takes_turns && kFewRows > ());
      }
    };
    with_flags(with, p.b_packed, p.b.zero_point, turns);
  };
  if (rows_a == kFewest) return with_rows(std::integral_constant<int, kFewest>());
  if (rows_a == kFew) return with_rows(std::integral_constant<int, kFew>());
  if (rows_a == kNarrow) return with_rows(std::integral_constant<int, kNarrow>());
  with_rows(std::integral_constant<int, kWide>());
}

// Of tiles with this many rows of a.
double expected_seconds(const GemmProblem& p, std::int64_t m, int rows_a) {
  const int count = order_of(m, p.n, rows_a).count();
  const int clusters = max_active_clusters(p.device, kClusterSize);
  // Of few rows the chain of waits counts; a's traffic grows with the number of blocks.
  const bool turns = one_an_sm(p, m, rows_a);
  const double few_cycles = rows_a == kFewest ? (turns ? 280 : 560) : turns ? 280 + 150.0 * count / clusters : 720;
  const double step_cycles = rows_a > kFew ? wide_step_cycles(p, rows_a) : few_cycles;
  const auto waves = static_cast<double>(ceil_div(count, rows_a <= kFew && !turns ? 2 * clusters : clusters));
  return (waves * (steps_of(p.k) * step_cycles + kTileCycles) + kGridCycles) / (kGigahertz * 1e9);
}

int best_rows(const GemmProblem& p, std::int64_t m) {
  int best = kNarrow;
  for (const int rows : {kWide, kFew, kFewest}) {
    if (rows <= kFew && !p.b_packed) continue;
    if (expected_seconds(p, m, rows) < expected_seconds(p, m, best)) best = rows;
  }
  return best;
}

Cost cost(const GemmProblem& p) {
  Cost cost = gemm_work(p);
  const double seconds = expected_seconds(p, p.m, best_rows(p, p.m));
  cost.seconds = std::max(seconds, cost.bytes / kBytesPerSecond) + kLaunchSeconds;
  return cost;
}

std::string detail(const GemmProblem& p) {
  const int rows = best_rows(p, p.m);
  const TileOrder order = order_of(p.m, p.n, rows);
  return message("y^T = b * a^T, tile ", rows_b_of(rows), "x", rows, ", clusters of ", kClusterSize, ", ", order.rows,
                 "x", order.cols, " of them");
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  for (const int rows_a : {kFewest, kFew, kNarrow, kWide}) {
    for (const bool turns : {false, true}) {
      with_form(problem, rows_a, turns, []<class F>(F) { prepare(kName, w4a8_gemm_kernel<F>, sizeof(Shared<F>)); });
    }
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  const int rows = best_rows(problem, o.a.rows());
  with_form(problem, rows, one_an_sm(problem, o.a.rows(), rows),
            [&]<class F>(F) { launch_form<F>(kName, problem, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a8_gemm_sm90 = {
    .name = "w4a8_gemm_sm90",
    .task = {Operation::gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = reason_against_problem,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = int4_mappable,
};

}  // namespace octile::cuda
