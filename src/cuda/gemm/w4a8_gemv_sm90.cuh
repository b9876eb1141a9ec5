// w4a8_gemv_sm90, the kernel, for few rows of a, tokens: close to the time of reading the weight from memory.
//
//   over the groups g of k in order: t = fma(f32(sum_c a[i, c] * (q[j, c] - z[j, g])), s[j, g], t)
//   y (m, n) = round_to_y(fma(t, a_scale[i], bias[j]))
//
// a s8. A block has a run of tiles of 16 rows of the weight. Its warps share the units of 128 columns: a warp keeps a
// unit of all tokens in registers, as mma fragments, while that unit of tile after tile streams from global memory into
// registers, a few tiles ahead. The sums of a group within a unit, exact in s32 in any order, go to shared memory. From
// there warps add them up in the order of the groups, as many units and tiles at a time, a phase, as there is room for;
// phases take turns with two buffers, so that one barrier each is enough. Behind a quantizer the first units are on
// their way before it has ended.
//
// Without zero points the bytes are 16 q. A sum of 128 products then is below 2^22 and starts at the bits of the float
// 1.5 * 2^23, so that one exact fma makes the float that f32 of the group's sum is.
//
// Of experts with few tokens each: see gemv_experts_sm90.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/ceil_div.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/gemv_experts_sm90.cuh"
#include "cuda/gemm/gemv_units_sm90.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/operands.h"
#include "plan/kernel.h"

namespace octile::cuda::w4a8_gemv {

constexpr int kMaxShared = 162 * 1024;  // the rest is L1, where loads arrive
constexpr float kNoBias = -0.0f;        // changes no sum, its sign included

struct Arguments {
  NibbleWeight weight;
  UnitPlaces places;
  const std::int8_t* x = nullptr;
  std::int64_t x_pitch = 0;
  RowScale<float> x_scale;
  bool only_x_pending = false;  // GemmOperands::only_a_pending
  int tokens = 0;
  int units = 0;
  int rounds = 0;      // each warp takes one unit in a round
  int tiles = 0;       // of each block
  int more_tiles = 0;  // blocks that have one more
  // A phase is one or more rounds of all tiles, or one round of this many tiles.
  int phase_rounds = 0;
  int phase_tiles = 0;
  // In shared memory: two buffers of a phase's sums, totals of all tiles, bias, scales of tokens.
  int buffer_bytes = 0;
  int totals_at = 0;
  int biases_at = 0;
  int x_scales_at = 0;
  Bias bias;
  TokenRows y;
  // Of experts' tokens.
  Experts experts = {};
  int first_token = 0;
  int row_tiles = 0;  // of an expert's weight
  int room = 0;       // for this many of them at once
};

// token_blocks: of eight. ahead: units in flight per warp. row: a group is a whole row. experts: of experts' tokens.
template <int token_blocks_, int max_warps_, int ahead_, bool row_, class Unit_, bool experts_ = false>
struct Form {
  using Unit = Unit_;
  static constexpr int token_blocks = token_blocks_;
  static constexpr int max_warps = max_warps_;
  static constexpr int ahead = ahead_;
  static constexpr bool row = row_;
  static constexpr bool experts = experts_;
  static_assert(!experts || token_blocks == 1);
  static constexpr int parts = Unit::kParts;
  static constexpr int part_bytes = token_blocks * 512 + kTileRows * 4;  // of a tile: sums, scales
  static constexpr int slot_bytes = parts * part_bytes;
  static constexpr int max_tiles = std::min(64, 128 / token_blocks);
};

// ---- Products.

// A lane's columns of a unit of all tokens.
template <class F>
struct TokenTerms {
  using Unit = typename F::Unit;
  static constexpr int kNext = Unit::first_term(1, 0);  // from a lane's block to its next
  uint2 at[F::token_blocks][kUnitBlocks];
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
      const std::int8_t* const from = p.x + (F::experts ? row : token_of_lane(t, p.tokens)) * p.x_pitch + first;
#pragma unroll
      for (int block = 0; block < kUnitBlocks; ++block) {
        const bool inside = first + block * kNext < p.weight.terms;
        if constexpr (kNext == 8) {
          if (block % 2 != 0) continue;
          const uint4 two = inside ? __ldcg(reinterpret_cast<const uint4*>(from + block * 8)) : uint4{};
          at[t][block] = {two.x, two.y};
          at[t][block + 1] = {two.z, two.w};
        } else {
          at[t][block] = inside ? __ldcg(reinterpret_cast<const uint2*>(from + block * kNext)) : uint2{};
        }
      }
    }
  }

  // Permuted to match the weight: of eight terms, those of low nibbles first.
  __device__ void prepare() {
    if constexpr (!Unit::kPacked) {
#pragma unroll
      for (auto& of_token : at) {
#pragma unroll
        for (uint2& v : of_token) v = {__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.x, v.y, 0x7531)};
      }
    }
  }
};

