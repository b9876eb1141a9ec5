// w8a16_gemm_sm90, the kernel:
//
//   y (m, n) = sum_c a[i, c] * (b[j, c] * c_scale[c])
//
//   a   (m, k) f16 or bf16       b   (n, k) s8       each K-major or MN-major, sums in f32
//
// It computes y^T = b * a^T: WGMMA takes b from registers, where it has just been dequantized to 16 bits, and a from
// shared memory. A persistent grid of clusters of two stacked blocks, which share a by multicast, or of more, which
// split K too (device/split_tiles.cuh). In each block a producer warp fills a ring of stages by TMA, another one loads
// the scales. Two consumer warpgroups take half of b's rows each, and convert the next slice while the tensor cores
// work on this one.
//
// w8a16_group_gemm_sm90 is the same kernel with a scale for each row of b, left to the epilogue with the bias.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/split_tiles.cuh"
#include "cuda/device/tma_transpose.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/operands.h"

namespace octile::cuda::w8a16 {

// ---- From s8 to 16 bits.

// A byte v in the lowest bits of a 16-bit float is v steps, a step being the type's smallest number: subnormal in f16;
// in bf16 subnormal or, from 128 on, in the first binade, whose step is the same. So with v = q + 128 one fma computes
//   q * scale * 2^(shift + exponent of the step) = v steps * scale' - 128 steps * scale',   scale' = scale * 2^shift
// Scales are rounded to 16 bits, and so is the product; 128 steps * scale' is exact unless a scale is so far below the
// largest one that T has no bits left for it.
//
// The shift brings the largest scale to the top of T's range: none overflows, and as few bits as possible are lost at
// the other end. The epilogue undoes it. A single scale is left to the epilogue altogether; then nothing is rounded
// here. With u the unit roundoff of T, the error of a result is at most
//   sum |a b scale| (2u + k 2^-24) + sum |a| largest scale 2^-15 (f16 only) + k largest scale 2^-116 (bf16 only)
// plus half a unit in the last place of y. The last term: tensor cores flush subnormals to zero.

// A thread's scales of 16 columns of b: 2c, 2c + 1, 2c + 8 and 2c + 9.
template <class T>
struct alignas(16) Scales16 {
  Two<T> scale[2];   // scale'
  Two<T> offset[2];  // -128 steps * scale'
};

template <class T>
__device__ Two<T> offset_of(Two<T> scale) {
  constexpr std::uint32_t kFactor = 0x80808080u;  // twice -128 steps, in either type
  return __hmul2(scale, reinterpret_cast<const Two<T>&>(kFactor));
}

// Bytes `first` and `second` of a word, times two scales.
template <class T, int first, int second>
__device__ std::uint32_t scaled_bytes(std::uint32_t bytes, Two<T> scale, Two<T> offset) {
  constexpr unsigned kPlaces = first | 4u << 4 | second << 8 | 4u << 12;
  const std::uint32_t steps = __byte_perm(bytes ^ 0x80808080u, 0, kPlaces);
  const Two<T> product = __hfma2(reinterpret_cast<const Two<T>&>(steps), scale, offset);
  return reinterpret_cast<const std::uint32_t&>(product);
}

// exponent: of the step. largest: exponent of the largest scale'. guard: added to its bits, so that it cannot round to
// the next power of two, which f16 does not have.
template <class T>
struct Step;
template <>
struct Step<__half> {
  static constexpr int exponent = -24;
  static constexpr int largest = 15;
  static constexpr unsigned guard = 0x1000;
};
template <>
struct Step<__nv_bfloat16> {
  static constexpr int exponent = -133;
  static constexpr int largest = 125;  // y's factor is an f32 unless the scale is enormous
  static constexpr unsigned guard = 0;
};

struct Scaling {
  int shift;
  float after;  // factor of y
};

// largest: bits of the largest magnitude among the scales.
template <class T>
__device__ Scaling scaling(const RowScale<float>& scale, unsigned largest) {
  constexpr int kBias = 127;
  constexpr int kAbove = Step<T>::largest + Step<T>::exponent;
  if (scale.stride == 0) return {Step<T>::largest, ldexpf(scale.data ? __ldcg(scale.data) : scale.value, -kAbove)};
  const int exponent = static_cast<int>((largest + Step<T>::guard) >> 23) - kBias;
  const int after = min(exponent - kAbove, kBias);  // at least -118
  return {-Step<T>::exponent - after, ldexpf(1.0f, after)};
}

// The bits of the largest finite magnitude among `count` scales, by the threads of whole warps (this thread's number,
// and their count): one atomicMax per warp on `largest` in shared memory. Bypasses L1, which may be stale in a grid
// that starts early.
__device__ inline void find_largest(const RowScale<float>& scale, std::int64_t count, int2 thread_of,
                                    unsigned* largest) {
  constexpr int kAtOnce = 8;
  constexpr unsigned kInfinity = 0x7f800000u;
  unsigned max_bits = 0;
  for (std::int64_t i = thread_of.x; i < count; i += kAtOnce * thread_of.y) {
    unsigned found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::int64_t at = min(i + j * thread_of.y, count - 1);
      found[j] = __float_as_uint(__ldcg(scale.data + at * scale.stride)) & ~(1u << 31);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) max_bits = max(max_bits, found[j] < kInfinity ? found[j] : 0);
  }
  max_bits = __reduce_max_sync(0xffffffff, max_bits);
  if (threadIdx.x % 32 == 0) atomicMax(largest, max_bits);
}

