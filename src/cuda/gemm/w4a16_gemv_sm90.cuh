// w4a16_gemv_sm90, the kernel, for few rows of a, tokens: close to the time of reading the weight from memory.
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16. With b the integer that q becomes (gemv_units_sm90.cuh), q + 8 or q + 24, and o = b - q, a group
// contributes s * (sum a b - (o + z) sum a): all products are exact, and their sums in f32. The error of a result is at
// most
//   sum |a s| (b + |o + z|) (k + 4) 2^-24 / (1 - (k + 4) 2^-24)
// (the k terms, their offset, two scalings and the bias) plus half a unit in the last place of y. An infinite a gives
// NaN.
//
// A block has a run of tiles of 16 rows of the weight. Its warps share the units of 128 columns. Activations stay
// resident: a warp keeps a unit of all tokens in registers, as mma fragments, while that unit of tile after tile
// streams from global memory into registers, a few tiles ahead; no warp waits for another. Each leaves its sums in
// shared memory, where those of all warps are added at the end.
//
// Of experts with few tokens each: the blocks are divided evenly among the tiles of up to eight tokens of an expert.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/device/grid.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/gemv_experts_sm90.cuh"
#include "cuda/gemm/gemv_units_sm90.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "plan/kernel.h"

namespace octile::cuda::w4a16_gemv {

constexpr int kMaxShared = 160 * 1024;  // the rest is L1, where loads arrive

struct Arguments {
  NibbleWeight weight;
  UnitPlaces places;
  const uint4* x = nullptr;
  int x_pitch = 0;  // of eight terms
  int tokens = 0;
  int units = 0;
  int tiles = 0;       // of each block
  int more_tiles = 0;  // blocks that have one more
  int pair_bits = 0;   // of eight tokens 2^pair_bits pairs exist
  int sum_bytes = 0;   // of a warp's sums of a tile
  int tile_bytes = 0;  // of all warps' sums of a tile
  int biases_at = 0;   // in shared memory, after the sums
  Bias bias;
  TokenRows y;
  // Of experts' tokens. A block's tiles and sizes of sums follow from its share of them.
  Experts experts = {};
  int first_token = 0;
  int row_tiles = 0;  // of an expert's weight
  int shared_bytes = 0;
};

// token_blocks: of eight. ahead: units in flight per warp. experts: of experts' tokens.
template <class T_, int token_blocks_, int warps_, int ahead_, class Unit_, bool experts_ = false>
struct Form {
  using T = T_;
  using Unit = Unit_;
  static constexpr int token_blocks = token_blocks_;
  static constexpr int warps = warps_;
  static constexpr int threads = 32 * warps_;
  static constexpr int ahead = ahead_;
  static constexpr bool experts = experts_;
  static_assert(!experts || token_blocks == 1);
};

// Compile-time constants where sums of all eight tokens of a block are kept.
template <class F>
constexpr bool kWholeEights = F::token_blocks > 1 || !F::Unit::kPacked;
template <class F>
__device__ int pair_bits(const Arguments& p) {
  return kWholeEights<F> ? 2 : p.pair_bits;
}
template <class F>
__device__ int sum_bytes(const Arguments& p) {
  return kWholeEights<F> ? F::token_blocks * 512 : p.sum_bytes;
}

// How many tokens there are, and the sizes of their sums.
template <class F>
__host__ __device__ void set_tokens(Arguments& p, int tokens) {
  p.tokens = tokens;
  p.pair_bits = kWholeEights<F> || tokens > 4 ? 2 : tokens > 2 ? 1 : 0;
  p.sum_bytes = F::token_blocks * (128 << p.pair_bits);
  p.tile_bytes = (p.units < F::warps ? p.units : F::warps) * p.sum_bytes;
}

// ---- Bias.

// Into L2, well ahead of its use.
__device__ inline void prefetch_bias(const Arguments& p, int row) {
  if (p.bias.data == nullptr || row >= p.weight.rows) return;
  const std::int64_t at = row * p.bias.stride * (p.bias.type == DType::f32 ? 4 : 2);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p.bias.data) + at));
}

// ---- Products.

__device__ inline void add(float4& sums, float4 more) {
  sums.x += more.x;
  sums.y += more.y;
  sums.z += more.z;
  sums.w += more.w;
}

// A lane's columns of a unit of all tokens, and the tokens' sums of each part.
template <class F>
struct TokenTerms {
  using T = typename F::T;
  using Unit = typename F::Unit;
  uint4 at[F::token_blocks][kUnitBlocks];
  float sums[F::token_blocks][Unit::kParts][2];
  int row = 0;  // of a; of an expert's token

