// w8a16 on Hopper's matrix unit: y (m, n) = sum_c a[i, c] * (b[j, c] * c_scale[c]), a (m, k) of f16 or bf16, b (n, k)
// of s8, either with contiguous rows or with contiguous columns, sums in f32.
//
// It computes y^T, b by a^T: the matrix unit takes b from registers, where it has just become 16 bits wide, and a from
// shared memory. A persistent grid of clusters of two blocks, which lie below each other and share a. In each block one
// warpgroup copies: a warp has the copy engine fill a ring of stages with tiles of a and b, another one brings the
// scales. Two warpgroups have half of b's rows each: while the matrix unit works on one stage they convert the next.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/message.h"
#include "cuda/device/epilogue.cuh"
#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/register_products.cuh"
#include "cuda/device/scaled_bytes.cuh"
#include "cuda/device/transposed_boxes.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w8a16_gemm_sm90";
constexpr int kStep = 64;    // terms of a stage
constexpr int kSlices = 4;   // sixteens of them
constexpr int kRowsB = 128;  // of a tile: y's columns
constexpr int kAhead = 2;    // slices that are converted before their products begin
constexpr int kCluster = 2;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kSearchers = kThreads - 32;  // of the largest scale: all but the warp that copies
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kSearchBarrier = 1;     // of threads, besides 0 of the block
constexpr int kConsumerBarriers = 2;  // and the next
constexpr int kScaleBarriers = 4;     // and the next: of each stage

// A tile's rows of a, and so of y: many, or fewer where there are too few tiles for the multiprocessors.
template <int rows_a_, int stages_>
struct Tile {
  static constexpr int rows_a = rows_a_;
  static constexpr int stages = stages_;
};
using WideTile = Tile<256, 4>;
using NarrowTile = Tile<128, 7>;

// What a kernel is compiled for. outer: the operand's columns are contiguous.
template <class T_, class Tile_, bool a_outer_, bool b_outer_>
struct Form : Tile_ {
  using T = T_;
  using Tile = Tile_;
  static constexpr bool a_outer = a_outer_;
  static constexpr bool b_outer = b_outer_;
  // Slices whose products are left in flight while a later one is converted: bytes that come one by one take longer.
  static constexpr int in_flight = b_outer ? 1 : 2;
  static_assert(kAhead + in_flight <= kSlices);
};

template <class F>
struct Shared {
  struct Stage {
    std::uint8_t a[F::rows_a * kStep * 2];
    std::uint8_t b[kRowsB * kStep];
  };
  Stage stages[F::stages];
  TransposedBoxes<F::rows_a> boxes[kConsumers];
  Scales16<typename F::T> scales[F::stages][kSlices * 4];
  std::uint64_t full[F::stages];
  std::uint64_t empty[F::stages];
  unsigned largest;  // of the scales' magnitudes, as bits
};

struct Arguments {
  int steps = 0;    // of k
  TileOrder order;  // of the clusters' tiles: rows of b down, rows of a across
  std::int64_t k = 0;
  RowScale<float> scale;
  BoxTarget y;
};

struct Maps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap b_odd;  // contraction-major: b has the even rows
  CUtensorMap y;
};

// Where a block is.
template <class F>
struct Place {
  int clusters = static_cast<int>(gridDim.x) / kCluster;
  int cluster = static_cast<int>(blockIdx.x) / kCluster;
  int rank = static_cast<int>(blockIdx.x) % kCluster;

  // Of a tile: its first row of b, and of a.
  __device__ int2 origin(int2 tile) const { return {(tile.x * kCluster + rank) * kRowsB, tile.y * F::rows_a}; }
};

template <class F>
__device__ void init(Shared<F>& shared) {
  for (auto& barrier : shared.full) ptx::barrier_init(ptx::shared_address(&barrier), 1 + 32);
  for (auto& barrier : shared.empty) ptx::barrier_init(ptx::shared_address(&barrier), kCluster * 4 * kConsumers);
  shared.largest = 0;
  ptx::barrier_init_done();
}

