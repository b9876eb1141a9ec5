// y[i, j] = fma(Real(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k) and b (n, k) s8, on every
// GPU from Ampere on, for every stride and alignment.
//
// A block multiplies a tile (kLeft rows of the left operand, kRight rows of the right one), kStep terms at a time,
// through a ring of kStages pairs of operand tiles in shared memory (device/product_tiles.cuh), in the orientations of
// the operands in global memory. y is written along its contiguous dimension. Where that is i, the operands are
// swapped: left is b and right is a. Few tiles share the GPU by parts of k, whose exact sums a second kernel adds up.
// Lines that cp.async cannot copy as they are take 2.5 to 4 times as long; large operands with such lines are copied
// first.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "base/message.h"
#include "cuda/forms.h"
#include "cuda/gemm/repack.h"
#include "cuda/gemm/w8a8_gemm_sm80.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/cost.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

using namespace w8a8_sm80;

constexpr char kName[] = "w8a8_gemm_sm80";

constexpr double kSumSeconds = 2.5e-6;  // of the second kernel, besides its bytes
constexpr double kRepackSeconds = 2.5e-6;
constexpr int kMaxParts = 8;
constexpr int kMinTerms = 512;             // of a part
constexpr std::size_t kMaxSums = 8 << 20;  // bytes

// What a launch runs.
struct Choice {
  int tile = -1;
  int parts = 1;
  bool repacks = false;  // lines that are not aligned
  double seconds = std::numeric_limits<double>::infinity();
};

// A product, as in the plan's selection or in a run. Shifted lines are not aligned as cp.async needs
// them.
struct Call {
  std::int64_t m, n, k;
  bool a_outer, b_outer, a_shifted, b_shifted;
  bool swapped;  // left is b
  DType y;
  Device device;
  std::size_t room;  // bytes of scratch

  friend bool operator==(const Call&, const Call&) = default;

  bool shifted() const { return a_shifted || b_shifted; }
  std::int64_t left() const { return swapped ? n : m; }
  std::int64_t right() const { return swapped ? m : n; }
  std::size_t copies_size() const {
    return (a_shifted ? repacked_size(m, k) : 0) + (b_shifted ? repacked_size(n, k) : 0);
  }
  std::int64_t sums_pitch() const { return ceil_div(right(), 4) * 4; }
  std::size_t sums_size(int parts) const {
    return parts == 1 ? 0 : static_cast<std::size_t>(parts * left() * sums_pitch()) * sizeof(std::int32_t);
  }
  std::size_t size(const Choice& c) const { return (c.repacks ? copies_size() : 0) + sums_size(c.parts); }
};

// As far as the problem is known: lines without gaps, from an aligned address on.
Call call_of(const GemmProblem& p) {
  const bool a_outer = p.a_major == Major::outer;
  const bool b_outer = p.b_major == Major::outer;
  const bool a_shifted = (a_outer ? p.m : p.k) % kChunk != 0;
  const bool b_shifted = (b_outer ? p.n : p.k) % kChunk != 0;
  const bool swapped = p.y_major == Major::outer;
  return {p.m, p.n, p.k, a_outer, b_outer, a_shifted, b_shifted, swapped, p.y, p.device, ~std::size_t{0}};
}

std::int64_t terms_of_part(std::int64_t k, int parts, int step) { return ceil_div(ceil_div(k, parts), step) * step; }

// Of the tiles alone.
template <class Tile>
double tile_seconds(const TileTimes& times, const Call& call, const Choice& choice, const CudaDevice& gpu) {
  const std::int64_t blocks = ceil_div(call.left(), Tile::kLeft) * ceil_div(call.right(), Tile::kRight) * choice.parts;
  const bool shifted = call.shifted() && !choice.repacks;
  return block_seconds<Tile>(times, static_cast<double>(blocks), terms_of_part(call.k, choice.parts, Tile::kStep),
                             shifted, gpu);
}

