// w8a8 on Hopper's matrix unit: y (m, n) = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]), a (m,
// k) and b (n, k) of s8 with contiguous rows, the sum in s32 over the whole of k.
//
// A persistent grid of clusters of two blocks. In each block one warpgroup copies: a warp has the copy engine fill a
// ring of stages with tiles of a and b, swizzled, 128 bytes of k at a time, of which the two blocks share one operand;
// another warp brings the scales. Two warpgroups multiply, and write y by way of shared memory and the copy engine.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "cuda/device/epilogue.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/repack.h"
#include "cuda/tensor_map.h"
#include "kernels.h"
#include "message.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w8a8_gemm_sm90";
constexpr int kStep = 128;  // bytes of k in a stage: one swizzled row
constexpr int kCluster = 2;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// ping_pong: each warpgroup has tiles of its own, and multiplies while the other one stores.
// cooperative: each has half of a tile's rows, and nothing is multiplied while they store.
enum class Schedule { ping_pong, cooperative };

// rows x cols of y in a block. The blocks of a cluster lie below each other and share b, or beside each other and share
// a.
template <int rows_, int cols_, bool share_b_, int stages_, int boxes_, Schedule schedule_>
struct Tile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr bool share_b = share_b_;
  static constexpr int stages = stages_;
  static constexpr int boxes = boxes_;  // of a warp, filled in turn
  static constexpr Schedule schedule = schedule_;
  static constexpr bool ping_pong = schedule == Schedule::ping_pong;
  static constexpr int cluster_rows = share_b ? kCluster : 1;
  static constexpr int cluster_cols = share_b ? 1 : kCluster;
  static constexpr int blocks = (ping_pong ? rows : rows / kConsumers) / 64;  // 64 rows each, of a warpgroup
  static constexpr int readers = ping_pong ? 4 : 4 * kConsumers;              // warps that read a stage
  static constexpr int tiles = ping_pong ? kConsumers : 1;                    // at a time
};

template <class T, class Y>
struct Shared {
  struct Stage {
    std::uint8_t a[T::rows * kStep];
    std::uint8_t b[T::cols * kStep];
  };
  using Box = cuda::Box<Y, T::cols>;

  Stage stages[T::stages];
  std::uint8_t boxes[kConsumers * 4][T::boxes][Box::bytes];  // of a warp
  float4 col_scales[T::tiles][T::cols / 2];                  // {scale, scale, bias, bias} of two columns
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
  std::uint64_t turn[kConsumers];
  std::uint64_t scales_full[T::tiles];
  std::uint64_t scales_empty[T::tiles];
};

template <class Y>
struct Arguments {
  int steps = 0;    // of k
  TileOrder order;  // of the clusters' tiles
  RowScale<float> a_scale;
  RowScale<float> b_scale;
  const Y* bias = nullptr;
  std::int64_t bias_stride = 0;
  Destination<Y> y;
  int engine_cols = 0;  // the copy engine may store tiles that end here or before
};

// Where a block is, and what it shares.
template <class T>
struct Place {
  int clusters = static_cast<int>(gridDim.x) / kCluster;
  int cluster = static_cast<int>(blockIdx.x) / kCluster;
  int rank = static_cast<int>(blockIdx.x) % kCluster;

  __device__ int2 origin(int2 tile) const {
    return {(tile.x * T::cluster_rows + (T::share_b ? rank : 0)) * T::rows,
            (tile.y * T::cluster_cols + (T::share_b ? 0 : rank)) * T::cols};
  }
};

template <class T, class Y>
__device__ void init(Shared<T, Y>& shared) {
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), static_cast<std::uint32_t>(arrivals));
  };
  for (auto& barrier : shared.full) init(barrier, 1);
  for (auto& barrier : shared.empty) init(barrier, kCluster * T::readers);
  for (auto& barrier : shared.turn) init(barrier, 4);
  for (auto& barrier : shared.scales_full) init(barrier, 32);
  for (auto& barrier : shared.scales_empty) init(barrier, T::readers);
  ptx::barrier_init_done();
}

