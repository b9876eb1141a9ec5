// w8a8_gemm_skinny_sm90 where TMA cannot read a; up to 32 tokens. All of a is resident in shared memory; the weight
// streams past it once.
//
//   y[i, j] = round_to_y(fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]))
//
//   a   (m, k) s8: rows contiguous, any alignment
//   b   (n, k) s8: rows contiguous, each at a multiple of 16 bytes
//
// A block has a run of groups of 16 rows of b, cut along k into chunks of at most a kilobyte. Two producer warps load
// them into a ring by bulk copies, row by row. Of 16 consumer warps each multiplies its own 64 bytes of every chunk;
// their s32 sums, exact in any order, are added in shared memory at the end of a group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/ceil_div.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm/w8a8_gemm_skinny_sm90.cuh"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

inline constexpr int kSkinnyWarps = 16;  // consumers
inline constexpr int kSkinnyConsumers = kSkinnyWarps * 32;
// M = 1, 4096 x 14336 on an H200: 27.7 us with one (some 110 cycles per copy), 20.7 with two, 21.2 with four,
// 22 with eight.
inline constexpr int kProducerWarps = 2;
inline constexpr int kSkinnyThreads = kSkinnyConsumers + kProducerWarps * 32;
inline constexpr int kStepBytes = 64;  // of k, a warp's at a time: 16 per lane
inline constexpr int kGroupRows = 16;  // of b: M of the mma instruction
inline constexpr int kChunkBytes = kSkinnyWarps * kStepBytes;
inline constexpr int kPassGroups = 8;  // whose sums a block holds at a time
inline constexpr int kPassRows = kPassGroups * kGroupRows;
inline constexpr int kSumPitch = kPassRows + 4;  // eight rows of four tokens meet no bank conflict
inline constexpr int kMaxSlots = 16;
inline constexpr int kMinSlots = 4;  // 64 KB in flight

// Strides of vectors may be 0.
struct SkinnyProduct {
  const std::int8_t* a = nullptr;
  std::int64_t a_pitch = 0;
  bool a_aligned = false;  // rows start at multiples of 16 bytes
  int tokens = 0;          // m
  int k = 0;
  RowScale<float> a_scale;
  const std::int8_t* b = nullptr;
  std::int64_t b_pitch = 0;
  int rows = 0;         // n
  int chunks = 0;       // along k
  int chunk_bytes = 0;  // a multiple of kStepBytes
  int slots = 0;        // of the ring
  RowScale<float> b_scale;
  Bias bias;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
};

// Bytes between rows in shared memory: an odd multiple of 64 avoids bank conflicts between 16-byte loads of 8 rows.
__host__ __device__ constexpr int padded(int bytes) { return ((bytes + 63) / 64 | 1) * 64; }

// Shared memory, in this order: ring, sums, scales of rows, bias, scales of tokens, barriers, tokens.
template <int kTokenBlocks>
struct SkinnyLayout {
  static constexpr int kTokens = 8 * kTokenBlocks;
  static constexpr int kFixed = kTokens * kSumPitch * 4 + 2 * kPassRows * 4 + kTokens * 4 + 2 * kMaxSlots * 8;
};

// Named barriers.
__device__ inline void sync_consumers() { ptx::bar_sync<1, kSkinnyConsumers>(); }
__device__ inline void sync_producers() { ptx::bar_sync<3, kProducerWarps * 32>(); }
// The producers have initialized the ring's barriers, and go on; the consumers wait for that.
__device__ inline void report_barriers() { ptx::bar_arrive<2, kSkinnyThreads>(); }
__device__ inline void await_barriers() { ptx::bar_sync<2, kSkinnyThreads>(); }

