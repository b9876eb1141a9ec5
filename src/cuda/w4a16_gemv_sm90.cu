// w4a16 for few rows of a, tokens: near the time of the weight's way through memory.
//
//   y (m, n) = round_to_y(sum over groups g of s[j, g] * (sum over c in g of a[i, c] * (q[j, c] - z[j, g])) + bias[j])
//
// a f16 or bf16; the integers q - z are exact in either, their products with a are summed in f32, and scaled there.
//
// A block has a run of tiles of 16 rows of the weight. Its warps share the terms, in chunks; each keeps all tokens'
// terms of a chunk in registers, as the matrix unit wants them, while the chunk's part of one tile after the other
// comes by, through a ring of the warp's own: no warp waits for another. What it has of a tile's sums it leaves in
// shared memory, where those of all warps are added, in the order of terms, when the run is done.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/device/floats.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/nibble_chunks.cuh"
#include "cuda/device/nibbles.cuh"
#include "cuda/launch.h"
#include "cuda/nibble_weight.h"
#include "kernels.h"
#include "message.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w4a16_gemv_sm90";
// With 16, of 128 registers each, M = 16 takes 32 us, and 26 with these (H200, 4096 x 14336).
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMostShared = 227 * 1024;
constexpr int kMostTokens = 32;

struct Arguments {
  NibbleWeight weight;
  const uint4* x = nullptr;
  std::int64_t x_pitch = 0;  // of eight terms
  int tokens = 0;
  int chunks = 0;
  int sharers = 1;      // warps that share the terms of a tile
  int pass_tiles = 0;   // whose sums are kept at a time
  int stage_bytes = 0;  // of a ring
  int sums_at = 0;      // in shared memory, behind the rings
  int biases_at = 0;
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
};

// token_blocks: of eight.
template <class T_, int token_blocks_, int stages_, class Chunk_>
struct Form {
  using T = T_;
  using Chunk = Chunk_;
  static constexpr int token_blocks = token_blocks_;
  static constexpr int stages = stages_;
  static constexpr int sum_bytes = token_blocks * 32 * 16;  // of a tile: a lane's four, of each token block
};

struct Span {
  int first, end;
};

__device__ inline Span share(int count, int part, int parts) {
  return {static_cast<int>(static_cast<std::int64_t>(count) * part / parts),
          static_cast<int>(static_cast<std::int64_t>(count) * (part + 1) / parts)};
}

// ---- Products.

// All tokens' terms of a chunk, a lane's own.
template <class F>
struct TokenTerms {
  uint4 at[F::token_blocks][F::Chunk::kBlocks];

  // As they lie in memory.
  __device__ void read(const Arguments& p, int chunk) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
      const uint4* const row = p.x + min(t * 8 + lane / 4, p.tokens - 1) * p.x_pitch;
#pragma unroll
      for (int block = 0; block < F::Chunk::kBlocks; ++block) {
        const int term = chunk * F::Chunk::kTerms + F::Chunk::first_term(block, lane % 4);
        at[t][block] = term < p.weight.terms ? __ldcg(row + term / 8) : uint4{};
      }
    }
  }

  // In the order of the weight's.
  __device__ void take(const TokenTerms& read) {
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
#pragma unroll
      for (int block = 0; block < F::Chunk::kBlocks; ++block) {
        at[t][block] = as_nibbles_lie<F::Chunk::kPacked>(read.at[t][block]);
      }
    }
  }
};

// One chunk of a tile, added to this lane's sums of the tile, which lie at `sums`, one token block after the other.
template <class F>
__device__ void multiply_chunk(const NibbleWeight& weight, const TokenTerms<F>& x, std::uint32_t stage,
                               std::uint32_t sums, bool first) {
  using T = typename F::T;
  using Chunk = typename F::Chunk;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint4 total[F::token_blocks] = {};
  if (!first) {
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) total[t] = load_shared(sums + t * 512);
  }
