// Tiles of x86 vectors, each of which holds some channels of a row: a panel, or half of one. Terms: integer_panels.h.
// tile_avx2.h and tile_avx512vnni.h come before, with the vectors: Integers, Floats and fused(a, b, c) = a * b + c. The
// file that includes them says OCTILE_TILE, the target of all functions.
#pragma once

#include <cstring>

#include "cpu/gemm/integer_panels.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr int kChannels = sizeof(Integers) / sizeof(std::int32_t);      // of a vector
constexpr int kVectors = static_cast<int>(kPanelChannels) / kChannels;  // of a panel
typedef std::uint32_t Lanes __attribute__((vector_size(sizeof(Integers))));
typedef std::uint8_t Bytes __attribute__((vector_size(kChannels)));

template <class Vector = Integers>
OCTILE_TILE_INLINE Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
OCTILE_TILE_INLINE Integers all(std::uint32_t lane) { return __builtin_bit_cast(Integers, lane - Lanes{}); }
OCTILE_TILE_INLINE Integers broadcast(const std::uint8_t* four) { return all(load<std::uint32_t>(four)); }

template <class Terms, bool kFolds>
struct Tile : Terms {
  // (rows, vectors) sums in registers, from vector `first` of the panels on.
  template <int rows, int vectors>
  OCTILE_TILE static void run(const TileRun& run, int first) {
    const int panel = first / kVectors;
    TileOperands at{run.a, run.b + panel * run.b_stride, run.narrow ? run.narrow + panel * kMaxNarrowBlocks : nullptr};
    if constexpr (!kFolds) {
      Integers sum[rows][vectors];
      std::int32_t* sums = run.sums + first * kChannels;
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
          sum[i][j] = run.accumulate ? load(sums + i * run.sums_stride + j * kChannels) : all(0);
        }
      }
      Terms::multiply(run, at, sum);
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
          std::memcpy(sums + i * run.sums_stride + j * kChannels, &sum[i][j], sizeof sum[i][j]);
        }
      }
    } else {
      for (std::int64_t g = 0; g < run.group.groups; ++g) {
        Integers sum[rows][vectors];
        start(run.group, first, g, sum);
        Terms::multiply(run, at, sum);
        if (Terms::kOffset == Offset::none && run.group.rest) {
          Terms::multiply(run, {run.group.rest + g * run.depth, at.b, at.narrow}, sum);
        }
        fold(run.group, first, g, sum);
        at.a += run.depth;
        at.b += run.depth * Terms::kDepthBytes;
        if (at.narrow) at.narrow += run.depth / kNarrowDepth;
      }
    }
  }

 private:
  static std::int64_t segment_of(const GroupRun& run, int vector, std::int64_t g) {
    return vector / kVectors * run.segments_stride + g * kPanelChannels + vector % kVectors * kChannels;
  }

  template <int rows, int vectors>
  OCTILE_TILE_INLINE static void start(const GroupRun& run, int first, std::int64_t g, Integers (&sum)[rows][vectors]) {
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        sum[i][j] = all(0);
        if constexpr (Terms::kOffset != Offset::row_sums) continue;
        const Lanes less = Lanes{} - static_cast<std::uint32_t>(run.row_sums[i * run.row_sums_stride + g]);
        sum[i][j] = __builtin_bit_cast(Integers, less << 3);
        if (!run.zero_points) continue;
        const auto z = load<Bytes>(run.zero_points + segment_of(run, first + j, g));
        sum[i][j] = __builtin_bit_cast(Integers, less * __builtin_convertvector(z, Lanes));
      }
    }
  }

  // A vector at a time by recursion, not in a loop: GCC 12 unrolls no loop that becomes so long, and then keeps the
  // sums on the stack. It does so, too, with sums that begin at the same value other than 0.
  template <int j = 0, int rows, int vectors>
  OCTILE_TILE_INLINE static void fold(const GroupRun& run, int first, std::int64_t g, Integers (&sum)[rows][vectors]) {
    const std::int64_t segment = segment_of(run, first + j, g);
    const auto scale = load<Floats>(run.scales + segment * 4);
    [[maybe_unused]] Lanes less;
    if constexpr (Terms::kOffset == Offset::channel_sums) less = load<Lanes>(run.channel_sums + segment * 4) << 7;
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
      asm("" : "+v"(sum[i][j]));
      auto acc = __builtin_bit_cast(Lanes, sum[i][j]);
      if constexpr (Terms::kOffset == Offset::channel_sums) acc -= less;
      float* totals = run.totals + i * run.totals_stride + (first + j) * kChannels;
      typedef std::int32_t Signed __attribute__((vector_size(sizeof(Integers))));
      const auto sums = __builtin_convertvector(__builtin_bit_cast(Signed, acc), Floats);
      const Floats total = fused(sums, scale, load<Floats>(totals));
      std::memcpy(totals, &total, sizeof total);
    }
    if constexpr (j + 1 < vectors) fold<j + 1>(run, first, g, sum);
  }
};

}  // namespace

}  // namespace octile::cpu