// The first `bytes` of 16 at p, then zeros; any alignment. Rare, so a function of its own: the rest of the code is
// shorter then, and loads faster from a cold cache.
static __device__ __noinline__ uint4 load_bytes(const std::int8_t* p, int bytes) {
  std::uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = 0;
#pragma unroll 1
    for (int i = 0; i < 4 && 4 * w + i < bytes; ++i) {
      words[w] |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(__ldcg(p + 4 * w + i))) << (i * 8);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Copies a to `tokens`, by all consumers; the caller commits the copies.
__device__ inline void copy_tokens(const SkinnyProduct& p, std::uint32_t tokens) {
  const int chunks = (p.k + kStepBytes - 1) / kStepBytes * (kStepBytes / 16);  // zeros beyond k, where b holds anything
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.tokens * chunks; i += kSkinnyConsumers) {
    const int token = i / chunks;
    const int c = (i - token * chunks) * 16;
    const std::int8_t* const from = p.a + token * p.a_pitch + c;
    const std::uint32_t to = tokens + static_cast<unsigned>(token * padded(p.k) + c);
    // cp.async of fewer bytes would do, but memcheck takes it for 16.
    if (p.a_aligned && p.k - c >= 16) {
      copy_async(to, from);
    } else {
      store_shared(to, load_bytes(from, p.k - c));
    }
  }
}

// The groups of rows of one block, in passes.
struct BlockRun {
  int first, end, pass_groups;

  __device__ explicit BlockRun(int rows) {
    const unsigned groups = static_cast<unsigned>(rows + kGroupRows - 1) / kGroupRows;
    const unsigned each = groups / gridDim.x;
    const unsigned rest = groups % gridDim.x;
    first = static_cast<int>(each * blockIdx.x + min(blockIdx.x, rest));
    end = first + static_cast<int>(each + (blockIdx.x < rest));
    const int passes = (end - first + kPassGroups - 1) / kPassGroups;
    pass_groups = (end - first + passes - 1) / passes;
  }
};