// A block of a unit as bytes: 16 q, or q - z.
template <class Unit>
__device__ void bytes_of(const Unit& unit, int block, int part, std::uint32_t (&a)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::uint32_t word = unit.word(block, h);
    if constexpr (Unit::kZeros) {
      constexpr std::uint32_t kFlip = Unit::kPacked ? 0x80808080u : 0x88888888u;  // 128 + (q + 8): no byte borrows
      const std::uint32_t offset = static_cast<unsigned>(unit.zero(part, h)) * 0x01010101u;
      a[h] = (and_xor(word, 0x0f0f0f0fu, kFlip) - offset) ^ 0x80808080u;
      a[h + 2] = (and_xor(word >> 4, 0x0f0f0f0fu, kFlip) - offset) ^ 0x80808080u;
    } else {
      constexpr std::uint32_t kFlip = Unit::kPacked ? 0x80808080u : 0;
      a[h] = and_xor(word << 4, 0xf0f0f0f0u, kFlip);
      a[h + 2] = and_xor(word, 0xf0f0f0f0u, kFlip);
    }
  }
}

// What counts 1 in a group's sum as the tensor cores leave it; and the bits of 1.5 * 2^23.
template <class F>
constexpr float kShare = F::Unit::kZeros ? 1.0f : 0x1p-4f;
template <class F>
constexpr std::int32_t kStart = F::row ? 0 : 0x4b400000;

// A unit of a tile: sums, as floats (row: as integers), and scales to a slot in shared memory.
template <class F>
__device__ void multiply_unit(const typename F::Unit& unit, const TokenTerms<F>& x, std::uint32_t slot) {
  constexpr int kBlocks = kUnitBlocks / F::parts;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int2 rows = F::Unit::rows(lane);
#pragma unroll
  for (int part = 0; part < F::parts; ++part) {
    std::int32_t sums[F::token_blocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = part * kBlocks + i;
      std::uint32_t a[4];
      bytes_of(unit, block, part, a);
#pragma unroll
      for (int t = 0; t < F::token_blocks; ++t) {
        if (i == 0) {
          multiply_s8(sums[t], a, x.at[t][block].x, x.at[t][block].y, kStart<F>);
        } else {
          multiply_add_s8(sums[t], a, x.at[t][block].x, x.at[t][block].y);
        }
      }
    }
    const std::uint32_t to = slot + part * F::part_bytes;
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
      std::uint32_t out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        constexpr float kBase = 0x1.8p23f * kShare<F>;
        const auto sum = static_cast<std::uint32_t>(sums[t][e]);
        out[e] = F::row ? sum : __float_as_uint(__fmaf_rn(__uint_as_float(sum), kShare<F>, -kBase));
      }
      store_shared(to + t * 512 + lane * 16, uint4{out[0], out[1], out[2], out[3]});
    }
    if (lane % 4 == 0) {
      const std::uint32_t scales = to + F::token_blocks * 512;
      store_shared(scales + rows.x * 4, unit.scales[part].x);
      store_shared(scales + rows.y * 4, unit.scales[part].y);
    }
  }
}

// ---- From the sums of groups to y.

