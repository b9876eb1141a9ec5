// Packed 4-bit weights of experts with few tokens each, on Hopper: y^T = weight * tokens^T by WGMMA.
//
// A persistent grid, a block for each SM, goes over all tiles of all experts: up to kTokens tokens of an expert by
// kRows rows of its weight, by all of K; first those of more than kFewer tokens. In a block
//   - one thread requests the tokens and another the weight by TMA. A stage of their ring has 128 columns of K. The
//     ring continues from one tile into the next, so that memory does not wait while a tile is stored;
//   - a warpgroup puts 16-bit tokens into the order in which the nibbles leave their words, and reads the scales of int8
//     tokens;
//   - two consumer warpgroups have two units of sums each, tiles of 64 rows: nibbles become exact 16-bit or 8-bit
//     integers q - z in registers, from where WGMMA takes them. The products of a group are scaled in f32 and added to
//     the sums.
// Tokens lie in the order of the experts. TMA loads 16 at a time; the last 16 of a tile may include tokens of the next
// expert, whose results are not stored.
//
// Of int8 tokens the sums of a group are exact, and what follows is w4a8_gemm_sm90's:
//
//   t = fma(f32(sum_c a[i, c] * (q[j, c] - z[j, g])), s[j, g], t), then y[i, j] = fma(t, a_scale[i], bias[j])
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device/experts.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/nibble_bytes.cuh"
#include "cuda/device/output.cuh"
#include "cuda/device/token_order.cuh"
#include "cuda/device/warp_specialized.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/operands.h"

namespace octile::cuda::experts_skinny {

constexpr int kTokens = 64;  // of a tile, at most
constexpr int kFewer = 32;   // with at most this many tokens, a tile's WGMMAs are half as wide
constexpr int kRows = 256;   // of the weight
constexpr int kPanels = kRows / static_cast<int>(kPanelChannels);
constexpr int kTerms = 128;  // of a stage
constexpr int kSets = kTerms / 32;
constexpr int kUnits = 2;
constexpr int kBoxTokens = 16;  // that TMA loads at a time
constexpr int kAtOnce = 2;      // stages of the weight that are requested before the first has arrived

// The block's warps: consumers, those that put tokens in order, and those that fetch.
constexpr int kConsumerThreads = 256;
constexpr int kOrderThreads = 128;
constexpr int kFetchThreads = 128;
constexpr int kThreads = kConsumerThreads + kOrderThreads + kFetchThreads;
constexpr int kConsumerRegisters = 208;
constexpr int kOrderRegisters = 56;
constexpr int kFetchRegisters = 40;
constexpr int kOrderWarp = kConsumerThreads / 32;  // the first one
constexpr int kTokenWarp = kOrderWarp + kOrderThreads / 32;
constexpr int kWeightWarp = kTokenWarp + 1;

constexpr int kWholeRow = 0;

// X: type of the tokens, f16, bf16 or s8. folds: how often in a stage products are scaled. With 16-bit tokens a group
// spans one or more folds. With int8 tokens a fold is a group; kWholeRow: products are scaled once, at the end of K.
template <class X_, int folds_, bool zeros_>
struct Form {
  using X = X_;
  static constexpr bool exact = std::is_same_v<X, std::int8_t>;
  static constexpr int folds = folds_;
  static constexpr bool zeros = zeros_;
  static_assert(exact || folds != kWholeRow);

  static constexpr int scale_groups = std::max(folds, 1);  // of a stage
  static constexpr int fold_sets = folds == kWholeRow ? kSets : kSets / folds;
  static constexpr int token_bytes = kTerms * static_cast<int>(sizeof(X));  // of a token in a stage
  static constexpr int weight_bytes = kRows * kTerms / 2 + scale_groups * kRows * (zeros ? 5 : 4);
  static constexpr int stages = std::min(8, 216 * 1024 / (kTokens * token_bytes + weight_bytes));
  using Product = std::conditional_t<exact, int, float>;
  static constexpr int fragments = exact ? 1 : 2;  // of a set
};

// A tile: rows of y, and rows of an expert's weight.
struct Tile {
  int expert, first_token, end_token, first_row;