#pragma unroll
  for (int part = 0; part < Chunk::kParts; ++part) {
    constexpr int kBlocks = Chunk::kBlocks / Chunk::kParts;
    const uint2 scale = Chunk::scales(stage, part, lane);
    Offset<T> offsets[2];
    if (weight.zeros != nullptr) {
      const uint2 u = Chunk::zeros(stage, part, lane);
      offsets[0] = Offset<T>(u.x);
      offsets[1] = Offset<T>(u.y);
    }
    std::uint32_t words[2][kBlocks];
    Chunk::template load<kBlocks>(stage, part * kBlocks, lane, words);
    float part_sums[F::token_blocks][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      std::uint32_t upper[4];
      std::uint32_t lower[4];
      integers<!Chunk::kPacked>(words[0][i], offsets[0], upper);
      integers<!Chunk::kPacked>(words[1][i], offsets[1], lower);
      const std::uint32_t one[4] = {upper[0], lower[0], upper[1], lower[1]};
      const std::uint32_t other[4] = {upper[2], lower[2], upper[3], lower[3]};
#pragma unroll
      for (int t = 0; t < F::token_blocks; ++t) {
        const uint4& terms = x.at[t][part * kBlocks + i];
        multiply_add_16(T(), part_sums[t], one, uint2{terms.x, terms.y});
        multiply_add_16(T(), part_sums[t], other, uint2{terms.z, terms.w});
      }
    }
    const float upper_scale = __uint_as_float(scale.x);
    const float lower_scale = __uint_as_float(scale.y);
#pragma unroll
    for (int t = 0; t < F::token_blocks; ++t) {
      total[t].x = __float_as_uint(__fmaf_rn(part_sums[t][0], upper_scale, __uint_as_float(total[t].x)));
      total[t].y = __float_as_uint(__fmaf_rn(part_sums[t][1], upper_scale, __uint_as_float(total[t].y)));
      total[t].z = __float_as_uint(__fmaf_rn(part_sums[t][2], lower_scale, __uint_as_float(total[t].z)));
      total[t].w = __float_as_uint(__fmaf_rn(part_sums[t][3], lower_scale, __uint_as_float(total[t].w)));
    }
  }
#pragma unroll
  for (int t = 0; t < F::token_blocks; ++t) store_shared(sums + t * 512, total[t]);
}

// ---- From the sums of all warps to y.

// The bits of the bias of a row, to be converted when it is wanted.
__device__ inline unsigned bias_bits(const Arguments& p, int row) {
  if (p.bias == nullptr || row >= p.weight.rows) return 0;
  const std::int64_t at = row * p.bias_stride;
  return p.y_type == DType::f32 ? __ldcg(static_cast<const unsigned*>(p.bias) + at)
                                : __ldcg(static_cast<const unsigned short*>(p.bias) + at);
}
__device__ inline float bias_of(unsigned bits, DType type) {
  if (type == DType::f32) return __uint_as_float(bits);
  const auto half = static_cast<unsigned short>(bits);
  return type == DType::f16 ? widen(__ushort_as_half(half)) : widen(__ushort_as_bfloat16(half));
}