// One thread: a's and b's tiles, stage by stage. Of a each block loads half, for both.
template <class F>
__device__ void load_operands(Shared<F>& shared, const Place<F>& place, const Maps& maps, const Arguments& arguments) {
  constexpr std::uint16_t kBoth = 3;
  constexpr int kHalf = F::rows_a / kCluster;
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int2 origin = place.origin(arguments.order[t]);
    for (int step = 0; step < arguments.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const std::uint32_t a = ptx::shared_address(stage.a + place.rank * kHalf * kStep * 2);
      const std::uint32_t b = ptx::shared_address(stage.b);
      const int term = step * kStep;
      const int row = origin.y + place.rank * kHalf;
      ptx::wait(ptx::shared_address(&shared.empty[at.stage]), at.parity ^ 1);
      ptx::arrive_and_expect(full, sizeof(stage));
      if constexpr (F::a_outer) {
#pragma unroll
        for (int i = 0; i < kHalf; i += 64) {
          ptx::load_box_to(kBoth, a + i * kStep * 2, maps.a, {row + i, term}, full);
        }
      } else {
        ptx::load_box_to(kBoth, a, maps.a, {term, row}, full);
      }
      if constexpr (F::b_outer) {
        ptx::load_box(b, maps.b, origin.x, term, full);
      } else {
        ptx::load_box(b, maps.b, term, origin.x / 2, full);
        ptx::load_box(b + kRowsB / 2 * kStep, maps.b_odd, term, origin.x / 2, full);
      }
      at.next();
    }
  }
}

// All warps but the one that copies: the largest scale.
template <class F>
__device__ void find_largest_scale(Shared<F>& shared, const Arguments& arguments) {
  if (arguments.scale.stride != 0) {
    find_largest(arguments.scale, arguments.k, {static_cast<int>(threadIdx.x) - 32, kSearchers}, &shared.largest);
  }
  asm volatile("bar.sync %0, %1;" ::"n"(kSearchBarrier), "n"(kSearchers) : "memory");
}

// The scales of a stage have been read by every consumer. Not by the stage's empty barrier, on which one lane arrives
// for its warp: racecheck does not follow that for plain loads.
constexpr int kScaleThreads = kConsumers * kWarpgroup + 32;
__device__ inline void report_scales_read(int stage) {
  asm volatile("bar.arrive %0, %1;" ::"r"(kScaleBarriers + stage), "n"(kScaleThreads) : "memory");
}
__device__ inline void await_scales_read(int stage) {
  asm volatile("bar.sync %0, %1;" ::"r"(kScaleBarriers + stage), "n"(kScaleThreads) : "memory");
}

// One warp: the scales of each stage, lane by lane those of two terms.
template <class F>
__device__ void load_scales(Shared<F>& shared, const Place<F>& place, const Arguments& arguments) {
  using T = typename F::T;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int shift = scaling<T>(arguments.scale, shared.largest).shift;
  const bool one_for_all = arguments.scale.stride == 0;
  const auto scale_at = [&](std::int64_t term) {
    if (term >= arguments.k) return 0.0f;
    return one_for_all ? 1.0f : __ldcg(arguments.scale.data + term * arguments.scale.stride);
  };
  const auto pair_at = [&](int step) {
    const std::int64_t term = static_cast<std::int64_t>(step) * kStep + 2 * lane;
    return float2{scale_at(term), scale_at(term + 1)};
  };
  RingPosition<F::stages> at;
  int filled = 0;  // stages that hold scales
  float2 next = pair_at(0);
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    for (int step = 0; step < arguments.steps; ++step) {
      const Pair<T> scale = {narrow<T>(ldexpf(next.x, shift)), narrow<T>(ldexpf(next.y, shift))};
      next = pair_at(step + 1 == arguments.steps ? 0 : step + 1);
      if (filled == F::stages) {
        await_scales_read(at.stage);
      } else {
        ++filled;
      }
      Scales16<T>& to = shared.scales[at.stage][lane / 8 * 4 + lane % 4];
      to.scale[lane / 4 % 2] = scale;
      to.offset[lane / 4 % 2] = offset_of<T>(scale);
      ptx::arrive(ptx::shared_address(&shared.full[at.stage]));
      at.next();
    }
  }
  for (int i = 0; i < filled; ++i) await_scales_read(i);  // no barrier is left half full
}

// ---- Products.

// A warp of a consumer: its warpgroup, itself in that, and the barriers of the blocks that fill its stages, one a lane.
template <class F>
struct Consumer {
  using T = typename F::T;
  Shared<F>& shared;
  const Arguments& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty = ptx::in_block(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(lane % kCluster));
  BytesReader<T, F::b_outer> reader = BytesReader<T, F::b_outer>(static_cast<unsigned>(4 * group + warp));