  __device__ int tokens() const { return end_token - first_token; }
};

// How many tiles shared memory describes at once. The thread that fetches tokens writes them. It writes tile n + 16
// once the consumers have released a stage of tile n + 1 or a later one, and so have stored tile n.
constexpr int kKnownTiles = 16;

template <class F>
struct Shared {
  static_assert(kKnownTiles > F::stages);
  alignas(1024) std::uint8_t weight[F::stages][kRows * kTerms / 2];
  alignas(1024) std::uint8_t tokens[F::stages][kTokens * F::token_bytes];
  alignas(128) float scales[F::stages][F::scale_groups][kPanels][kPanelChannels];
  alignas(128) std::uint8_t zeros[F::zeros ? F::stages : 1][F::scale_groups][F::zeros ? kPanels : 1][kPanelChannels];
  float token_scales[F::exact ? kKnownTiles : 1][F::exact ? kTokens : 1];
  std::uint64_t loaded[F::stages];
  std::uint64_t full[F::stages];  // with tokens in order
  std::uint64_t empty[F::stages];
  Tile tiles[kKnownTiles];
  ExpertTable wide;    // an expert's tiles of more than kFewer tokens
  ExpertTable narrow;  // its last one, if that has fewer
};

// All threads of the block.
template <class F>
__device__ void fill_tables(Shared<F>& shared, const Experts& experts) {
  for (int e = static_cast<int>(threadIdx.x); e <= experts.count; e += kThreads) {
    shared.wide.first_row[e] = shared.narrow.first_row[e] = experts.offset(e);
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 2) {
    const auto tiles_of = [&](int e) {
      const int tokens = shared.wide.first_row[e + 1] - shared.wide.first_row[e];
      const int wide = (tokens + kTokens - kFewer - 1) / kTokens;
      return warp == 0 ? wide : (tokens + kTokens - 1) / kTokens - wide;
    };
    count_tiles((warp == 0 ? shared.wide : shared.narrow).first_tile, experts.count, tiles_of);
  }
  __syncthreads();
}

struct Maps {
  CUtensorMap weight, tokens;
  CUtensorMap scales, zeros;
};

struct Arguments {
  NibbleWeight weight;
  RowScale<float> token_scale;  // of int8 tokens
  Experts experts;
  int steps = 0;
  int row_tiles = 0;    // of an expert's weight
  int group_folds = 1;  // of 16-bit tokens
  Bias bias;
  void* y = nullptr;
  std::int64_t y_pitch = 0;
  DType y_type = DType::f32;
  bool y_aligned = false;  // for two elements at a time

  // The group whose scales a fold of a stage takes. It may lie beyond the last one: TMA then writes zeros, so that no
  // stale NaN is multiplied by 0.
  template <class F>
  __device__ int group_of(int step, int fold) const {
    if constexpr (F::exact) return F::folds == kWholeRow ? 0 : step * F::folds + fold;
    return weight.groups == 1 ? 0 : (step * F::folds + fold) / group_folds;
  }
};

// The block's tiles, as a role walks them. Narrow ones take less time and come last, so that blocks end together.
template <class F>
class TileWalk {
 public:
  __device__ TileWalk(const Shared<F>& shared, const Arguments& p)
      : wide_{shared.wide, p.experts.count, p.row_tiles},
        narrow_{shared.narrow, p.experts.count, p.row_tiles},
        at_(static_cast<int>(blockIdx.x)) {}

  // How many the block has. Uniform, as the compiler can see.
  __device__ int count() const {
    const int all = wide_.count() + narrow_.count();
    const int left = all - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1;
    return __shfl_sync(0xffffffff, left / static_cast<int>(gridDim.x), 0);
  }