  __device__ explicit TokenTerms(const Arguments& p) {
    if constexpr (F::experts) row = row_of<F>(p, token_of_lane(0, p.tokens));
  }

  // Not yet permuted.
  __device__ void read(const Arguments& p, int unit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = unit * kUnitTerms + Unit::first_term(0, lane % 4);
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
      const std::int64_t from_row = F::experts ? row : token_of_lane(t, p.tokens);
      const uint4* const from = p.x + (from_row * p.x_pitch + first / 8);
#pragma unroll
      for (int block = 0; block < kUnitBlocks; ++block) {
        constexpr int kNext = Unit::first_term(1, 0);
        at[t][block] = first + block * kNext < p.weight.terms ? read_terms(from + block * kNext / 8) : uint4{};
      }
    }
  }

  // A lane's adjacent blocks share a sector: the second comes from L1.
  __device__ static uint4 read_terms(const uint4* from) {
    return Unit::first_term(1, 0) == 8 ? __ldca(from) : __ldcg(from);
  }

  // Permuted to match the weight. The sums are products with ones.
  __device__ void prepare() {
    constexpr std::uint32_t kOnes[4] = {Raw<T>::kOnes, Raw<T>::kOnes, Raw<T>::kOnes, Raw<T>::kOnes};
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
      float even[Unit::kParts][4] = {};
      float odd[Unit::kParts][4] = {};
#pragma unroll
      for (int block = 0; block < kUnitBlocks; ++block) {
        const int part = block * Unit::kParts / kUnitBlocks;
        uint4& terms = at[t][block];
        terms = to_unpack_order<Unit::kPacked>(terms);
        multiply_add_16(T(), even[part], kOnes, uint2{terms.x, terms.z});
        multiply_add_16(T(), odd[part], kOnes, uint2{terms.y, terms.w});
      }
#pragma unroll
      for (int part = 0; part < Unit::kParts; ++part) {
        sums[t][part][0] = even[part][0] + odd[part][0];
        sums[t][part][1] = even[part][1] + odd[part][1];
      }
    }
  }
};

// A unit's contribution to this lane's sums of a tile.
template <class F>
__device__ void multiply_unit(const typename F::Unit& unit, const TokenTerms<F>& x,
                              float (&total)[F::token_blocks][4]) {
  using T = typename F::T;
  using Unit = typename F::Unit;
  constexpr int kBlocks = kUnitBlocks / Unit::kParts;
#pragma unroll
  for (int part = 0; part < Unit::kParts; ++part) {
    float even[F::token_blocks][4] = {};
    float odd[F::token_blocks][4] = {};
#pragma unroll
    for (int i = part * kBlocks; i < (part + 1) * kBlocks; ++i) {
      std::uint32_t upper[4];
      std::uint32_t lower[4];
      raw_integers<!Unit::kPacked>(T(), unit.word(i, 0), upper);
      raw_integers<!Unit::kPacked>(T(), unit.word(i, 1), lower);
      const std::uint32_t evens[4] = {upper[0], lower[0], upper[2], lower[2]};
      const std::uint32_t odds[4] = {upper[1], lower[1], upper[3], lower[3]};
#pragma unroll
      for (int t = 0; t < F::token_blocks; ++t) {
        multiply_add_16(T(), even[t], evens, uint2{x.at[t][i].x, x.at[t][i].z});
        multiply_add_16(T(), odd[t], odds, uint2{x.at[t][i].y, x.at[t][i].w});
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float scale = unit.scale(part, e / 2) * Raw<T>::kUnit;
      const float offset = -Raw<T>::kAdded - static_cast<float>(unit.zero(part, e / 2));
#pragma unroll
      for (int t = 0; t < F::token_blocks; ++t) {
        const float raw = __fmaf_rn(odd[t][e], Raw<T>::kOddShare, even[t][e]);
        const float sum = __fmaf_rn(offset, x.sums[t][part][e % 2], raw);
        total[t][e] = part == 0 ? sum * scale : __fmaf_rn(sum, scale, total[t][e]);
      }
    }
  }
}

// One warp's share of `count` tiles from `first` on.
template <class F>
__device__ void multiply_tiles(const Arguments& p, std::uint32_t all_sums, int first, int count) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Steps are (unit, tile) pairs, all tiles of a unit in a row; each warp has its share of them.
  const auto steps = static_cast<unsigned>(p.units * count);
  const unsigned begin = steps * warp / F::warps;
  int left = static_cast<int>(steps * (warp + 1) / F::warps - begin);
  int unit = static_cast<unsigned>(p.units) * warp / F::warps;
  int tile = static_cast<int>(begin) - unit * count;
  if (p.places.unit_step > 1) unit = warp;
  // A tile has a slot of sums for each unit; where there are more units than warps, for each warp, which adds to it.
  const bool once = p.units <= F::warps;
  const int old_from = once ? 0 : left - count;  // steps left when all tiles' sums had been written once
  const int pairs = 1 << pair_bits<F>(p);
  const int place = pairs == 4 ? lane : lane / 4 * pairs + lane % 4;
  std::uint32_t sums = all_sums + (once ? unit : warp) * sum_bytes<F>(p) + place * 16;

  TokenTerms<F> x(p);
  typename F::Unit ring[F::ahead];
  UnitReader<typename F::Unit> reader(p.weight, p.places, first, count, {tile, unit});
#pragma unroll
  for (int i = 0; i < F::ahead; ++i) {
    reader.read(p.weight, p.places, i < left, ring[i]);
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count * kTileRows) prefetch_bias(p, first * kTileRows + thread);
  bool fresh_terms = true;
#pragma unroll 1
  while (left > 0) {
#pragma unroll
    for (int i = 0; i < F::ahead; ++i) {
      if (i > 0 && left <= 0) break;
      if (fresh_terms) {
        x.read(p, unit);
        x.prepare();
      }
      float total[F::token_blocks][4];
      multiply_unit<F>(ring[i], x, total);
      reader.read(p.weight, p.places, left > F::ahead, ring[i]);
      const std::uint32_t to = sums + tile * p.tile_bytes;
      if (F::token_blocks > 1 || lane % 4 < pairs) {
#pragma unroll
        for (int t = 0; t < F::token_blocks; ++t) {
          float4 sum = {total[t][0], total[t][1], total[t][2], total[t][3]};
          if (left <= old_from) {
            const uint4 v = load_shared(to + t * 512);
            add(sum, {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)});
          }
          store_shared(to + t * 512, uint4{__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                                           __float_as_uint(sum.w)});
        }
      }
      --left;
      fresh_terms = ++tile == count;
      if (fresh_terms) {
        tile = 0;
        unit += p.places.unit_step;
        if (once) sums += sum_bytes<F>(p);
      }
    }
  }
}