Choice search(const Call& call) {
  const CudaDevice& gpu = properties(call.device);
  const double bytes_per_second = kTileBytesPerSecond * gpu.sms;
  const double operands = static_cast<double>(call.m + call.n) * static_cast<double>(call.k);
  const double y = static_cast<double>(call.m) * static_cast<double>(call.n) * bits(call.y) / 8;
  const double memory = (operands + y) / bytes_per_second;
  Choice best;
  double least = std::numeric_limits<double>::infinity();
  int number = 0;
  for_each_tile([&]<class Tile, bool kOuter>(const Candidate<Tile, kOuter>& candidate) {
    const int tile = number++;
    if (!fits<Tile>(gpu)) return;
    for (const bool repacks : {false, true}) {
      if (repacks ? !call.shifted() : call.shifted() && !Tile::kShifts) continue;
      const bool a_outer = call.a_outer && !(repacks && call.a_shifted);
      const bool b_outer = call.b_outer && !(repacks && call.b_shifted);
      if (!kOuter && (a_outer || b_outer)) continue;
      for (int parts = 1; parts <= kMaxParts && (parts == 1 || call.k >= parts * kMinTerms); ++parts) {
        Choice choice = {tile, parts, repacks};
        if (call.size(choice) > call.room || call.sums_size(parts) > kMaxSums) continue;
        const double tiles = tile_seconds<Tile>(candidate.times, call, choice, gpu);
        choice.seconds = launch_seconds(tiles, memory);
        if (repacks) choice.seconds += kRepackSeconds + 2 * operands / bytes_per_second;
        if (parts > 1)
          choice.seconds += kSumSeconds + 2 * static_cast<double>(call.sums_size(parts)) / bytes_per_second;
        const double rank = ranked(choice.seconds, tile);
        if (rank < least) least = rank, best = choice;
      }
    }
  });
  return best;
}

// A search takes the host microseconds, so each thread remembers its results.
Choice choose(const Call& call) {
  struct Found {
    Call call = {};
    Choice choice;
  };
  constexpr std::size_t kRemembered = 64;
  static thread_local Found found[kRemembered];
  Found& f = found[static_cast<std::size_t>(call.m * 31 + call.n * 7 + call.k / 16) % kRemembered];
  if (f.choice.tile < 0 || f.call != call) f = {call, search(call)};
  return f.choice;
}

// ---- The launch.

template <class Tile, bool kLeftOuter, bool kRightOuter>
TileKernel<Product> kernel() {
  return {w8a8_gemm_kernel<Tile, kLeftOuter, kRightOuter>, kSharedBytes<Tile, kLeftOuter, kRightOuter>};
}

template <class Tile, bool kOuter>
TileKernel<Product> kernel_for(bool left_outer, bool right_outer) {
  if constexpr (kOuter) {
    if (left_outer) return right_outer ? kernel<Tile, true, true>() : kernel<Tile, true, false>();
    if (right_outer) return kernel<Tile, false, true>();
  }
  return kernel<Tile, false, false>();
}

auto* sum_parts_for(DType y) {
  return with_float_type(y, []<class Y>(Y) { return &sum_parts_kernel<Y>; });
}

std::string supports(const GemmProblem& problem) {
  if (problem.grouped()) return "has no groups";
  return reason_against_product(problem);
}

Cost cost(const GemmProblem& problem) {
  Cost cost = gemm_work(problem);
  cost.seconds = choose(call_of(problem)).seconds;
  return cost;
}

std::string detail(const GemmProblem& problem) {
  const Choice choice = choose(call_of(problem));
  std::string text;
  with_tile(choice.tile, [&]<class Tile, bool kOuter>() {
    text = message(problem.y_major == Major::outer ? "y^T = b * a^T, " : "", "tile ", Tile::kLeft, "x", Tile::kRight,
                   ", steps of ", Tile::kStep, ", ", choice.parts, choice.parts == 1 ? " part of k" : " parts of k",
                   choice.repacks ? ", after a copy with aligned lines" : "");
  });
  return text;
}

std::size_t workspace(const GemmProblem& problem) {
  const Call call = call_of(problem);
  return call.size(choose(call));
}