  __device__ Tile next() {
    const int number = at_;
    at_ += static_cast<int>(gridDim.x);
    if (number < wide_.count()) {
      const int2 place = wide_[number];
      return tile(wide_, place.x, place.y);
    }
    const int2 place = narrow_[number - wide_.count()];
    const int* const wide_tiles = wide_.table.first_tile + narrow_.expert;
    return tile(narrow_, wide_tiles[1] - wide_tiles[0], place.y);
  }

 private:
  __device__ static Tile tile(const ExpertWalk& walk, int part, int across) {
    const int first = walk.first_row() + part * kTokens;
    return {walk.expert, first, min(first + kTokens, walk.end_row()), across * kRows};
  }

  ExpertWalk wide_, narrow_;
  int at_;
};

// ---- The warps that fetch.

template <class F>
struct Fetcher {
  Shared<F>& shared;
  const Maps& maps;
  const Arguments& p;
  TileWalk<F> tiles = TileWalk<F>(shared, p);

  // The last box may include tokens of the next expert.
  __device__ void tokens(const Tile& tile, int step, int stage) const {
    const int boxes = (tile.tokens() + kBoxTokens - 1) / kBoxTokens;
    const std::uint32_t loaded = ptx::shared_address(&shared.loaded[stage]);
    const std::uint32_t to = ptx::shared_address(shared.tokens[stage]);
    ptx::mbarrier_arrive_expect_tx(loaded, static_cast<std::uint32_t>(boxes * kBoxTokens * F::token_bytes));
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      const int first = box * kBoxTokens;
      // Lines of 128 bytes.
#pragma unroll
      for (int part = 0; part < F::token_bytes / 128; ++part) {
        constexpr int kPartTerms = 128 / static_cast<int>(sizeof(typename F::X));
        ptx::tma_load(to + part * kTokens * 128 + first * 128, maps.tokens, step * kTerms + part * kPartTerms,
                      tile.first_token + first, loaded);
      }
    }
  }

  // With scales and zero points.
  __device__ void weight(const Tile& tile, int step, int stage) const {
    const int panel = tile.first_row / static_cast<int>(kPanelChannels);
    const std::uint32_t loaded = ptx::shared_address(&shared.loaded[stage]);
    const std::uint32_t to = ptx::shared_address(shared.weight[stage]);
    ptx::mbarrier_arrive_expect_tx(loaded, F::weight_bytes);
    if constexpr (F::exact) {
      ptx::tma_load(to, maps.weight, int3{step * kTerms * 2, panel, tile.expert}, loaded);
    } else {
      ptx::tma_load(to, maps.weight, int4{0, step * (kTerms / 8), panel, tile.expert}, loaded, ptx::evict_first());
    }
#pragma unroll
    for (int fold = 0; fold < F::scale_groups; ++fold) {
      const int3 at = {p.template group_of<F>(step, fold) * static_cast<int>(kPanelChannels), panel, tile.expert};
      ptx::tma_load(ptx::shared_address(shared.scales[stage][fold]), maps.scales, at, loaded);
      if constexpr (F::zeros) ptx::tma_load(ptx::shared_address(shared.zeros[stage][fold]), maps.zeros, at, loaded);
    }
  }

  // One thread: calls begin(number, tile, step) and fetch(tile, step, stage) for each step of all tiles, as stages
  // become empty.
  template <class Begin, class Fetch>
  __device__ void each(int count, const Begin& begin, const Fetch& fetch) {
    RingPosition<F::stages> at;
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
      const Tile tile = tiles.next();
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step, at.next()) {
        ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
        begin(number, tile, step);
        fetch(tile, step, at.stage);
      }
    }
  }

  __device__ void run(int warp) {
    const int count = tiles.count();
    if (warp == kTokenWarp && ptx::elect_one()) {
      each(
          count,
          [&](int number, const Tile& tile, int step) {
            if (step == 0) shared.tiles[number % kKnownTiles] = tile;
          },
          [&](const Tile& tile, int step, int stage) { tokens(tile, step, stage); });
    }
    if (warp == kWeightWarp && ptx::elect_one()) {
      each(
          count,
          [&](int number, const Tile&, int step) {
            // Requesting more before the first stage has arrived only delays it.
            if (number == 0 && step == kAtOnce) ptx::mbarrier_wait(shared.loaded[0], 0);
          },
          [&](const Tile& tile, int step, int stage) { weight(tile, step, stage); });
    }
  }
};

