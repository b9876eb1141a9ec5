// w8a8_gemm_skinny_sm90, the kernel: int8 WGMMA, tokens as A, the weight as B.
//
//   y[i, j] = round_to_y(fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]))
//
//   a   (m, k) s8, b (n, k) s8: rows contiguous and aligned for TMA
//
// A block has up to 64 or 128 tokens and a run of rows of b over all of k, sized so that all blocks run at once. The
// blocks of a cluster form a small grid: `token_parts` of them share rows of b, and `row_parts` share tokens; each
// loads a part of what it shares, by multicast.
//
// Besides bytes, the cost is instructions that one thread issues in sequence, and code that loads from a cold cache:
// hence several producer warps, and short loops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/grid.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda {

inline constexpr int kSkinnyShared = 227 * 1024;
inline constexpr int kTileK = 128;  // bytes of k in a stage: one swizzled row
inline constexpr int kMaxStages = 16;
// 64, 128 and 256 x 4096 x 4096 on an H200: 13.8, 14.5 and 16.0 us with one, 12.2, 12.8 and 14.3 with three.
inline constexpr int kTileProducerWarps = 3;

// groups: consumer warpgroups, 64 tokens each. rows: of b, at most; a block multiplies all of them, even if it has
// fewer.
template <int groups_, int rows_>
struct SkinnyTile {
  static constexpr int groups = groups_;
  static constexpr int tokens = 64 * groups;
  static constexpr int rows = rows_;
  static constexpr int consumers = 128 * groups;
  static constexpr int threads = consumers + 32 * (kTileProducerWarps + 1);  // and a warp that loads scales
  static constexpr int sum_pitch = rows + 8;  // four rows of eight bytes per lane meet no bank conflict
  static_assert(rows % 32 == 0 || rows % 32 == 16);
};

struct TiledProduct {
  int rows = 0;         // n
  int tokens = 0;       // m
  int steps = 0;        // of k
  int tile_rows = 0;    // of a block
  int tile_tokens = 0;  // load_tokens * row_parts
  int token_parts = 1;
  int row_parts = 1;
  int token_groups = 1;  // of clusters
  int load_tokens = 0;   // that a block loads, as load_rows of b
  int load_rows = 0;
  int stages = 0;
  RowScale<float> a_scale;
  RowScale<float> b_scale;
  Bias bias;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
  bool y_aligned = false;   // four elements at a time
  unsigned every_part = 1;  // bit i * token_parts for all i < row_parts

  // Of a stage, where b begins: eight rows are a kilobyte.
  __host__ __device__ int token_bytes() const { return (tile_tokens + 7) / 8 * 8 * kTileK; }
};

// In shared memory; the ring lies behind it, from the next kilobyte on, and the sums come where the ring was.
template <class T>
struct SkinnyTileShared {
  float row_scales[T::rows];
  float biases[T::rows];
  float token_scales[T::tokens];
  std::uint64_t full[kMaxStages];
  std::uint64_t empty[kMaxStages];

  __host__ __device__ static constexpr int bytes() {
    return (static_cast<int>(sizeof(SkinnyTileShared)) + 1023) / 1024 * 1024;
  }
};

// A block's place in its cluster, and its operands.
struct TilePlace {
  int token_part = 0;
  int row_part = 0;
  int first_token, first_row;

  __device__ explicit TilePlace(const TiledProduct& p) {
    const int blocks = p.token_parts * p.row_parts;
    if (blocks > 1) {
      const int rank = static_cast<int>(blockIdx.x) % blocks;  // uniform, as the compiler can see
      token_part = rank % p.token_parts;
      row_part = rank / p.token_parts;
    }
    const int cluster = static_cast<int>(blockIdx.x) / blocks;
    // The last tiles overlap the ones before: TMA is slow to fill in zeros.
    first_token = (cluster % p.token_groups * p.token_parts + token_part) * p.tile_tokens;
    first_token = max(min(first_token, p.tokens - p.tile_tokens), 0);
    first_row = (cluster / p.token_groups * p.row_parts + row_part) * p.tile_rows;
    first_row = max(min(first_row, p.rows - p.tile_rows), 0);
  }
};

