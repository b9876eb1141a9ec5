// w4a16_gemv_sm90, for few rows of a, tokens: close to the time of reading the weight from memory.
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16. With b the integer that q becomes (w4a16_gemv_sm90.cuh), q + 8 or q + 24, and o = b - q, a group
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
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/device/grid.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/dispatch.h"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/gemm/w4a16_gemv_sm90.cuh"
#include "cuda/launch.h"
#include "plan/kernel.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemv_sm90";
constexpr int kMaxShared = 160 * 1024;  // the rest is L1, where loads arrive
constexpr int kMaxTokens = 16;

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
};

// token_blocks: of eight. ahead: units in flight per warp.
template <class T_, int token_blocks_, int warps_, int ahead_, class Unit_>
struct Form {
  using T = T_;
  using Unit = Unit_;
  static constexpr int token_blocks = token_blocks_;
  static constexpr int warps = warps_;
  static constexpr int threads = 32 * warps_;
  static constexpr int ahead = ahead_;
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

// ---- Bias.

// Into L2, well ahead of its use.
__device__ inline void prefetch_bias(const Arguments& p, int row) {
  if (p.bias.data == nullptr || row >= p.weight.rows) return;
  const std::int64_t at = row * p.bias.stride * (p.y.type == DType::f32 ? 4 : 2);
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

  // Not yet permuted.
  __device__ void read(const Arguments& p, int unit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = unit * kUnitTerms + Unit::first_term(0, lane % 4);
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
      const int token = min(t * 8 + lane / 4, p.tokens - 1);
      const uint4* const from = p.x + (static_cast<std::int64_t>(token) * p.x_pitch + first / 8);
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

  TokenTerms<F> x;
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

template <class F>
__global__ void __launch_bounds__(F::threads, 1) w4a16_gemv_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  float* const biases = reinterpret_cast<float*>(shared + p.biases_at);
  const int block = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int first = p.tiles * block + min(block, p.more_tiles);
  const int count = p.tiles + (block < p.more_tiles ? 1 : 0);
  let_next_start();
  wait_for_previous();
  multiply_tiles<F>(p, shared_address(shared), first, count);
  if (thread < count * kTileRows) biases[thread] = p.bias.at(first * kTileRows + thread, p.weight.rows, 0);
  __syncthreads();
  finish_tiles<F>(p, shared, biases, first, count);
}

// ---- Launching.

bool small_groups(const GemmProblem& p) { return p.b.group < 128 && p.b.group < p.k; }

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  Arguments p;
  p.weight = nibble_weight(problem, o);
  p.x = static_cast<const uint4*>(o.a.data);
  p.x_pitch = static_cast<int>(o.a.strides[0] / 8);
  p.tokens = static_cast<int>(o.a.rows());
  p.units = static_cast<int>(ceil_div(problem.k, kUnitTerms));
  // Adjacent units of a row-major weight share cache lines: warps take them at the same time, where they divide evenly.
  p.places = unit_places(p.weight, !F::Unit::kPacked && p.units % F::warps == 0 ? F::warps : 1);
  p.pair_bits = kWholeEights<F> || p.tokens > 4 ? 2 : p.tokens > 2 ? 1 : 0;
  p.sum_bytes = F::token_blocks * (128 << p.pair_bits);
  p.tile_bytes = std::min(p.units, F::warps) * p.sum_bytes;
  // One block per SM, or several waves where there is too little room for the sums.
  const std::int64_t tiles = ceil_div(problem.n, kTileRows);
  const std::int64_t room = std::min(kMaxShared / (p.tile_bytes + kTileRows * 4), F::threads / kTileRows);
  const std::int64_t sms = properties(problem.device).sms;
  const std::int64_t waves = ceil_div(tiles, sms * room);
  const std::int64_t blocks = std::min(tiles, sms * waves);
  p.tiles = static_cast<int>(tiles / blocks);
  p.more_tiles = static_cast<int>(tiles % blocks);
  const int max_tiles = p.tiles + (p.more_tiles > 0 ? 1 : 0);
  p.biases_at = max_tiles * p.tile_bytes;
  p.bias = bias_of(problem, o);
  p.y = {o.y.data, o.y.strides[0], problem.y, p.weight.rows, p.tokens};
  const auto bytes = static_cast<unsigned>(p.biases_at + max_tiles * kTileRows * 4);
  const unsigned grid = static_cast<unsigned>(blocks);
  enqueue(kName, w4a16_gemv_kernel<F>, LaunchShape{grid, F::threads, bytes}, stream, p);
}

// Calls body(form) with the problem's form for this many tokens.
template <class Body>
void with_form(const GemmProblem& p, std::int64_t tokens, const Body& body) {
  const auto with = [&]<bool half, bool packed, bool small, bool zeros, bool few>() {
    // As many warps, and units in flight, as registers allow.
    constexpr bool kWide = small || zeros || !packed;
    constexpr int kWarps = few ? (kWide ? 16 : 32) : (small ? 8 : 16);
    constexpr int kAhead = few ? (kWide && !small ? 2 : 1) : (small || packed ? 2 : 1);
    constexpr int kBlocks = few ? 1 : 2;
    using T = std::conditional_t<half, __half, __nv_bfloat16>;
    using U = Unit<packed, small, zeros>;
    body(Form<T, kBlocks, kWarps, kAhead, U>());
  };
  with_flags(with, p.a == DType::f16, p.b_packed, small_groups(p), p.b.zero_point, tokens <= 8);
}

std::string supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.scale != DType::f32) return "has no f64";
  if (p.m > kMaxTokens) return message("is for up to ", kMaxTokens, " rows of a");
  if (p.k % 32 != 0) return "needs K to be a multiple of 32";
  if (std::max(p.n, p.k) > std::int64_t{1} << 23) return "takes at most 2^23 rows or columns";
  return {};
}

Cost cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const double bytes =
      n * k / 2 + n * k / static_cast<double>(std::max<std::int64_t>(p.b.group, 1)) * (p.b.zero_point ? 8 : 4);
  const std::int64_t rounds = ceil_div(ceil_div(p.n, kTileRows), properties(p.device).sms);
  // Seconds per weight element of a block, measured on an H200.
  const double each = p.m > 8 ? 2.8e-11 : 2.4e-11;
  const double tile = kTileRows * std::max(k, 2048.0) * each * (p.b_packed ? 1 : p.m > 8 ? 1.25 : 1.1);
  return {2 * m * n * k, m * k * 2 + bytes + m * n * bits(p.y) / 8, 5e-6 + static_cast<double>(rounds) * tile};
}

std::string detail(const GemmProblem& p) {
  int warps = 0;
  with_form(p, p.m, [&]<class F>(F) { warps = F::warps; });
  return message("tiles of ", kTileRows, " rows, ", warps, " warps");
}

void load(const GemmProblem& problem) {
  for (const std::int64_t tokens : {8, 16}) {
    with_form(problem, tokens, []<class F>(F) { prepare(kName, w4a16_gemv_kernel<F>, kMaxShared); });
  }
}

void launch(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  with_form(problem, o.a.rows(), [&]<class F>(F) { launch_form<F>(problem, o, launch.stream); });
}

}  // namespace

extern constinit const GemmKernel w4a16_gemv_sm90 = {
    .name = "w4a16_gemv_sm90",
    .task = {Operation::gemm, kW4A16},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .launch = launch,
    .prepare = load,
    .detail = detail,
    .aligned = units_aligned,
    .bound = Bound::offset_weight,
};

}  // namespace octile::cuda
