// Sums of a tile in AVX2 registers: a vector holds 8 channels of a row, half a panel.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

#define OCTILE_AVX2 __attribute__((target("avx2")))

namespace octile::cpu {

inline constexpr int kHalfChannels = 8;
inline constexpr int kHalves = 2;  // of a panel

OCTILE_AVX2 inline __attribute__((always_inline)) __m256i load(const std::uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

OCTILE_AVX2 inline __attribute__((always_inline)) __m256i broadcast(const std::uint8_t* four) {
  std::int32_t lane;
  std::memcpy(&lane, four, sizeof lane);
  return _mm256_set1_epi32(lane);
}

template <int rows, int halves>
OCTILE_AVX2 inline __attribute__((always_inline)) void load_sums(const TileRun& run, int first,
                                                                 __m256i (&sum)[rows][halves]) {
  const auto* sums = reinterpret_cast<const __m256i*>(run.sums + first * kHalfChannels);
  const std::int64_t stride = run.sums_stride / kHalfChannels;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < halves; ++j) {
      sum[i][j] = run.accumulate ? _mm256_loadu_si256(sums + i * stride + j) : _mm256_setzero_si256();
    }
  }
}

template <int rows, int halves>
OCTILE_AVX2 inline __attribute__((always_inline)) void store_sums(const TileRun& run, int first,
                                                                  const __m256i (&sum)[rows][halves]) {
  auto* sums = reinterpret_cast<__m256i*>(run.sums + first * kHalfChannels);
  const std::int64_t stride = run.sums_stride / kHalfChannels;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < halves; ++j) _mm256_storeu_si256(sums + i * stride + j, sum[i][j]);
  }
}

}  // namespace octile::cpu