// The producer warps, every kProducerWarps-th chunk each, lanes 0 to 15 a row each. Here, and where the ring is read,
// each lane arrives for itself, so that racecheck understands it.
__device__ inline void fetch_rows(const SkinnyProduct& p, std::uint32_t ring, std::uint32_t full, std::uint32_t empty) {
  const int fetcher = static_cast<int>(threadIdx.x) / 32 - kSkinnyWarps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const BlockRun run(p.rows);
  const std::uint64_t policy = ptx::evict_first();
  const int pitch = padded(p.chunk_bytes);
  int turn = 0;
  int slot = 0;
  std::uint32_t parity = 1;
  for (int group = run.first; group < run.end; ++group) {
    const int row = group * kGroupRows + lane;
    const std::int8_t* const from = p.b + row * p.b_pitch;
    // Past a row's end comes the next row; past the last one there may be nothing readable.
    const bool may_exceed = row + 1 < p.rows && p.b_pitch >= p.k;
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      if (turn == fetcher && lane < kGroupRows) {
        const int c = chunk * p.chunk_bytes;
        const int wanted = row < p.rows ? min(p.k - c, p.chunk_bytes) : 0;
        const int bytes = may_exceed ? (wanted + 15) / 16 * 16 : wanted / 16 * 16;
        const std::uint32_t to = ring + static_cast<unsigned>((slot * kGroupRows + lane) * pitch);
        ptx::mbarrier_wait(empty + slot * 8, parity);
        if (bytes < wanted) {
          store_shared(to + bytes, load_bytes(from + c + bytes, wanted - bytes));
          ptx::fence_proxy_async();  // where rows overlap, a later copy writes the same place
        }
        ptx::mbarrier_arrive_expect_tx(full + slot * 8, static_cast<unsigned>(bytes));
        if (bytes > 0) ptx::bulk_load(to, from + c, bytes, full + slot * 8, policy);
      }
      turn = turn + 1 == kProducerWarps ? 0 : turn + 1;
      if (++slot == p.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

template <int kTokenBlocks>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    w8a8_gemm_skinny_unaligned_kernel(const __grid_constant__ SkinnyProduct p) {
  using Layout = SkinnyLayout<kTokenBlocks>;
  extern __shared__ __align__(128) char shared[];
  char* const behind_ring = shared + p.slots * kGroupRows * padded(p.chunk_bytes);
  std::int32_t* const sums = reinterpret_cast<std::int32_t*>(behind_ring);                 // (kTokens, kSumPitch)
  float* const row_scales = reinterpret_cast<float*>(sums + Layout::kTokens * kSumPitch);  // (kPassRows)
  float* const biases = row_scales + kPassRows;                                            // (kPassRows)
  float* const token_scales = biases + kPassRows;                                          // (kTokens)
  const std::uint32_t tokens = shared_address(behind_ring + Layout::kFixed);               // (p.tokens, padded(k))
  const std::uint32_t full = tokens - 2 * kMaxSlots * 8;
  const std::uint32_t empty = full + kMaxSlots * 8;
  const std::uint32_t ring = shared_address(shared);  // (slots, kGroupRows, padded(chunk_bytes))

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane_row = thread % 32 / 4;
  const int lane_byte = warp * kStepBytes + thread % 4 * 16;  // of a chunk

  let_next_start();
  if (warp >= kSkinnyWarps) {
    if (thread == kSkinnyConsumers) {
#pragma unroll 1
      for (int i = 0; i < p.slots; ++i) {
        ptx::mbarrier_init(full + i * 8, kGroupRows);
        ptx::mbarrier_init(empty + i * 8, kSkinnyConsumers);
      }
      ptx::fence_mbarrier_init();
    }
    sync_producers();
    report_barriers();
    wait_for_previous();
    fetch_rows(p, ring, full, empty);
    return;
  }
  wait_for_previous();

  const BlockRun run(p.rows);
  float row_scale = 0;
  float bias = 0;
  const auto fetch_row_vectors = [&](int pass) {
    const int row = pass * kGroupRows + thread;
    if (thread < kPassRows && row < p.rows) {
      row_scale = p.b_scale[row];
      bias = p.bias.at(row, p.rows, 0);
    }
  };
  const auto keep_row_vectors = [&] {
    if (thread < kPassRows) {
      row_scales[thread] = row_scale;
      biases[thread] = bias;
    }
  };

  std::int32_t acc[kTokenBlocks][4] = {};
  const auto multiply_step = [&](uint4 b0, uint4 b1, int c) {
    // Any order of k will do, since it is the same on both sides: a lane's 16 bytes fill its four slots of two
    // instructions.
    const std::uint32_t first[4] = {b0.x, b1.x, b0.y, b1.y};
    const std::uint32_t second[4] = {b0.z, b1.z, b0.w, b1.w};
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t) {
      const int token = min(t * 8 + lane_row, p.tokens - 1);
      const uint4 x = load_shared(tokens + static_cast<unsigned>(token * padded(p.k) + c));
      multiply_add_s8(acc[t], first, x.x, x.y);
      multiply_add_s8(acc[t], second, x.z, x.w);
    }
  };

  const auto hand_over = [&](int group_in_pass) {
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = t * 8 + thread % 4 * 2 + e % 2;
        atomicAdd(&sums[token * kSumPitch + group_in_pass * kGroupRows + lane_row + e / 2 * 8], acc[t][e]);
        acc[t][e] = 0;
      }
    }
  };

  const auto store_pass = [&](int pass) {
    const int rows = min(min(run.pass_groups, run.end - pass) * kGroupRows, p.rows - pass * kGroupRows);
#pragma unroll 1
    for (int i = thread; i < p.tokens * kPassRows; i += kSkinnyConsumers) {
      const int token = i / kPassRows;
      const int row = i % kPassRows;
      if (row >= rows) continue;
      std::int32_t& sum = sums[token * kSumPitch + row];
      const float scale = __fmul_rn(token_scales[token], row_scales[row]);
      const float product = static_cast<float>(sum);
      sum = 0;
      const float y = p.bias.data != nullptr ? __fmaf_rn(product, scale, biases[row]) : __fmul_rn(product, scale);
      store_float(p.y, token * p.y_pitch + pass * kGroupRows + row, p.y_type, y);
    }
  };

  fetch_row_vectors(run.first);
  copy_tokens(p, tokens);
  commit_copies();
  if (thread < p.tokens) token_scales[thread] = p.a_scale[thread];
#pragma unroll 1
  for (int i = thread; i < Layout::kTokens * kSumPitch; i += kSkinnyConsumers) sums[i] = 0;
  await_barriers();
  wait_for_copies<0>();
  keep_row_vectors();
  sync_consumers();

  int slot = 0;
  std::uint32_t parity = 0;
  for (int pass = run.first; pass < run.end; pass += run.pass_groups) {
    const int end = min(pass + run.pass_groups, run.end);
    for (int group = pass; group < end; ++group) {
#pragma unroll 1
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const int c = chunk * p.chunk_bytes + lane_byte;
        const bool busy = lane_byte < p.chunk_bytes && c - thread % 4 * 16 < p.k;
        const std::uint32_t from =
            ring + static_cast<unsigned>((slot * kGroupRows + lane_row) * padded(p.chunk_bytes) + lane_byte);
        ptx::mbarrier_wait(full + slot * 8, parity);
        if (busy) multiply_step(load_shared(from), load_shared(from + 8 * padded(p.chunk_bytes)), c);
        ptx::mbarrier_arrive(empty + slot * 8);
        if (++slot == p.slots) {
          slot = 0;
          parity ^= 1;
        }
      }
      hand_over(group - pass);
    }
    sync_consumers();
    store_pass(pass);
    if (end < run.end) {
      fetch_row_vectors(end);
      sync_consumers();
      keep_row_vectors();
      sync_consumers();
    }
  }
}