// One thread of each producer warp, in turn: both operands into the ring. Unrolled it is 2 us slower.
template <class T>
__device__ void fetch_tiles(const TiledProduct& p, SkinnyTileShared<T>& shared, std::uint32_t ring,
                            const CUtensorMap& b, const CUtensorMap& a, const TilePlace& place) {
  const int a_bytes = p.token_bytes();
  const int stage_bytes = a_bytes + p.tile_rows * kTileK;
  const unsigned bytes = static_cast<unsigned>((p.tile_tokens + p.tile_rows) * kTileK);
  const std::uint64_t once = p.token_groups == 1 ? ptx::evict_first() : ptx::evict_last();
  const std::uint64_t again = ptx::evict_last();
  // Bit i: block i of the cluster.
  const unsigned same_rows = ((1u << p.token_parts) - 1) << place.row_part * p.token_parts;
  const unsigned same_tokens = p.every_part << place.token_part;
  const std::uint32_t to_a = ring + static_cast<unsigned>(place.row_part * p.load_tokens * kTileK);
  const std::uint32_t to_b = ring + static_cast<unsigned>(a_bytes + place.token_part * p.load_rows * kTileK);
  const int token = place.first_token + place.row_part * p.load_tokens;
  const int row = place.first_row + place.token_part * p.load_rows;
  const std::uint32_t barriers = ptx::shared_address(shared.full);
  constexpr std::uint32_t kEmpty = sizeof(shared.full);
  const int fetcher = static_cast<int>(threadIdx.x) / 32 - T::consumers / 32;
  int stage = fetcher;
  std::uint32_t parity = 1;
#pragma unroll 1
  for (int step = fetcher; step < p.steps; step += kTileProducerWarps) {
    const std::uint32_t full = barriers + static_cast<unsigned>(stage) * 8;
    const std::uint32_t offset = static_cast<unsigned>(stage * stage_bytes);
    const int col = step * kTileK;
    ptx::mbarrier_wait(full + kEmpty, parity);
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    if (p.token_parts > 1) {
      ptx::tma_load_multicast(static_cast<std::uint16_t>(same_rows), to_b + offset, b, int2{col, row}, full, once);
    } else {
      ptx::tma_load(to_b + offset, b, int2{col, row}, full, once);
    }
    if (p.row_parts > 1) {
      ptx::tma_load_multicast(static_cast<std::uint16_t>(same_tokens), to_a + offset, a, int2{col, token}, full, again);
    } else {
      ptx::tma_load(to_a + offset, a, int2{col, token}, full, again);
    }
    stage += kTileProducerWarps;
    if (stage >= p.stages) {
      stage -= p.stages;
      parity ^= 1;
    }
  }
}