struct Phase {
  int tile = 0;  // of the block, the first
  int unit = 0;  // the first
  int tiles = 0;
  int units = 0;
  int buffer = 0;
};

__device__ inline float4 load_four(const std::uint8_t* from) { return *reinterpret_cast<const float4*>(from); }

// Eight tokens of a tile: the next groups' sums, in order.
template <class F>
__device__ void add_groups(const Arguments& p, const std::uint8_t* from, const std::uint8_t* scales, int units,
                           float4& t) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int2 rows = F::Unit::rows(lane);
  const int unit_bytes = p.phase_tiles * F::slot_bytes;
  const auto add = [&](float4 sum, const std::uint8_t* of_tile) {
    const float upper = *reinterpret_cast<const float*>(of_tile + rows.x * 4);
    const float lower = *reinterpret_cast<const float*>(of_tile + rows.y * 4);
    t.x = __fmaf_rn(sum.x, upper, t.x);
    t.y = __fmaf_rn(sum.y, upper, t.y);
    t.z = __fmaf_rn(sum.z, lower, t.z);
    t.w = __fmaf_rn(sum.w, lower, t.w);
  };
#pragma unroll 4
  for (int i = 0; i < units; ++i) {
    if constexpr (F::row) {
      const float4 sum = load_four(from);
      t.x = __int_as_float(__float_as_int(t.x) + __float_as_int(sum.x));
      t.y = __int_as_float(__float_as_int(t.y) + __float_as_int(sum.y));
      t.z = __int_as_float(__float_as_int(t.z) + __float_as_int(sum.z));
      t.w = __int_as_float(__float_as_int(t.w) + __float_as_int(sum.w));
    } else if constexpr (F::parts == 1) {
      add(load_four(from), scales);
    } else {
      // A group of 64 columns has the sums of two blocks; they are small integers.
      const int blocks = 1 + p.places.twin_parts;
#pragma unroll 1
      for (int part = 0; part < F::parts; part += blocks) {
        float4 sum = load_four(from + part * F::part_bytes);
        if (blocks > 1) {
          const float4 more = load_four(from + (part + 1) * F::part_bytes);
          sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        add(sum, scales + part * F::part_bytes);
      }
    }
    from += unit_bytes;
    scales += unit_bytes;
  }
}

template <class F>
__device__ void finish_phase(const Arguments& p, std::uint8_t* shared, int first, const Phase& phase) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::uint8_t* const buffer = shared + phase.buffer * p.buffer_bytes;
#pragma unroll 1
  for (int i = thread / 32; i < phase.tiles * F::token_blocks; i += warps) {
    const int tile = i / F::token_blocks;
    const int block = i % F::token_blocks;
    const std::uint8_t* const slot = buffer + tile * F::slot_bytes;
    const std::uint8_t* const scales = slot + F::token_blocks * 512;
    float4* const total =
        reinterpret_cast<float4*>(shared + p.totals_at) + ((phase.tile + tile) * F::token_blocks + block) * 32 + lane;
    float4 t = phase.unit == 0 ? float4{} : *total;
    add_groups<F>(p, slot + block * 512 + lane * 16, scales, phase.units, t);
    if (phase.unit + phase.units < p.units) {
      *total = t;
      continue;
    }
    const int token = block * 8 + lane % 4 * 2;
    if (token >= p.tokens) continue;
    int2 rows = F::Unit::rows(lane);
    if constexpr (F::row) {
      constexpr int kShift = F::Unit::kZeros ? 0 : 4;
      const float upper = *reinterpret_cast<const float*>(scales + rows.x * 4);
      const float lower = *reinterpret_cast<const float*>(scales + rows.y * 4);
      const auto scaled = [](float sum, float scale) {
        return __fmaf_rn(__int2float_rn(__float_as_int(sum) >> kShift), scale, 0);
      };
      t = {scaled(t.x, upper), scaled(t.y, upper), scaled(t.z, lower), scaled(t.w, lower)};
    }
    rows.x += (phase.tile + tile) * kTileRows;
    rows.y += (phase.tile + tile) * kTileRows;
    const float* const biases = reinterpret_cast<const float*>(shared + p.biases_at);
    const float2 x_scale = *reinterpret_cast<const float2*>(shared + p.x_scales_at + token * 4);
    t = {__fmaf_rn(t.x, x_scale.x, biases[rows.x]), __fmaf_rn(t.y, x_scale.y, biases[rows.x]),
         __fmaf_rn(t.z, x_scale.x, biases[rows.y]), __fmaf_rn(t.w, x_scale.y, biases[rows.y])};
    p.y.store(token, {rows.x + first * kTileRows, rows.y + first * kTileRows}, t);
  }
}