// One thread: a's and b's tiles, stage by stage. Of the shared operand each block loads half, for both.
template <class T, class Y>
__device__ void load_operands(Shared<T, Y>& shared, const Place<T>& place, const CUtensorMap& a, const CUtensorMap& b,
                              const Arguments<Y>& arguments) {
  constexpr std::uint16_t kBoth = 3;
  constexpr int kSharedRows = (T::share_b ? T::cols : T::rows) / kCluster;
  const int half = place.rank * kSharedRows;
  RingPosition<T::stages> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int2 origin = place.origin(arguments.order[t]);
    for (int step = 0; step < arguments.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const int col = step * kStep;
      ptx::wait(ptx::shared_address(&shared.empty[at.stage]), at.parity ^ 1);
      ptx::arrive_and_expect(full, sizeof(stage));
      if constexpr (T::share_b) {
        ptx::load_box(ptx::shared_address(stage.a), a, col, origin.x, full);
        ptx::load_box_to(kBoth, ptx::shared_address(stage.b + half * kStep), b, {col, origin.y + half}, full);
      } else {
        ptx::load_box_to(kBoth, ptx::shared_address(stage.a + half * kStep), a, {col, origin.x + half}, full);
        ptx::load_box(ptx::shared_address(stage.b), b, col, origin.y, full);
      }
      at.next();
    }
  }
}

// Past the first-level cache, which a grid that starts early may find stale.
__device__ float scale_at(const RowScale<float>& scale, std::int64_t i) {
  return scale.data ? __ldcg(scale.data + i * scale.stride) : scale.value;
}

// One warp: the columns' scales and bias of each tile, any stride, long before their use. Where there is no bias it is
// -0: fma(x, y, -0) is the rounded product, its sign included.
template <class T, class Y>
__device__ void load_scales(Shared<T, Y>& shared, const Place<T>& place, const Arguments<Y>& arguments) {
  const auto column = [&](int j, float& scale, float& bias) {
    const bool inside = j < arguments.y.cols;
    scale = inside ? scale_at(arguments.b_scale, j) : 0.0f;
    bias = inside && arguments.bias ? widen(__ldcg(arguments.bias + j * arguments.bias_stride)) : -0.0f;
  };
  RingPosition<T::tiles> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int first = place.origin(arguments.order[t]).y;
    ptx::wait(ptx::shared_address(&shared.scales_empty[at.stage]), at.parity ^ 1);
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x) % 32; j < T::cols / 2; j += 32) {
      float4 pair;
      column(first + 2 * j, pair.x, pair.z);
      column(first + 2 * j + 1, pair.y, pair.w);
      shared.col_scales[at.stage][j] = pair;
    }
    ptx::arrive(ptx::shared_address(&shared.scales_full[at.stage]));
    at.next();
  }
}