// ---- The warpgroup that puts tokens in order.

template <class F>
__device__ void order_tokens(Shared<F>& shared, const Arguments& p) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumerThreads;
  const int count = TileWalk<F>(shared, p).count();
  RingPosition<F::stages> at;
#pragma unroll 1
  for (int number = 0; number < count; ++number) {
    float scale = 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step, at.next()) {
      ptx::mbarrier_wait(shared.loaded[at.stage], at.parity);
      const Tile& tile = shared.tiles[number % kKnownTiles];
      if constexpr (F::exact) {
        // Loaded in the first step and stored in the last, which hides the latency.
        if (step == 0 && thread < tile.tokens()) scale = p.token_scale[p.experts.row_of_a(tile.first_token + thread)];
        if (step + 1 == p.steps && thread < kTokens) shared.token_scales[number % kKnownTiles][thread] = scale;
      } else {
        put_in_order<kTokens, kOrderThreads, true>(ptx::shared_address(shared.tokens[at.stage]), thread, tile.tokens());
        ptx::fence_proxy_async();
      }
      ptx::mbarrier_arrive(shared.full[at.stage]);
    }
  }
}

// ---- Consumers. A warp has 16 rows of each of its warpgroup's tiles.

// The first of a lane's two neighbouring rows among the warp's 16, which are rows g and g + 8 of the WGMMA. With 16-bit
// tokens the order of the pairs avoids bank conflicts within half a warp.
template <class F>
__device__ int row_of(int lane) {
  const int g = lane / 4;
  if constexpr (F::exact) return 2 * g;
  return 2 * ((g & 1) | (g & 2) << 1 | (g & 4) >> 1);
}

// Which 16 of the block's rows the warp has in a unit.
__device__ inline int sixteen_of(int unit) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return warp / 4 * kUnits * 4 + unit * 4 + warp % 4;
}

// A lane's nibbles in a tile of the weight, and their conversion to the fragments of WGMMA.
template <class F, bool exact = F::exact>
class Nibbles {
 public:
  using RowOffset = Offset<typename F::X>;
  template <int sets>
  using Words = std::uint32_t[(sets + 1) / 2][2][2];  // of two sets: [set][row], eight columns of each row

  __device__ Nibbles() {
    const unsigned lane = threadIdx.x % 32;
    const unsigned pair = static_cast<unsigned>(row_of<F>(static_cast<int>(lane))) / 2;
    const unsigned line = lane % 4;
    place_ = static_cast<unsigned>(sixteen_of(0)) * 1024 + line * 64 + (pair / 2 ^ line / 2) * 16 + pair % 2 * 8;
  }

  __device__ static RowOffset offset(unsigned u) { return RowOffset(u); }  // u = 8 + z

  // The words of the sets from this one on.
  template <int sets>
  __device__ void read(const std::uint8_t* weight, int unit, int first, Words<sets>& to) const {
    if (first % 2 != 0) return;
    // Lines of 64 bytes with TMA's swizzle of 64 bytes.
    const std::uint32_t at = ptx::shared_address(weight) + place_ + static_cast<unsigned>(unit) * 4096;
#pragma unroll
    for (int i = 0; i < 2 * ((sets + 1) / 2); ++i) {
      const unsigned line = static_cast<unsigned>(first + i) * 4;
      const uint2 two = load_shared_pair((at ^ line / 2 % 4 * 16) + line * 64);
      to[i / 2][i % 2][0] = two.x, to[i / 2][i % 2][1] = two.y;
    }
  }