// A warp's 16 rows of a tile of s8, 128 x 64, to fragments. Rows g and g + 8 of the WGMMA are rows 2g and 2g + 1 of the
// tile (in an MN-major tile they share a word).
// K-major: the even rows, then the odd ones, lines of 64 bytes, swizzled.
// MN-major (outer): lines of 128 rows, one for each k, swizzled.
template <class T, bool outer>
class BytesReader {
 public:
  // sixteen: which 16 of the tile's 128 rows.
  __device__ explicit BytesReader(unsigned sixteen) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned i = 0; i < kPlaces; ++i) {
      const unsigned twist = outer ? sixteen ^ lane % 8 : i ^ lane / 8;
      places[i] = (outer ? lane * 128 : (8 * sixteen + lane / 4) * 64 + lane % 4 * 2) + twist * 16;
      asm volatile("" : "+r"(places[i]));  // kept in registers, not recomputed
    }
  }

  // Loads slice `slice` of 16 columns, and its scales.
  template <int slice>
  __device__ void fetch(const std::uint8_t* tile, const Scales16<T>* all) {
    scales = all[threadIdx.x % 4];
    if constexpr (!outer) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        words[part] =
            *reinterpret_cast<const std::uint16_t*>(tile + places[slice] + (part % 2 * 64 * 64 + part / 2 * 8));
      }
    } else if constexpr (slice % 2 == 0) {  // and the next one
      load_matrices_transposed(shared_address(tile) + places[0] + 16 * 128 * slice, words);
    }
  }

  // The slice loaded last.
  template <int slice>
  __device__ void convert(Fragment& to) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const Two<T> scale = scales.scale[part];
      const Two<T> offset = scales.offset[part];
      if constexpr (outer) {
        const std::uint32_t word = words[slice % 2 * 2 + part];
        to[2 * part] = scaled_bytes<T, 0, 2>(word, scale, offset);
        to[2 * part + 1] = scaled_bytes<T, 1, 3>(word, scale, offset);
      } else {
        to[2 * part] = scaled_bytes<T, 0, 1>(words[2 * part], scale, offset);
        to[2 * part + 1] = scaled_bytes<T, 0, 1>(words[2 * part + 1], scale, offset);
      }
    }
  }

 private:
  static constexpr int kPlaces = outer ? 1 : 4;
  std::uint32_t places[kPlaces];  // of this thread's bytes: in each slice, or MN-major in the first
  std::uint32_t words[4];         // of one slice, or MN-major of two
  Scales16<T> scales;
};

// ---- Constants.

constexpr int kTileK = 64;                     // of a stage
constexpr int kSlices = 4;                     // of 16
constexpr int kRowsB = 128;                    // of a tile; columns of y
constexpr int kAhead = 2;                      // slices converted ahead of their WGMMA
constexpr int kSearchers = kGemmThreads - 32;  // for the largest scale: all but the TMA warp
constexpr int kSearchBarrier = 1;              // named barriers; 0 is __syncthreads'
constexpr int kConsumerBarriers = 2;           // and the next
constexpr int kScaleBarriers = 4;              // one per stage
constexpr int kAddBarrier = 11;                // of both consumers

