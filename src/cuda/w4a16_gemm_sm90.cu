// w4a16 on Hopper's matrix unit: y (m, n) = sum_c a[i, c] * ((q[j, c] - z[j, g]) * s[j, g]) + bias[j], a (m, k) of f16
// or bf16, sums in f32.
//
// It computes y^T, the weight by a^T: the matrix unit takes the weight from registers, where it has just become 16 bits
// wide, and a from shared memory. A persistent grid of clusters; in a cluster two blocks lie below each other and share
// a, and where there are few tiles further such pairs have other terms of the same tile. In each block one thread has
// the copy engine fill a ring of stages with tiles of a and of the weight. Two warpgroups have half of the weight's
// rows each: while the matrix unit works on half of a stage they convert the next half, and read the scales of later
// groups.
//
// With u the unit roundoff of a's type a result is within
//   sum |a (q - z) s| ((2 + u) u + (k + 3) 2^-24) + sum |a| S 2^-26 (f16: S the largest scale of the row)
// of the exact one, and half a unit in the last place of y; with one scale a row the first and the third term are none.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/nibble_rows.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/register_products.cuh"
#include "cuda/device/transposed_boxes.cuh"
#include "cuda/launch.h"
#include "cuda/nibble_weight.h"
#include "cuda/tensor_map.h"
#include "kernels.h"
#include "message.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemm_sm90";
constexpr int kStep = 64;    // terms of a stage
constexpr int kSlices = 4;   // sixteens of them
constexpr int kRowsB = 128;  // of a tile of the weight: y's columns
constexpr int kPair = 2;     // blocks that share a
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kMeetBarrier = 1;       // of threads
constexpr int kConsumerBarriers = 2;  // and the next
constexpr int kMostParts = 4;

// A tile's rows of a, and so of y, and the blocks of a multiprocessor: two fill each other's waits.
template <int rows_a_, int stages_, int blocks_>
struct Tile {
  static constexpr int rows_a = rows_a_;
  static constexpr int stages = stages_;
  static constexpr int blocks = blocks_;
  static constexpr int producer_registers = blocks == 1 ? 40 : 32;
  static constexpr int consumer_registers = blocks == 1 ? 232 : 104;
};
using WideTile = Tile<256, 4, 1>;
using NarrowTile = Tile<128, 8, 1>;
using SmallTile = Tile<64, 8, 2>;

template <class T_, class Tile_, bool packed_>
struct Form : Tile_ {
  using T = T_;
  using Tile = Tile_;
  static constexpr bool packed = packed_;
};

template <class F>
struct Shared {
  struct Stage {
    std::uint8_t a[F::rows_a * kStep * 2];
    std::uint8_t b[NibbleReader<typename F::T, F::packed>::kTileBytes];
  };
  Stage stages[F::stages];
  TransposedBoxes<F::rows_a> boxes[kConsumers];
  std::uint64_t full[F::stages];
  std::uint64_t empty[F::stages];
};

struct Arguments {
  NibbleWeight weight;
  int steps = 0;    // of k
  int parts = 1;    // of k
  TileOrder order;  // of the clusters' tiles: rows of the weight down, rows of a across
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  BoxTarget y;
};

struct Maps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap b_odd;  // b has the even rows
  CUtensorMap y;
};

// Where a block is, and its terms.
template <class F>
struct Place {
  int clusters;
  int cluster;
  int rank;  // in its pair
  int part;
  int first_step;
  int steps;

  __device__ explicit Place(const Arguments& p) {
    const int blocks = kPair * p.parts;
    clusters = static_cast<int>(gridDim.x) / blocks;
    cluster = static_cast<int>(blockIdx.x) / blocks;
    const int in_cluster = static_cast<int>(blockIdx.x) % blocks;
    rank = in_cluster % kPair;
    part = in_cluster / kPair;
    // Two steps are a whole group, or several.
    const int twos = (p.steps + 1) / 2;
    first_step = twos * part / p.parts * 2;
    steps = min(twos * (part + 1) / p.parts * 2, p.steps) - first_step;
  }

  // Of a tile: its first row of b, and of a.
  __device__ int2 origin(int2 tile) const { return {(tile.x * kPair + rank) * kRowsB, tile.y * F::rows_a}; }
};