// ---- The main loop.

// arguments() are read again for each phase.
template <class F, class ReadArguments>
__device__ void multiply_tiles(const ReadArguments& arguments, std::uint8_t* shared, int first, int count) {
  const Arguments& p = arguments();
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int warps = threads / 32;
  const int unit_bytes = p.phase_tiles * F::slot_bytes;
  const int place = thread / 32 * unit_bytes;
  const std::uint32_t sums = shared_address(shared);
  int unit = thread / 32;
  int tile = 0;
  int left = p.rounds * count;  // steps: a unit of a tile
  Phase phase;
  int phase_left = 0;
  std::uint32_t slot = 0;
  const auto begin_phase = [&] {
    phase.tile = tile;
    phase.unit = unit - thread / 32;
    phase.tiles = min(p.phase_tiles, count - tile);
    phase.units = min(p.phase_rounds * warps, p.units - phase.unit);
    phase_left = min(p.phase_rounds * phase.tiles, left);
    slot = sums + phase.buffer * p.buffer_bytes + place;
  };

  typename F::Unit ring[F::ahead];
  UnitReader<typename F::Unit> reader(p.weight, p.places, first, count, {0, unit});
#pragma unroll
  for (int i = 0; i < F::ahead; ++i) reader.read(p.weight, p.places, i < left, ring[i]);
  wait_for_previous();
  TokenTerms<F> x(p);
  x.read(p, unit);
  for (int i = thread; i < count * kTileRows; i += threads) {
    reinterpret_cast<float*>(shared + p.biases_at)[i] = p.bias.at(first * kTileRows + i, p.weight.rows, kNoBias);
  }
  for (int i = thread; i < F::token_blocks * 8; i += threads) {
    reinterpret_cast<float*>(shared + p.x_scales_at)[i] = i < p.tokens ? p.x_scale[row_of<F>(p, i)] : 0;
  }
  begin_phase();
#pragma unroll 1
  while (left > 0) {
#pragma unroll
    for (int i = 0; i < F::ahead; ++i) {
      if (i > 0 && left <= 0) break;
      if (tile == 0) x.prepare();
      if (unit < p.units) multiply_unit<F>(ring[i], x, slot);
      reader.read(p.weight, p.places, left > F::ahead, ring[i]);
      slot += F::slot_bytes;
      --left;
      if (++tile == count) {
        tile = 0;
        unit += warps;
        slot += warps * unit_bytes - phase.tiles * F::slot_bytes;
        if (left > 0) x.read(p, unit);
      }
      if (--phase_left == 0) {
        __syncthreads();
        finish_phase<F>(arguments(), shared, first, phase);
        phase.buffer ^= 1;
        begin_phase();
      }
    }
  }
}

template <class F>
__global__ void __launch_bounds__(F::max_warps * 32, 1) w4a8_gemv_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int block = static_cast<int>(blockIdx.x);
  const int first = p.tiles * block + min(block, p.more_tiles);
  const int count = p.tiles + (block < p.more_tiles ? 1 : 0);
  let_next_start();
  if (!p.only_x_pending) wait_for_previous();
  multiply_tiles<F>([&]() -> const Arguments& { return p; }, shared, first, count);
}

