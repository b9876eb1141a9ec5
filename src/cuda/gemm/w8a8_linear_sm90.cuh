// The kernel of w8a8_linear_sm90, and of w8a8_gemm_skinny_sm90 where TMA cannot read a; up to 32 tokens. All of X is
// resident in shared memory as s8; the weight streams past it once.
//
//   y[i, j] = round_to_y(fma(f32(sum_c xq[i, c] * b[j, c]), x_scale[i] * b_scale[j], bias[j]))
//
//   b   (n, k) s8, rows contiguous, any pitch
//   xq  (m, k) s8 in shared memory: copied, or quantized by every block while its first weights are in flight
//
// A block has a run of groups of 16 rows of b, cut along k into chunks of at most a kilobyte. Two producer warps load
// them into a ring by bulk copies, row by row. Of 16 consumer warps each multiplies its own 64 bytes of every chunk;
// their s32 sums, exact in any order, are added in shared memory at the end of a group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "base/ceil_div.h"
#include "cuda/clusters.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm/w8a8_linear_sm90_tokens.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

// M = 1, 4096 x 14336 on an H200: 27.7 us with one (some 110 cycles per copy), 20.7 with two, 21.2 with four,
// 22 with eight.
inline constexpr int kProducerWarps = 2;
inline constexpr int kSkinnyThreads = kSkinnyConsumers + kProducerWarps * 32;
inline constexpr int kGroupRows = 16;  // of b: M of the mma instruction
inline constexpr int kChunkBytes = kSkinnyWarps * kStepBytes;
inline constexpr int kPassGroups = 8;  // whose sums a block holds at a time
inline constexpr int kPassRows = kPassGroups * kGroupRows;
inline constexpr int kSumPitch = kPassRows + 4;  // eight rows of four tokens meet no bank conflict
inline constexpr int kMaxSlots = 16;
inline constexpr int kMinSlots = 4;  // 64 KB in flight
inline constexpr int kSkinnyShared = 227 * 1024;
inline constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;  // of b: 32-bit indices

// Strides of vectors may be 0.
struct SkinnyProduct {
  Tokens x;
  const std::int8_t* b = nullptr;
  std::int64_t b_pitch = 0;
  bool b_copyable = false;  // every 16 bytes of a row, counted from its start, are aligned
  int rows = 0;             // n
  int chunks = 0;           // along k
  int chunk_bytes = 0;      // a multiple of kStepBytes
  int slots = 0;            // of the ring
  RowScale<float> b_scale;
  Bias bias;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
};

// Shared memory, in this order: ring, sums, scales of rows, bias, scales of tokens, scratch, barriers, xq.
template <int kTokenBlocks>
struct SkinnyLayout {
  static constexpr int kTokens = 8 * kTokenBlocks;
  static constexpr int kFixed =
      kTokens * kSumPitch * 4 + 2 * kPassRows * 4 + (kTokens + kSkinnyWarps) * 4 + (2 * kMaxSlots + 2) * 8;
};