__device__ inline void store_float(void* data, std::int64_t i, DType type, float value) {
  if (type == DType::f16) {
    static_cast<__half*>(data)[i] = narrow<__half>(value);
  } else if (type == DType::bf16) {
    static_cast<__nv_bfloat16*>(data)[i] = narrow<__nv_bfloat16>(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

template <class F>
__device__ void finish_pass(const Arguments& p, std::uint32_t sums, const float* biases, const Span& tiles) {
  const int count = (tiles.end - tiles.first) * F::token_blocks * 32;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int lane = i % 32;
    const int token = i / 32 % F::token_blocks * 8 + lane % 4 * 2;
    if (token >= p.tokens) continue;
    float4 sum = {};
#pragma unroll 4
    for (int sharer = 0; sharer < p.sharers; ++sharer) {
      const uint4 more = load_shared(sums + sharer * p.pass_tiles * F::sum_bytes + i * 16);
      sum.x += __uint_as_float(more.x);
      sum.y += __uint_as_float(more.y);
      sum.z += __uint_as_float(more.z);
      sum.w += __uint_as_float(more.w);
    }
    const int tile = tiles.first + i / (F::token_blocks * 32);
    const int2 rows = F::Chunk::rows(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile * kTileRows + (h == 0 ? rows.x : rows.y);
      if (row >= p.weight.rows) continue;
      const float bias = biases[row - tiles.first * kTileRows];
      store_float(p.y, token * p.y_pitch + row, p.y_type, (h == 0 ? sum.x : sum.z) + bias);
      if (token + 1 < p.tokens) {
        store_float(p.y, (token + 1) * p.y_pitch + row, p.y_type, (h == 0 ? sum.y : sum.w) + bias);
      }
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads, 1) w4a16_gemv_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t base = shared_address(shared);
  const std::uint32_t ring = base + warp * F::stages * p.stage_bytes;
  const std::uint32_t ring_end = ring + F::stages * p.stage_bytes;
  const int sharer = warp % p.sharers;
  const int first_tile = warp / p.sharers;  // of a pass, and then every by_tiles'th
  const int by_tiles = kWarps / p.sharers;
  const std::uint32_t all_sums = base + p.sums_at;
  const std::uint32_t sums = all_sums + sharer * p.pass_tiles * F::sum_bytes + lane * 16;
  float* const biases = reinterpret_cast<float*>(shared + p.biases_at);
  const Span tiles =
      share((p.weight.rows + kTileRows - 1) / kTileRows, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const Span chunks = share(p.chunks, sharer, p.sharers);

  let_next_start();
  wait_for_previous();
  std::uint32_t stage = ring;
  std::uint32_t to = ring;
#pragma unroll 1
  for (int pass = tiles.first; pass < tiles.end; pass += p.pass_tiles) {
    const int count = min(p.pass_tiles, tiles.end - pass);
    const int own = (count - first_tile + by_tiles - 1) / by_tiles;  // tiles of this warp
    const unsigned bias = bias_bits(p, pass * kTileRows + static_cast<int>(threadIdx.x));
    TokenTerms<F> x;
    TokenTerms<F> next;
    next.read(p, chunks.first);
    typename F::Chunk::Fetcher fetcher(p.weight, chunks.first, pass + first_tile, by_tiles);
    int fetch_chunk = chunks.first;
    int fetch_tile = first_tile;
    int chunk = chunks.first;
    int tile = first_tile;
    // The first steps fetch alone: one loop, since its code comes from a cold memory.
#pragma unroll 1
    for (int step = 1 - F::stages; step < own * (chunks.end - chunks.first); ++step) {
      __syncwarp();  // all lanes have read what is overwritten now
      if (fetch_chunk < chunks.end && fetch_tile < count) {
        fetcher.fetch(p.weight, to, fetch_chunk, pass + fetch_tile);
        if ((fetch_tile += by_tiles) >= count) {
          fetch_tile = first_tile;
          fetcher.begin(p.weight, ++fetch_chunk, pass + fetch_tile);
        }
      }
      commit_copies();
      if ((to += p.stage_bytes) == ring_end) to = ring;
      if (step < 0) continue;
      wait_for_copies<F::stages - 1>();
      __syncwarp();
      if (tile == first_tile) {
        x.take(next);
        if (chunk + 1 < chunks.end) next.read(p, chunk + 1);
      }
      multiply_chunk<F>(p.weight, x, stage, sums + tile * F::sum_bytes, chunk == chunks.first);
      if ((stage += p.stage_bytes) == ring_end) stage = ring;
      if ((tile += by_tiles) >= count) {
        tile = first_tile;
        ++chunk;
      }
    }
    stage = to;  // all that was fetched has been read
    if (threadIdx.x < count * kTileRows) biases[threadIdx.x] = bias_of(bias, p.y_type);
    __syncthreads();
    finish_pass<F>(p, all_sums, biases, {pass, pass + count});
    if (pass + count < tiles.end) __syncthreads();
  }
}

// ---- Launching.

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool fine(const GemmProblem& p) { return p.group < 128 && p.group < p.k; }

template <class F>
int stage_bytes(const GemmProblem& p) {
  return F::Chunk::kValueBytes + F::Chunk::kScaleBytes + (p.zero_point ? F::Chunk::kZeroBytes : 0);
}

// Warps that share the terms of a tile: each has a chunk at least.
template <class F>
int sharers_of(const GemmProblem& p) {
  int sharers = kWarps;
  while (sharers > ceil_div(p.k, F::Chunk::kTerms)) sharers /= 2;
  return std::max(sharers, 1);
}

template <class F>
void launch_form(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  Arguments p;
  p.weight = nibble_weight(problem, o);
  p.x = static_cast<const uint4*>(o.a.data);
  p.x_pitch = o.a.strides[0] / 8;
  p.tokens = static_cast<int>(o.a.rows());
  p.chunks = static_cast<int>(ceil_div(problem.k, F::Chunk::kTerms));
  p.sharers = sharers_of<F>(problem);
  p.stage_bytes = stage_bytes<F>(problem);
  p.sums_at = kWarps * F::stages * p.stage_bytes;
  const std::int64_t tiles = ceil_div(problem.n, kTileRows);
  const std::int64_t blocks = std::min<std::int64_t>(tiles, properties(problem.device).multiprocessors);
  // As few passes as there is room for, and as equal.
  const std::int64_t most = ceil_div(tiles, blocks);
  const std::int64_t room = std::min<std::int64_t>(
      (kMostShared - p.sums_at) / (p.sharers * F::sum_bytes + kTileRows * 4), kThreads / kTileRows);
  p.pass_tiles = static_cast<int>(ceil_div(most, ceil_div(most, room)));
  p.biases_at = p.sums_at + p.sharers * p.pass_tiles * F::sum_bytes;
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
  }
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  const auto bytes = static_cast<unsigned>(p.biases_at + p.pass_tiles * kTileRows * 4);
  enqueue(kName, w4a16_gemv_kernel<F>, LaunchShape{static_cast<unsigned>(blocks), kThreads, bytes}, stream, p);
}

// Calls body(form) for the problem's, with so many tokens.
template <class Body>
auto with_form(const GemmProblem& p, std::int64_t tokens, const Body& body) {
  const auto with_chunk = [&]<class T, bool packed, bool fine>(T, std::bool_constant<packed>,
                                                               std::bool_constant<fine>) {
    if (tokens <= 8) return body(Form<T, 1, 8, Chunk<8, packed, fine>>());
    if (tokens <= 16) return body(Form<T, 2, 6, Chunk<8, packed, fine>>());
    return body(Form<T, 4, 6, Chunk<4, packed, fine>>());
  };
  const auto with_type = [&]<class T>(T type) {
    if (p.b_packed && fine(p)) return with_chunk(type, std::true_type(), std::true_type());
    if (p.b_packed) return with_chunk(type, std::true_type(), std::false_type());
    if (fine(p)) return with_chunk(type, std::false_type(), std::true_type());
    return with_chunk(type, std::false_type(), std::false_type());
  };
  return p.a == DType::f16 ? with_type(__half()) : with_type(__nv_bfloat16());
}

bool aligned(const void* data, std::int64_t pitch_bytes) {
  return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(pitch_bytes)) % 16 == 0;
}

// Whether 16 bytes of a row may be read at a time.
bool readable(const GemmProblem& p, const GemmOperands& o) {
  return aligned(o.a.data, o.a.strides[0] * 2) && (p.b_packed || aligned(o.b.data, o.b.strides[0] / 2));
}

}  // namespace

std::string w4a16_gemv_sm90_supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.a != DType::f16 && p.a != DType::bf16) return "takes f16 and bf16";
  if (p.scale != DType::f32) return "has no f64";
  if (p.m > kMostTokens) return message("is for up to ", kMostTokens, " rows of a");
  if (p.k % 32 != 0) return "wants rows of a multiple of 32 terms";
  if (std::max(p.n, p.k) > std::int64_t{1} << 30) return "takes at most 2^30 rows or terms";
  return {};
}