  __device__ void release(int stage) const {
    ptx::arrive_in_cluster(empty + 8 * stage, lane < kCluster);
    report_scales_read(stage);
  }

  __device__ void wait_full(const RingPosition<F::stages>& at) const {
    ptx::wait(ptx::shared_address(&shared.full[at.stage]), at.parity);
  }

  template <int slice>
  __device__ void fetch(int stage) {
    reader.template fetch<slice>(shared.stages[stage].b, shared.scales[stage] + 4 * slice);
  }

  // While the products of slices up to `slice` of a stage are enqueued: a later one is converted, and the bytes of the
  // one after that brought.
  template <int slice>
  __device__ void advance(Fragment (&b)[kSlices], int stage, int next_stage, bool next) {
    constexpr int kConvert = slice + kAhead;
    constexpr int kFetch = kConvert + 1;
    if (kConvert < kSlices || next) reader.template convert<kConvert % kSlices>(b[kConvert % kSlices]);
    if (kFetch < kSlices || next) fetch<kFetch % kSlices>(kFetch < kSlices ? stage : next_stage);
  }

  // One slice's products are enqueued; all but the last F::in_flight slices' are done.
  template <int slice>
  __device__ void enqueue(float (&sums)[F::rows_a / 2], const Fragment (&b)[kSlices], int stage,
                          bool accumulate) const {
    const std::uint32_t a = operand_descriptor<F::a_outer>(ptx::shared_address(shared.stages[stage].a));
    ptx::begin_products();
    multiply_16<T, F::a_outer>(sums, b[slice], a + slice * kNextTerms<F::a_outer>, accumulate);
    ptx::commit_products();
    ptx::wait_products<F::in_flight>();
  }

  // The first slices of a tile.
  __device__ void begin(Fragment (&b)[kSlices], const RingPosition<F::stages>& at) {
    wait_full(at);
    fetch<0>(at.stage);
    reader.template convert<0>(b[0]);
    fetch<1>(at.stage);
    reader.template convert<1>(b[1]);
    fetch<2>(at.stage);
  }

  // sums (64, rows of a) = b's rows by a, over all steps. b: fragments of the first kAhead slices of the stage `at`,
  // and in the end those of the next tile, if there is one.
  __device__ void multiply(float (&sums)[F::rows_a / 2], Fragment (&b)[kSlices], RingPosition<F::stages>& at,
                           bool more) {
    int last = 0;
    for (int step = 0; step < arguments.steps; ++step) {
      const int stage = at.stage;
      const bool next = more || step + 1 < arguments.steps;
      at.next();
      const auto slice = [&]<int i>(std::integral_constant<int, i>) {
        enqueue<i>(sums, b, stage, step > 0 || i > 0);
        if (i == F::in_flight - 1 && step > 0) release(last);
        if (i + kAhead + 1 == kSlices && next) wait_full(at);
        advance<i>(b, stage, at.stage, next);
      };
      slice(std::integral_constant<int, 0>());
      slice(std::integral_constant<int, 1>());
      slice(std::integral_constant<int, 2>());
      slice(std::integral_constant<int, 3>());
      last = stage;
    }
    ptx::wait_products<0>();
    release(last);
    hold(sums);
  }

  __device__ void run(const Place<F>& place, const CUtensorMap& y) {
    const float after = scaling<T>(arguments.scale, shared.largest).after;
    RingPosition<F::stages> at;
    Fragment b[kSlices];
    float sums[F::rows_a / 2];
    if (place.cluster < arguments.order.count()) begin(b, at);
    for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
      const int2 origin = place.origin(arguments.order[t]);
      multiply(sums, b, at, t + place.clusters < arguments.order.count());
      store_transposed<T>(sums, after, shared.boxes[group], {origin.x + 64 * group, origin.y}, y, arguments.y,
                          kConsumerBarriers + group);
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::wait_stores_read<0>();
    __syncwarp();
  }
};