// A warp of a consumer: its warpgroup, itself in that, and the barriers of the blocks that fill its stages, one a lane.
template <class T, class Y>
struct Consumer {
  Shared<T, Y>& shared;
  const Arguments<Y>& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty = ptx::in_block(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kCluster));
  std::uint32_t other_turn = ptx::in_block(ptx::shared_address(&shared.turn[group ^ 1]), ptx::cluster_rank());

  __device__ void release(int stage) const { ptx::arrive_in_cluster(empty + 8 * stage, lane < kCluster); }

  // sums (blocks x 64, cols) = a's rows by b, over all steps; leaves `at` behind the last one. One step's products are
  // in flight while the next one's are enqueued.
  __device__ void multiply(int (&sums)[T::blocks][T::cols / 2], RingPosition<T::stages>& at) const {
    const int first_row = T::ping_pong ? 0 : group * T::blocks * 64;
    int last = 0;
    for (int step = 0; step < arguments.steps; ++step) {
      ptx::wait(ptx::shared_address(&shared.full[at.stage]), at.parity);
      if constexpr (T::ping_pong) ptx::arrive_in_cluster(other_turn, step + 1 == arguments.steps && lane == 0);
      const std::uint32_t a =
          ptx::matrix_descriptor(ptx::shared_address(shared.stages[at.stage].a + first_row * kStep));
      const std::uint32_t b = ptx::matrix_descriptor(ptx::shared_address(shared.stages[at.stage].b));
      ptx::begin_products();
#pragma unroll
      for (int part = 0; part < kStep / 32; ++part) {
#pragma unroll
        for (int block = 0; block < T::blocks; ++block) {
          ptx::multiply_s8<kStep>(ptx::Columns<T::cols>(), sums[block], a + 512 * block + 2 * part, b + 2 * part,
                                  step > 0 || part > 0);
        }
      }
      ptx::commit_products();
      ptx::wait_products<1>();
      if (step > 0) release(last);
      last = at.stage;
      at.next();
    }
    ptx::wait_products<0>();
    release(last);
#pragma unroll
    for (int block = 0; block < T::blocks; ++block) ptx::hold(sums[block]);
  }

  // 64 rows of y from `at`, by way of this warp's boxes. upper and lower: the scales of this thread's two rows.
  __device__ void store(const int (&sums)[T::cols / 2], int2 at, float upper, float lower, const float4* cols,
                        int first_box, const CUtensorMap& y) const {
    using Box = typename Shared<T, Y>::Box;
    const bool by_engine = at.y + T::cols <= arguments.engine_cols;
    const int row = at.x + 16 * warp;
#pragma unroll
    for (int part = 0; part < Box::count; ++part) {
      const int col = at.y + part * Box::cols;
      std::uint8_t* const box = shared.boxes[4 * group + warp][(first_box + part) % T::boxes];
      BoxValues<Y, Box> values;
      values.compute(sums + part * 4 * Box::eights, upper, lower,
                     [&](int j) { return cols[4 * (part * Box::eights + j) + lane % 4]; });
      if (lane == 0) ptx::wait_stores_read<T::boxes - 1>();
      __syncwarp();
      values.write(ptx::shared_address(box));
      if (by_engine) ptx::publish_to_engines();
      __syncwarp();
      if (!by_engine) store_edge<Y, Box>(box, {row, col}, arguments.y);
      if (lane == 0) {
        if (by_engine) ptx::store_box(y, col, row, ptx::shared_address(box));
        ptx::commit_stores();  // a group for each box, if only an empty one: the wait above counts them
      }
    }
  }

  __device__ void run(const Place<T>& place, const CUtensorMap& y) const {
    const int set = T::ping_pong ? group : 0;
    const int first_row = T::ping_pong ? 0 : group * T::blocks * 64;
    const int apart = T::tiles * place.clusters;
    std::uint32_t parity = 0;
    RingPosition<T::stages> at;
    if constexpr (T::ping_pong) at = at.ahead(group * arguments.steps);
    int sums[T::blocks][T::cols / 2];
    for (int t = place.cluster + set * place.clusters; t < arguments.order.count(); t += apart) {
      int2 origin = place.origin(arguments.order[t]);
      origin.x += first_row;
      float row_scales[T::blocks][2];
#pragma unroll
      for (int i = 0; i < 2 * T::blocks; ++i) {
        const int row = origin.x + 8 * i + 48 * (i / 2) + 16 * warp + lane / 4;
        row_scales[i / 2][i % 2] = row < arguments.y.rows ? scale_at(arguments.a_scale, row) : 0.0f;
      }
      // The other warpgroup has waited for all of its stages: ours are at most a lap away, and the parities are right.
      if constexpr (T::ping_pong) ptx::wait(ptx::shared_address(&shared.turn[group]), parity ^ (group == 0));
      multiply(sums, at);
      if constexpr (T::ping_pong) at = at.ahead(arguments.steps);
      ptx::wait(ptx::shared_address(&shared.scales_full[set]), parity);
#pragma unroll
      for (int block = 0; block < T::blocks; ++block) {
        store(sums[block], {origin.x + 64 * block, origin.y}, row_scales[block][0], row_scales[block][1],
              shared.col_scales[set], block * Shared<T, Y>::Box::count, y);
      }
      if (lane == 0) ptx::arrive(ptx::shared_address(&shared.scales_empty[set]));
      __syncwarp();
      parity ^= 1;
    }
    if (lane == 0) ptx::wait_stores_read<0>();
    __syncwarp();
  }
};

template <class T, class Y>
__global__ void __launch_bounds__(kThreads, 1)
    w8a8_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                     const __grid_constant__ CUtensorMap y, const __grid_constant__ Arguments<Y> arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<T, Y>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const Place<T> place;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(a);
    ptx::prefetch_map(b);
    ptx::prefetch_map(y);
    init(shared);
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  wait_for_previous();
  let_next_start();
  if (warp < 4) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands(shared, place, a, b, arguments);
    if (warp == 1) load_scales(shared, place, arguments);
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    Consumer<T, Y>{shared, arguments, warp / 4 - 1, warp % 4}.run(place, y);
  }
  ptx::cluster_arrive();  // no block leaves while the other one still writes to its shared memory
  ptx::cluster_wait();
}

// The tiles, with what they were measured to cost on an H200: cycles of a tile besides its products, and the clock in
// GHz that the power limit leaves (the larger the tile, the less is moved, the higher the clock).
template <class T_>
struct Measured {
  using T = T_;
  double tile_cycles;
  double gigahertz;
};

using Tile128 = Tile<128, 128, false, 6, 2, Schedule::ping_pong>;
using Tile176 = Tile<128, 176, true, 5, 1, Schedule::ping_pong>;
using Tile192 = Tile<128, 192, true, 5, 1, Schedule::ping_pong>;
using Tile256 = Tile<128, 256, true, 4, 2, Schedule::cooperative>;

