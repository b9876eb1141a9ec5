// w4a16_gemm_skinny_sm90, the kernel and its consumers: y^T = weight * tokens^T by WGMMA.
//
// A block has 256 rows of the weight, or 128 where there are more than 64 tokens, all tokens, and a part of K; the
// blocks of a cluster split K. In a block
//   - the producer warpgroup fills two rings by TMA, one with the tokens and one with 128 columns of the weight per
//     stage, and up to 64 tokens are permuted to match the nibble unpacking order
//     (w4a16_gemm_skinny_sm90_producer.cuh);
//   - two consumer warpgroups have two units of sums each, two tiles of 64 rows or one with two halves of the tokens:
//     nibbles become exact 16-bit integers q - z in registers, from where WGMMA takes them. The products of a group are
//     scaled in f32 and added to the sums.
// At the end the blocks of a cluster exchange their sums, and each adds up some of them, in the order of K.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/grid.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/w4a16_gemm_skinny_sm90_producer.cuh"
#include "cuda/gemm/w4a16_gemm_sm90_convert.cuh"

namespace octile::cuda {

namespace w4a16_skinny {

// ---- Consumers. A warp has 16 rows of each of its warpgroup's tiles.

// Which of 16 rows a lane has as rows g and g + 8 of the WGMMA. Packed: neighbours, in an order without bank conflicts
// within half a warp.
template <bool packed>
__device__ int2 rows_of(int lane) {
  const int g = lane / 4;
  if constexpr (!packed) return {g, g + 8};
  const int pair = (g & 1) | (g & 2) << 1 | (g & 4) >> 1;
  return {2 * pair, 2 * pair + 1};
}

// Which 16 of the block's rows the warp has in its first tile; in the next tile, the fourth 16 after that.
template <class F>
__device__ int first_sixteen() {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return warp / 4 * F::row_tiles * 4 + warp % 4;
}

// A lane's words, scales and zero points in a stage, and its fragments from them.
template <class F>
struct Reader {
  using T = typename F::T;
  using RowOffset = std::conditional_t<F::in_order, std::uint32_t, Offset<T>>;
  // Of a tile: in order, the words of 32 columns; else those of two sets, [set][row], eight columns of each row.
  using Words = std::uint32_t[F::in_order ? 4 : 2][2];

  std::uint32_t place;
  std::uint32_t row;         // the first of its rows, in elements of a step's scales
  std::uint32_t next_tile;   // elements from one tile to the next
  std::uint32_t half_folds;  // 1 where two folds share a group
  struct Nothing {};
  std::conditional_t<F::in_order, PairOfWord<T, true>, Nothing> pair_of_word;

  __device__ explicit Reader(const SkinnyArguments& p) {
    const unsigned lane = threadIdx.x % 32;
    const auto sixteen = static_cast<unsigned>(first_sixteen<F>());
    const auto groups = static_cast<unsigned>(F::folds == 1 ? 1 : p.step_groups);
    const auto of_sixteen = static_cast<unsigned>(rows_of<F::packed>(static_cast<int>(lane)).x);
    row = sixteen * groups * 16 + of_sixteen;
    next_tile = 4 * groups * 16;
    half_folds = static_cast<unsigned>(p.group_folds - 1);
    if constexpr (F::packed) {
      const unsigned pair = of_sixteen / 2;
      const unsigned line = F::in_order ? 0 : lane % 4;
      place = sixteen * 1024 + line * 64 + (pair / 2 ^ line / 2) * 16 + pair % 2 * 8;
    } else {
      const unsigned line = lane % 16;
      place = (sixteen * 16 + line) * 64 + (lane / 16 ^ line / 2 % 4) * 16;
    }
  }

  // For the sets from this one on.
  __device__ void read_words(std::uint32_t stage, int tile, int set, Words& to) const {
    const std::uint32_t at = stage + place + tile * 4096;
    if constexpr (F::packed) {
      // Lines of 64 bytes with TMA's swizzle of 64 bytes.
#pragma unroll
      for (unsigned i = 0; i < std::extent_v<Words>; ++i) {
        const unsigned line = F::in_order ? set * 4 + i : (set + i) * 4;
        const uint2 two = load_shared_pair((at ^ line / 2 % 4 * 16) + line * 64);
        to[i][0] = two.x, to[i][1] = two.y;
      }
    } else {
      load_matrices(at ^ set * 16, reinterpret_cast<std::uint32_t(&)[4]>(to));
    }
  }

  // Of the first of its rows.
  __device__ unsigned scale_of(int tile, int fold) const {
    return row + tile * next_tile + (F::folds == 1 ? 0 : (static_cast<unsigned>(fold) >> half_folds) * 16);
  }