// The main loop: sums (64, rows) of a warpgroup. One step's WGMMAs are always in flight, so a stage is released one
// step late.
template <class T>
__device__ void multiply_tiles(int (&sums)[T::rows / 2], const TiledProduct& p, SkinnyTileShared<T>& shared,
                               std::uint32_t ring, const TilePlace& place) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned group = threadIdx.x / 128;
  const int a_bytes = p.token_bytes();
  const unsigned stage_bytes = static_cast<unsigned>(a_bytes + p.tile_rows * kTileK);
  // The blocks that fill this one's stages, one per lane.
  const int blocks = p.token_parts * p.row_parts;
  const bool filler =
      lane < blocks && (lane % p.token_parts == place.token_part || lane / p.token_parts == place.row_part);
  const std::uint32_t empty = ptx::mapa(ptx::shared_address(shared.empty), static_cast<unsigned>(filler ? lane : 0));
  std::uint32_t left = smem_descriptor(ring + group * 64 * kTileK);
  std::uint32_t right = smem_descriptor(ring + static_cast<unsigned>(a_bytes));
  int stage = 0;
  int last = 0;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    ptx::mbarrier_wait(shared.full[stage], parity);
    const std::uint32_t at = static_cast<unsigned>(stage) * stage_bytes / 16;
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < kTileK / 32; ++part) {
      wgmma_s8<kTileK>(sums, left + at + 2 * part, right + at + 2 * part, step > 0 || part > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::mbarrier_arrive_cluster(empty + static_cast<unsigned>(last) * 8, step > 0 && filler);
    last = stage;
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  ptx::wgmma_wait<0>();
  wgmma_fence_operand(sums);
}

template <class T>
__device__ void sync_tile_consumers() {
  ptx::bar_sync<1, T::consumers>();
}

// The sums of a warpgroup to shared memory, tokens by rows.
template <class T>
__device__ void keep_tile(const int (&sums)[T::rows / 2], std::int32_t* kept) {
  const int thread = static_cast<int>(threadIdx.x);
  std::int32_t* const to = kept + (thread / 32 * 16 + thread % 32 / 4) * T::sum_pitch + thread % 4 * 2;
#pragma unroll
  for (int j = 0; j < T::rows / 8; ++j) {
    *reinterpret_cast<int2*>(to + 8 * j) = {sums[4 * j], sums[4 * j + 1]};
    *reinterpret_cast<int2*>(to + 8 * T::sum_pitch + 8 * j) = {sums[4 * j + 2], sums[4 * j + 3]};
  }
}

// One warp: all scales and the bias, every load issued before the first is used.
template <class T>
__device__ void fetch_scales(const TiledProduct& p, SkinnyTileShared<T>& shared, const TilePlace& place) {
  constexpr int kRowLoads = (T::rows + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = min(p.rows - place.first_row, p.tile_rows);
  const int tokens = min(p.tokens - place.first_token, p.tile_tokens);
  float row_scales[kRowLoads];
  unsigned biases[kRowLoads];
  float token_scales[T::tokens / 32];
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    const int row = place.first_row + 32 * i + lane;
    const bool inside = 32 * i + lane < rows;
    row_scales[i] = inside ? p.b_scale[row] : 0;
    biases[i] = 0;
    if (p.bias.data != nullptr && inside) {
      const std::int64_t at = row * p.bias.stride;
      biases[i] = p.y_type == DType::f32 ? __ldcg(static_cast<const unsigned*>(p.bias.data) + at)
                                         : __ldcg(static_cast<const unsigned short*>(p.bias.data) + at);
    }
  }
#pragma unroll
  for (int i = 0; i < T::tokens / 32; ++i) {
    token_scales[i] = 32 * i + lane < tokens ? p.a_scale[place.first_token + 32 * i + lane] : 0;
  }
#pragma unroll
  for (int i = 0; i < kRowLoads; ++i) {
    if (32 * i + lane >= T::rows) continue;
    shared.row_scales[32 * i + lane] = row_scales[i];
    // A missing bias is -0: fma(x, y, -0) is the rounded product, its sign included.
    const auto half = __ushort_as_half(static_cast<unsigned short>(biases[i]));
    const auto brain = __ushort_as_bfloat16(static_cast<unsigned short>(biases[i]));
    shared.biases[32 * i + lane] = p.bias.data == nullptr    ? -0.0f
                                   : p.y_type == DType::f16  ? widen(half)
                                   : p.y_type == DType::bf16 ? widen(brain)
                                                             : __uint_as_float(biases[i]);
  }
#pragma unroll
  for (int i = 0; i < T::tokens / 32; ++i) shared.token_scales[32 * i + lane] = token_scales[i];
}

// Four adjacent elements of a row of y.
__device__ inline void store_four(const TiledProduct& p, std::int64_t at, const float (&y)[4], int count,
                                  bool aligned) {
  if (count < 4 || !aligned) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < count) store_float(p.y, at + e, p.y_type, y[e]);
    }
  } else if (p.y_type == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.y) + at) = {y[0], y[1], y[2], y[3]};
  } else if (p.y_type == DType::f16) {
    *reinterpret_cast<uint2*>(static_cast<__half*>(p.y) + at) = {pack<__half>(y[0], y[1]), pack<__half>(y[2], y[3])};
  } else {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.y) + at) = {pack<__nv_bfloat16>(y[0], y[1]),
                                                                        pack<__nv_bfloat16>(y[2], y[3])};
  }
}