template <class F>
__device__ void init(Shared<F>& shared) {
  for (auto& barrier : shared.full) ptx::barrier_init(ptx::shared_address(&barrier), 1);
  for (auto& barrier : shared.empty) ptx::barrier_init(ptx::shared_address(&barrier), kPair * 4 * kConsumers);
  ptx::barrier_init_done();
}

// One thread: a's and b's tiles, stage by stage. Of a each block of a pair loads half, for both.
template <class F>
__device__ void load_operands(Shared<F>& shared, const Place<F>& place, const Maps& maps, const Arguments& arguments) {
  constexpr int kHalf = F::rows_a / kPair;
  const auto both = static_cast<std::uint16_t>(3u << kPair * place.part);
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
    const int2 origin = place.origin(arguments.order[t]);
    for (int step = 0; step < place.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const std::uint32_t a = ptx::shared_address(stage.a + place.rank * kHalf * kStep * 2);
      const std::uint32_t b = ptx::shared_address(stage.b);
      const int term = (place.first_step + step) * kStep;
      ptx::wait(ptx::shared_address(&shared.empty[at.stage]), at.parity ^ 1);
      ptx::arrive_and_expect(full, sizeof(stage));
      ptx::load_box_to(both, a, maps.a, {term, origin.y + place.rank * kHalf}, full);
      if constexpr (F::packed) {
        ptx::load_box(b, maps.b, term * 2, origin.x / 16, full);
      } else {
        ptx::load_box(b, maps.b, term / 2, origin.x / 2, full);
        ptx::load_box(b + sizeof(stage.b) / 2, maps.b_odd, term / 2, origin.x / 2, full);
      }
      at.next();
    }
  }
}

// ---- Products.

// A warp of a consumer: its warpgroup, itself in that, and the barriers of the blocks that fill its stages, one a lane.
template <class F>
struct Consumer {
  using T = typename F::T;
  Shared<F>& shared;
  const Arguments& arguments;
  const Place<F>& place;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty =
      ptx::in_block(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(kPair* place.part + lane % kPair));
  NibbleReader<T, F::packed> reader = NibbleReader<T, F::packed>(static_cast<unsigned>(4 * group + warp));

  __device__ void release(int stage) const { ptx::arrive_in_cluster(empty + 8 * stage, lane < kPair); }

  __device__ void wait_full(const RingPosition<F::stages>& at) const {
    ptx::wait(ptx::shared_address(&shared.full[at.stage]), at.parity);
  }

  // The first of the thread's rows in the cluster's i-th tile, or -1.
  __device__ int row_of(int i) const {
    const int t = place.cluster + i * place.clusters;
    if (t >= arguments.order.count()) return -1;
    return place.origin(arguments.order[t]).x + 64 * group + 16 * warp + lane / 4 * 2;
  }

  template <int half>
  __device__ void fetch(int stage) {
    reader.template fetch<half>(shared.stages[stage].b);
  }

  template <int half, class Scales>
  __device__ void convert(Fragment (&b)[kSlices], Scales& scales) const {
    if constexpr (half == 0) {
      scales.advance_step();
    } else {
      scales.advance();
    }
    reader.convert(b[2 * half], scales, 0);
    reader.convert(b[2 * half + 1], scales, 1);
  }

  // The products of half a stage are enqueued; those of the half before are done.
  template <int half>
  __device__ void enqueue(float (&sums)[F::rows_a / 2], const Fragment (&b)[kSlices], int stage,
                          bool accumulate) const {
    const std::uint32_t a = operand_descriptor<false>(ptx::shared_address(shared.stages[stage].a));
    ptx::begin_products();
    multiply_16<T, false>(sums, b[2 * half], a + 2 * half * kNextTerms<false>, accumulate);
    multiply_16<T, false>(sums, b[2 * half + 1], a + (2 * half + 1) * kNextTerms<false>, true);
    ptx::commit_products();
    ptx::wait_products<1>();
  }

