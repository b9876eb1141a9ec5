// Of the product of a 4-bit weight with few tokens (skinny_nibbles.cuh): nibbles from shared memory by tokens on the
// matrix unit, and the sums to y.
#pragma once

#include <cstdint>

#include "cuda/device/floats.cuh"
#include "cuda/device/narrow_products.cuh"
#include "cuda/device/skinny_nibble_fetch.cuh"

namespace octile::cuda {

namespace skinny_nibbles {

// ---- Products: a warp, which has 16 rows of each of its warpgroup's two tiles.

constexpr int kTiles = 2;

// Of 16 rows, those of a lane, as rows g and g + 8 of the product. Packed: neighbours, and in such an order that half a
// warp meets no bank twice.
template <bool packed>
__device__ int2 rows_of(int lane) {
  const int g = lane / 4;
  if constexpr (!packed) return {g, g + 8};
  const int pair = (g & 1) | (g & 2) << 1 | (g & 4) >> 1;
  return {2 * pair, 2 * pair + 1};
}

// Of the block's sixteens of rows, the warp's one in its first tile; that of the second is the fourth after it.
__device__ inline int first_sixteen() {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return warp / 4 * 8 + warp % 4;
}

// Where a lane's words, scales and zero points lie in a stage.
template <class F>
struct Reader {
  std::uint32_t words;
  std::uint32_t row;  // the first of its rows, in elements of scales

  __device__ Reader() {
    const unsigned lane = threadIdx.x % 32;
    const auto sixteen = static_cast<unsigned>(first_sixteen());
    row = sixteen * F::folds * 16 + static_cast<unsigned>(rows_of<F::packed>(static_cast<int>(lane)).x);
    if constexpr (F::packed) {
      const unsigned pair = row % 16 / 2;
      const unsigned line = lane % 4;
      words = sixteen * 1024 + line * 64 + (pair / 2 ^ line / 2) * 16 + pair % 2 * 8;
    } else {
      const unsigned line = lane % 16;
      words = (sixteen * 16 + line) * 64 + (lane / 16 ^ line / 2 % 4) * 16;
    }
  }

  // A step's words of a tile, [set][row]: eight terms of each row, a set after the other.
  __device__ void read_words(std::uint32_t stage, int tile, std::uint32_t (&to)[F::sets][2]) const {
    const std::uint32_t at = stage + words + tile * 4096;
    if constexpr (F::packed) {
#pragma unroll
      for (unsigned set = 0; set < F::sets; ++set) {
        // Lines of 64 bytes, whose sixteens the engine exchanges by the number of the pair of lines.
        const uint2 two = load_shared_pair((at ^ set % 2 * 32) + set * 256);
        to[set][0] = two.x, to[set][1] = two.y;
      }
    } else {
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[2 * half][0]), "=r"(to[2 * half][1]), "=r"(to[2 * half + 1][0]),
                       "=r"(to[2 * half + 1][1])
                     : "r"(at ^ half * 32)
                     : "memory");
      }
    }
  }

  __device__ void read_scales(const Shared<F>& shared, int stage, int tile, int fold, float (&to)[2]) const {
    const float* const at = &shared.scales[stage][0][0][0] + row + (tile * 4 * F::folds + fold) * 16;
    if constexpr (F::packed) {
      const float2 two = *reinterpret_cast<const float2*>(at);
      to[0] = two.x, to[1] = two.y;
    } else {
      to[0] = at[0], to[1] = at[8];
    }
  }

  __device__ void read_offsets(const Shared<F>& shared, int stage, int tile, int fold,
                               Offset<typename F::T> (&to)[2]) const {
    if constexpr (F::zeros) {
      const auto* const at = &shared.zeros[stage][0][0][0] + row + (tile * 4 * F::folds + fold) * 16;
      if constexpr (F::packed) {
        const unsigned two = *reinterpret_cast<const std::uint16_t*>(at);
        to[0] = Offset<typename F::T>(two & 255);
        to[1] = Offset<typename F::T>(two >> 8);
      } else {
        to[0] = Offset<typename F::T>(static_cast<unsigned>(8 + at[0]));
        to[1] = Offset<typename F::T>(static_cast<unsigned>(8 + at[8]));
      }
    }
  }
};

