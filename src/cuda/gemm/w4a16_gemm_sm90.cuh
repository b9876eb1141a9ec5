// w4a16_gemm_sm90, the kernel and its consumers:
//
//   y (m, n) = sum_c a[i, c] * ((q[j, c] - z[j, g]) * s[j, g]) + bias[j], a (m, k) f16 or bf16, sums in f32
//
// It computes y^T = weight * a^T: WGMMA takes the weight from registers, where it has just been dequantized to 16 bits
// (w4a16_gemm_sm90_convert.cuh), and a from shared memory. A persistent grid of clusters: pairs of stacked blocks share
// a by multicast; with few tiles, split-K across the pairs of a cluster; where the last tiles would leave half of the
// grid idle, the two blocks of a pair split K. The producers are in w4a16_gemm_sm90_producer.cuh. Two consumer
// warpgroups take half of the weight's rows each, and convert the next 32 columns while the tensor cores work on
// these 32.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/tma_transpose.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/w4a16_gemm_sm90_convert.cuh"
#include "cuda/gemm/w4a16_gemm_sm90_producer.cuh"

namespace octile::cuda::w4a16 {

// A consumer warp: its warpgroup, its number in that, and, one per lane, the empty barriers of the blocks that fill its
// stages.
template <class F>
struct Consumer {
  using T = typename F::T;
  using Scales = RowScales<T, F::packed>;
  using Half = Fragment[2];  // 32 columns
  using Sums = float[F::products][F::width / 2];
  // Whether a tile of K is known to be the first or the second half of 128 columns.
  template <int k_tile>
  static constexpr int known = F::k_tiles == 2 ? k_tile : -1;
  Shared<F>& shared;
  const Arguments& arguments;
  Place<F> place;
  int group;
  int warp;
  int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty = 0;
  RingPosition<kScales> scales_at = {};
  NibbleReader<T, F::packed> reader = NibbleReader<T, F::packed>(static_cast<unsigned>(4 * group + warp));

  // Which blocks this warp releases stages to: both of the pair, or this one twice where it fills its stages alone.
  __device__ void fill_by(bool both) {
    const int block = kClusterSize * place.whole.part + (both ? lane % kClusterSize : place.rank);
    empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<std::uint32_t>(block));
  }

  __device__ void release(int stage) const { ptx::mbarrier_arrive_cluster(empty + 8 * stage, lane < kClusterSize); }

  __device__ void wait_full(const RingPosition<F::stages>& at) const {
    ptx::mbarrier_wait(shared.full[at.stage], at.parity);
  }

  template <int k_tile, int half>
  __device__ void fetch(int stage, Scales& scales) {
    reader.template fetch<half>(shared.stages[stage].b[k_tile]);
    if (half == 1 || !scales.template begins<known<k_tile>>()) return;
    ptx::mbarrier_wait(shared.scales_full[scales_at.stage], scales_at.parity);
    scales.fetch(shared.scales[scales_at.stage]);
    ptx::mbarrier_arrive(shared.scales_empty[scales_at.stage]);
    scales_at.next();
  }

  template <int k_tile, int half>
  __device__ void convert(Half& b, Scales& scales) const {
    if constexpr (half == 0) {
      scales.template begin_step<known<k_tile>>();
    } else {
      scales.begin_half();
    }
    reader.convert(b[0], scales, 0);
    reader.convert(b[1], scales, 1);
  }

