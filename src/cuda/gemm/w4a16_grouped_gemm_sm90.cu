// w4a16_gemm_sm90 of each expert's rows, whose error bound is its dense plan's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>

#include "base/message.h"
#include "cuda/dispatch.h"
#include "cuda/gemm/gather_rows.h"
#include "cuda/gemm/w4a16_gemm_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace w4a16;

constexpr std::string_view kName = "w4a16_grouped_gemm_sm90";

using Tiles = std::tuple<Tile<256, 1, 4>, Tile<128, 1, 8>>;

// Measured on an H200, layers of bench/torch/moe.py.
constexpr double kStoreCycles = 12, kStoreWideCycles = 25;  // of a tile, for each of its rows; of f32
constexpr double kHidden = 0.85;                            // of the shorter one of arithmetic and memory

template <class T>
double expected_seconds(const GemmProblem& p, std::int64_t m) {
  const double tiles = expected_tiles(p, m, T::rows_a) * order_of<T>({m, p.n, p.k}).rows;
  const double waves = std::ceil(tiles / clusters_at_once<T>(1, p.device));
  const double tile_cycles = steps_of<T>(p.k) * T::k_tiles * k_tile_cycles<T>(false) +
                             T::rows_a * (p.y == DType::f32 ? kStoreWideCycles : kStoreCycles);
  const double products = (waves * tile_cycles + kGridCycles) / (kGigahertz * 1e9);
  const double memory = grouped_work(p).bytes / kBytesPerSecond;
  return kLaunchSeconds + std::max(products, memory) + (1 - kHidden) * std::min(products, memory);
}

SplitChoice choose(const GemmProblem& p, std::int64_t m) {
  SplitChoice best;  // never split
  with_cheapest([](const auto& visit) { with_each_tile<Tiles>(visit); },
                [&]<class T>(T) { return expected_seconds<T>(p, m); },
                [&]<class T>(T, double seconds) {
                  best = {T::rows_a, 1, 0, seconds};
                });
  return best;
}

// Calls body(form) with the problem's form of this many rows of a.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, const Body& body) {
  with_each_tile<Tiles>([&]<class Tile>(Tile) {
    if (Tile::rows_a != rows_a) return;
    p.a == DType::f16 ? body(Form<__half, Tile, true, true>()) : body(Form<__nv_bfloat16, Tile, true, true>());
  });
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against_problem(p); !reason.empty()) return reason;
  if (!p.b_packed) return "takes packed weights";
  if (p.experts > kMaxExperts) return message("is for at most ", kMaxExperts, " experts");
  if (max_tiles(p, p.m, 128) * ceil_div(p.n, 128) > std::int64_t{1} << 30) return "takes at most 2^30 tiles of y";
  return {};
}

Cost cost(const GemmProblem& p) {
  Cost cost = grouped_work(p);
  cost.seconds = choose(p, p.m).seconds + gather_seconds(p);
  return cost;
}

std::string detail(const GemmProblem& p) {
  return message("tile ", choose(p, p.m).rows_a, "x", kRowsB, ", clusters of ", kClusterSize,
                 p.gather ? ", rows of a gathered first" : "");
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  if (problem.gather) prepare_gather_rows();
  with_each_tile<Tiles>([&]<class T>(T) {
    with_form(problem, T::rows_a, []<class F>(F) { prepare(kName, w4a16_gemm_kernel<F>, sizeof(Shared<F>)); });
  });
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const std::int64_t m = o.y.rows();
  if (m == 0 || o.a.rows() == 0 || problem.n == 0 || problem.experts == 0) return;
  GemmOperands in_order = o;
  if (problem.gather) gather_rows(problem, in_order, launch);
  with_form(problem, choose(problem, m).rows_a,
            [&]<class F>(F) { launch_form<F>(kName, problem, in_order, {}, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_grouped_gemm_sm90 = {
    .name = "w4a16_grouped_gemm_sm90",
    .task = {Operation::grouped_gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = gathered_size,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = int4_mappable,
    .bound = Bound::rounded_weight,
};

}  // namespace octile::cuda