// rows_a: of a tile of a, and of y. The narrower tiles are for problems with fewer tiles than SMs.
template <int rows_a_, int stages_>
struct Tile {
  static constexpr int rows_a = rows_a_;
  static constexpr int stages = stages_;
};
using WideTile = Tile<256, 4>;
using MiddleTile = Tile<192, 5>;
using NarrowTile = Tile<128, 7>;

// What a kernel is compiled for. outer: the operand is MN-major. channels: a row of b has a scale, and y a bias.
template <class T_, class Tile_, bool a_outer_, bool b_outer_, bool channels_ = false>
struct Form : Tile_ {
  using T = T_;
  using Tile = Tile_;
  static constexpr bool channels = channels_;
  static constexpr bool a_outer = a_outer_;
  static constexpr bool b_outer = b_outer_;
  // WGMMA slices left in flight while a later one is converted; MN-major bytes take longer to convert.
  static constexpr int in_flight = b_outer ? 1 : 2;
  static_assert(kAhead + in_flight <= kSlices);
  static_assert(!a_outer || Tile_::rows_a % (64 * kClusterSize) == 0);
};

template <class F>
struct Shared {
  struct Stage {
    std::uint8_t a[F::rows_a * kTileK * 2];
    std::uint8_t b[kRowsB * kTileK];
  };
  Stage stages[F::stages];
  TransposeBuffer<F::rows_a> buffers[kConsumers];
  Scales16<typename F::T> scales[F::stages][kSlices * 4];
  std::uint64_t full[F::stages];
  std::uint64_t empty[F::stages];
  unsigned largest;  // magnitude among the scales, as bits
};

struct Arguments {
  SplitTiles tiles;
  int few_rows = 0;  // of a, if the first block of a cluster loads all: TMA takes long over boxes mostly out of bounds
  std::int64_t k = 0;
  RowScale<float> scale;
  TransposeTarget y;
  // Of channels, rows of b.
  RowScale<float> channel_scale;
  Bias bias;
  int channels = 0;
};

template <class F>
using Place = SplitPlace<F::rows_a, kRowsB, 1>;

// One thread: tiles of a and b, stage by stage. Each block of a pair loads half of a for both, unless they split K.
// Few rows of a are followed by stale data, whose columns of sums are not stored.
template <class F>
__device__ void load_operands(Shared<F>& shared, const Place<F>& place, const GemmMaps& maps,
                              const Arguments& arguments) {
  constexpr int kHalf = F::rows_a / kClusterSize;
  const bool few = !F::a_outer && arguments.few_rows > 0;
  const unsigned bytes = few ? sizeof(Shared<F>::Stage::b) + arguments.few_rows * kTileK * 2 : sizeof(shared.stages[0]);
  RingPosition<F::stages> at;
  for (int t = place.cluster; t < place.tasks(); t += place.clusters) {
    const SplitTask task = place[t];
    const bool halved = place.is_halved(t);
    // Rows of a, from `first` on, to one of the block's halves of the tile, or to that of both blocks.
    const auto load_rows = [&](std::uint32_t a, int term, int first, std::uint32_t full) {
      const int row = task.origin.y + first;
#pragma unroll
      for (int i = 0; i < (F::a_outer ? kHalf : 1); i += 64) {
        const int2 from = F::a_outer ? int2{row + i, term} : int2{term, row};
        const std::uint32_t to = a + (first + i) * kTileK * 2;
        if (halved) {
          ptx::tma_load(to, maps.a, from.x, from.y, full);
        } else {
          ptx::tma_load_multicast(place.pair(), to, maps.a, from, full);
        }
      }
    };
    for (int step = 0; step < task.steps; ++step) {
      auto& stage = shared.stages[at.stage];
      const std::uint32_t full = ptx::shared_address(&shared.full[at.stage]);
      const std::uint32_t a = ptx::shared_address(stage.a);
      const std::uint32_t b = ptx::shared_address(stage.b);
      const int term = (task.first_step + step) * kTileK;
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, bytes);
      if (few) {
        if (halved || place.rank == 0) load_rows(a, term, 0, full);
      } else {
        load_rows(a, term, halved ? 0 : place.rank * kHalf, full);
        if (halved) load_rows(a, term, kHalf, full);
      }
      if constexpr (F::b_outer) {
        ptx::tma_load(b, maps.b, task.origin.x, term, full);
      } else {
        ptx::tma_load(b, maps.b, term, task.origin.x / 2, full);
        ptx::tma_load(b + kRowsB / 2 * kTileK, maps.b_odd, term, task.origin.x / 2, full);
      }
      at.next();
    }
  }
}