// What all launches share; launch_skinny adds the rest.
inline SkinnyProduct skinny_product(const GemmProblem& problem, const GemmOperands& o) {
  SkinnyProduct p;
  p.a = static_cast<const std::int8_t*>(o.a.data);
  p.a_pitch = o.a.strides[0];
  p.a_aligned = aligned_rows(o.a.data, o.a.strides[0], 16);
  p.tokens = static_cast<int>(o.a.rows());
  p.k = static_cast<int>(o.a.cols());
  p.a_scale = row_scale<float>(o.a_scale);
  p.b = static_cast<const std::int8_t*>(o.b.data);
  p.b_pitch = o.b.strides[0];
  p.rows = static_cast<int>(o.b.rows());
  p.b_scale = row_scale<float>(o.b_scale);
  p.bias = bias_of(problem, o);
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  p.chunks = ceil_div(p.k, kChunkBytes);
  p.chunk_bytes = ceil_div(ceil_div(p.k, p.chunks), kStepBytes) * kStepBytes;
  return p;
}

template <int kTokenBlocks>
void prepare_skinny(std::string_view name) {
  prepare(name, w8a8_gemm_skinny_unaligned_kernel<kTokenBlocks>, kSkinnyShared);
}

template <int kTokenBlocks>
std::int64_t room_for_ring(std::int64_t tokens, std::int64_t k) {
  return kSkinnyShared - SkinnyLayout<kTokenBlocks>::kFixed - tokens * padded(static_cast<int>(k));
}

template <int kTokenBlocks>
void launch_skinny(std::string_view name, SkinnyProduct& p, const GemmProblem& problem, Stream stream) {
  const int slot_bytes = kGroupRows * padded(p.chunk_bytes);
  const std::int64_t room = room_for_ring<kTokenBlocks>(p.tokens, p.k);
  p.slots = static_cast<int>(std::min<std::int64_t>(room / slot_bytes, kMaxSlots));
  const int blocks = std::min(ceil_div(p.rows, kGroupRows), properties(problem.device).sms);
  const unsigned bytes = static_cast<unsigned>(kSkinnyShared - room + p.slots * slot_bytes);
  enqueue(name, w8a8_gemm_skinny_unaligned_kernel<kTokenBlocks>,
          LaunchShape{static_cast<unsigned>(blocks), kSkinnyThreads, bytes}, stream, p);
}

// Whether a and a ring of kMinSlots fit into shared memory.
template <int kTokenBlocks>
bool fits_skinny(std::int64_t tokens, std::int64_t k) {
  return k < (1 << 18) && room_for_ring<kTokenBlocks>(tokens, k) >= kMinSlots * kGroupRows * padded(kChunkBytes);
}

}  // namespace octile::cuda