  template <int sets>
  __device__ void convert(const std::uint8_t*, int, int first, const Words<sets>& words, const RowOffset (&offsets)[2],
                          Fragment (&to)[sets][2]) const {
#pragma unroll
    for (int i = 0; i < sets; ++i) {
      std::uint32_t upper[4];
      std::uint32_t lower[4];
      integers<false>(words[i / 2][(first + i) % 2][0], offsets[0], upper);
      integers<false>(words[i / 2][(first + i) % 2][1], offsets[1], lower);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[i][half][0] = upper[2 * half], to[i][half][1] = lower[2 * half];
        to[i][half][2] = upper[2 * half + 1], to[i][half][3] = lower[2 * half + 1];
      }
    }
  }

 private:
  std::uint32_t place_;
};

template <class F>
class Nibbles<F, true> {
 public:
  using RowOffset = std::uint32_t;  // in all four bytes
  template <int sets>
  struct Words {};

  __device__ static RowOffset offset(unsigned u) { return u * 0x01010101u; }

  template <int sets>
  __device__ void read(const std::uint8_t*, int, int, Words<sets>&) const {}

  template <int sets>
  __device__ void convert(const std::uint8_t* weight, int unit, int first, const Words<sets>&,
                          const RowOffset (&offsets)[2], Fragment (&to)[sets][1]) const {
#pragma unroll
    for (int i = 0; i < sets; ++i) bytes_.convert(first + i, to[i][0], weight + unit * 4096, offsets);
  }

 private:
  NibbleBytes<kRows, true, F::zeros> bytes_ = NibbleBytes<kRows, true, F::zeros>(static_cast<unsigned>(sixteen_of(0)));
};

using Sums = float[kUnits][kTokens / 2];

// A step's part for one unit: some sets, which are converted and multiplied together.
template <class F, int n>
struct Job {
  static constexpr int sets = F::fold_sets == 1 ? 1 : F::exact ? F::fold_sets : n > kFewer ? 2 : F::fold_sets;
  static constexpr int count = kUnits * kSets / sets;  // of a step

  int unit, first;  // set

  __device__ constexpr explicit Job(int number) : unit(number % kUnits), first(number / kUnits * sets) {}
  __device__ constexpr int fold() const { return first / F::fold_sets; }
  __device__ constexpr bool begins_fold() const { return first % F::fold_sets == 0; }
  __device__ constexpr bool ends_fold() const { return (first + sets) % F::fold_sets == 0; }
};