// The kept sums to y, four adjacent elements per thread.
template <class T>
__device__ void finish_tile(const TiledProduct& p, const SkinnyTileShared<T>& shared, const std::int32_t* kept,
                            const TilePlace& place) {
  constexpr int kChunks = T::rows / 4;
  const int tokens = min(p.tokens - place.first_token, p.tile_tokens);
  const int rows = min(p.rows - place.first_row, p.tile_rows);
  const bool aligned = p.y_aligned && place.first_row % 4 == 0;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < tokens * kChunks; i += T::consumers) {
    const int token = i / kChunks;
    const int row = i % kChunks * 4;
    if (row >= rows) continue;
    const int4 sum = *reinterpret_cast<const int4*>(kept + token * T::sum_pitch + row);
    const float4 scales = *reinterpret_cast<const float4*>(shared.row_scales + row);
    const float4 bias = *reinterpret_cast<const float4*>(shared.biases + row);
    const float token_scale = shared.token_scales[token];
    const float y[4] = {
        __fmaf_rn(static_cast<float>(sum.x), __fmul_rn(token_scale, scales.x), bias.x),
        __fmaf_rn(static_cast<float>(sum.y), __fmul_rn(token_scale, scales.y), bias.y),
        __fmaf_rn(static_cast<float>(sum.z), __fmul_rn(token_scale, scales.z), bias.z),
        __fmaf_rn(static_cast<float>(sum.w), __fmul_rn(token_scale, scales.w), bias.w),
    };
    store_four(p, (place.first_token + token) * p.y_pitch + place.first_row + row, y, rows - row, aligned);
  }
}

template <class T>
__global__ void __launch_bounds__(T::threads, 1)
    w8a8_gemm_skinny_kernel(const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap a,
                            const __grid_constant__ TiledProduct p) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  SkinnyTileShared<T>& shared = *reinterpret_cast<SkinnyTileShared<T>*>(shared_bytes);
  std::uint8_t* const ring = shared_bytes + SkinnyTileShared<T>::bytes();
  const int thread = static_cast<int>(threadIdx.x);
  const int blocks = p.token_parts * p.row_parts;
  const TilePlace place(p);

  let_next_start();
  if (thread == T::consumers) {
    ptx::prefetch_tensormap(b);
    ptx::prefetch_tensormap(a);
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) {
      ptx::mbarrier_init(shared.full[i], 1);
      ptx::mbarrier_init(shared.empty[i], static_cast<unsigned>(T::consumers / 32 * (p.token_parts + p.row_parts - 1)));
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  if (thread >= T::consumers) {
    if (blocks > 1) {
      ptx::cluster_arrive_relaxed();
    } else if (thread < T::consumers + 32 * kTileProducerWarps) {
      ptx::bar_sync<2, T::consumers + 32 * kTileProducerWarps>();  // the barriers are initialized
    }
    wait_for_previous();
    if (thread >= T::consumers + 32 * kTileProducerWarps) {
      fetch_scales<T>(p, shared, place);
      ptx::bar_arrive<3, T::consumers + 32>();
      if (blocks > 1) ptx::cluster_wait();
    } else {
      if (blocks > 1) ptx::cluster_wait();
      if (thread % 32 == 0) fetch_tiles<T>(p, shared, ptx::shared_address(ring), b, a, place);
    }
    __syncwarp();
  } else {
    if (blocks > 1) ptx::cluster_arrive_relaxed();
    wait_for_previous();
    if (blocks > 1) {
      ptx::cluster_wait();
    } else {
      ptx::bar_sync<2, T::consumers + 32 * kTileProducerWarps>();
    }
    int sums[T::rows / 2];
    multiply_tiles<T>(sums, p, shared, ptx::shared_address(ring), place);
    sync_tile_consumers<T>();  // the ring has been read
    std::int32_t* const kept = reinterpret_cast<std::int32_t*>(ring);
    keep_tile<T>(sums, kept);
    ptx::bar_sync<3, T::consumers + 32>();  // the scales have been loaded
    finish_tile<T>(p, shared, kept, place);
  }
  if (blocks > 1) {  // no block leaves while others arrive on its barriers
    ptx::cluster_sync_relaxed();
  }
}

// How many stages fit. A warpgroup reads 64 tokens and a tile's full width, whether they exist or not.
template <class T>
int tile_stages(const TiledProduct& p, int shared_bytes) {
  const int room = shared_bytes - SkinnyTileShared<T>::bytes();
  const int last = std::max(T::tokens * kTileK, p.token_bytes() + T::rows * kTileK);
  static_assert(T::tokens * T::sum_pitch * 4 <= kSkinnyShared - SkinnyTileShared<T>::bytes());
  return std::min((room - last) / (p.token_bytes() + p.tile_rows * kTileK) + 1, kMaxStages);
}

}  // namespace octile::cuda
