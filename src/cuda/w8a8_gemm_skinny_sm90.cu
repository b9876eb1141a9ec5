// w8a8 for few rows of a, tokens: the time of the weight's way through memory, whatever the number of tokens up to 64.
//
//   y (m, n) = fma(f32(sum_c a[i, c] * b[j, c]), a_scale[i] * b_scale[j], bias[j]); a (m, k), b (n, k) of s8, rows of
//   both contiguous, the sum in s32
//
// Up to 8 tokens, and where an operand is not aligned up to 32: device/skinny.cuh. More: below. The weight takes the 64
// rows of the matrix unit's left side and the tokens its right one; a tile of y is 128 weight rows by all of 64, 128,
// 192 or 256 tokens. Where there are too few tiles for the multiprocessors, the blocks of a cluster share a tile along
// k and add up through each other's shared memory: sums of s32 are exact in any order. Where there are enough, pairs of
// blocks share the tokens: each fetches half of them for both.
#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda/device/pipeline.cuh"
#include "cuda/device/skinny.cuh"
#include "cuda/tensor_map.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kName = "w8a8_gemm_skinny_sm90";

constexpr int kTileRows = 128;  // of b: 64 a warpgroup
constexpr int kStep = 128;      // bytes of k in a stage: one swizzled row
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 32;
constexpr int kPartialPitch = kTileRows + 4;  // keeps the eight rows of four tokens in their own banks

// tokens: of a tile.
template <int tokens_>
struct Tile {
  static constexpr int tokens = tokens_;
  static constexpr int b_bytes = kTileRows * kStep;
  static constexpr int stage_bytes = b_bytes + tokens * kStep;
  static constexpr int stages = (kSkinnyShared - 2048) / stage_bytes < 9 ? (kSkinnyShared - 2048) / stage_bytes : 9;
  static_assert(tokens * kPartialPitch * 4 <= stages * stage_bytes, "the ring holds the sums afterwards");
};

template <class T>
struct Shared {
  std::uint8_t stages[T::stages][T::stage_bytes];  // b (kTileRows, kStep), a (tokens, kStep); then sums of s32
  float token_scales[T::tokens];
  std::uint64_t full[T::stages];
  std::uint64_t empty[T::stages];
};

struct WideProduct {
  int rows = 0;        // n
  int tokens = 0;      // m
  int steps = 0;       // along k
  int splits = 1;      // blocks of a cluster that share a tile along k
  int shares = 1;      // blocks of a cluster that share tokens
  int box_tokens = 0;  // that a block fetches: none beyond those that there are, in units of a swizzled kilobyte
  RowScale<float> a_scale;
  RowScale<float> b_scale;
  const void* bias = nullptr;
  std::int64_t bias_stride = 0;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
  bool y_aligned = false;  // four elements at a time
};

__device__ inline void load_box_once(std::uint32_t to, const CUtensorMap& map, int2 at, std::uint32_t barrier,
                                     std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(at.x), "r"(at.y), "r"(barrier), "l"(policy)
      : "memory");
}

// As ptx::cluster_wait, but the lanes of a warp may come one by one.
__device__ inline void cluster_wait_lane() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// The steps of k that are this block's. Of a cluster's blocks, those that share tokens come one after the other.
struct Steps {
  int first, end;
  __device__ Steps(const WideProduct& p, int rank) {
    const int split = rank / p.shares;
    first = p.steps * split / p.splits;
    end = p.steps * (split + 1) / p.splits;
  }
};