Cost w4a16_gemv_sm90_cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const double bytes =
      n * k / 2 + n * k / static_cast<double>(std::max<std::int64_t>(p.group, 1)) * (p.zero_point ? 8 : 4);
  const std::int64_t rounds = ceil_div(ceil_div(p.n, kTileRows), properties(p.device).multiprocessors);
  // Of a weight and a block, measured on an H200.
  const double each = p.m > 16 ? 6.7e-11 : p.m > 8 ? 4.6e-11 : 3.3e-11;
  const double tile = kTileRows * std::max(k, 2048.0) * each;
  return {2 * m * n * k, m * k * 2 + bytes + m * n * bits(p.y) / 8, 5e-6 + static_cast<double>(rounds) * tile};
}

std::string w4a16_gemv_sm90_detail(const GemmProblem& p) {
  const int sharers = with_form(p, p.m, [&]<class F>(F) { return sharers_of<F>(p); });
  return message("tiles of ", kTileRows, " rows, ", sharers, " warps each");
}

void w4a16_gemv_sm90_prepare(const GemmProblem& problem) {
  for (const std::int64_t tokens : {8, 16, 32}) {
    with_form(problem, tokens, []<class F>(F) { prepare(kName, w4a16_gemv_kernel<F>, kMostShared); });
  }
  w4a16_gemm_sm80_prepare(problem);
}

void w4a16_gemv_sm90(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  if (o.a.rows() == 0 || problem.n == 0) return;
  if (!readable(problem, o)) return w4a16_gemm_sm80(problem, o, launch);
  with_form(problem, o.a.rows(), [&]<class F>(F) { launch_form<F>(problem, o, launch.stream); });
}

}  // namespace octile::cuda
