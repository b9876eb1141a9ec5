// 16-bit tokens in shared memory, put into the order in which 4-bit weights leave their words.
#pragma once

#include <cstdint>

#include "cuda/device/int4.cuh"
#include "cuda/device/mma.cuh"

namespace octile::cuda {

// `threads` threads: 128 columns of the first `count` of `tokens` tokens, in two tiles of 64 columns, lines of 128
// bytes as TMA swizzles them. A thread takes 32 columns of a token, four units of eight; a unit is four pairs, in the
// order of a word's nibbles. The four pairs j, one of each unit, become unit j.
template <int tokens, int threads, bool packed>
__device__ void put_in_order(std::uint32_t tiles, int thread, int count) {
  constexpr int kOwn = tokens * 4 / threads;  // sets of 32 columns
  const int token = thread % tokens;
  if (token >= count) return;
  const std::uint32_t line = tiles + static_cast<std::uint32_t>(token) * 128;
  const std::uint32_t twist = static_cast<std::uint32_t>(token) % 8 * 16;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const auto set = static_cast<std::uint32_t>(thread / tokens + i * (threads / tokens));
    const std::uint32_t at = line + set / 2 * (tokens * 128);
    uint4 pairs[4];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) {
      pairs[j] = to_unpack_order<packed>(load_shared(at + ((set % 2 * 4 + j) * 16 ^ twist)));
    }
    store_shared(at + ((set % 2 * 4 + 0) * 16 ^ twist), {pairs[0].x, pairs[1].x, pairs[2].x, pairs[3].x});
    store_shared(at + ((set % 2 * 4 + 1) * 16 ^ twist), {pairs[0].y, pairs[1].y, pairs[2].y, pairs[3].y});
    store_shared(at + ((set % 2 * 4 + 2) * 16 ^ twist), {pairs[0].z, pairs[1].z, pairs[2].z, pairs[3].z});
    store_shared(at + ((set % 2 * 4 + 3) * 16 ^ twist), {pairs[0].w, pairs[1].w, pairs[2].w, pairs[3].w});
  }
}

}  // namespace octile::cuda