// All kernels that a run may take, which may have fewer rows and other lines than the problem.
void load(const GemmProblem& problem) {
  for_each_tile([&]<class Tile, bool kOuter>(const Candidate<Tile, kOuter>&) {
    if (!fits<Tile>(properties(problem.device))) return;
    for (const bool left_outer : {false, true}) {
      for (const bool right_outer : {false, true}) {
        if (!kOuter && (left_outer || right_outer)) continue;
        const TileKernel<Product> kernel = kernel_for<Tile, kOuter>(left_outer, right_outer);
        prepare(kName, kernel.function, kernel.shared_bytes);
      }
    }
  });
  prepare(kName, sum_parts_for(problem.y));
  prepare_repack();
}

void launch(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  GemmOperands o = operands;
  if (o.y.rows() == 0 || o.y.cols() == 0) return;
  Call call = call_of(problem);
  call.m = o.a.rows();
  call.n = o.b.rows();
  call.k = o.a.cols();
  Operand a = operand_of(o.a, call.a_outer);
  Operand b = operand_of(o.b, call.b_outer);
  call.a_shifted = a.shifted;
  call.b_shifted = b.shifted;
  call.room = launch.workspace.size;
  const Choice choice = choose(call);
  auto* room = static_cast<std::byte*>(launch.workspace.data);
  if (choice.repacks) {
    repack({a.shifted ? &o.a : nullptr, b.shifted ? &o.b : nullptr}, room, launch.stream);
    call.a_outer = call.a_outer && !a.shifted;
    call.b_outer = call.b_outer && !b.shifted;
    a = operand_of(o.a, call.a_outer);
    b = operand_of(o.b, call.b_outer);
    room += call.copies_size();
  }

  const bool swapped = call.swapped;
  Product p = {};
  p.left_scale = factors_of(swapped ? o.b_scale : o.a_scale, problem.scale);
  p.right_scale = factors_of(swapped ? o.a_scale : o.b_scale, problem.scale);
  if (problem.bias) p.bias = {o.bias.data, o.bias.strides[0], 0};
  p.bias_of_left = swapped;
  p.y = o.y.data;
  p.y_pitch = o.y.strides[swapped ? 1 : 0];
  p.y_type = problem.y;
  p.accumulate = problem.accumulate;
  const std::int64_t element = bits(problem.y) / 8;
  p.y_aligned = aligned_rows(p.y, p.y_pitch * element, std::min<std::int64_t>(4 * element, 16));
  with_tile(choice.tile, [&]<class Tile, bool kOuter>() {
    p.tiling = tiling_of<Tile>(swapped ? b : a, swapped ? a : b, call.k);
    p.part_terms = static_cast<int>(terms_of_part(call.k, choice.parts, Tile::kStep));
    p.parts = ceil_div(p.tiling.k, p.part_terms);
    if (p.parts > 1) p.sums = reinterpret_cast<std::int32_t*>(room);
    p.sums_pitch = call.sums_pitch();
    const unsigned tiles = static_cast<unsigned>(p.tiling.left_tiles) * static_cast<unsigned>(p.tiling.right_tiles);
    const TileKernel<Product> kernel =
        kernel_for<Tile, kOuter>(swapped ? call.b_outer : call.a_outer, swapped ? call.a_outer : call.b_outer);
    const LaunchShape shape{{tiles, static_cast<unsigned>(p.parts)}, Tile::kThreads, kernel.shared_bytes};
    enqueue(kName, kernel.function, shape, launch.stream, p);
  });
  if (p.parts == 1) return;
  const auto rows = static_cast<unsigned>(std::min<std::int64_t>(call.left(), 65535));
  const LaunchShape shape{{blocks_for(call.right(), 4 * kSumThreads), rows}, kSumThreads};
  enqueue(kName, sum_parts_for(problem.y), shape, launch.stream, p);
}

}  // namespace

extern constinit const GemmKernel w8a8_gemm_sm80 = {
    .name = "w8a8_gemm_sm80",
    .task = {Operation::gemm, kW8A8},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
    .detail = detail,
};

}  // namespace octile::cuda