template <class F>
__global__ void __launch_bounds__(F::max_warps * 32, 1)
    w4a8_experts_gemv_kernel(const __grid_constant__ Arguments all) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ ExpertShare share;  // so that nothing of it occupies registers in the main loop
  let_next_start();
  if (!all.only_x_pending) wait_for_previous();
  find_share(all.experts, all.row_tiles, share);
  const auto arguments = [&] {
    asm volatile("" ::: "memory");
    Arguments p = all;
    p.tokens = share.tokens();
    p.first_token = share.first_token;
    move_to_expert(p.weight, p.experts, share.expert);
    move_to_expert(p.bias, p.experts, share.expert);
    move_to_tokens(p.y, share);
    return p;
  };
#pragma unroll 1
  for (int first = share.begin; first < share.end; first += all.room) {
    multiply_tiles<F>(arguments, shared, first, min(all.room, share.end - first));
    __syncthreads();
  }
}

// ---- The host's side.

inline bool small_groups(const GemmProblem& p) { return p.b.group < 128 && p.b.group < p.k; }

// Calls body(form) for up to eight tokens. Of experts a block has few tiles, and half of the warps with three units
// each take less time.
template <bool packed, bool zeros, bool experts, class Body>
void with_few_tokens(const GemmProblem& p, const Body& body) {
  using Whole = Unit<packed, false, zeros>;
  constexpr int kWarps = experts ? 16 : 32;
  constexpr int kAhead = experts ? 3 : 1;
  if (p.b.group == p.k) return body(Form<1, kWarps, kAhead, true, Whole, experts>());
  if (p.b.group == 128) return body(Form<1, kWarps, kAhead, false, Whole, experts>());
  body(Form<1, 16, 2, false, Unit<packed, true, zeros>, experts>());
}

// As few as possible for the minimum number of rounds over all units.
template <class F>
int warps(int units) {
  return ceil_div(units, ceil_div(units, F::max_warps));
}

// All but what depends on the number of tokens; `most` tiles at once.
template <class F>
struct KernelLaunch {
  Arguments arguments;
  unsigned threads, shared_bytes;

  KernelLaunch(const GemmProblem& problem, const GemmOperands& o, int most) {
    Arguments& p = arguments;
    p.weight = nibble_weight(problem, o);
    p.x = static_cast<const std::int8_t*>(o.a.data);
    p.x_pitch = o.a.strides[0];
    p.x_scale = row_scale<float>(o.a_scale);
    p.only_x_pending = o.only_a_pending;
    p.units = static_cast<int>(ceil_div(problem.k, kUnitTerms));
    p.rounds = ceil_div(p.units, F::max_warps);
    const int warps = w4a8_gemv::warps<F>(p.units);
    p.places = unit_places(p.weight, warps);
    const int vectors = (most * kTileRows + F::token_blocks * 8) * 4;
    const int round_bytes = warps * F::slot_bytes;  // of a tile
    p.phase_rounds = p.rounds;
    p.phase_tiles = most;
    int buffers = 1;
    int total_bytes = 0;
    if (p.rounds * most * round_bytes + vectors > kMaxShared) {
      buffers = 2;
      total_bytes = most * F::token_blocks * 512;
      const int steps = std::max((kMaxShared - vectors - total_bytes) / (2 * round_bytes), 1);
      p.phase_rounds = std::max(steps / most, 1);
      p.phase_rounds = ceil_div(p.rounds, ceil_div(p.rounds, p.phase_rounds));
      p.phase_tiles = std::min(steps, most);
      p.phase_tiles = ceil_div(most, ceil_div(most, p.phase_tiles));
    }
    p.buffer_bytes = p.phase_rounds * p.phase_tiles * round_bytes;
    p.totals_at = buffers * p.buffer_bytes;
    p.x_scales_at = p.totals_at + total_bytes;
    p.biases_at = p.x_scales_at + F::token_blocks * 8 * 4;
    p.bias = bias_of(problem, o);
    p.y = {o.y.data, o.y.strides[0], problem.y, p.weight.rows, static_cast<int>(o.y.rows())};
    threads = static_cast<unsigned>(32 * warps);
    shared_bytes = static_cast<unsigned>(p.totals_at + total_bytes + vectors);
  }
};

}  // namespace octile::cuda::w4a8_gemv
