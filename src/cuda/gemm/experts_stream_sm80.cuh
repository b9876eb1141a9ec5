// Experts with few rows each, of w4a8_grouped_gemm_sm80 and w4a16_grouped_gemm_sm80: packed nibbles go from global
// memory straight into the registers of the instructions. There is no shared memory, and there are no barriers.
//
// Each warp multiplies alone: tiles of 16 rows of the weight, a panel, by up to kTokens of an expert's tokens, one tile
// after another. Its loads of the weight are kAhead units of 128 terms ahead, also from one tile to the next. Tokens
// come from the L1 cache, since the warps of a block have neighbouring panels of one expert. The order of the sums is
// that of grouped_weight_gemm_sm80.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80.cuh"

namespace octile::cuda::grouped_weight_sm80 {

constexpr int kUnitTerms = 128;
constexpr int kUnitSlices = kUnitTerms / kSliceTerms;
constexpr int kPanelRows = 16;
constexpr int kSliceBytes = kPanelRows * kSliceTerms / 2;

template <int kTokenBlocks_>  // 1 or 2
struct StreamShape {
  static constexpr int kTokenBlocks = kTokenBlocks_;
  static constexpr int kTokens = 8 * kTokenBlocks_;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kPanelRows * kWarps;  // of the weight, of a block
  static constexpr int kBlocks = 2;                  // on an SM
  static constexpr int kLaneRows = 2;
  static constexpr int kStep = kUnitTerms;
  static constexpr bool kStreams = true;
};

// A lane's two rows of a unit, as loaded.
template <class Arithmetic>
struct StreamUnit {
  static constexpr int kChunks = kUnitSlices / Arithmetic::kChunk;
  uint2 words[kUnitSlices] = {};
  uint2 scales[Arithmetic::kRow ? 1 : kChunks] = {};
  std::uint32_t zeros[kChunks] = {};  // 8 + z of both rows
};

// Where a lane reads its part of a tile.
struct StreamSource {
  const std::uint8_t* words;
  const std::uint8_t* scales;
  const std::uint8_t* zeros;
};

struct StreamPlace {
  int expert;
  int first_token, end_token;
  int panel;
};

// unit: counted from the source.
template <bool kZeros, class Arithmetic>
__device__ void read_unit(const StreamSource& from, int unit, int group_shift, StreamUnit<Arithmetic>& to) {
#pragma unroll
  for (int s = 0; s < kUnitSlices; ++s) {
    to.words[s] = __ldcs(reinterpret_cast<const uint2*>(from.words + (unit * kUnitSlices + s) * kSliceBytes));
  }
#pragma unroll
  for (int chunk = 0; chunk < StreamUnit<Arithmetic>::kChunks; ++chunk) {
    const int group = (unit * kUnitTerms + chunk * Arithmetic::kChunk * kSliceTerms) >> group_shift;
    if constexpr (!Arithmetic::kRow) {
      to.scales[chunk] = __ldcs(reinterpret_cast<const uint2*>(from.scales + group * (kPanelRows * 4)));
    }
    if (kZeros) to.zeros[chunk] = __ldcs(reinterpret_cast<const std::uint16_t*>(from.zeros + group * kPanelRows));
  }
}

template <class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_stream(const GroupedArguments& p) {
  constexpr int kChunk = Arithmetic::kChunk;
  constexpr int kElement = Arithmetic::kElement;
  constexpr int kAhead = kChunk < kUnitSlices ? 2 : 5 - Shape::kTokenBlocks;  // units
  using Unit = StreamUnit<Arithmetic>;
  using Terms = decltype(Arithmetic::read(0u));  // a lane's of a slice of a token
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane_row = lane / 4 * 2;
  const int panels = (p.weight.rows + kPanelRows - 1) / kPanelRows;
  const int units = p.weight.terms / kUnitTerms;
  const int groups_at_once = (kAhead * kUnitTerms) >> p.group_shift;

  TileFinder finder(p.experts, Shape::kTokens);
  int number = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
  // The warp's next tile; false after the last one.
  const auto next = [&](StreamPlace& to, StreamSource& from) {
    for (;;) {
      number += static_cast<int>(gridDim.x);
      const int tokens = number / p.row_tiles;
      const ExpertTile t = finder.find(tokens);
      if (t.expert < 0) return false;
      to.panel = (number - tokens * p.row_tiles) * Shape::kWarps + warp;
      if (to.panel >= panels) continue;
      to.expert = t.expert;
      to.first_token = t.first + t.tile * Shape::kTokens;
      to.end_token = t.end;
      GroupedWeight w = p.weight;
      move_to_expert(w, p.experts, t.expert);
      from.words = w.values + to.panel * w.pitch + lane % 4 * 64 + lane / 4 * 8;
      const std::int64_t row = w.scale.at(to.panel * kPanelRows + lane_row, 0);
      from.scales = static_cast<const std::uint8_t*>(w.scales) + row * 4;
      if (kZeros) from.zeros = static_cast<const std::uint8_t*>(w.zeros) + row;
      return true;
    }
  };

  Arithmetic arithmetic(kZeros);
  typename Arithmetic::Offset offsets[2];
  StreamPlace place, next_place;
  StreamSource from = {};
  if (!next(place, from)) return;
  Unit ring[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < units) read_unit<kZeros>(from, i, p.group_shift, ring[i]);
  }
#pragma unroll 1
  for (bool more = true; more; place = next_place) {
    const std::uint8_t* tokens[Shape::kTokenBlocks];
#pragma unroll
    for (int t = 0; t < Shape::kTokenBlocks; ++t) {
      const int token = min(place.first_token + t * 8 + lane / 4, place.end_token - 1);
      tokens[t] = p.a + p.experts.row_of_a(token) * p.a_pitch + lane % 4 * (8 * kElement);
    }
    typename Arithmetic::Total totals[Shape::kTokenBlocks][4] = {};
#pragma unroll 1
    for (int left = units; left > 0; left -= kAhead) {
      int unread = left - kAhead;  // of this tile, or of the next one
      if (unread > 0) {
        from.words += kAhead * (kUnitSlices * kSliceBytes);
        from.scales += groups_at_once * (kPanelRows * 4);
        if (kZeros) from.zeros += groups_at_once * kPanelRows;
      } else {
        more = next(next_place, from);
        unread = more ? units : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i < left) {
#pragma unroll
          for (int chunk = 0; chunk < Unit::kChunks; ++chunk) {
            if (kZeros) {
              offsets[0] = typename Arithmetic::Offset(ring[i].zeros[chunk] & 255);
              offsets[1] = typename Arithmetic::Offset(ring[i].zeros[chunk] >> 8);
            }
            typename Arithmetic::Slice slices[kChunk];
#pragma unroll
            for (int s = 0; s < kChunk; ++s) {
              const uint2 words = ring[i].words[chunk * kChunk + s];
              arithmetic.convert(words.x, words.y, offsets[0], offsets[1], slices[s]);
            }
#pragma unroll
            for (int t = 0; t < Shape::kTokenBlocks; ++t) {
              typename Arithmetic::Sum sums[4];
              Terms terms[kChunk];
#pragma unroll
              for (int s = 0; s < kChunk; ++s) {
                const int term = i * kUnitTerms + (chunk * kChunk + s) * kSliceTerms;
                terms[s] = __ldca(reinterpret_cast<const Terms*>(tokens[t] + term * kElement));
              }
#pragma unroll
              for (int s = 0; s < kChunk; ++s) {
                if constexpr (Arithmetic::kRow) {
                  Arithmetic::multiply(totals[t], slices[s], terms[s], false);
                } else {
                  Arithmetic::multiply(sums, slices[s], terms[s], s == 0);
                }
              }
              if constexpr (!Arithmetic::kRow) {
                const float scales[2] = {__uint_as_float(ring[i].scales[chunk].x),
                                         __uint_as_float(ring[i].scales[chunk].y)};
#pragma unroll
                for (int e = 0; e < 4; ++e) totals[t][e] = arithmetic.fold(sums[e], scales[e / 2], totals[t][e]);
              }
            }
          }
        }
        if (i < unread) read_unit<kZeros>(from, i, p.group_shift, ring[i]);
      }
#pragma unroll
      for (int t = 0; t < Shape::kTokenBlocks; ++t) tokens[t] += kAhead * kUnitTerms * kElement;
    }