  // A loop, since the compiler would make predicated instructions of a branch, which wait for all sums in every step.
  template <class Scales>
  __device__ void scale_down(float (&sums)[F::rows_a / 2], Scales& scales) const {
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll 1
      while (scales.grown) {
        ptx::wait_products<0>();
        hold(sums);
#pragma unroll
        for (int i = 0; i < F::rows_a / 2; ++i) sums[i] *= scales.factor[i / 2 % 2];
        scales.grown = false;
      }
    }
  }

  // The first half of a tile's first stage.
  template <class Scales>
  __device__ void begin(Fragment (&b)[kSlices], const RingPosition<F::stages>& at, Scales& scales) {
    wait_full(at);
    fetch<0>(at.stage);
    convert<0>(b, scales);
    fetch<1>(at.stage);
  }

  // sums (64, rows of a) = b's rows by a, over all steps. b: fragments of the first half of the stage `at`, whose
  // second half has been fetched, and in the end those of the next tile, if there is one. While the products of one
  // half are done the next one is converted, and the one after that fetched.
  template <class Scales>
  __device__ void multiply(float (&sums)[F::rows_a / 2], Fragment (&b)[kSlices], RingPosition<F::stages>& at, bool more,
                           Scales& scales) {
    int last = 0;
    for (int step = 0; step < place.steps; ++step) {
      const int stage = at.stage;
      const bool next = more || step + 1 < place.steps;
      at.next();
      scale_down(sums, scales);
      enqueue<0>(sums, b, stage, step > 0);
      if (step > 0) release(last);
      convert<1>(b, scales);
      if (next) {
        wait_full(at);
        fetch<0>(at.stage);
      }
      enqueue<1>(sums, b, stage, true);
      if (next) {
        convert<0>(b, scales);
        fetch<1>(at.stage);
      }
      last = stage;
    }
    ptx::wait_products<0>();
    release(last);
    hold(sums);
  }

  __device__ float bias_of(int row) const {
    if (arguments.bias == nullptr || row >= arguments.weight.rows) return 0;
    const std::int64_t at = row * arguments.bias_stride;
    return arguments.y.wide ? __ldcg(static_cast<const float*>(arguments.bias) + at)
                            : widen(__ldcg(static_cast<const T*>(arguments.bias) + at));
  }

  // The parts' sums, in order, in the first one, by way of the stages, which nobody fills any more.
  __device__ void add_parts(float (&sums)[F::rows_a / 2]) {
    const std::uint32_t mine = ptx::shared_address(shared.stages) + (threadIdx.x - kWarpgroup) * 16;
    constexpr int kBetween = kConsumers * kWarpgroup * 16;
    static_assert(F::rows_a / 8 * kBetween <= sizeof(shared.stages));
    asm volatile("bar.sync %0, %1;" ::"n"(kMeetBarrier), "n"(kConsumers * kWarpgroup) : "memory");  // all are read
    if (place.part > 0) {
#pragma unroll
      for (int i = 0; i < F::rows_a / 8; ++i) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * kBetween), "f"(sums[4 * i]),
                     "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3])
                     : "memory");
      }
    }
    ptx::cluster_arrive_released();
    ptx::cluster_wait();
    if (place.part > 0) return;
    for (int part = 1; part < arguments.parts; ++part) {
      const std::uint32_t from = ptx::in_block(mine, static_cast<std::uint32_t>(kPair * part + place.rank));
#pragma unroll
      for (int i = 0; i < F::rows_a / 8; ++i) {
        float four[4];
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                     : "r"(from + i * kBetween)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[4 * i + e] += four[e];
      }
    }
  }

  __device__ void run(const CUtensorMap& y) {
    const auto rows = [&](int i) { return row_of(i); };
    RowScales<T, F::packed, decltype(rows)> scales(arguments.weight, rows, {2 * place.first_step, 2 * place.steps});
    RingPosition<F::stages> at;
    Fragment b[kSlices];
    float sums[F::rows_a / 2];
    if (place.cluster < arguments.order.count()) begin(b, at, scales);
    for (int t = place.cluster; t < arguments.order.count(); t += place.clusters) {
      const int2 origin = place.origin(arguments.order[t]);
      const int row = origin.x + 64 * group + 16 * warp + lane / 4 * 2;
      const float bias[2] = {bias_of(row), bias_of(row + 1)};
      const bool more = t + place.clusters < arguments.order.count();
      multiply(sums, b, at, more, scales);
      const float after[2] = {scales.after(0, more), scales.after(1, more)};
#pragma unroll
      for (int i = 0; i < F::rows_a / 2; ++i) sums[i] *= after[i / 2 % 2];
      if (arguments.parts > 1) add_parts(sums);
      if (place.part > 0) continue;
#pragma unroll
      for (int i = 0; i < F::rows_a / 2; ++i) sums[i] += bias[i / 2 % 2];
      store_transposed<T>(sums, 1.0f, shared.boxes[group], {origin.x + 64 * group, origin.y}, y, arguments.y,
                          kConsumerBarriers + group);
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::wait_stores_read<0>();
    __syncwarp();
  }
};