  __device__ void read_scales(const Shared<F>& shared, int stage, int tile, int fold, float (&to)[2]) const {
    const float* const at = shared.scales[stage] + scale_of(tile, fold);
    if constexpr (F::packed) {
      const float2 two = *reinterpret_cast<const float2*>(at);
      to[0] = two.x, to[1] = two.y;
    } else {
      to[0] = at[0], to[1] = at[8];
    }
  }

  // u = 8 + z
  __device__ static RowOffset offset(unsigned u) {
    if constexpr (F::in_order) return offset_of<T, true>(u);
    if constexpr (!F::in_order) return RowOffset(u);
  }

  __device__ void read_offsets(const Shared<F>& shared, int stage, int tile, int fold, RowOffset (&to)[2]) const {
    if constexpr (F::zeros) {
      const auto* const at = shared.zeros[stage] + scale_of(tile, fold);
      if constexpr (F::packed) {
        const unsigned two = *reinterpret_cast<const std::uint16_t*>(at);
        to[0] = offset(two & 255);
        to[1] = offset(two >> 8);
      } else {
        to[0] = offset(static_cast<unsigned>(8 + at[0]));
        to[1] = offset(static_cast<unsigned>(8 + at[8]));
      }
    }
  }

  // The 32 columns of a set.
  __device__ void convert(const Words& words, int set, const RowOffset (&offset)[2], Fragment (&to)[2]) const {
    if constexpr (F::in_order) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        to[i / 4][i % 4] = as_bits(pair_of_word.integers(words[i / 2][i % 2], offset[i % 2]));
      }
    } else {
      std::uint32_t upper[4];
      std::uint32_t lower[4];
      integers<!F::packed>(words[set % 2][0], offset[0], upper);
      integers<!F::packed>(words[set % 2][1], offset[1], lower);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[i][0] = upper[2 * i], to[i][1] = lower[2 * i];
        to[i][2] = upper[2 * i + 1], to[i][3] = lower[2 * i + 1];
      }
    }
  }
};

// Of consumers, in the rings: the words being converted, and the tokens.
template <class F>
struct RingPositions {
  RingPosition<F::weight_stages> weight;
  RingPosition<F::token_stages> tokens;
};