template <class F>
__device__ void convert(const std::uint32_t (&words)[2], const Offset<typename F::T> (&offset)[2], Fragment (&to)[2]) {
  std::uint32_t upper[4];
  std::uint32_t lower[4];
  integers<!F::packed>(words[0], offset[0], upper);
  integers<!F::packed>(words[1], offset[1], lower);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[i][0] = upper[2 * i], to[i][1] = lower[2 * i];
    to[i][2] = upper[2 * i + 1], to[i][3] = lower[2 * i + 1];
  }
}

// sums: of the tiles. A set is converted while the products of the one before are done.
template <class F>
__device__ void multiply(float (&sums)[kTiles][F::tokens / 2], Shared<F>& shared, const Place<F>& place) {
  using T = typename F::T;
  constexpr int kFoldSets = F::sets / F::folds;
  const Reader<F> reader;
  RingPosition<F::weight_stages> at;  // of what is converted
  RingPosition<F::token_stages> token_at;
  Fragment fragments[2][kTiles][2];
  std::uint32_t words[kTiles][F::sets][2];
  Offset<T> offsets[kTiles][2];
  float products[kTiles][F::tokens / 2];

  const auto take_words = [&] {
    ptx::wait(ptx::shared_address(&shared.weight_full[at.stage]), at.parity);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      reader.read_words(ptx::shared_address(shared.weight[at.stage]), tile, words[tile]);
    }
  };
  const auto convert_set = [&](int set) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (set % kFoldSets == 0) reader.read_offsets(shared, at.stage, tile, set / kFoldSets, offsets[tile]);
      convert<F>(words[tile][set], offsets[tile], fragments[set % 2][tile]);
    }
  };
  take_words();
  convert_set(0);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < F::tokens / 2; ++i) sums[tile][i] = 0;
  }
#pragma unroll 1
  for (int step = 0; step < place.steps; ++step) {
    ptx::wait(ptx::shared_address(&shared.tokens_full[token_at.stage]), token_at.parity);
    const std::uint32_t tokens = operand_descriptor<false>(ptx::shared_address(shared.tokens[token_at.stage]));
    const int stage = at.stage;
#pragma unroll
    for (int set = 0; set < F::sets; ++set) {
      ptx::begin_products();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto& own = fragments[set % 2][tile];
        multiply_16<T>(products[tile], own[0], tokens + 2 * set, set % kFoldSets > 0);
        multiply_16<T>(products[tile], own[1], tokens + F::tokens * 8 + 2 * set, true);
        ptx::commit_products();
      }
      ptx::wait_products<kTiles>();
      if (set + 1 < F::sets) {
        convert_set(set + 1);
      } else if (step + 1 < place.steps) {
        convert_set(0);
      }
      if (set + 2 == F::sets && step + 1 < place.steps) {
        at.next();
        take_words();
      }
      if ((set + 1) % kFoldSets > 0) continue;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float scale[2];
        reader.read_scales(shared, stage, tile, set / kFoldSets, scale);
        if (tile + 1 < kTiles) {
          ptx::wait_products<1>();
        } else {
          ptx::wait_products<0>();
        }
        hold(products[tile]);
#pragma unroll
        for (int i = 0; i < F::tokens / 2; ++i) {
          sums[tile][i] = __fmaf_rn(products[tile][i], scale[i / 2 % 2], sums[tile][i]);
        }
        hold(sums[tile]);  // while the other tile's products are still done
      }
    }
    __syncwarp();  // all lanes have read their scales
    if (threadIdx.x % 32 == 0) ptx::arrive(ptx::shared_address(&shared.tokens_empty[token_at.stage]));
    token_at.next();
  }
}