template <class F>
__global__ void __launch_bounds__(kThreads, F::blocks)
    w4a16_gemm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const Place<F> place(arguments);
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
    ptx::give_registers<F::producer_registers>();
    if (threadIdx.x == 0) load_operands(shared, place, maps, arguments);
    __syncwarp();
    if (arguments.parts > 1) {  // add_parts
      ptx::cluster_arrive_released();
      ptx::cluster_wait();
    }
  } else {
    ptx::take_registers<F::consumer_registers>();
    Consumer<F>{shared, arguments, place, warp / 4 - 1, warp % 4}.run(maps.y);
  }
  ptx::cluster_arrive();  // no block leaves while another one still reads its shared memory, or writes to it
  ptx::cluster_wait();
}

// ---- Launching.

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr double kGigahertz = 1.44;
constexpr double kGridCycles = 6000;
constexpr double kLaunchSeconds = 2.3e-6;
constexpr double kBytesPerSecond = 3.5e12;
constexpr int kBand = 11;  // pairs of tiles of b: with six tiles of a, of two bytes, 66 clusters

struct Size {
  std::int64_t m, n, k;
};

template <class T>
TileOrder order_of(const Size& size) {
  return {static_cast<int>(ceil_div(size.n, kRowsB * kPair)), static_cast<int>(ceil_div(size.m, T::rows_a)), kBand,
          true};
}

int steps_of(std::int64_t k) { return static_cast<int>(ceil_div(k, kStep)); }

// Clusters at one time: of one pair, two, and four, on an H200.
template <class T>
int clusters_at_once(int parts, int multiprocessors) {
  const int at_once = parts == 1 ? 66 : parts == 2 ? 30 : 15;
  return std::max(T::blocks * at_once * multiprocessors / 132, 1);
}

struct Choice {
  int rows_a = 0;
  int parts = 1;
  double seconds = std::numeric_limits<double>::infinity();
};

Choice best_choice(const Size& size, int multiprocessors) {
  Choice best;
  const auto consider = [&]<class T>(T) {
    const int steps = steps_of(size.k);
    for (int parts = 1; parts <= kMostParts; parts *= 2) {
      const int count = order_of<T>(size).count();
      const int clusters = clusters_at_once<T>(parts, multiprocessors);
      if (parts > 1 && (count > clusters || (steps + 1) / 2 < parts)) continue;
      const auto waves = static_cast<double>(ceil_div(count, clusters));
      // Blocks of a larger cluster lie two on a multiprocessor, though others are free.
      const bool alone = kPair * parts * count * (parts > 1 ? 2 : 1) <= multiprocessors;
      const double step_cycles = T::rows_a == 256 ? 1020 : T::rows_a == 128 ? 800 : alone ? 717 : 1120;
      const double cycles = waves * (std::ceil(static_cast<double>(steps) / parts) * step_cycles + 1500) + kGridCycles +
                            (parts > 1 ? 1500 + 500 * parts : 0);
      const double seconds = cycles / (kGigahertz * 1e9) + kLaunchSeconds;
      if (seconds < best.seconds) best = {T::rows_a, parts, seconds};
    }
  };
  consider(WideTile());
  consider(NarrowTile());
  consider(SmallTile());
  return best;
}

// Every second row from `first` on, as bytes, and one at least: of the row that is not there nothing comes.
ConstTensor every_second_row(const NibbleWeight& w, int first, Device device) {
  ConstTensor half;
  half.data = w.values + (w.rows > first ? first * w.pitch : 0);
  half.dtype = DType::u8;
  half.device = device;
  half.rank = 2;
  half.shape[0] = std::max((w.rows - first + 1) / 2, 1);
  half.shape[1] = (w.terms + 1) / 2;
  half.strides[0] = 2 * w.pitch;
  half.strides[1] = 1;
  return half;
}

bool mappable_nibbles(const ConstTensor& b) {
  const auto pitch = static_cast<std::uintptr_t>(b.strides[0] / 2);
  return pitch > 0 && (reinterpret_cast<std::uintptr_t>(b.data) | pitch) % kBulkAlignment == 0;
}

