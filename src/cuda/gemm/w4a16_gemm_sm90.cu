// w4a16_gemm_sm90 on the host: error bound, tiles, cost model.
//
// With u the unit roundoff of a's type, the error of a result is at most
//   sum |a (q - z) s| ((2 + u) u + (k + 3) 2^-24) + sum |a| S 2^-26 (f16: S the largest scale of the row)
// plus half a unit in the last place of y. With one scale per row the first and the third term vanish.
#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "cuda/dispatch.h"
#include "cuda/gemm/w4a16_gemm_sm90_launch.cuh"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w4a16;

constexpr std::string_view kName = "w4a16_gemm_sm90";

// Rows of a per WGMMA, WGMMAs, stages, tiles of K per stage, blocks per SM.
using Tiles = std::tuple<Tile<160, 2, 4>, Tile<256, 1, 4>, Tile<192, 1, 3, 2>, Tile<160, 1, 3, 2>, Tile<128, 1, 8>,
                         Tile<96, 1, 4, 2>, Tile<64, 1, 6, 1, 2>>;

// How much longer 64 columns take in groups of 32, fitted to 32 timings on an H200.
struct SmallGroups {
  double narrowest = 1;  // of the tile of 64 rows
  double others = 1;

  explicit SmallGroups(const GemmProblem& p) {
    if (p.b.group >= 64 || p.b.group == p.k) return;
    narrowest = p.b_packed ? 1.45 : 1.9;
    others = p.b_packed ? 1.08 : 1.15;
    if (p.b.zero_point) narrowest *= 1.3, others *= p.b_packed ? 1.1 : 1.26;
  }
};

template <class T>
SplitChoice choice_of(const GemmSize& size, int parts, const GemmProblem& p) {
  const Device device = p.device;
  const SmallGroups small(p);
  const double slower = T::blocks == 2 ? small.narrowest : small.others;
  const int steps = steps_of<T>(size.k);
  const int units = static_cast<int>(ceil_div(steps * T::step, 128));
  const int count = order_of<T>(size).count();
  const int clusters = clusters_at_once<T>(parts, device);
  if (parts > 1 && (count > clusters || units < parts)) return {};
  const int rest = count % clusters;
  const bool halve = T::blocks == 1 && parts == 1 && rest > 0 && 2 * rest <= clusters && units > 1;
  // Blocks of a larger cluster share SMs even where others are free.
  const bool alone = kClusterSize * parts * count * (parts > 1 || halve ? 2 : 1) <= properties(device).sms;
  const auto tile_cycles = [&](int part_units) {
    return std::min(part_units * 128 / kTileK, steps * T::k_tiles) * k_tile_cycles<T>(alone) * slower + kTileCycles;
  };
  const auto waves = static_cast<double>(halve ? count / clusters : ceil_div(count, clusters));
  double cycles = waves * tile_cycles(static_cast<int>(ceil_div(units, parts))) + kGridCycles;
  if (halve) cycles += tile_cycles((units + 1) / 2) + kHalvedCycles;
  if (parts > 1) cycles += 2500 + 500 * parts;
  if (parts > 2) cycles += (parts - 2) * std::max(0, 42 * T::rows_a - 2600);  // one block adds them all
  const double gigahertz = halve && waves > 0 ? kHalvedGigahertz : kGigahertz;
  return {T::rows_a, parts, halve ? rest : 0, cycles / (gigahertz * 1e9) + kLaunchSeconds};
}

SplitChoice best_choice(const GemmSize& size, const GemmProblem& p) {
  return best_split([](const auto& body) { with_each_tile<Tiles>(body); },
                    [&]<class T>(T, int parts) { return choice_of<T>(size, parts, p); });
}

// Calls body(form) with the problem's form of this many rows of a.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, const Body& body) {
  const auto with = [&]<bool half, bool packed>() {
    with_each_tile<Tiles>([&]<class Tile>(Tile) {
      using T = std::conditional_t<half, __half, __nv_bfloat16>;
      if (Tile::rows_a == rows_a) body(Form<T, Tile, packed>());
    });
  };
  with_flags(with, p.a == DType::f16, p.b_packed);
}

Cost cost(const GemmProblem& p) {
  Cost cost = gemm_work(p);
  cost.seconds = std::max(best_choice(size_of(p), p).seconds, cost.bytes / kBytesPerSecond + kLaunchSeconds);
  return cost;
}

std::string detail(const GemmProblem& p) { return split_detail(best_choice(size_of(p), p), kRowsB); }

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  with_each_tile<Tiles>([&]<class T>(T) {
    with_form(problem, T::rows_a, []<class F>(F) { prepare(kName, w4a16_gemm_kernel<F>, sizeof(Shared<F>)); });
  });
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  const SplitChoice choice = best_choice({o.a.rows(), problem.n, problem.k}, problem);
  with_form(problem, choice.rows_a, [&]<class F>(F) { launch_form<F>(kName, problem, o, choice, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_sm90 = {
    .name = "w4a16_gemm_sm90",
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = reason_against_problem,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = int4_mappable,
    .bound = Bound::rounded_weight,
};

}  // namespace octile::cuda
