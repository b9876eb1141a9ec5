// The product of a 4-bit weight with up to 64 tokens, on the matrix unit: y^T = weight by tokens^T.
//
// A block has 256 rows of the weight, all tokens, and a run of the terms; the blocks of a cluster share the terms. In a
// block
//   - a warpgroup has the copy engine fill two rings, with the tokens and with the weight, 256 rows by 128 terms a
//     stage, as it lies in memory, and puts the tokens' terms in the order in which the nibbles of a word come apart;
//   - two warpgroups multiply, two tiles of 64 rows each: nibbles become exact 16-bit integers q - z in registers, and
//     the matrix unit takes them from there. What a group of terms gives is scaled in f32 and added to the sums.
// In the end the blocks of a cluster send each other their sums, and each adds up some of them, in the order of the
// terms.
#pragma once

#include <cstdint>

#include "cuda/device/grid.cuh"
#include "cuda/gemm/w4a16_gemm_skinny_sm90_producer.cuh"
#include "cuda/gemm/w4a16_gemm_skinny_sm90.cuh"

namespace octile::cuda {

template <class F>
__global__ void __launch_bounds__(skinny_nibbles::kThreads, 1)
    skinny_nibbles_kernel(const __grid_constant__ SkinnyMaps maps, const __grid_constant__ SkinnyNibbles p) {
  namespace s = skinny_nibbles;
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<s::Shared<F>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const s::Place<F> place(p);
  let_next_start();
  if (threadIdx.x == s::kMultipliers) {
    ptx::prefetch_map(maps.tokens);
    ptx::prefetch_map(maps.weight);
    if (F::packed) ptx::prefetch_map(maps.scales);
    if (F::packed && F::zeros) ptx::prefetch_map(maps.zeros);
    s::init(shared);
  }
  wait_for_previous();
  const s::Bringer<F> bringer{p, place};
  if (warp == s::kMultipliers / 32) {
    bringer.begin(shared, maps);
    __syncwarp();
  } else {
    s::prefetch_first(p, place);
  }
  __syncthreads();
  const s::Exchange<F> exchange{p, place};
  if (warp < s::kMultipliers / 32) {
    ptx::take_registers<s::kMultiplierRegisters>();
    float sums[s::kTiles][F::tokens / 2];
    s::multiply<F>(sums, shared, place, [&] { ptx::cluster_arrive(); });
    ptx::cluster_wait();  // the others' weight has been read, and sums may lie there
    exchange.send(sums, shared);
    ptx::cluster_arrive_released();
    ptx::cluster_wait();  // all sums are there
    exchange.finish(shared);
  } else {
    ptx::give_registers<s::kBringerRegisters>();
    bringer.run(shared, maps);
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace octile::cuda