template <class F>
__global__ void __launch_bounds__(kThreads, 1)
    w8a16_gemm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const Place<F> place;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(maps.a);
    ptx::prefetch_map(maps.b);
    ptx::prefetch_map(maps.b_odd);
    ptx::prefetch_map(maps.y);
    init(shared);
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  wait_for_previous();
  let_next_start();
  if (warp < 4) {
    ptx::give_registers<kProducerRegisters>();
    if (warp == 0) {
      if (threadIdx.x == 0) load_operands(shared, place, maps, arguments);
    } else {
      find_largest_scale(shared, arguments);
      if (warp == 1) load_scales(shared, place, arguments);
    }
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    find_largest_scale(shared, arguments);
    Consumer<F>{shared, arguments, warp / 4 - 1, warp % 4}.run(place, maps.y);
  }
  ptx::cluster_arrive();  // no block leaves while the other one still writes to its shared memory
  ptx::cluster_wait();
}

// ---- Launching.

// Measured on an H200: the clock that the power limit leaves, the cycles of a step, where a narrow tile is bound by its
// conversions, and those of a tile besides.
template <class T>
constexpr double kCyclesOfStep = T::rows_a == 256 ? 1024 : 700;
constexpr double kTileCycles = 1200;
constexpr double kGigahertz = 1.44;
constexpr double kGridCycles = 5000;
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 2.9e12;  // where few tiles wait for memory; a guess
constexpr int kBand = 11;                   // pairs of tiles of b: with six tiles of a, of two bytes, 66 clusters