// Calls body(measured) for every tile.
template <class Body>
void for_each_tile(const Body& body) {
  body(Measured<Tile128>{800, 1.64});
  body(Measured<Tile176>{900, 1.665});
  body(Measured<Tile192>{900, 1.67});
  body(Measured<Tile256>{0, 1.70});
}

constexpr double kProductsPerCycle = 4096;   // of s8, of a multiprocessor
constexpr double kStoredBytesPerCycle = 17;  // where stores do not hide behind products
constexpr double kGridCycles = 5000;         // until the first products, and after the last ones
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 2.9e12;  // where few tiles wait for memory; a guess
constexpr std::int64_t kBandRows = 2048;    // of an operand, that a band of tiles keeps in the second-level cache

struct Size {
  std::int64_t m, n, k;
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class T>
TileOrder order_of(const Size& size) {
  constexpr int kRows = T::rows * T::cluster_rows;
  constexpr int kCols = T::cols * T::cluster_cols;
  // Bands lie across the operand that blocks have for themselves: kBandRows rows of it stay while the other passes by.
  const std::int64_t band = kBandRows / (T::share_b ? kRows : kCols);
  return {static_cast<int>(ceil_div(size.m, kRows)), static_cast<int>(ceil_div(size.n, kCols)), static_cast<int>(band),
          T::share_b};
}

template <class T>
int waves(const Size& size, int multiprocessors) {
  const TileOrder order = order_of<T>(size);
  return static_cast<int>(ceil_div(static_cast<std::int64_t>(order.rows) * order.cols, multiprocessors / kCluster));
}

template <class T>
double expected_seconds(const Measured<T>& measured, const Size& size, DType y, int multiprocessors) {
  constexpr double kTile = T::rows * T::cols;
  const double products = static_cast<double>(ceil_div(size.k, kStep)) * kStep * kTile / kProductsPerCycle;
  const double stores = T::ping_pong ? 0 : kTile * bits(y) / 8 / kStoredBytesPerCycle;
  const double cycles = waves<T>(size, multiprocessors) * (products + stores + measured.tile_cycles) + kGridCycles;
  return cycles / (measured.gigahertz * 1e9) + kLaunchSeconds;
}

// Calls body(measured) for the tile that is expected to be the fastest.
template <class Body>
void with_best_tile(const Size& size, DType y, int multiprocessors, const Body& body) {
  double best = std::numeric_limits<double>::infinity();
  for_each_tile([&](const auto& tile) { best = std::min(best, expected_seconds(tile, size, y, multiprocessors)); });
  bool done = false;
  for_each_tile([&](const auto& tile) {
    if (done || expected_seconds(tile, size, y, multiprocessors) > best) return;
    body(tile);
    done = true;
  });
}

// Whether the workspace has room for a copy of this operand that the copy engine can read. A row of k bytes that is no
// multiple of 16 and not padded either is not readable, and neither is what lies across.
bool repacks(Major major, std::int64_t k) { return major == Major::outer || k % kBulkAlignment != 0; }

template <class T, class Y>
void launch_tile(const GemmOperands& o, int multiprocessors, Stream stream) {
  static_assert(sizeof(Shared<T, Y>) <= 227 * 1024);
  using Box = typename Shared<T, Y>::Box;
  const CUtensorMap a = tensor_map(kName, o.a, {T::rows / T::cluster_cols, kStep, true});
  const CUtensorMap b = tensor_map(kName, o.b, {T::cols / T::cluster_rows, kStep, true});
  const bool by_engine = mappable(o.y);
  const CUtensorMap y = by_engine ? tensor_map(kName, o.y, {Box::rows, Box::cols, Box::swizzled}) : a;

  Arguments<Y> arguments;
  arguments.steps = static_cast<int>(ceil_div(o.a.cols(), kStep));
  arguments.order = order_of<T>({o.a.rows(), o.b.rows(), o.a.cols()});
  arguments.a_scale = row_scale<float>(o.a_scale);
  arguments.b_scale = row_scale<float>(o.b_scale);
  if (o.bias.present()) {
    arguments.bias = static_cast<const Y*>(o.bias.data);
    arguments.bias_stride = o.bias.strides[0];
  }
  arguments.y = {static_cast<Y*>(o.y.data), o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  // It writes sixteen bytes at a time: where a row ends within them, the last column of tiles is left to store_edge.
  const bool whole = o.y.cols() * static_cast<std::int64_t>(sizeof(Y)) % 16 == 0;
  arguments.engine_cols = !by_engine ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;

  const int clusters = std::min(multiprocessors / kCluster, arguments.order.count());
  enqueue(kName, w8a8_gemm_kernel<T, Y>,
          LaunchShape{static_cast<unsigned>(clusters * kCluster), kThreads, sizeof(Shared<T, Y>), kCluster}, stream, a,
          b, y, arguments);
}

Size size_of(const GemmProblem& problem) { return {problem.m, problem.n, problem.k}; }

}  // namespace

std::string w8a8_gemm_sm90_supports(const GemmProblem& problem) {
  if (std::string reason = reason_against(problem.device, 90, 91); !reason.empty()) return reason;
  if (problem.scale != DType::f32) return "has no f64";
  if (problem.b_packed) return "takes the weight as it is, not packed";
  if (problem.y_major != Major::contraction) return "wants rows of y contiguous";
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // counted in 32 bits
  if (std::max(problem.m, problem.n) > kMost) return "takes at most 2^30 rows of an operand";
  return {};
}

Cost w8a8_gemm_sm90_cost(const GemmProblem& problem) {
  const Size size = size_of(problem);
  const auto m = static_cast<double>(size.m);
  const auto n = static_cast<double>(size.n);
  const auto k = static_cast<double>(size.k);
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = (m + n) * k + m * n * bits(problem.y) / 8;
  const int multiprocessors = properties(problem.device).multiprocessors;
  with_best_tile(size, problem.y, multiprocessors, [&](const auto& tile) {
    cost.seconds = std::max(expected_seconds(tile, size, problem.y, multiprocessors),
                            cost.bytes / kBytesPerSecond + kLaunchSeconds);
  });
  // An X that a plan quantized is readable whatever k is.
  if (problem.a_major == Major::outer) cost.seconds += 2 * m * k / kBytesPerSecond + kLaunchSeconds;
  if (repacks(problem.b_major, size.k)) cost.seconds += 2 * n * k / kBytesPerSecond + kLaunchSeconds;
  return cost;
}

std::string w8a8_gemm_sm90_detail(const GemmProblem& problem) {
  const Size size = size_of(problem);
  const int multiprocessors = properties(problem.device).multiprocessors;
  std::string text;
  with_best_tile(size, problem.y, multiprocessors, [&]<class T>(const Measured<T>&) {
    const TileOrder order = order_of<T>(size);
    text = message("tile ", T::rows, "x", T::cols, T::ping_pong ? " ping-pong" : " cooperative", ", clusters ",
                   T::cluster_rows, "x", T::cluster_cols, ", ", T::stages, " stages, bands of ", order.band,
                   order.bands_of_rows ? " rows" : " columns", " of ", order.rows, "x", order.cols, " clusters, ",
                   waves<T>(size, multiprocessors), " waves");
  });
  return text;
}

std::size_t w8a8_gemm_sm90_workspace(const GemmProblem& p) {
  return (repacks(p.a_major, p.k) ? repacked_size(p.m, p.k) : 0) +
         (repacks(p.b_major, p.k) ? repacked_size(p.n, p.k) : 0);
}

void w8a8_gemm_sm90_prepare(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  with_narrow_type(problem.y, [&]<class Y>(Y) {
    for_each_tile([&]<class T>(const Measured<T>&) { prepare(kName, w8a8_gemm_kernel<T, Y>, sizeof(Shared<T, Y>)); });
  });
  prepare_repack();
  w8a8_gemm_sm80_prepare(problem);
}

void w8a8_gemm_sm90(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  GemmOperands o = operands;
  const Size size = {o.a.rows(), o.b.rows(), o.a.cols()};
  if (size.m == 0 || size.n == 0) return;
  const bool a_as_it_is = mappable(o.a);
  const bool b_as_it_is = mappable(o.b);
  if ((!a_as_it_is && !repacks(problem.a_major, problem.k)) || (!b_as_it_is && !repacks(problem.b_major, problem.k))) {
    return w8a8_gemm_sm80(problem, operands, launch);
  }
  auto* room = static_cast<std::byte*>(launch.workspace.data);
  if (!a_as_it_is) {
    o.a = repack(o.a, room, launch.stream);
    room += repacked_size(size.m, size.k);
  }
  if (!b_as_it_is) o.b = repack(o.b, room, launch.stream);
  const int multiprocessors = properties(problem.device).multiprocessors;
  with_narrow_type(problem.y, [&]<class Y>(Y) {
    with_best_tile(size, problem.y, multiprocessors,
                   [&]<class T>(const Measured<T>&) { launch_tile<T, Y>(o, multiprocessors, launch.stream); });
  });
}

}  // namespace octile::cuda
