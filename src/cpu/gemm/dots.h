// Few rows of a times channels of an unpacked b: dot products along k, four channels at a time.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>

#include "cpu/gemm/integer_panels.h"
#include "cpu/support/rows.h"

namespace octile::cpu {

inline constexpr int kDotChannels = 4;
inline constexpr std::int64_t kDotAhead = 1024;  // bytes of a channel

// Where a tile is: its rows, its channels and a range of terms.
struct DotPlace {
  const std::uint8_t* left;
  const std::uint8_t* right[kDotChannels];
  std::int64_t depth;
  std::int32_t* sums;
  bool accumulate;
  alignas(16) mutable std::int32_t correction[kDotChannels];  // 128 * the channels' sums

  // Bytes to what is to be fetched where `rest` terms are left. Where there are a few rows, the next channels lie as
  // far ahead as these are long; one or two rows are read as fast as memory allows, and look no further than needed.
  std::int64_t ahead(const DotRun& run, std::int64_t rest) const {
    const std::int64_t next = kDotChannels * run.b_stride;
    return run.rows > 2 ? next : rest > kDotAhead ? kDotAhead : kDotAhead + next - depth;
  }
};

// The sums of a tile's rows, less the correction: those of the last row, of the channels, if `first`.
template <class Dots, bool first, class Vector, std::size_t kSums>
OCTILE_TILE_INLINE void store_dots(const DotRun& run, const DotPlace& at, Vector (&sum)[kSums][kDotChannels]) {
  auto* const correction = reinterpret_cast<__m128i*>(at.correction);
  if constexpr (first) _mm_store_si128(correction, Dots::sum_lanes(sum[kSums - 1]));
#pragma GCC unroll 4
  for (std::size_t i = 0; i + 1 < kSums; ++i) {
    auto* sums = reinterpret_cast<__m128i*>(at.sums + static_cast<std::int64_t>(i) * run.sums_stride);
    const __m128i total = _mm_sub_epi32(Dots::sum_lanes(sum[i]), _mm_load_si128(correction));
    _mm_storeu_si128(sums, at.accumulate ? _mm_add_epi32(total, _mm_loadu_si128(sums)) : total);
  }
}

// Dots::tile<rows, first>(run, at), for at most Dots::kRows: `first` finds the correction, and fetches what comes next.
template <class Dots, bool first, int rows = 1>
void dot_rows(std::int64_t count, const DotRun& run, const DotPlace& at) {
  if constexpr (rows < Dots::kRows) {
    if (count > rows) return dot_rows<Dots, first, rows + 1>(count, run, at);
  }
  Dots::template tile<rows, first>(run, at);
}

template <class Dots>
void dot(const DotRun& run) {
  // Blocks of equal depth, that stay in the L1 cache; one or two rows do not come back to them.
  const std::int64_t max = run.rows <= 2 ? run.depth : run.rows <= 4 ? 3072 : 2048;
  const std::int64_t depth = round_up(ceil_div(run.depth, ceil_div(run.depth, max)), kPanelLine);
  for (std::int64_t term = 0; term < run.depth; term += depth) {
    for (std::int64_t j = 0; j < run.channels; j += kDotChannels) {
      DotPlace at;
      at.depth = std::min(depth, run.depth - term);
      at.accumulate = term > 0;
      for (int i = 0; i < kDotChannels; ++i) {
        at.right[i] = run.b + std::min(j + i, run.channels - 1) * run.b_stride + term;
      }
      for (std::int64_t i = 0; i < run.rows; i += Dots::kRows) {
        at.left = run.a + i * run.a_stride + term;
        at.sums = run.sums + i * run.sums_stride + j;
        i == 0 ? dot_rows<Dots, true>(run.rows, run, at) : dot_rows<Dots, false>(run.rows - i, run, at);
      }
    }
  }
}

}  // namespace octile::cpu