// A packed weight, a row for each panel, in words: eight terms of a channel.
ConstTensor panels(const NibbleWeight& w, Device device) {
  ConstTensor words;
  words.data = w.values;
  words.dtype = DType::f32;
  words.device = device;
  words.rank = 2;
  words.shape[0] = (w.rows + 15) / 16;
  words.shape[1] = words.strides[0] = w.pitch / 4;
  words.strides[1] = 1;
  return words;
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, int parts, Stream stream) {
  static_assert(sizeof(Shared<F>) <= 227 * 1024);
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
  arguments.parts = parts;
  arguments.order = order_of<typename F::Tile>({o.a.rows(), problem.n, problem.k});
  if (problem.bias) {
    arguments.bias = o.bias.data;
    arguments.bias_stride = o.bias.strides[0];
  }
  arguments.y = {o.y.data, o.y.strides[0], static_cast<int>(o.y.rows()), static_cast<int>(o.y.cols())};
  arguments.y.wide = wide;
  const bool whole = o.y.cols() * (bits(o.y.dtype) / 8) % 16 == 0;
  arguments.y.engine_cols = !by_engine ? 0 : whole ? std::numeric_limits<int>::max() : arguments.y.cols;

  const int clusters = std::min(clusters_at_once<typename F::Tile>(parts, properties(problem.device).multiprocessors),
                                arguments.order.count());
  const auto blocks = static_cast<unsigned>(kPair * parts);
  enqueue(kName, w4a16_gemm_kernel<F>,
          LaunchShape{static_cast<unsigned>(clusters) * blocks, kThreads, sizeof(Shared<F>), dim3(blocks)}, stream,
          maps, arguments);
}

// Calls body(form) for the problem's, with so many rows of a to a tile.
template <class Body>
void with_form(const GemmProblem& p, int rows_a, const Body& body) {
  const auto with_tile = [&]<class T, class Tile>(T, Tile) {
    if (p.b_packed) return body(Form<T, Tile, true>());
    body(Form<T, Tile, false>());
  };
  const auto with_type = [&]<class T>(T type) {
    if (rows_a == WideTile::rows_a) return with_tile(type, WideTile());
    if (rows_a == NarrowTile::rows_a) return with_tile(type, NarrowTile());
    with_tile(type, SmallTile());
  };
  if (p.a == DType::f16) return with_type(__half());
  with_type(__nv_bfloat16());
}

Size size_of(const GemmProblem& problem) { return {problem.m, problem.n, problem.k}; }

}  // namespace

std::string w4a16_gemm_sm90_supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
  if (p.scale != DType::f32) return "has no f64";
  if (p.k % 32 != 0) return "wants rows of a multiple of 32 terms";
  if (std::max({p.m, p.n, p.k}) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  return {};
}

Cost w4a16_gemm_sm90_cost(const GemmProblem& p) {
  const auto m = static_cast<double>(p.m);
  const auto n = static_cast<double>(p.n);
  const auto k = static_cast<double>(p.k);
  Cost cost;
  cost.operations = 2 * m * n * k;
  cost.bytes = 2 * m * k + n * k / 2 + m * n * bits(p.y) / 8;
  cost.seconds = std::max(best_choice(size_of(p), properties(p.device).multiprocessors).seconds,
                          cost.bytes / kBytesPerSecond + kLaunchSeconds);
  return cost;
}

std::string w4a16_gemm_sm90_detail(const GemmProblem& p) {
  const Choice choice = best_choice(size_of(p), properties(p.device).multiprocessors);
  return message("tile ", choice.rows_a, "x", kRowsB, ", clusters of ", kPair, "x", choice.parts);
}

void w4a16_gemm_sm90_prepare(const GemmProblem& problem) {
  prepare_tensor_maps(kName);
  for (const int rows_a : {WideTile::rows_a, NarrowTile::rows_a, SmallTile::rows_a}) {
    with_form(problem, rows_a, []<class F>(F) { prepare(kName, w4a16_gemm_kernel<F>, sizeof(Shared<F>)); });
  }
  w4a16_gemm_sm80_prepare(problem);
}

void w4a16_gemm_sm90(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  if (!mappable(o.a) || (!problem.b_packed && !mappable_nibbles(o.b))) return w4a16_gemm_sm80(problem, o, launch);
  const Choice choice = best_choice({o.a.rows(), problem.n, problem.k}, properties(problem.device).multiprocessors);
  with_form(problem, choice.rows_a, [&]<class F>(F) { launch_form<F>(problem, o, choice.parts, launch.stream); });
}

}  // namespace octile::cuda