// ---- From the sums of all warps to y.

// A warp reduces a tile's sums of eight tokens. Where there are fewer tokens, several lanes share a sum.
template <class F>
__device__ void finish_tiles(const Arguments& p, const std::uint8_t* sums, const float* biases, int first, int tiles) {
  constexpr int kAtOnce = 8;
  // Read again, so that nothing derived from it occupies registers in the main loop.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int lane = thread % 32;
  const int sharers = min(p.units, F::warps);
  const int bits = pair_bits<F>(p);
  const int places = 8 << bits;  // of four sums
  const int place = lane & (places - 1);
  const int part = lane >> (3 + bits);
  const int parts = 4 >> bits;
#pragma unroll 1
  for (int i = thread / 32; i < tiles * F::token_blocks; i += F::warps) {
    const int block = i % F::token_blocks;
    const int tile = i / F::token_blocks;
    const std::uint8_t* const from = sums + tile * p.tile_bytes + block * 512 + place * 16;
    float4 sum = {};
#pragma unroll 1
    for (int sharer = part; sharer < sharers; sharer += kAtOnce * parts) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int one = sharer + j * parts;
        add(sum, one < sharers ? *reinterpret_cast<const float4*>(from + one * sum_bytes<F>(p)) : float4{});
      }
    }
#pragma unroll 1
    for (int other = places; other < 32; other *= 2) {
      add(sum, {__shfl_xor_sync(~0u, sum.x, other), __shfl_xor_sync(~0u, sum.y, other),
                __shfl_xor_sync(~0u, sum.z, other), __shfl_xor_sync(~0u, sum.w, other)});
    }
    const int token = block * 8 + (place & ((1 << bits) - 1)) * 2;
    if (part > 0 || token >= p.tokens) continue;
    int2 rows = F::Unit::rows(place >> bits << 2);
    rows.x += tile * kTileRows;
    rows.y += tile * kTileRows;
    add(sum, {biases[rows.x], biases[rows.x], biases[rows.y], biases[rows.y]});
    rows.x += first * kTileRows;
    rows.y += first * kTileRows;
    p.y.store(token, rows, sum);
  }
}