// ---- From sums to y.

__device__ inline float bias_of(const SkinnyNibbles& p, int row) {
  if (p.bias == nullptr || row >= p.weight.rows) return 0;
  const std::int64_t at = row * p.bias_stride;
  if (p.y_type == DType::f32) return __ldcg(static_cast<const float*>(p.bias) + at);
  if (p.y_type == DType::f16) return widen(__ldcg(static_cast<const __half*>(p.bias) + at));
  return widen(__ldcg(static_cast<const __nv_bfloat16*>(p.bias) + at));
}

template <class Y>
__device__ void store_four_as(Y* to, const float (&y)[4], int count, bool aligned) {
  Y values[4] = {narrow<Y>(y[0]), narrow<Y>(y[1]), narrow<Y>(y[2]), narrow<Y>(y[3])};
  if (aligned && count >= 4) {
    if constexpr (sizeof(Y) == 4) {
      *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
    } else {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(values);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < count) to[e] = values[e];
  }
}

// The sums of a lane to shared memory, tokens by rows; the pitch keeps lanes in their own banks.
template <class F>
__device__ void keep_sums(const float (&sums)[F::tokens / 2], int sixteen, float* kept) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int2 rows = rows_of<F::packed>(lane);
  float* const to = kept + lane % 4 * 2 * F::sum_pitch + sixteen * 16 + rows.x;
#pragma unroll
  for (int i = 0; i < F::tokens / 2; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float* const token = to + (2 * i + e) * F::sum_pitch;
      if constexpr (F::packed) {
        *reinterpret_cast<float2*>(token) = {sums[i + e], sums[i + 2 + e]};
      } else {
        token[0] = sums[i + e];
        token[8] = sums[i + 2 + e];
      }
    }
  }
}

// Every `parts`-th token, of all blocks of the cluster; a thread has four neighbours in a row of y, of several tokens
// at a time.
template <class F>
__device__ void finish(const SkinnyNibbles& p, const Place<F>& place, const float* kept, const float* biases) {
  constexpr int kFours = F::rows / 4;
  constexpr int kTokens = F::tokens > 32 ? 6 : 3;
  const int four = static_cast<int>(threadIdx.x) % kFours * 4;
  const int row = place.first_row + four;
  const int count = p.weight.rows - row;
  if (count <= 0) return;
  const float4 bias = *reinterpret_cast<const float4*>(biases + four);
  const int between = kThreads / kFours * p.parts;
  const std::uint32_t from = ptx::shared_address(kept + four);
#pragma unroll 1
  for (int token = static_cast<int>(threadIdx.x) / kFours * p.parts + place.part; token < p.tokens;
       token += between * kTokens) {
    float y[kTokens][4] = {};
#pragma unroll 1
    for (int part = 0; part < p.parts; ++part) {
      const std::uint32_t there = ptx::in_block(from, static_cast<std::uint32_t>(part));
      float more[kTokens][4] = {};
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (token + i * between >= p.tokens) continue;
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(more[i][0]), "=f"(more[i][1]), "=f"(more[i][2]), "=f"(more[i][3])
                     : "r"(there + (token + i * between) * F::sum_pitch * 4)
                     : "memory");
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) y[i][e] += more[i][e];
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (token + i * between >= p.tokens) continue;
      const float with_bias[4] = {y[i][0] + bias.x, y[i][1] + bias.y, y[i][2] + bias.z, y[i][3] + bias.w};
      const std::int64_t at = static_cast<std::int64_t>(token + i * between) * p.y_pitch + row;
      if (p.y_type == DType::f32) {
        store_four_as(static_cast<float*>(p.y) + at, with_bias, count, p.y_aligned);
      } else {
        store_four_as(static_cast<typename F::T*>(p.y) + at, with_bias, count, p.y_aligned);
      }
    }
  }
}

}  // namespace skinny_nibbles

}  // namespace octile::cuda