// The main loop. The units alternate: while the tensor cores work on one, the products of the other are scaled, and the
// next set of a tile is converted. read_all() is called once the last words have been read. `position` goes from the
// first step to the last one, whose stages are not released.
template <class F, class ReadAll>
__device__ void multiply(float (&sums)[kUnits][F::unit_tokens / 2], Shared<F>& shared, const SkinnyArguments& p,
                         int steps, RingPositions<F>& position, const ReadAll& read_all) {
  using T = typename F::T;
  constexpr int kFoldSets = F::sets / F::folds;
  const Reader<F> reader(p);
  auto& at = position.weight;
  auto& token_at = position.tokens;
  Fragment fragments[2][F::row_tiles][2];
  typename Reader<F>::Words words[F::row_tiles];
  typename Reader<F>::RowOffset offsets[F::row_tiles][2];
#pragma unroll
  for (auto& of_tile : offsets) of_tile[0] = of_tile[1] = Reader<F>::offset(8);
  float products[kUnits][F::unit_tokens / 2];

  const auto wait_for_weight = [&] { ptx::mbarrier_wait(shared.weight_full[at.stage], at.parity); };
  // For the tile of a unit, once its last unit has begun with the set before.
  const auto convert_set = [&](int set, int unit) {
    if (unit % F::token_parts != F::token_parts - 1) return;
    const int tile = unit / F::token_parts;
    if (F::in_order || set % 2 == 0) {
      reader.read_words(ptx::shared_address(shared.weight[at.stage]), tile, set, words[tile]);
    }
    if (set % kFoldSets == 0) reader.read_offsets(shared, at.stage, tile, set / kFoldSets, offsets[tile]);
    reader.convert(words[tile], set, offsets[tile], fragments[set % 2][tile]);
  };
  const auto issue = [&](int set, int unit, std::uint32_t tokens) {
    constexpr int kNextTokens = F::unit_tokens * 128 / 16;
    const std::uint32_t of_set = tokens + set / 2 * (F::tokens * 8) + set % 2 * 4 + unit % F::token_parts * kNextTokens;
    const Fragment(&fragment)[2] = fragments[set % 2][unit / F::token_parts];
    ptx::wgmma_fence();
    wgmma_f32<T>(products[unit], fragment[0], of_set, set % kFoldSets > 0);
    wgmma_f32<T>(products[unit], fragment[1], of_set + 2, true);
    ptx::wgmma_commit();
  };
  const auto fold = [&](int unit, const float(&scale)[2]) {
    wgmma_fence_operand(products[unit]);
#pragma unroll
    for (int i = 0; i < F::unit_tokens / 2; ++i) {
      sums[unit][i] = __fmaf_rn(products[unit][i], scale[i / 2 % 2], sums[unit][i]);
    }
    wgmma_fence_operand(sums[unit]);
  };
  const auto take_tokens = [&](int step) {
    ptx::mbarrier_wait(shared.tokens_full[token_at.stage], token_at.parity);
    return smem_descriptor_in_cluster<false>(ptx::shared_address(shared.tokens[token_at.stage]));
  };
  // From the second set of a step, whose first is being multiplied, to the first of the next.
  const auto do_step = [&]<bool last>(int step, std::uint32_t& tokens) {
    const int stage = at.stage;
    int token_before = 0;
    float scales[F::row_tiles][2];
#pragma unroll
    for (int i = 1; i <= F::sets; ++i) {
      if (i == F::sets && !last) {
        token_before = token_at.stage;
        token_at.next();
        tokens = take_tokens(step + 1);
      }
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        if (i % kFoldSets == 0) {
          const int tile = unit / F::token_parts;
          if (unit % F::token_parts == 0) reader.read_scales(shared, stage, tile, i / kFoldSets - 1, scales[tile]);
          // The other unit's WGMMAs stay in flight; but ptxas cannot see that those of the iteration before are over.
          if ((last && i == F::sets && unit == kUnits - 1) || i + unit == 1) {
            ptx::wgmma_wait<0>();
          } else {
            ptx::wgmma_wait<kUnits - 1>();
          }
          fold(unit, scales[tile]);
        }
        if (i == F::sets && last) continue;
        issue(i % F::sets, unit, tokens);
        ptx::wgmma_wait<kUnits>();  // this unit's previous set
        if (i + 1 < F::sets || !last) convert_set((i + 1) % F::sets, unit);
      }
      if (i + 2 != F::sets) continue;
      if (!last) {
        at.next();
        wait_for_weight();
      } else {
        read_all();
      }
    }
    // All its WGMMAs have completed.
    __syncwarp();
    if (!last && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.tokens_empty[token_before]);
  };
  wait_for_weight();
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    convert_set(0, unit);
#pragma unroll
    for (int i = 0; i < F::unit_tokens / 2; ++i) sums[unit][i] = 0;
  }
  std::uint32_t tokens = take_tokens(0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    issue(0, unit, tokens);
    convert_set(1, unit);
  }
#pragma unroll 1
  for (int step = 0; step + 1 < steps; ++step) do_step.template operator()<false>(step, tokens);
  do_step.template operator()<true>(steps - 1, tokens);
}

// Split-K: a consumer's sums in chunks of eight tokens of a tile; each block of the cluster reduces its share of them.
// It receives them from all blocks, itself included, in place of the weight: [block][chunk][thread].
template <class F>
struct Exchange {
  static constexpr int kTileChunks = F::tokens / 8;
  static constexpr int kChunks = F::row_tiles * kTileChunks;
  static constexpr int kAtOnce = std::min(4, kTileChunks);
  static constexpr unsigned kChunkBytes = kConsumerThreads * 16;

  const SkinnyArguments& p;
  const Place<F>& place;
  const int own = chunks_of_part(p.parts);

  __host__ __device__ static constexpr int chunks_of_part(int parts) { return (kChunks + parts - 1) / parts; }
  static constexpr bool has_room(int parts) {
    return parts * chunks_of_part(parts) * kChunkBytes <= sizeof(Shared<F>::weight);
  }

  __device__ void send(const float (&sums)[kUnits][F::unit_tokens / 2], Shared<F>& shared) const {
    const std::uint32_t here = ptx::shared_address(shared.weight) + place.part * own * kChunkBytes + threadIdx.x * 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float* const from = &sums[chunk / (F::unit_tokens / 8)][chunk % (F::unit_tokens / 8) * 4];
      const int to = chunk / own;
      const std::uint32_t at = here + chunk % own * kChunkBytes;
      if (to == place.part) {
        store_shared(at, {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                          __float_as_uint(from[3])});
      } else {
        ptx::store_cluster(ptx::mapa(at, static_cast<std::uint32_t>(to)), from);
      }
    }
  }

  // Adds the sums of all blocks, in order, and the bias, and stores y. whole: all rows exist, and two can be stored at
  // a time.
  template <class Y, bool whole>
  __device__ void finish_as(const Shared<F>& shared) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t from = ptx::shared_address(shared.weight) + threadIdx.x * 16;
    // Rows g and g + 8: lanes swap with their neighbours, so that each has two adjacent rows.
    const bool odd = lane / 4 % 2 != 0;
    const int2 rows = rows_of<F::packed>(lane);
    const int row = F::packed || !odd ? rows.x : rows.y - 1;
    const int end_chunk = min(own, kChunks - place.part * own);