// Named barriers; 1 is sync_consumers.
__device__ inline void sync_producers() { ptx::bar_sync<3, kProducerWarps * 32>(); }
// The producers have initialized the ring's barriers, and go on; the consumers wait for that.
__device__ inline void report_barriers() { ptx::bar_arrive<2, kSkinnyThreads>(); }
__device__ inline void await_barriers() { ptx::bar_sync<2, kSkinnyThreads>(); }

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
    const bool may_exceed = row + 1 < p.rows && p.b_pitch >= p.x.k;
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      if (turn == fetcher && lane < kGroupRows) {
        const int c = chunk * p.chunk_bytes;
        const int wanted = row < p.rows ? min(p.x.k - c, p.chunk_bytes) : 0;
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

// Source: std::int8_t, or a float type to be quantized.
template <class Source, int kTokenBlocks>
__global__ void __launch_bounds__(kSkinnyThreads, 1) w8a8_linear_kernel(const __grid_constant__ SkinnyProduct p) {
  using Layout = SkinnyLayout<kTokenBlocks>;
  extern __shared__ __align__(128) char shared[];
  char* const behind_ring = shared + p.slots * kGroupRows * padded(p.chunk_bytes);
  std::int32_t* const sums = reinterpret_cast<std::int32_t*>(behind_ring);                 // (kTokens, kSumPitch)
  float* const row_scales = reinterpret_cast<float*>(sums + Layout::kTokens * kSumPitch);  // (kPassRows)
  float* const biases = row_scales + kPassRows;                                            // (kPassRows)
  float* const token_scales = biases + kPassRows;                                          // (kTokens)
  float* const scratch = token_scales + Layout::kTokens;                                   // (kSkinnyWarps)
  const std::uint32_t xq = shared_address(behind_ring + Layout::kFixed);                   // (tokens, padded(k))
  const std::uint32_t full = xq - (2 * kMaxSlots + 2) * 8;
  const std::uint32_t empty = full + kMaxSlots * 8;
  const std::uint32_t ready = empty + kMaxSlots * 8;  // all tokens are in xq
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
      ptx::mbarrier_init(ready, static_cast<unsigned>(p.x.cluster * kSkinnyWarps));
      ptx::fence_mbarrier_init();
    }
    sync_producers();
    report_barriers();
    if (p.x.cluster > 1) ptx::cluster_arrive_relaxed();
    wait_for_previous();
    if (p.b_copyable) fetch_rows(p, ring, full, empty);
    if (p.x.cluster > 1) {
      __syncwarp();
      ptx::cluster_wait();
      ptx::cluster_sync_relaxed();
    }
    return;
  }
  if (p.x.cluster > 1) ptx::cluster_arrive_relaxed();
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
      const int token = min(t * 8 + lane_row, p.x.count - 1);
      const uint4 x = load_shared(xq + static_cast<unsigned>(token * padded(p.x.k) + c));
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
    for (int i = thread; i < p.x.count * kPassRows; i += kSkinnyConsumers) {
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
  if constexpr (std::is_same_v<Source, std::int8_t>) {
    copy_tokens(p.x, xq);
    commit_copies();
    if (thread < p.x.count) token_scales[thread] = p.x.scale[thread];
  }
#pragma unroll 1
  for (int i = thread; i < Layout::kTokens * kSumPitch; i += kSkinnyConsumers) sums[i] = 0;
  await_barriers();
  if constexpr (std::is_same_v<Source, std::int8_t>) {
    wait_for_copies<0>();
  } else {
    quantize_tokens<Source>(p.x, xq, token_scales, scratch, ready);
  }
  keep_row_vectors();
  if constexpr (!std::is_same_v<Source, std::int8_t>) ptx::mbarrier_wait_acquire_cluster(ready);
  if (p.x.cluster > 1) ptx::cluster_arrive_relaxed();  // this block's tokens are complete
  sync_consumers();

  int slot = 0;
  std::uint32_t parity = 0;
  for (int pass = run.first; pass < run.end; pass += run.pass_groups) {
    const int end = min(pass + run.pass_groups, run.end);
    for (int group = pass; group < end; ++group) {
#pragma unroll 1
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const int c = chunk * p.chunk_bytes + lane_byte;
        const bool busy = lane_byte < p.chunk_bytes && c - thread % 4 * 16 < p.x.k;
        uint4 b0;
        uint4 b1;
        if (p.b_copyable) {
          const std::uint32_t from =
              ring + static_cast<unsigned>((slot * kGroupRows + lane_row) * padded(p.chunk_bytes) + lane_byte);
          ptx::mbarrier_wait(full + slot * 8, parity);
          if (busy) {
            b0 = load_shared(from);
            b1 = load_shared(from + 8 * padded(p.chunk_bytes));
          }
        } else if (busy) {
          const int row = group * kGroupRows + lane_row;
          b0 = load_bytes(p.b + row * p.b_pitch + c, row < p.rows ? p.x.k - c : 0);
          b1 = load_bytes(p.b + (row + 8) * p.b_pitch + c, row + 8 < p.rows ? p.x.k - c : 0);
        }
        if (busy) multiply_step(b0, b1, c);
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
  if (p.x.cluster > 1) ptx::cluster_wait();  // no block leaves before all others have written to it
}

// What all launches share; launch_skinny adds the rest.
inline SkinnyProduct skinny_product(const GemmProblem& problem, const GemmOperands& o) {
  SkinnyProduct p;
  p.x.data = o.a.data;
  p.x.pitch = o.a.strides[0];
  p.x.aligned = aligned_rows(o.a.data, o.a.strides[0] * bits(o.a.dtype) / 8, 16);
  p.x.count = static_cast<int>(o.a.rows());
  p.x.k = static_cast<int>(o.a.cols());
  p.x.dynamic = problem.dynamic;
  p.x.multiplied = o.multiplier.present();
  if (o.a_scale.present()) p.x.scale = row_scale<float>(o.a_scale);
  if (o.multiplier.present()) p.x.multiplier = row_scale<float>(o.multiplier);
  p.b = static_cast<const std::int8_t*>(o.b.data);
  p.b_pitch = o.b.strides[0];
  p.b_copyable = aligned_rows(o.b.data, o.b.strides[0], 16);
  p.rows = static_cast<int>(o.b.rows());
  p.b_scale = row_scale<float>(o.b_scale);
  p.bias = bias_of(problem, o);
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  p.chunks = ceil_div(p.x.k, kChunkBytes);
  p.chunk_bytes = ceil_div(ceil_div(p.x.k, p.chunks), kStepBytes) * kStepBytes;
  return p;
}

template <class Source, int kTokenBlocks>
void prepare_skinny(std::string_view name) {
  prepare(name, w8a8_linear_kernel<Source, kTokenBlocks>, kSkinnyShared);
}

template <int kTokenBlocks>
std::int64_t room_for_ring(std::int64_t tokens, std::int64_t k) {
  return kSkinnyShared - SkinnyLayout<kTokenBlocks>::kFixed - tokens * padded(static_cast<int>(k));
}

template <class Source, int kTokenBlocks>
void launch_skinny(std::string_view name, SkinnyProduct& p, const GemmProblem& problem, Stream stream) {
  const int slot_bytes = kGroupRows * padded(p.chunk_bytes);
  const std::int64_t room = room_for_ring<kTokenBlocks>(p.x.count, p.x.k);
  p.slots = static_cast<int>(std::min<std::int64_t>(room / slot_bytes, kMaxSlots));
  int blocks = std::min(ceil_div(p.rows, kGroupRows), properties(problem.device).sms);
  if constexpr (!std::is_same_v<Source, std::int8_t>) {
    // Up to four tokens per block: one batch of vectors per lane for k = 4096 in 16 bits. Were every block to quantize
    // 8 or 16 tokens, 21 and 24 us would become 25 and 29.
    p.x.cluster = p.x.count <= 4 ? 1 : p.x.count <= 8 ? 2 : 4;
    blocks = std::min(blocks / p.x.cluster, max_active_clusters(problem.device, p.x.cluster)) * p.x.cluster;
    if (blocks == 0) {
      p.x.cluster = 1;
      blocks = std::min(ceil_div(p.rows, kGroupRows), properties(problem.device).sms);
    }
  }
  const unsigned bytes = static_cast<unsigned>(kSkinnyShared - room + p.slots * slot_bytes);
  enqueue(name, w8a8_linear_kernel<Source, kTokenBlocks>,
          LaunchShape{static_cast<unsigned>(blocks), kSkinnyThreads, bytes, dim3(static_cast<unsigned>(p.x.cluster))},
          stream, p);
}

// Whether X and a ring of kMinSlots fit into shared memory.
template <int kTokenBlocks>
bool fits_skinny(std::int64_t tokens, std::int64_t k) {
  return k < (1 << 18) && room_for_ring<kTokenBlocks>(tokens, k) >= kMinSlots * kGroupRows * padded(kChunkBytes);
}

}  // namespace octile::cuda
