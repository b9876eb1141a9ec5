// Rows of experts that are gathered, on Hopper: the producer warpgroup copies them by cp.async to where TMA would,
// lines of 128 bytes with its swizzle.
#pragma once

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp_specialized.cuh"

namespace octile::cuda {

// A thread's rows of a tile: every sixteenth, 16 bytes of each line.
template <int rows>
class GatheredRows {
 public:
  __device__ GatheredRows(const Experts& experts, int first, int end) {
    const int line = static_cast<int>(threadIdx.x) / 8;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = first + line + 16 * i;
      rows_[i] = row < end ? experts.row_of_a(row) : -1;
    }
  }

  // Starts copying a line of each. `left` of its bytes, a multiple of 16, exist, and zeros follow; rows that do not
  // exist are left as they are.
  __device__ void copy(std::uint8_t* tile, const std::uint8_t* from, std::int64_t pitch, int left) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int chunk = thread % 8, line = thread / 8;
    const std::uint32_t to = ptx::shared_address(tile) + line * 128 + (chunk ^ line % 8) * 16;
    if (chunk * 16 < left) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        copy_async_if(rows_[i] >= 0, to + i * 16 * 128, from + rows_[i] * pitch + chunk * 16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        ptx::store_shared_v2(to + i * 16 * 128, 0, 0);
        ptx::store_shared_v2(to + i * 16 * 128 + 8, 0, 0);
      }
    }
  }

 private:
  static constexpr int kTurns = rows / 16;
  static_assert(kTurns * 16 == rows);

  int rows_[kTurns];  // of a; -1: none
};

// Stages that a thread has filled by cp.async, in order: kLag stages later what it has copied is made visible to WGMMA,
// and it arrives.
template <int stages>
class Landings {
 public:
  __device__ void commit(std::uint64_t (&full)[stages]) {
    commit_copies();
    if (++under_way_ > kLag) {
      wait_for_copies<kLag>();
      land(full);
    }
  }

  // After the last one.
  __device__ void finish(std::uint64_t (&full)[stages]) {
    wait_for_copies<0>();
    while (under_way_ > 0) land(full);
  }

 private:
  // A stage is multiplied, and the next one has to be there.
  static constexpr int kLag = stages > 3 ? 2 : 1;
  static_assert(stages >= kLag + 2);

  __device__ void land(std::uint64_t (&full)[stages]) {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(full[at_.stage]);
    at_.next();
    --under_way_;
  }

  RingPosition<stages> at_;
  int under_way_ = 0;
};

}  // namespace octile::cuda
