// Sums of a tile in AVX-512 registers: a vector holds 16 channels of a row.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

#define OCTILE_AVX512VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

namespace octile::cpu {

OCTILE_AVX512VNNI inline __attribute__((always_inline)) __m512i broadcast(const std::uint8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm512_set1_epi32(lane);
}

template <int rows, int panels>
OCTILE_AVX512VNNI inline __attribute__((always_inline)) void load_sums(const TileRun& run, int first,
                                                                       __m512i (&sum)[rows][panels]) {
  const std::int32_t* sums = run.sums + first * kPanelChannels;
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
      sum[i][j] =
          run.accumulate ? _mm512_loadu_si512(sums + i * run.sums_stride + j * kPanelChannels) : _mm512_setzero_si512();
    }
  }
}

template <int rows, int panels>
OCTILE_AVX512VNNI inline __attribute__((always_inline)) void store_sums(const TileRun& run, int first,
                                                                        const __m512i (&sum)[rows][panels]) {
  std::int32_t* sums = run.sums + first * kPanelChannels;
#pragma GCC unroll 12
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < panels; ++j) {
      _mm512_storeu_si512(sums + i * run.sums_stride + j * kPanelChannels, sum[i][j]);
    }
  }
}

}  // namespace octile::cpu