// One thread: both operands' boxes into the ring. The first boxes of b need not wait for the other blocks of the
// cluster to be there.
template <class T>
__device__ void fetch(const WideProduct& p, Shared<T>& shared, const CUtensorMap& b, const CUtensorMap& a, int row,
                      int rank) {
  const Steps steps(p, rank);
  const std::uint64_t policy = read_once();
  const unsigned token_bytes = static_cast<unsigned>(p.box_tokens * kStep);
  const auto fetch_b = [&](int stage, int step) {
    const std::uint32_t full = ptx::shared_address(&shared.full[stage]);
    ptx::arrive_and_expect(full, T::b_bytes + token_bytes * static_cast<unsigned>(p.shares));
    load_box_once(ptx::shared_address(shared.stages[stage]), b, int2{step * kStep, row}, full, policy);
  };
  const auto fetch_a = [&](int stage, int step) {
    const std::uint32_t full = ptx::shared_address(&shared.full[stage]);
    const std::uint32_t to = ptx::shared_address(shared.stages[stage]) + T::b_bytes;
    if (p.shares == 1) {
      ptx::load_box(to, a, step * kStep, 0, full);
    } else {
      const int part = rank % 2;
      const auto both = static_cast<std::uint16_t>(3u << (rank - part));
      ptx::load_box_to(both, to + static_cast<unsigned>(part) * token_bytes, a, {step * kStep, part * p.box_tokens},
                       full);
    }
  };
  const int early = min(T::stages, steps.end - steps.first);
  for (int i = 0; i < early; ++i) fetch_b(i, steps.first + i);
  if (p.shares > 1) cluster_wait_lane();
  for (int i = 0; i < early; ++i) fetch_a(i, steps.first + i);
  RingPosition<T::stages> at;
  at.parity = 1;
  for (int step = steps.first + early; step < steps.end; ++step) {
    ptx::wait(ptx::shared_address(&shared.empty[at.stage]), at.parity ^ 1);
    fetch_b(at.stage, step);
    fetch_a(at.stage, step);
    at.next();
  }
}

// sums (64, tokens) of a warpgroup. One step's products are always in flight, so a stage is released one step late.
template <class T>
__device__ void multiply(int (&sums)[T::tokens / 2], const WideProduct& p, Shared<T>& shared, int rank) {
  const Steps steps(p, rank);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t empty = ptx::in_block(ptx::shared_address(shared.empty),
                                            static_cast<unsigned>(p.shares > 1 ? rank / 2 * 2 + lane % 2 : rank));
  RingPosition<T::stages> at;
  int last = 0;
  for (int step = steps.first; step < steps.end; ++step) {
    const std::uint32_t stage = ptx::shared_address(shared.stages[at.stage]);
    ptx::wait(ptx::shared_address(&shared.full[at.stage]), at.parity);
    const std::uint32_t left = ptx::matrix_descriptor(stage + static_cast<unsigned>(warpgroup * 64 * kStep));
    const std::uint32_t right = ptx::matrix_descriptor(stage + T::b_bytes);
    ptx::begin_products();
#pragma unroll
    for (int part = 0; part < kStep / 32; ++part) {
      ptx::multiply_s8<kStep>(ptx::Columns<T::tokens>(), sums, left + 2 * part, right + 2 * part,
                              step > steps.first || part > 0);
    }
    ptx::commit_products();
    ptx::wait_products<1>();
    ptx::arrive_in_cluster(empty + static_cast<unsigned>(last) * 8, step > steps.first && lane < p.shares);
    last = at.stage;
    at.next();
  }
  ptx::wait_products<0>();
  ptx::hold(sums);
}

__device__ inline void meet_warpgroups() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

__device__ inline int4 load_from_cluster(std::uint32_t from) {
  int4 v;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// The sums of a warpgroup to shared memory, tokens by rows, where the ring was.
template <class T>
__device__ void keep_sums(const int (&sums)[T::tokens / 2], std::int32_t* partial) {
  const int thread = static_cast<int>(threadIdx.x);
  std::int32_t* const to = partial + thread % 4 * 2 * kPartialPitch + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int j = 0; j < T::tokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[(8 * j + e % 2) * kPartialPitch + e / 2 * 8] = sums[4 * j + e];
  }
}