// All warps but the TMA warp: the largest scale.
template <class F>
__device__ void find_largest_scale(Shared<F>& shared, const Arguments& arguments) {
  if (arguments.scale.stride != 0) {
    find_largest(arguments.scale, arguments.k, {static_cast<int>(threadIdx.x) - 32, kSearchers}, &shared.largest);
  }
  ptx::bar_sync<kSearchBarrier, kSearchers>();
}

// All consumers have read a stage's scales. Not by the stage's empty barrier, on which one lane arrives for its warp:
// racecheck does not understand that for plain loads.
constexpr int kScaleThreads = kConsumers * kWarpgroup + 32;
__device__ inline void report_scales_read(int stage) { ptx::bar_arrive<kScaleThreads>(kScaleBarriers + stage); }
__device__ inline void await_scales_read(int stage) { ptx::bar_sync<kScaleThreads>(kScaleBarriers + stage); }

// One warp: the scales of each stage, two per lane.
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
    const std::int64_t term = static_cast<std::int64_t>(step) * kTileK + 2 * lane;
    return float2{scale_at(term), scale_at(term + 1)};
  };
  RingPosition<F::stages> at;
  int filled = 0;  // stages that hold scales
  if (place.cluster >= place.tasks()) return;
  SplitTask task = place[place.cluster];
  float2 next = pair_at(task.first_step);
  for (int t = place.cluster; t < place.tasks(); t += place.clusters) {
    const int end = task.first_step + task.steps;
    for (int step = task.first_step; step < end; ++step) {
      const Two<T> scale = {narrow<T>(ldexpf(next.x, shift)), narrow<T>(ldexpf(next.y, shift))};
      if (step + 1 == end && t + place.clusters < place.tasks()) task = place[t + place.clusters];
      next = pair_at(step + 1 == end ? task.first_step : step + 1);
      if (filled == F::stages) {
        await_scales_read(at.stage);
      } else {
        ++filled;
      }
      Scales16<T>& to = shared.scales[at.stage][lane / 8 * 4 + lane % 4];
      to.scale[lane / 4 % 2] = scale;
      to.offset[lane / 4 % 2] = offset_of<T>(scale);
      ptx::mbarrier_arrive(shared.full[at.stage]);
      at.next();
    }
  }
  for (int i = 0; i < filled; ++i) await_scales_read(i);  // leaves no barrier half full
}

// ---- Products.

// A consumer warp: its warpgroup, its number in that, and, one per lane, the empty barriers of the blocks that fill its
// stages.
template <class F>
struct Consumer {
  using T = typename F::T;
  Shared<F>& shared;
  const Arguments& arguments;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty = 0;
  BytesReader<T, F::b_outer> reader = BytesReader<T, F::b_outer>(static_cast<unsigned>(4 * group + warp));