  // Issues the WGMMAs of half a stage, whose rows of a begin at `a`; those of the half before have completed then.
  __device__ void enqueue(Sums& sums, const Half& b, std::uint32_t a, bool accumulate) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2 * F::products; ++i) {
      constexpr int kNextProduct = F::width * kTileK * 2 / 16;
      const int slice = i / F::products, product = i % F::products;
      wgmma_f32<T>(sums[product], b[slice], a + slice * kNextTerms<false> + product * kNextProduct,
                   accumulate || slice > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }

  __device__ static void hold_all(Sums& sums) {
#pragma unroll
    for (int i = 0; i < F::products; ++i) wgmma_fence_operand(sums[i]);
  }

  // sums = sums * by, rows g and g + 8
  __device__ static void scale_rows(Sums& sums, const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < F::rows_a / 2; ++i) sums[i / (F::width / 2)][i % (F::width / 2)] *= by[i / 2 % 2];
  }

  // A loop: the compiler would turn a branch into predicated instructions, which wait for all sums in every step.
  __device__ void scale_down(Sums& sums, Scales& scales) const {
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll 1
      while (scales.rescaled) {
        ptx::wgmma_wait<0>();
        hold_all(sums);
        scale_rows(sums, scales.factor);
        scales.rescaled = false;
      }
    }
  }

  // The first half of a tile.
  __device__ void begin(Half (&b)[2], const RingPosition<F::stages>& at, Scales& scales) {
    wait_full(at);
    fetch<0, 0>(at.stage, scales);
    convert<0, 0>(b[0], scales);
    fetch<0, 1>(at.stage, scales);
  }

  // The main loop: sums (64, rows of a) = b * a^T over all steps. b[0]: the first half of stage `at`, whose second half
  // has been loaded; at the end, that of the next tile, if any. While one half is multiplied, the next is converted,
  // and the one after that loaded.
  __device__ void multiply(Sums& sums, Half (&b)[2], RingPosition<F::stages>& at, int steps, bool more,
                           Scales& scales) {
    int last = 0;
    for (int step = 0; step < steps; ++step) {
      const int stage = at.stage;
      const bool next = more || step + 1 < steps;
      at.next();
      const auto k_tile = [&]<int i>(std::integral_constant<int, i>) {
        constexpr bool last_k_tile = i + 1 == F::k_tiles;
        constexpr int then = last_k_tile ? 0 : i + 1;
        const std::uint32_t a = smem_descriptor_in_cluster<false>(ptx::shared_address(shared.stages[stage].a[i]));
        scale_down(sums, scales);
        enqueue(sums, b[0], a, i > 0 || step > 0);
        if (i == 0 && step > 0) release(last);
        convert<i, 1>(b[1], scales);
        if (last_k_tile && step + 1 == steps) scales.begin_tile();
        if (!last_k_tile) {
          fetch<then, 0>(stage, scales);
        } else if (next) {
          wait_full(at);
          fetch<then, 0>(at.stage, scales);
        }
        enqueue(sums, b[1], a + 2 * kNextTerms<false>, true);
        convert<then, 0>(b[0], scales);
        if (!last_k_tile) {
          fetch<then, 1>(stage, scales);
        } else if (next) {
          fetch<then, 1>(at.stage, scales);
        }
      };
      k_tile(std::integral_constant<int, 0>());
      if constexpr (F::k_tiles == 2) k_tile(std::integral_constant<int, 1>());
      last = stage;
    }
    ptx::wgmma_wait<0>();
    release(last);
    hold_all(sums);
  }

  template <class Y, class Finish, class Target>
  __device__ void store(const Sums& sums, const Finish& finish, int2 at, const CUtensorMap& y,
                        const Target& target) const {
#pragma unroll
    for (int i = 0; i < F::products; ++i) {
      store_tiles<Y, false, F::width>(sums[i], finish, shared.lines[group], {at.x, at.y + i * F::width}, y, target,
                                      kConsumerBarriers + group);
    }
  }

  template <class Finish, class Target>
  __device__ void store(const Sums& sums, const Finish& finish, int2 at, const CUtensorMap& y,
                        const Target& target) const {
    if (target.wide) {
      store<float>(sums, finish, at, y, target);
    } else {
      store<T>(sums, finish, at, y, target);
    }
  }

  // Of one of the weight's rows. An expert's may be narrower than y.
  template <class Task>
  __device__ float bias_at(const Task& task, int row) const {
    if constexpr (F::experts) {
      Bias bias = arguments.bias;
      if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + task.expert * arguments.experts.bias;
      return bias.at(row, arguments.weight.rows, 0);
    } else {
      return arguments.bias.template at<T>(row, arguments.weight.rows, arguments.y.wide);
    }
  }

  __device__ void run(const CUtensorMap& y) {
    const int first_row = 64 * group + 16 * warp + lane / 4 * 2;
    Scales scales(arguments.weight, first_row);
    RingPosition<F::stages> at;
    Half b[2];
    Sums sums;
    fill_by(true);
    if (place.cluster < place.tasks()) begin(b, at, scales);
    for (int t = place.cluster; t < place.tasks(); t += place.clusters) {
      auto task = place[t];
      float bias[2];
      const auto load_bias = [&] {
#pragma unroll
        for (int h = 0; h < 2; ++h) bias[h] = bias_at(task, task.origin.x + first_row + h);
      };
      if constexpr (!F::experts) load_bias();
      if (place.is_halved(t)) fill_by(false);
      // A shuffle, so that the compiler knows the value is uniform.
      multiply(sums, b, at, __shfl_sync(~0u, task.steps, 0), t + place.clusters < place.tasks(), scales);
      float after[2] = {scales.after(0), scales.after(1)};
      if constexpr (F::experts) {  // again, so that registers need not keep it
        task = place[t];
        load_bias();
      } else if (task.parts > 1) {
        scale_rows(sums, after);
        after[0] = after[1] = 1;
        auto& all = reinterpret_cast<float(&)[F::rows_a / 2]>(sums);
        static_assert(kConsumers * kWarpgroup * sizeof(all) <= sizeof(shared.stages));
        add_parts<kNamedBarrier>(all, task, place, ptx::shared_address(shared.stages));
        if (task.part > 0) continue;
      }
      const auto finish = [&](float x, unsigned h) { return __fmaf_rn(x, after[h], bias[h]); };
      const int2 corner = {task.origin.x + 64 * group, task.origin.y};
      if constexpr (F::experts) {
        store(sums, finish, corner, y, ExpertTarget(arguments.y, task.end));
      } else {
        store(sums, finish, corner, y, arguments.y);
      }
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();
  }
};

template <class F>
__global__ void __launch_bounds__(kGemmThreads, F::blocks)
    w4a16_gemm_kernel(const __grid_constant__ typename F::Maps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = uniform_warp();
  gemm_prologue([&] {
    maps.prefetch();
    if constexpr (F::experts) maps.prefetch_panels(arguments.weight.zeros != nullptr);
    init(shared);
  });
  if constexpr (F::experts) fill_table(shared.experts, arguments.experts, F::rows_a);
  const Place<F> place = place_of(shared, arguments);
  const auto produce = [&](int warp) {
    if (threadIdx.x == 0) load_operands(shared, place, maps, arguments.weight);
    if (!F::experts && (warp == 1 || warp == 2)) load_scales(shared, place, arguments.weight);
    __syncwarp();
    place.join_adding();
  };
  const auto consume = [&](int group, int warp) { Consumer<F>{shared, arguments, place, group, warp}.run(maps.y); };
  produce_and_consume<F::producer_registers, F::consumer_registers>(warp, produce, consume);
}

}  // namespace octile::cuda::w4a16