    const int col = place.panel * kPanelRows + lane_row;
    Bias bias = p.bias;
    if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + place.expert * p.experts.bias;
    float scales[2], biases[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      biases[i] = bias.at(col + i, p.weight.rows, -0.0f);
      if constexpr (Arithmetic::kRow) {
        const auto* const of_expert =
            static_cast<const std::uint8_t*>(p.weight.scales) + place.expert * p.experts.b_scale;
        scales[i] = __ldcg(reinterpret_cast<const float*>(of_expert) + p.weight.scale.at(col + i, 0));
      }
    }
#pragma unroll
    for (int t = 0; t < Shape::kTokenBlocks; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = place.first_token + t * 8 + lane % 4 * 2 + e;
        if (token >= place.end_token) continue;
        const float a_scale = kElement == 1 ? p.a_scale_of(token) : 1;
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto total = totals[t][i * 2 + e];
          values[i] = fmaf(Arithmetic::kRow ? arithmetic.fold_row(total, scales[i]) : static_cast<float>(total),
                           a_scale, biases[i]);
        }
        store_rows(p, token, col, values);
      }
    }
  }
}

template <class Shape, class Arithmetic, bool kZeros>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    experts_stream_kernel(const __grid_constant__ GroupedArguments p) {
  wait_for_previous();
  __threadfence();  // a grid that started early must not meet lines of the L1 from before: tokens come from there
  let_next_start();
  multiply_stream<Shape, Arithmetic, kZeros>(p);
}

}  // namespace octile::cuda::grouped_weight_sm80