// All sums are in shared memory, or are about to be.
template <class F>
__device__ void finish(const Arguments& p, std::uint8_t* shared, int first, int count) {
  float* const biases = reinterpret_cast<float*>(shared + p.biases_at);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < count * kTileRows) biases[thread] = p.bias.at(first * kTileRows + thread, p.weight.rows, 0);
  __syncthreads();
  finish_tiles<F>(p, shared, biases, first, count);
}

template <class F>
__global__ void __launch_bounds__(F::threads, 1) w4a16_gemv_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int block = static_cast<int>(blockIdx.x);
  const int first = p.tiles * block + min(block, p.more_tiles);
  const int count = p.tiles + (block < p.more_tiles ? 1 : 0);
  let_next_start();
  wait_for_previous();
  multiply_tiles<F>(p, shared_address(shared), first, count);
  finish<F>(p, shared, first, count);
}

// How many tiles of the weight there is room for at once.
template <class F>
__device__ int room(const Arguments& p) {
  return min(p.shared_bytes / (p.tile_bytes + kTileRows * 4), F::threads / kTileRows);
}

// Of one expert, for a share of its tokens.
template <class F>
__device__ Arguments arguments_of(const Arguments& all, const ExpertShare& share) {
  Arguments p = all;
  set_tokens<F>(p, share.tokens());
  p.first_token = share.first_token;
  p.biases_at = room<F>(p) * p.tile_bytes;
  move_to_expert(p.weight, p.experts, share.expert);
  move_to_expert(p.bias, p.experts, share.expert);
  move_to_tokens(p.y, share);
  return p;
}

template <class F>
__device__ void multiply_share(const Arguments& all, std::uint8_t* shared, const ExpertShare& share) {
#pragma unroll 1
  for (int first = share.begin; first < share.end; first += room<F>(arguments_of<F>(all, share))) {
    const auto count = [&](const Arguments& p) { return min(room<F>(p), share.end - first); };
    const Arguments to_multiply = arguments_of<F>(all, share);
    multiply_tiles<F>(to_multiply, shared_address(shared), first, count(to_multiply));
    asm volatile("" ::: "memory");
    const Arguments to_finish = arguments_of<F>(all, share);
    finish<F>(to_finish, shared, first, count(to_finish));
    __syncthreads();
  }
}

// Shares are in shared memory, so that they occupy no registers in the main loop.
template <class F, bool evenly>
__global__ void __launch_bounds__(F::threads, 1) w4a16_experts_gemv_kernel(const __grid_constant__ Arguments all) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  let_next_start();
  wait_for_previous();
  if constexpr (evenly) {
    __shared__ ExpertShares shares;
    find_shares(all.experts, all.row_tiles, shares);
#pragma unroll 1
    for (int i = 0; i < shares.count; ++i) multiply_share<F>(all, shared, shares.of[i]);
  } else {
    __shared__ ExpertShare share;
    find_share(all.experts, all.row_tiles, share);
    multiply_share<F>(all, shared, share);
  }
}

// ---- The host's side.

inline bool small_groups(const GemmProblem& p) { return p.b.group < 128 && p.b.group < p.k; }

// Up to eight tokens: as many warps, and units in flight, as registers allow. Of experts a block has few tiles, and
// half of the warps with three units each take less time.
template <class T, class Unit, bool experts = false>
struct FewTokens {
  static constexpr bool wide = Unit::kSmallGroups || Unit::kZeros || !Unit::kPacked;
  static constexpr int ahead = Unit::kSmallGroups ? 1 : wide ? 2 : experts ? 3 : 1;
  using Form = w4a16_gemv::Form<T, 1, wide || experts ? 16 : 32, ahead, Unit, experts>;
};

// All but what depends on a form and on the number of tokens.
inline Arguments arguments_of(const GemmProblem& problem, const GemmOperands& o) {
  Arguments p;
  p.weight = nibble_weight(problem, o);
  p.places = unit_places(p.weight, 1);
  p.x = static_cast<const uint4*>(o.a.data);
  p.x_pitch = static_cast<int>(o.a.strides[0] / 8);
  p.units = static_cast<int>(ceil_div(problem.k, kUnitTerms));
  p.bias = bias_of(problem, o);
  p.y = {o.y.data, o.y.strides[0], problem.y, p.weight.rows, static_cast<int>(o.y.rows())};
  return p;
}

// Of a block, for up to eight tokens and a packed weight, measured on an H200.
inline double tile_seconds(const GemmProblem& p) {
  return kTileRows * std::max(static_cast<double>(p.k), 2048.0) * 2.4e-11;
}

}  // namespace octile::cuda::w4a16_gemv
