// The product of a 4-bit weight with up to 64 tokens, on the matrix unit: y^T = weight by tokens^T.
//
// A block has 256 rows of the weight, all tokens, and a run of the terms; the blocks of a cluster share the terms. In a
// block
//   - a warpgroup brings the tokens, puts their terms in the order in which the nibbles of a word come apart, and has
//     the copy engine fill a deeper ring with the weight, 256 rows by 128 terms a stage, as it lies in memory;
//   - two warpgroups multiply, two tiles of 64 rows each: nibbles become exact 16-bit integers q - z in registers, and
//     the matrix unit takes them from there. What a group of terms gives is scaled in f32 and added to the sums.
// In the end the blocks of a cluster add their sums up, in the order of the terms, each for some of the tokens.
#pragma once

#include <cstdint>

#include "cuda/device/grid.cuh"
#include "cuda/device/skinny_nibble_fetch.cuh"
#include "cuda/device/skinny_nibble_products.cuh"

namespace octile::cuda {

template <class F>
__global__ void __launch_bounds__(skinny_nibbles::kThreads, 1)
    skinny_nibbles_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ SkinnyNibbles p) {
  namespace s = skinny_nibbles;
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<s::Shared<F>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // the compiler knows it is uniform
  const s::Place<F> place(p);
  let_next_start();
  if (threadIdx.x == 0) {
    ptx::prefetch_map(weight);
    s::init(shared);
  }
  wait_for_previous();
  s::prefetch_small(p, place);
  __syncthreads();
  const auto meet_cluster = [&] {
    ptx::cluster_arrive_released();
    ptx::cluster_wait();
  };
  float* const kept = reinterpret_cast<float*>(shared.weight);
  static_assert(F::tokens * F::sum_pitch * 4 <= sizeof(shared.weight));
  if (warp < s::kMultipliers / 32) {
    ptx::take_registers<s::kMultiplierRegisters>();
    float sums[s::kTiles][F::tokens / 2];
    s::multiply<F>(sums, shared, place);
    asm volatile("bar.sync %0, %1;" ::"n"(s::kMeetBarrier), "n"(s::kMultipliers) : "memory");  // the ring is read
#pragma unroll
    for (int tile = 0; tile < s::kTiles; ++tile) s::keep_sums<F>(sums[tile], s::first_sixteen() + 4 * tile, kept);
  } else {
    ptx::give_registers<s::kBringerRegisters>();
    s::Bringer<F>{p, place}.run(shared, weight);
    for (int i = static_cast<int>(threadIdx.x) - s::kMultipliers; i < F::rows; i += s::kBringers) {
      shared.biases[i] = s::bias_of(p, place.first_row + i);
    }
    __syncwarp();
  }
  // As __syncthreads() would do; but racecheck loses sight of that one here, and not of this.
  ptx::arrive(ptx::shared_address(&shared.sums_kept));
  ptx::wait(ptx::shared_address(&shared.sums_kept), 0);
  __syncwarp();
  if (p.parts > 1) meet_cluster();
  s::finish<F>(p, place, kept, shared.biases);
  if (p.parts > 1) meet_cluster();  // no block leaves while others read its sums
}

}  // namespace octile::cuda