// Four neighbours in a row of y.
__device__ inline void store_four(const WideProduct& p, std::int64_t at, const float (&y)[4], int count) {
  if (count < 4 || !p.y_aligned) {
    for (int e = 0; e < 4; ++e) {
      if (e < count) store_float(p.y, at + e, p.y_type, y[e]);
    }
  } else if (p.y_type == DType::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.y) + at) = {y[0], y[1], y[2], y[3]};
  } else if (p.y_type == DType::f16) {
    __half four[4] = {narrow<__half>(y[0]), narrow<__half>(y[1]), narrow<__half>(y[2]), narrow<__half>(y[3])};
    *reinterpret_cast<uint2*>(static_cast<__half*>(p.y) + at) = *reinterpret_cast<const uint2*>(four);
  } else {
    __nv_bfloat16 four[4] = {narrow<__nv_bfloat16>(y[0]), narrow<__nv_bfloat16>(y[1]), narrow<__nv_bfloat16>(y[2]),
                             narrow<__nv_bfloat16>(y[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.y) + at) = *reinterpret_cast<const uint2*>(four);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    wide_kernel(const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap a,
                const __grid_constant__ WideProduct p) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int cluster = p.splits * p.shares;
  const int rank = cluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const int row = (static_cast<int>(blockIdx.x) / cluster * p.shares + rank % p.shares) * kTileRows;

  let_next_start();
  if (thread == kConsumers) {
    ptx::prefetch_map(b);
    ptx::prefetch_map(a);
    for (int i = 0; i < T::stages; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.empty[i]), kConsumers / 32 * p.shares);
    }
    ptx::barrier_init_done();
  }
  __syncthreads();
  if (p.shares > 1) ptx::cluster_arrive();
  wait_for_previous();
  if (thread >= kConsumers) {
    if (thread == kConsumers) {
      fetch<T>(p, shared, b, a, row, rank);
    } else if (p.shares > 1) {
      cluster_wait_lane();
    }
    __syncwarp();
    for (int i = (p.splits > 1) + (cluster > 1); i > 0; --i) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
    return;
  }

  // Each lane will finish four rows, always the same ones.
  float row_scales[4] = {};
  float biases[4] = {};
  const int rows = min(p.rows - row - 4 * lane, 4);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e >= rows) continue;
    row_scales[e] = p.b_scale[row + 4 * lane + e];
    if (p.bias != nullptr) biases[e] = load_float(p.bias, (row + 4 * lane + e) * p.bias_stride, p.y_type);
  }
  if (thread < p.tokens) shared.token_scales[thread] = p.a_scale[thread];

  if (p.shares > 1) ptx::cluster_wait();
  int sums[T::tokens / 2];
  multiply<T>(sums, p, shared, rank);
  std::int32_t* const partial = reinterpret_cast<std::int32_t*>(shared_bytes);
  meet_warpgroups();  // the ring is read
  keep_sums<T>(sums, partial);
  if (p.splits > 1) {
    ptx::cluster_arrive_released();
    ptx::cluster_wait();
  } else {
    meet_warpgroups();
  }

  // Sums of four tokens from up to four blocks are on the way to a warp at one time.
  constexpr int kBatch = 4;
  constexpr int kWarps = kConsumers / 32;
  const int share = (p.tokens + p.splits - 1) / p.splits;
  const int split = rank / p.shares;
  const int end = min((split + 1) * share, p.tokens);
  for (int first = split * share + thread / 32; first < end; first += kBatch * kWarps) {
    int4 sum[kBatch] = {};
    for (int block = 0; block < p.splits; block += kBatch) {
      int4 part[kBatch][kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (block + i >= p.splits) break;
        const std::uint32_t from = ptx::in_block(ptx::shared_address(partial + 4 * lane),
                                                 static_cast<unsigned>((block + i) * p.shares + rank % p.shares));
#pragma unroll
        for (int t = 0; t < kBatch; ++t) {
          const int token = first + t * kWarps;
          if (token < end) part[i][t] = load_from_cluster(from + static_cast<unsigned>(token * kPartialPitch * 4));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int t = 0; t < kBatch; ++t) {
          sum[t].x += part[i][t].x;
          sum[t].y += part[i][t].y;
          sum[t].z += part[i][t].z;
          sum[t].w += part[i][t].w;
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kBatch; ++t) {
      const int token = first + t * kWarps;
      if (token >= end) break;
      const int parts[4] = {sum[t].x, sum[t].y, sum[t].z, sum[t].w};
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = __fmul_rn(shared.token_scales[token], row_scales[e]);
        const float product = static_cast<float>(parts[e]);
        y[e] = p.bias != nullptr ? __fmaf_rn(product, scale, biases[e]) : __fmul_rn(product, scale);
      }
      store_four(p, token * p.y_pitch + row + 4 * lane, y, rows);
    }
  }
  if (cluster > 1) {  // no block leaves while others read its shared memory: what they read has been added up
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace

// ---- The launch.

namespace {

struct WideShape {
  int tiles, splits, shares;
};

// A tile is split along k while there is room for all blocks at one time; where two tiles can share their tokens too,
// they do.
WideShape wide_shape(std::int64_t tokens, std::int64_t rows, std::int64_t k, Device device) {
  WideShape shape = {static_cast<int>((rows + kTileRows - 1) / kTileRows), 1, 1};
  const int steps = static_cast<int>((k + kStep - 1) / kStep);
  const auto fits = [&](int splits, int shares) {
    return splits * shares <= kMostClusterBlocks && splits <= std::max(steps / 2, 1) &&
           (shape.tiles + shares - 1) / shares <= clusters_at_once(splits * shares, device);
  };
  for (int splits = kMostClusterBlocks; splits > 1; --splits) {
    if (!fits(splits, 1)) continue;
    shape.splits = splits;
    break;
  }
  if (shape.tiles > 1 && (shape.splits == 1 || (tokens > 64 && fits(shape.splits, 2)))) shape.shares = 2;
  return shape;
}

template <class T>
void launch_wide(const GemmProblem& problem, const GemmOperands& o, Stream stream) {
  const WideShape shape = wide_shape(o.a.rows(), o.b.rows(), o.b.cols(), problem.device);
  WideProduct p;
  p.rows = static_cast<int>(o.b.rows());
  p.tokens = static_cast<int>(o.a.rows());
  p.steps = static_cast<int>((o.a.cols() + kStep - 1) / kStep);
  p.splits = shape.splits;
  p.shares = shape.shares;
  p.box_tokens = ((p.tokens + p.shares - 1) / p.shares + 7) / 8 * 8;
  p.a_scale = row_scale<float>(o.a_scale);
  p.b_scale = row_scale<float>(o.b_scale);
  if (problem.bias) {
    p.bias = o.bias.data;
    p.bias_stride = o.bias.strides[0];
  }
  p.y = o.y.data;
  p.y_pitch = o.y.strides[0];
  p.y_type = problem.y;
  const std::int64_t four = bits(problem.y) / 8 * 4;
  p.y_aligned = (reinterpret_cast<std::uintptr_t>(o.y.data) | static_cast<std::uintptr_t>(p.y_pitch * four / 4)) %
                    static_cast<std::uintptr_t>(four) ==
                0;
  const int cluster = p.splits * p.shares;
  const unsigned blocks = static_cast<unsigned>((shape.tiles + p.shares - 1) / p.shares * cluster);
  enqueue(kName, wide_kernel<T>, LaunchShape{blocks, kThreads, sizeof(Shared<T>), dim3(static_cast<unsigned>(cluster))},
          stream, tensor_map(kName, o.b, {kTileRows, kStep, true}), tensor_map(kName, o.a, {p.box_tokens, kStep, true}),
          p);
}

// Calls body(token blocks) if the first kernel takes it. Up to 8 tokens it is the faster one; up to 32 it is what reads
// a weight, or tokens, at any alignment.
template <class Body>
bool with_few(std::int64_t tokens, std::int64_t k, bool aligned, const Body& body) {
  if (tokens <= 8 && fits_skinny<1>(tokens, k)) return body(std::integral_constant<int, 1>()), true;
  if (aligned) return false;
  if (tokens <= 16 && fits_skinny<2>(tokens, k)) return body(std::integral_constant<int, 2>()), true;
  if (tokens <= 32 && fits_skinny<4>(tokens, k)) return body(std::integral_constant<int, 4>()), true;
  return false;
}

// Fitted to an H200: what moves, at the rates at which it did, and what a launch and a reduction took besides.
double wide_seconds(const GemmProblem& p) {
  const WideShape shape = wide_shape(p.m, p.n, p.k, p.device);
  const double m = static_cast<double>(p.m);
  const double k = static_cast<double>(p.k);
  const double weight = static_cast<double>(p.n) * k / 4.2e12;
  const double tokens = m * k * shape.tiles / shape.shares / 5.5e12;
  const int at_once = clusters_at_once(shape.splits * shape.shares, p.device) * shape.shares;
  const double waves = (shape.tiles + at_once - 1) / at_once;
  const double tile_tokens = (p.m + 63) / 64 * 64;
  const double arithmetic = waves * k / shape.splits * tile_tokens / 32 / 1.6e9;
  return 3.5e-6 + std::max(weight + tokens, arithmetic) + (waves - 1) * 3e-6 +
         (shape.splits > 1 ? 2.5e-6 + m * 1e-8 : 0);
}

double few_seconds(const GemmProblem& p) {
  return 5.4e-6 + static_cast<double>(p.n) * static_cast<double>(p.k) / 4.2e12 + static_cast<double>(p.m) * 1e-7;
}

}  // namespace

std::string w8a8_gemm_skinny_sm90_supports(const GemmProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.scale != DType::f32) return "has no f64";
  if (p.a_major != Major::contraction || p.b_major != Major::contraction || p.y_major != Major::contraction) {
    return "wants rows of a, b and y contiguous";
  }
  if (p.b_packed) return "takes the weight as it is, not packed";
  if (p.m > 256) return "is for up to 256 rows of a";
  if (p.n > kMostRows) return "takes at most 2^30 rows of b";
  return {};
}

Cost w8a8_gemm_skinny_sm90_cost(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const bool few = p.m <= 8 && fits_skinny<1>(p.m, p.k);
  // Rows that begin anywhere are for the portable kernel.
  const bool engine_reads = p.k % kBulkAlignment == 0;
  return {2 * m * n * k, m * k + n * k + m * n * bits(p.y) / 8,
          few            ? few_seconds(p)
          : engine_reads ? wide_seconds(p)
                         : w8a8_gemm_sm80_cost(p).seconds};
}

std::size_t w8a8_gemm_skinny_sm90_workspace(const GemmProblem&) { return 0; }

void w8a8_gemm_skinny_sm90_prepare(const GemmProblem& problem) {
  prepare_skinny<std::int8_t, 1>(kName);
  prepare_skinny<std::int8_t, 2>(kName);
  prepare_skinny<std::int8_t, 4>(kName);
  prepare(kName, wide_kernel<Tile<64>>, sizeof(Shared<Tile<64>>));
  prepare(kName, wide_kernel<Tile<128>>, sizeof(Shared<Tile<128>>));
  prepare(kName, wide_kernel<Tile<192>>, sizeof(Shared<Tile<192>>));
  prepare(kName, wide_kernel<Tile<256>>, sizeof(Shared<Tile<256>>));
  prepare_tensor_maps(kName);
  w8a8_gemm_sm80_prepare(problem);
}

void w8a8_gemm_skinny_sm90(const GemmProblem& problem, const GemmOperands& o, const Launch& launch) {
  const std::int64_t tokens = o.a.rows();
  if (tokens == 0 || o.b.rows() == 0) return;
  const Stream stream = launch.stream;
  const bool aligned = mappable(o.a) && mappable(o.b);
  const bool few = with_few(tokens, o.a.cols(), aligned, [&](auto blocks) {
    SkinnyProduct p = skinny_product(problem, o);
    launch_skinny<std::int8_t, decltype(blocks)::value>(kName, p, problem, stream);
  });
  if (few) return;
  if (!aligned) {
    w8a8_gemm_sm80(problem, o, launch);
  } else {
    tokens <= 64    ? launch_wide<Tile<64>>(problem, o, stream)
    : tokens <= 128 ? launch_wide<Tile<128>>(problem, o, stream)
    : tokens <= 192 ? launch_wide<Tile<192>>(problem, o, stream)
                    : launch_wide<Tile<256>>(problem, o, stream);
  }
}

}  // namespace octile::cuda