#pragma unroll 1
    for (int first = 0, count; first < end_chunk; first += count) {
      const int chunk = place.part * own + first;
      const int of_tile = chunk % kTileChunks;
      count = min(kAtOnce, min(end_chunk - first, kTileChunks - of_tile));
      float y[kAtOnce][4] = {};
#pragma unroll 1
      for (int block = 0; block < p.parts; ++block) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // May read a chunk that is another's, which is not used.
          const uint4 more = load_shared(from + (block * own + first + i) * kChunkBytes);
          y[i][0] += __uint_as_float(more.x), y[i][1] += __uint_as_float(more.y);
          y[i][2] += __uint_as_float(more.z), y[i][3] += __uint_as_float(more.w);
        }
      }
      const int sixteen = (first_sixteen<F>() + chunk / kTileChunks * 4) * 16;
      const float bias[2] = {shared.biases[sixteen + rows.x], shared.biases[sixteen + rows.y]};
      const int token = of_tile * 8 + lane % 4 * 2;
      const int end = min(p.tokens, (of_tile + count) * 8);
      const int rows_inside = p.weight.rows - place.first_row - sixteen - row;
      Y* to = static_cast<Y*>(p.y) + token * p.y_pitch + (place.first_row + sixteen + row);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float two[2] = {y[i][e] + bias[0], y[i][2 + e] + bias[1]};
          if constexpr (!F::packed) {
            const float others = __shfl_xor_sync(0xffffffff, odd ? two[0] : two[1], 4);
            two[0] = odd ? others : two[0];
            two[1] = odd ? two[1] : others;
          }
          const Y values[2] = {narrow<Y>(two[0]), narrow<Y>(two[1])};
          Y* const there = to + (8 * i + e) * p.y_pitch;
          const bool inside = token + 8 * i + e < end;
          put_pair<Y, whole>(there, values, inside ? rows_inside : 0);
        }
      }
    }
  }

  __device__ void finish(const Shared<F>& shared) const {
    const bool whole = p.y_aligned && place.first_row + F::rows <= p.weight.rows;
    if (p.y_type != DType::f32) {
      if (whole) return finish_as<typename F::T, true>(shared);
      return finish_as<typename F::T, false>(shared);
    }
    if (whole) return finish_as<float, true>(shared);
    finish_as<float, false>(shared);
  }
};

template <class F>
__global__ void __launch_bounds__(kThreads, 1)
    w4a16_gemm_skinny_kernel(const __grid_constant__ SkinnyMaps maps, const __grid_constant__ SkinnyArguments p) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<F>*>(shared_bytes);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);  // uniform, as the compiler can see
  const Place<F> place(p);
  let_next_start();
  if (threadIdx.x == kConsumerThreads) {
    ptx::prefetch_tensormap(maps.tokens);
    ptx::prefetch_tensormap(maps.weight);
    if (F::packed) ptx::prefetch_tensormap(maps.scales);
    if (F::packed && F::zeros) ptx::prefetch_tensormap(maps.zeros);
    init(shared);
  }
  wait_for_previous();
  const Producer<F> producer{p, place};
  if (warp == kConsumerThreads / 32) {
    producer.begin(shared, maps);
    __syncwarp();
  } else {
    prefetch_first(p, place);
  }
  __syncthreads();
  const Exchange<F> exchange{p, place};
  if (warp < kConsumerThreads / 32) {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    float sums[kUnits][F::unit_tokens / 2];
    RingPositions<F> position;
    multiply<F>(sums, shared, p, place.steps, position, [&] { ptx::cluster_arrive_relaxed(); });
    ptx::cluster_wait();  // the other blocks have read their weight, which the sums replace
    exchange.send(sums, shared);
    ptx::cluster_arrive_release();
    ptx::cluster_wait();  // all sums have arrived
    exchange.finish(shared);
  } else {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    producer.run(shared, maps);
    __syncwarp();
    ptx::cluster_sync_relaxed();
    ptx::cluster_sync_relaxed();
  }
}

}  // namespace w4a16_skinny

}  // namespace octile::cuda