struct Size {
  std::int64_t m, n, k;
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class T>
TileOrder order_of(const Size& size) {
  return {static_cast<int>(ceil_div(size.n, kRowsB * kCluster)), static_cast<int>(ceil_div(size.m, T::rows_a)), kBand,
          true};
}

int steps_of(std::int64_t k) { return static_cast<int>(ceil_div(k, kStep)); }

template <class T>
double expected_seconds(const Size& size, int multiprocessors) {
  const auto waves = static_cast<double>(ceil_div(order_of<T>(size).count(), multiprocessors / kCluster));
  return (waves * (steps_of(size.k) * kCyclesOfStep<T> + kTileCycles) + kGridCycles) / (kGigahertz * 1e9) +
         kLaunchSeconds;
}

// Calls body(tile) for the one that is expected to be the faster.
template <class Body>
auto with_best_tile(const Size& size, int multiprocessors, const Body& body) {
  const bool narrow =
      expected_seconds<NarrowTile>(size, multiprocessors) < expected_seconds<WideTile>(size, multiprocessors);
  return narrow ? body(NarrowTile()) : body(WideTile());
}

// The matrix whose rows are contiguous.
template <class Tensor>
Tensor lines_of(const Tensor& t, bool outer) {
  if (!outer) return t;
  Tensor turned = t;
  std::swap(turned.shape[0], turned.shape[1]);
  std::swap(turned.strides[0], turned.strides[1]);
  return turned;
}

// Every second row from `first` on, and one at least: of the row that is not there nothing comes of it.
ConstTensor every_second_row(const ConstTensor& t, int first) {
  ConstTensor half = t;
  if (t.rows() > first) half.data = static_cast<const std::int8_t*>(t.data) + first * t.strides[0];
  half.shape[0] = std::max<std::int64_t>((t.rows() - first + 1) / 2, 1);
  half.strides[0] = 2 * t.strides[0];
  return half;
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  using T = typename F::T;
  static_assert(sizeof(Shared<F>) <= 227 * 1024);
  const ConstTensor a = lines_of(o.a, F::a_outer);
  const ConstTensor b = lines_of(o.b, F::b_outer);
  const bool y_along_a = problem.y_major == Major::outer;
  const Tensor y = lines_of(o.y, y_along_a);

  Maps maps;
  maps.a =
      F::a_outer ? tensor_map(kName, a, {kStep, 64, true}) : tensor_map(kName, a, {F::rows_a / kCluster, kStep, true});
  if (F::b_outer) {
    maps.b = maps.b_odd = tensor_map(kName, b, {kStep, kRowsB, true});
  } else {
    maps.b = tensor_map(kName, every_second_row(b, 0), {kRowsB / 2, kStep, true});
    maps.b_odd = tensor_map(kName, every_second_row(b, 1), {kRowsB / 2, kStep, true});
  }
  const bool by_engine = mappable(y);
  const bool wide = problem.y == DType::f32;
  maps.y = by_engine ? tensor_map(kName, y, TransposedBoxes<F::rows_a>::box(wide, y_along_a)) : maps.a;

  Arguments arguments;
  arguments.steps = steps_of(o.a.cols());
  arguments.order = order_of<typename F::Tile>({o.a.rows(), o.b.rows(), o.a.cols()});
  arguments.k = o.a.cols();
  arguments.scale = row_scale<float>(o.b_scale);
  arguments.y = {y.data, y.strides[0], static_cast<int>(y.rows()), static_cast<int>(y.cols())};
  arguments.y.along_a = y_along_a;
  arguments.y.wide = wide;
  arguments.y.accumulate = problem.accumulate;
  const bool whole = y.cols() * (bits(y.dtype) / 8) % 16 == 0;
  arguments.y.engine_cols = !by_engine ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;

  const int multiprocessors = properties(problem.device).multiprocessors;
  const int clusters = std::min(multiprocessors / kCluster, arguments.order.count());
  enqueue(kName, w8a16_gemm_kernel<F>,
          LaunchShape{static_cast<unsigned>(clusters * kCluster), kThreads, sizeof(Shared<F>), kCluster}, stream, maps,
          arguments);
}

// Calls body(form) for the problem's, with this tile.
template <class Tile, class Body>
void with_form(const GemmProblem& p, const Body& body) {
  const auto with_type = [&]<class T>(T) {
    const bool a_outer = p.a_major == Major::outer;
    const bool b_outer = p.b_major == Major::outer;
    if (a_outer && b_outer) return body(Form<T, Tile, true, true>());
    if (a_outer) return body(Form<T, Tile, true, false>());
    if (b_outer) return body(Form<T, Tile, false, true>());
    body(Form<T, Tile, false, false>());
  };
  if (p.a == DType::f16) return with_type(__half());
  with_type(__nv_bfloat16());
}

Size size_of(const GemmProblem& problem) { return {problem.m, problem.n, problem.k}; }

std::string supports(const GemmProblem& problem) {
  if (std::string reason = reason_against(problem.device, 90, 91); !reason.empty()) return reason;
  if (problem.grouped()) return "has no groups";
  if (problem.a != DType::f16 && problem.a != DType::bf16) return "takes f16 and bf16";
  if (problem.scale != DType::f32) return "has no f64";
  if (problem.b_packed) return "takes the weight as it is, not packed";
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // counted in 32 bits
  if (std::max({problem.m, problem.n, problem.k}) > kMost) return "takes at most 2^30 rows or terms";
  return {};
}

Cost cost(const GemmProblem& problem) {
  const Size size = size_of(problem);
  const auto m = static_cast<double>(size.m);
  const auto n = static_cast<double>(size.n);
  const auto k = static_cast<double>(size.k);
  const int multiprocessors = properties(problem.device).multiprocessors;
  const double seconds =
      std::min(expected_seconds<WideTile>(size, multiprocessors), expected_seconds<NarrowTile>(size, multiprocessors));
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = 2 * m * k + n * k + m * n * bits(problem.y) / 8;
  cost.seconds = std::max(seconds, cost.bytes / kBytesPerSecond + kLaunchSeconds);
  return cost;
}

std::string detail(const GemmProblem& problem) {
  const Size size = size_of(problem);
  return with_best_tile(size, properties(problem.device).multiprocessors, [&]<class T>(T) {
    const TileOrder order = order_of<T>(size);
    return message("tile ", T::rows_a, "x", kRowsB, ", clusters 1x", kCluster, ", ", T::stages, " stages, bands of ",
                   order.band, " columns of ", order.cols, "x", order.rows, " clusters");
  });
}

void load(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  const auto prepare_form = [&]<class F>(F) { prepare(kName, w8a16_gemm_kernel<F>, sizeof(Shared<F>)); };
  with_form<WideTile>(problem, prepare_form);
  with_form<NarrowTile>(problem, prepare_form);
}

bool aligned(const GemmProblem& p, const GemmOperands& o) {
  return mappable(lines_of(o.a, p.a_major == Major::outer)) && mappable(lines_of(o.b, p.b_major == Major::outer));
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || o.b.rows() == 0) return;
  const Size size = {o.a.rows(), o.b.rows(), o.a.cols()};
  with_best_tile(size, properties(problem.device).multiprocessors, [&]<class T>(T) {
    with_form<T>(problem, [&]<class F>(F) { launch_form<F>(problem, o, launch.stream); });
  });
}

}  // namespace

extern constinit const GemmKernel w8a16_gemm_sm90 = {
    .name = "w8a16_gemm_sm90",
    .task = {Operation::gemm, kW8A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = aligned,
    .bound = Bound::rounded_scale,
};

}  // namespace octile::cuda