// A tile's sums, of the first `n` tokens. The loop goes from job to job: while the tensor cores work on one, the warp
// scales the products of the job before, and converts the words of the next one. The first stage has been loaded.
template <class F, int n>
__device__ void multiply(Sums& sums, Shared<F>& shared, int steps, RingPosition<F::stages>& at) {
  using X = typename F::X;
  using J = Job<F, n>;
  using Read = Nibbles<F>;
  const Read nibbles;
  const int row = row_of<F>(static_cast<int>(threadIdx.x) % 32);
  Fragment fragments[kUnits][J::sets][F::fragments];
  typename Read::template Words<J::sets> words[kUnits];
  typename Read::RowOffset offsets[kUnits][2];
  typename F::Product products[kUnits][n / 2];
  float scales[kUnits][2];
#pragma unroll
  for (auto& of_unit : offsets) of_unit[0] = of_unit[1] = Read::offset(8);
#pragma unroll
  for (auto& of_unit : sums) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) of_unit[i] = 0;
  }

  const auto read = [&](const J& job) {
    nibbles.template read<J::sets>(shared.weight[at.stage], job.unit, job.first, words[job.unit]);
    if constexpr (F::zeros) {
      if (!job.begins_fold()) return;
      const std::uint8_t* const zeros = &shared.zeros[at.stage][job.fold()][sixteen_of(job.unit)][row];
      const unsigned two = *reinterpret_cast<const std::uint16_t*>(zeros);
      offsets[job.unit][0] = Read::offset(two & 255);
      offsets[job.unit][1] = Read::offset(two >> 8);
    }
  };
  const auto convert = [&](const J& job) {
    nibbles.template convert<J::sets>(shared.weight[at.stage], job.unit, job.first, words[job.unit], offsets[job.unit],
                                      fragments[job.unit]);
  };
  const auto issue = [&](const J& job, std::uint32_t tokens, bool first_step) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < J::sets; ++i) {
      const int set = job.first + i;
      if constexpr (F::exact) {
        const bool more = set % F::fold_sets > 0 || (F::folds == kWholeRow && !first_step);
        wgmma_s8(products[job.unit], fragments[job.unit][i][0], tokens + 2 * set, more);
      } else {
        const std::uint32_t of_set = tokens + set / 2 * (kTokens * 8) + set % 2 * 4;
        wgmma_f32<X>(products[job.unit], fragments[job.unit][i][0], of_set, set % F::fold_sets > 0);
        wgmma_f32<X>(products[job.unit], fragments[job.unit][i][1], of_set + 2, true);
      }
    }
    ptx::wgmma_commit();
  };
  const auto read_scales = [&](int unit, int stage, int fold) {
    const float2 two = *reinterpret_cast<const float2*>(&shared.scales[stage][fold][sixteen_of(unit)][row]);
    scales[unit][0] = two.x, scales[unit][1] = two.y;
  };
  // Its WGMMAs have completed. Without zero points sums of int8 tokens are 16 times too large.
  const auto fold = [&](int unit) {
    auto& of_unit = products[unit];
    wgmma_fence_operand(of_unit);
    const auto add = [&](const float(&scale)[2], const auto& product) {
#pragma unroll
      for (int i = 0; i < n / 2; ++i) sums[unit][i] = __fmaf_rn(product(of_unit[i]), scale[i / 2 % 2], sums[unit][i]);
    };
    if constexpr (!F::exact) {
      add(scales[unit], [](float x) { return x; });
    } else if constexpr (F::zeros) {
      add(scales[unit], [](int x) { return __int2float_rn(x); });
    } else if (fminf(fabsf(scales[unit][0]), fabsf(scales[unit][1])) >= 0x1p-122f) {
      // A sixteenth of the scale is exact, so that the products are the same numbers.
      const float scale[2] = {scales[unit][0] * 0x1p-4f, scales[unit][1] * 0x1p-4f};
      add(scale, [](int x) { return __int2float_rn(x); });
    } else {
      add(scales[unit], [](int x) { return __int2float_rn(x >> 4); });
    }
  };

  read(J(0));
  convert(J(0));
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = at.stage;
    const bool last = step + 1 == steps;
    ptx::mbarrier_wait(shared.full[stage], at.parity);
    const std::uint32_t tokens = smem_descriptor_in_cluster<false>(ptx::shared_address(shared.tokens[stage]));
#pragma unroll
    for (int number = 0; number < J::count; ++number) {
      const J job(number);
      const J next((number + 1) % J::count);
      const bool more = number + 1 < J::count;
      issue(job, tokens, step == 0);
      if (F::folds != kWholeRow && job.ends_fold()) read_scales(job.unit, stage, job.fold());
      if (!more) {
        if (F::folds == kWholeRow && last) {
#pragma unroll
          for (int unit = 0; unit < kUnits; ++unit) read_scales(unit, stage, 0);
        }
        at.next();
        if (!last) ptx::mbarrier_wait(shared.loaded[at.stage], at.parity);
      }
      if (more || !last) read(next);
      if (number > 0) {
        ptx::wgmma_wait<1>();
        const J before(number - 1);
        if (F::folds != kWholeRow && before.ends_fold()) fold(before.unit);
      }
      if (more || !last) convert(next);
    }
    ptx::wgmma_wait<0>();
    if (F::folds != kWholeRow) fold(kUnits - 1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.empty[stage]);
  }
  if constexpr (F::folds == kWholeRow) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) fold(unit);
  }
}

template <class F>
struct Consumer {
  Shared<F>& shared;
  const Arguments& p;

