// quantize_tensor: one segment, row-major out. One cooperative launch: the maximum, a barrier of the whole grid, the
// levels. What each multiprocessor read last it keeps, 204 KiB in shared memory and 72 KiB in registers: 37 MB on an
// H200; the second look goes backwards, so that some of the rest is in L2.
#pragma once

#include "cuda/device/quantize_bands.cuh"

namespace octile::cuda {

constexpr int kTensorThreads = 768;
constexpr int kHeld = 6;      // vectors that a thread keeps in registers
constexpr int kStashed = 17;  // and in shared memory
constexpr int kAhead = 4;     // loads in flight for each thread, twice

// The matrix has no gaps: it is `all` vectors, of which a block takes every gridDim.x-th slab of kTensorThreads.
// `partial`: the blocks' maxima. `known`: the scale for another kernel; then there is no second half.
template <class T>
__global__ void __launch_bounds__(kTensorThreads, 1)
    quantize_tensor(QuantizeArguments<T> a, std::int64_t all, float* partial, float* known) {
  constexpr int n = kVectorSize<T>;
  extern __shared__ __align__(16) unsigned char stash_bytes[];
  auto* const stash = reinterpret_cast<Vector<T>*>(stash_bytes) + threadIdx.x;
  __shared__ float most_of_warp[kTensorThreads / 32];
  __shared__ PlainScale of_block;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t step = std::int64_t{gridDim.x} * kTensorThreads;
  const std::int64_t first = std::int64_t{blockIdx.x} * kTensorThreads + threadIdx.x;
  // The same for all threads. All vectors of a turn but those of the last one are there.
  const int turns = static_cast<int>((all + step - 1) / step);
  const int held = max(0, turns - kHeld);       // from here on they are held in registers,
  const int stashed = max(0, held - kStashed);  // from here on in shared memory; before, they are read again
  const T* const from = a.x + first * n;
  std::uint8_t* const to = a.q + first * n;
  const auto load = [&](int turn) { return load_vector(from + turn * (step * n), n, true); };
  const auto finish = [&](const Vector<T>& v, const PlainScale& g, int turn) {
    plain_bytes(v, g, a.rules).store(to + turn * (step * n));
  };

  let_next_start();
  wait_for_previous();
  Magnitude<T> magnitude;
  int turn = 0;
  for (; turn + 2 * kAhead <= stashed; turn += 2 * kAhead) {
    Vector<T> v[2 * kAhead];
#pragma unroll
    for (int k = 0; k < 2 * kAhead; ++k) v[k] = load(turn + k);
#pragma unroll
    for (int k = 0; k < 2 * kAhead; ++k) magnitude.include(v[k]);
  }
  for (; turn < stashed; ++turn) magnitude.include(load(turn));
  for (; turn < held; ++turn) copy_async(stash + (turn - stashed) * kTensorThreads, from + turn * (step * n));
  Vector<T> last[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    last[k] = turn + k < turns && first + (turn + k) * step < all ? load(turn + k) : Vector<T>{};
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) magnitude.include(last[k]);
  wait_for_copies();
  for (int slot = 0; slot < held - stashed; ++slot) magnitude.include(stash[slot * kTensorThreads]);

  const float most_of_lanes = max_of_lanes(magnitude.value());
  if (thread % 32 == 0) most_of_warp[thread / 32] = most_of_lanes;
  __syncthreads();
  if (thread < 32) {
    const float most = max_of_lanes(thread < kTensorThreads / 32 ? most_of_warp[thread] : 0.0f);
    if (thread == 0) partial[blockIdx.x] = most;
  }
  // The first of the second looks are on their way while the blocks wait for one another.
  Vector<T> even[kAhead];
  Vector<T> odd[kAhead];
  const auto load_again = [&](int before, Vector<T>(&v)[kAhead]) {
    const T* p = from + (before - 1) * (step * n);
#pragma unroll
    for (int k = 0; k < kAhead; ++k, p -= step * n) {
      if (before - k > 0) v[k] = load_vector(p, n, true);
    }
  };
  load_again(stashed, even);
  cg::this_grid().sync();
  if (thread < 32) {
    float most = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += 32) most = max_nan(most, __ldcg(partial + i));
    const PlainScale g = plain_scale(a.rules, max_of_lanes(most), a.rules.given ? a.given_scale[0] : 1.0f);
    if (thread == 0) of_block = g;
    if (thread == 0 && blockIdx.x == 0) {
      if (a.scale) *a.scale = g.s;
      if (known) known[0] = g.s, known[1] = g.inv, known[2] = g.sure;
    }
  }
  if (known) return;
  __syncthreads();
  const PlainScale g = of_block;

#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (held + k < turns && first + (held + k) * step < all) finish(last[k], g, held + k);
  }
  // What is in shared memory is written between reads, so that memory does both.
  int slot = held - stashed - 1;
  const auto finish_slot = [&] {
    if (slot >= 0) finish(stash[slot * kTensorThreads], g, stashed + slot);
    --slot;
  };
  const auto finish_again = [&](int before, const Vector<T>(&v)[kAhead]) {
    std::uint8_t* p = to + (before - 1) * (step * n);
#pragma unroll
    for (int k = 0; k < kAhead; ++k, p -= step * n) {
      if (before - k > 0) plain_bytes(v[k], g, a.rules).store(p);
    }
  };
  for (turn = stashed; turn > 0; turn -= 2 * kAhead) {
    load_again(turn - kAhead, odd);
    finish_slot();
    finish_again(turn, even);
    load_again(turn - 2 * kAhead, even);
    finish_slot();
    finish_again(turn - kAhead, odd);
  }
  while (slot >= 0) finish_slot();
}

}  // namespace octile::cuda