  __device__ void release(int stage) const {
    ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < kClusterSize);
    report_scales_read(stage);
  }

  __device__ void wait_full(const RingPosition<F::stages>& at) const {
    ptx::mbarrier_wait(shared.full[at.stage], at.parity);
  }

  template <int slice>
  __device__ void fetch(int stage) {
    reader.template fetch<slice>(shared.stages[stage].b, shared.scales[stage] + 4 * slice);
  }

  // While the WGMMAs up to `slice` are in flight: converts a later slice, and loads the one after that.
  template <int slice>
  __device__ void advance(Fragment (&b)[kSlices], int stage, int next_stage, bool next) {
    constexpr int kConvert = slice + kAhead;
    constexpr int kFetch = kConvert + 1;
    if (kConvert < kSlices || next) reader.template convert<kConvert % kSlices>(b[kConvert % kSlices]);
    if (kFetch < kSlices || next) fetch<kFetch % kSlices>(kFetch < kSlices ? stage : next_stage);
  }

  // Issues one slice; all but the last F::in_flight slices have completed then.
  template <int slice>
  __device__ void enqueue(float (&sums)[F::rows_a / 2], const Fragment (&b)[kSlices], int stage,
                          bool accumulate) const {
    const std::uint32_t a = smem_descriptor_in_cluster<F::a_outer>(ptx::shared_address(shared.stages[stage].a));
    ptx::wgmma_fence();
    wgmma_f32<T, F::a_outer>(sums, b[slice], a + slice * kNextTerms<F::a_outer>, accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<F::in_flight>();
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

  // The main loop: sums (64, rows of a) = b * a^T over all steps. b: fragments of the first kAhead slices of stage
  // `at`; at the end, those of the next tile, if there is one.
  __device__ void multiply(float (&sums)[F::rows_a / 2], Fragment (&b)[kSlices], RingPosition<F::stages>& at, int steps,
                           bool more) {
    int last = 0;
    for (int step = 0; step < steps; ++step) {
      const int stage = at.stage;
      const bool next = more || step + 1 < steps;
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
    ptx::wgmma_wait<0>();
    release(last);
    wgmma_fence_operand(sums);
  }

  // Scales and biases of this thread's two rows of b, neighbours, of the warpgroup's from `first` on.
  __device__ void finish(float (&sums)[F::rows_a / 2], int first, float after) const {
    const int row = first + 16 * warp + lane / 4 * 2;
    float scale[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = row + i < arguments.channels ? arguments.channel_scale[row + i] * after : 0;
      bias[i] = arguments.bias.at(row + i, arguments.channels, -0.0f);
    }
#pragma unroll
    for (int i = 0; i < F::rows_a / 2; ++i) sums[i] = __fmaf_rn(sums[i], scale[i / 2 % 2], bias[i / 2 % 2]);
  }

  __device__ void run(const Place<F>& place, const CUtensorMap& y) {
    const float after = scaling<T>(arguments.scale, shared.largest).after;
    RingPosition<F::stages> at;
    Fragment b[kSlices];
    float sums[F::rows_a / 2];
    empty = place.barrier_of(shared.empty, lane, true);
    if (place.cluster < place.tasks()) begin(b, at);
    for (int t = place.cluster; t < place.tasks(); t += place.clusters) {
      const SplitTask task = place[t];
      const int2 origin = task.origin;
      if (place.is_halved(t)) empty = place.barrier_of(shared.empty, lane, false);
      // A shuffle, so that the compiler knows the value is uniform.
      multiply(sums, b, at, __shfl_sync(~0u, task.steps, 0), t + place.clusters < place.tasks());
      if (task.parts > 1) {
        static_assert(sizeof(sums) * kConsumers * kWarpgroup <= sizeof(shared.stages));
        add_parts<kAddBarrier>(sums, task, place, ptx::shared_address(shared.stages));
        if (task.part > 0) continue;
      }
      if constexpr (F::channels) finish(sums, origin.x + 64 * group, after);
      store_transposed<T>(sums, F::channels ? 1 : after, shared.buffers[group], {origin.x + 64 * group, origin.y}, y,
                          arguments.y, kConsumerBarriers + group);
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }
};

template <class F>
__global__ void __launch_bounds__(kGemmThreads, 1)
    w8a16_gemm_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = uniform_warp();
  const Place<F> place(arguments.tiles);
  gemm_prologue([&] {
    maps.prefetch();
    init_barriers(shared.full, 1 + 32);
    init_barriers(shared.empty, kClusterSize * 4 * kConsumers);
    shared.largest = 0;
  });
  const auto produce = [&](int warp) {
    if (warp == 0) {
      if (threadIdx.x == 0) load_operands(shared, place, maps, arguments);
      __syncwarp();
    } else {
      find_largest_scale(shared, arguments);
      if (warp == 1) load_scales(shared, place, arguments);
    }
    place.join_adding();
  };
  const auto consume = [&](int group, int warp) {
    find_largest_scale(shared, arguments);
    Consumer<F>{shared, arguments, group, warp}.run(place, maps.y);
  };
  produce_and_consume<kProducerRegisters, kConsumerRegisters>(warp, produce, consume);
}

}  // namespace octile::cuda::w8a16