  // A lane has two neighbouring rows of the weight in each unit, and two tokens of every eight.
  template <class Y, bool whole>
  __device__ void store(const Sums& sums, int number, const Tile& tile) const {
    constexpr float kNoBias = F::exact ? -0.0f : 0.0f;  // -0 changes no sum, its sign included
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int token = lane % 4 * 2;
    Bias bias = p.bias;
    if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + tile.expert * p.experts.bias;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int row = tile.first_row + sixteen_of(unit) * 16 + row_of<F>(lane);
      const int rows_inside = p.weight.rows - row;
      const float of_row[2] = {bias.at(row, p.weight.rows, kNoBias), bias.at(row + 1, p.weight.rows, kNoBias)};
      Y* const to = static_cast<Y*>(p.y) + (tile.first_token + token) * p.y_pitch + row;
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int place = token + 8 * i + e;
          const float two[2] = {sums[unit][4 * i + e], sums[unit][4 * i + 2 + e]};
          Y values[2];
          if constexpr (F::exact) {
            const float scale = shared.token_scales[number % kKnownTiles][place];
            values[0] = narrow<Y>(__fmaf_rn(two[0], scale, of_row[0]));
            values[1] = narrow<Y>(__fmaf_rn(two[1], scale, of_row[1]));
          } else {
            values[0] = narrow<Y>(two[0] + of_row[0]);
            values[1] = narrow<Y>(two[1] + of_row[1]);
          }
          put_pair<Y, whole>(to + (8 * i + e) * p.y_pitch, values, place < tile.tokens() ? rows_inside : 0);
        }
      }
    }
  }

  template <class Y>
  __device__ void store(const Sums& sums, int number, const Tile& tile) const {
    if (p.y_aligned && tile.first_row + kRows <= p.weight.rows) return store<Y, true>(sums, number, tile);
    store<Y, false>(sums, number, tile);
  }

  __device__ void run() const {
    const int count = TileWalk<F>(shared, p).count();
    RingPosition<F::stages> at;
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
      ptx::mbarrier_wait(shared.loaded[at.stage], at.parity);
      const Tile& tile = shared.tiles[number % kKnownTiles];
      Sums sums;
      if (tile.tokens() <= kFewer) {
        multiply<F, kFewer>(sums, shared, p.steps, at);
      } else {
        multiply<F, kTokens>(sums, shared, p.steps, at);
      }
      if (p.y_type == DType::f32) {
        store<float>(sums, number, tile);
      } else if constexpr (!F::exact) {
        store<typename F::X>(sums, number, tile);
      } else if (p.y_type == DType::f16) {
        store<__half>(sums, number, tile);
      } else {
        store<__nv_bfloat16>(sums, number, tile);
      }
      __syncwarp();
    }
  }
};

template <class F>
__global__ void __launch_bounds__(kThreads, 1)
    experts_skinny_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = uniform_warp();
  if (threadIdx.x == kTokenWarp * 32) {
    ptx::prefetch_tensormap(maps.tokens);
    ptx::prefetch_tensormap(maps.weight);
    ptx::prefetch_tensormap(maps.scales);
    if (F::zeros) ptx::prefetch_tensormap(maps.zeros);
    init_barriers(shared.loaded, 2);
    init_barriers(shared.full, kOrderThreads);
    init_barriers(shared.empty, kConsumerThreads / 32);
    ptx::fence_mbarrier_init();
  }
  wait_for_previous();
  let_next_start();
  fill_tables(shared, p.experts);
  if (warp < kOrderWarp) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Consumer<F>{shared, p}.run();
  } else if (warp < kTokenWarp) {
    ptx::setmaxnreg_dec<kOrderRegisters>();
    order_tokens(shared, p);
  } else {
    ptx::setmaxnreg_dec<kFetchRegisters>();
    Fetcher<F>{shared, maps, p}.run(warp);
  }
}

}  // namespace octile::cuda::experts_skinny
