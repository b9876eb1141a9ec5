// w4a8_gemm_sm90 of each expert's rows. The bits of an expert's rows are its dense plan's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/message.h"
#include "cuda/gemm/gather_rows.h"
#include "cuda/gemm/w4a8_gemm_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace w4a8;

constexpr std::string_view kName = "w4a8_grouped_gemm_sm90";

// Calls body(form) with the problem's form of this many rows of a.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, const Body& body) {
  const auto with_rows = [&]<int rows>() {
    const auto with = [&]<bool zero_points>() {
      if (p.b.group == 32) return body(Form<rows, true, zero_points, 1, false, true>());
      if (p.b.group == 64) return body(Form<rows, true, zero_points, 2, false, true>());
      if (p.b.group == 128) return body(Form<rows, true, zero_points, 4, false, true>());
      body(Form<rows, true, zero_points, 0, false, true>());
    };
    p.b.zero_point ? with.template operator()<true>() : with.template operator()<false>();
  };
  rows_a == kFewest ? with_rows.template operator()<kFewest>() : with_rows.template operator()<kNarrow>();
}

// Measured on an H200, layers of bench/torch/moe.py.
constexpr double kFewestStepCycles = 750;
constexpr double kStoreCycles = 30, kStoreWideCycles = 47;  // of a tile, for each of its rows; of f32
constexpr double kSearchCycles = 7000;                      // until the first tile is found
constexpr double kHidden = 0.85;                            // of the shorter one of arithmetic and memory

double expected_seconds(const GemmProblem& p, std::int64_t m, int rows_a) {
  const double across = static_cast<double>(ceil_div(p.n, std::int64_t{kClusterSize} * rows_b_of(rows_a)));
  const double tiles = expected_tiles(p, m, rows_a) * across;
  const int clusters = (rows_a == kFewest ? 2 : 1) * max_active_clusters(p.device, kClusterSize);
  const double step_cycles = rows_a == kFewest ? kFewestStepCycles : wide_step_cycles(p, rows_a);
  const double tile_cycles =
      steps_of(p.k) * step_cycles + rows_a * (p.y == DType::f32 ? kStoreWideCycles : kStoreCycles);
  const double products =
      (std::ceil(tiles / clusters) * tile_cycles + kGridCycles + kSearchCycles) / (kGigahertz * 1e9);
  const double memory = grouped_work(p).bytes / kBytesPerSecond;
  return kLaunchSeconds + std::max(products, memory) + (1 - kHidden) * std::min(products, memory);
}

int best_rows(const GemmProblem& p, std::int64_t m) {
  return expected_seconds(p, m, kFewest) < expected_seconds(p, m, kNarrow) ? kFewest : kNarrow;
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against_problem(p); !reason.empty()) return reason;
  if (!p.b_packed) return "takes packed weights";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  if (max_tiles(p, p.m, kFewest) * ceil_div(p.n, 128) > std::int64_t{1} << 30) return "takes at most 2^30 tiles of y";
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = expected_seconds(p, p.m, best_rows(p, p.m)) + gather_seconds(p);
  return cost;
}

std::string detail(const GemmProblem& p) {
  const int rows = best_rows(p, p.m);
  return message("y^T = b * a^T, tile ", rows_b_of(rows), "x", rows, ", clusters of ", kClusterSize,
                 p.gather ? ", rows of a gathered first" : "");
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  if (problem.gather) prepare_gather_rows();
  for (const int rows_a : {kFewest, kNarrow}) {
    with_form(problem, rows_a, []<class F>(F) { prepare(kName, w4a8_gemm_kernel<F>, sizeof(Shared<F>)); });
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const std::int64_t m = o.y.rows();
  if (m == 0 || o.a.rows() == 0 || problem.n == 0 || problem.experts == 0) return;
  GemmOperands in_order = o;
  if (problem.gather) gather_rows(problem, in_order, launch);
  with_form(problem, best_rows(problem, m),
            [&]<class F>(F) { launch_form<F>(kName, problem, in_order, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a8_grouped_gemm_sm90 = {
    .name = "w4a8_grouped_gemm_sm90",
    .task = {Operation::grouped_gemm, kW4A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = gathered_size,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = int4_mappable,
};

}  // namespace octile::cuda
