// Experts with few rows each, of w4a8_grouped_gemm_sm80 and w4a16_grouped_gemm_sm80, whose weight is packed.
//
// The grid has a block for each SM. All panels, 16 rows of an expert's weight, of all tiles of tokens are numbered, and
// each block has a stretch of them. It copies its tiles' tokens to shared memory, as many tiles at a time as fit there;
// then each warp multiplies every kWarps-th panel alone, without barriers: units of 128 terms go by cp.async through a
// ring of its own in shared memory, kRing - 1 ahead, also from one panel to the next. The order of the sums is that of
// grouped_weight_gemm_sm80.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80.cuh"

namespace octile::cuda::grouped_weight_sm80 {

constexpr int kUnitTerms = 128;
constexpr int kUnitSlices = kUnitTerms / kSliceTerms;
constexpr int kPanelRows = 16;
constexpr int kSliceBytes = kPanelRows * kSliceTerms / 2;

template <int kTokenBlocks_>
struct StreamShape {
  static constexpr int kTokenBlocks = kTokenBlocks_;
  static constexpr int kTokens = 8 * kTokenBlocks_;  // of a tile, at most
  static constexpr int kRing = 4;                    // units
  static constexpr int kBlocks = 1;                  // on an SM
  static constexpr int kWarps = 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kPanelRows;
  static constexpr int kTiles = 8;  // in shared memory, at most
  static constexpr int kLaneRows = 2;
  static constexpr int kStep = kUnitTerms;
  static constexpr bool kStreams = true;
};

// In shared memory: 16 rows of 128 terms; their scales and 8 + z, for each chunk.
template <class Arithmetic>
struct StreamUnit {
  static constexpr int kChunks = kUnitSlices / Arithmetic::kChunk;
  static constexpr int kScales = kUnitSlices * kSliceBytes;
  static constexpr int kZeros = kScales + (Arithmetic::kRow ? 0 : kChunks * (kPanelRows * 4));
  static constexpr int kBytes = kZeros + kChunks * kPanelRows;
};

template <class Shape, class Arithmetic>
constexpr int kRingBytes = Shape::kWarps* Shape::kRing* StreamUnit<Arithmetic>::kBytes;

// A warp's ring of units: those of its panels, one after another.
template <class Shape, class Arithmetic, bool kZeros>
class UnitRing {
  using Unit = StreamUnit<Arithmetic>;

 public:
  // Panels number, number + kWarps and so on below end.
  __device__ UnitRing(const GroupedArguments& p, TileFinder& finder, std::uint32_t ring, int number, int end)
      : p_(p), finder_(finder), ring_(ring), filling_(ring), number_(number), end_(end) {
    find();
    for (int i = 0; i < Shape::kRing - 1; ++i) fill();
  }

  // The next unit in shared memory; the one before it is overwritten.
  __device__ std::uint32_t next() {
    wait_for_copies<Shape::kRing - 2>();
    __syncwarp();
    const std::uint32_t unit = reading_ == 0 ? ring_ : reading_;
    fill();
    reading_ = unit + Unit::kBytes == ring_ + kBytes ? ring_ : unit + Unit::kBytes;
    return unit;
  }

 private:
  static constexpr int kBytes = Shape::kRing * Unit::kBytes;
  static constexpr int kScaleLanes = Arithmetic::kRow ? 0 : 4 * Unit::kChunks;
  static constexpr int kZeroLanes = kZeros ? Unit::kChunks : 0;
  static_assert(kScaleLanes + kZeroLanes <= 32);

  __device__ void find() {
    if (number_ >= end_) return;
    const int panels = (p_.weight.rows + kPanelRows - 1) / kPanelRows;
    const int tile = number_ / panels;
    const int panel = number_ - tile * panels;
    if (tile != tile_) {
      tile_ = tile;
      expert_ = finder_.find(tile).expert;
    }
    GroupedWeight w = p_.weight;
    move_to_expert(w, p_.experts, expert_);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    words_ = w.values + panel * w.pitch + lane * kUnit;
    const std::int64_t row = w.scale.at(panel * kPanelRows, 0);
    if (kZeros && lane >= kScaleLanes) {
      more_ = static_cast<const std::uint8_t*>(w.zeros) + row;
    } else {
      more_ = static_cast<const std::uint8_t*>(w.scales) + row * 4 + lane % 4 * kUnit;
    }
    units_ = p_.weight.terms / kUnitTerms;
    term_ = 0;
  }

  __device__ void fill() {
    if (number_ < end_) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const std::uint32_t to = filling_ + lane * kUnit;
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_async_if(true, to + i * (32 * kUnit), words_ + i * (32 * kUnit));
      if (lane < kScaleLanes + kZeroLanes) {
        const bool zero = kZeros && lane >= kScaleLanes;
        const int chunk = zero ? lane - kScaleLanes : lane / 4;
        const int group = (term_ + chunk * Arithmetic::kChunk * kSliceTerms) >> p_.group_shift;
        copy_async_if(true, to + Unit::kScales, more_ + group * (zero ? kPanelRows : kPanelRows * 4));
      }
      words_ += kUnitSlices * kSliceBytes;
      term_ += kUnitTerms;
      if (--units_ == 0) {
        number_ += Shape::kWarps;
        find();
      }
    }
    commit_copies();
    filling_ = filling_ + Unit::kBytes == ring_ + kBytes ? ring_ : filling_ + Unit::kBytes;
  }

  const GroupedArguments& p_;
  TileFinder& finder_;
  std::uint32_t ring_, filling_, reading_ = 0;
  int number_, end_;
  int tile_ = -1, expert_ = 0;
  const std::uint8_t* words_;
  const std::uint8_t* more_;  // a scale or a zero point
  int units_, term_;
};

// In shared memory: tokens first_token .. end_token - 1 of y, where they are, and their scales.
template <class Shape>
struct StreamTile {
  int expert;
  int first_token, end_token;
  std::uint32_t at;
  float scales[Shape::kTokens];
};

// The block's threads copy the tokens of a tile: blocks of 8, of each all slices, of each 32 terms of the 8 tokens, so
// that what a warp reads at once is together. Behind the last token that one's terms stand again.
template <class Shape, int kElement>
__device__ void copy_tokens(const GroupedArguments& p, int first_token, int end_token, std::uint32_t to) {
  constexpr int kUnits = kSliceTerms * kElement / kUnit;  // of a token's slice
  constexpr int kAtOnce = Shape::kThreads / (8 * kUnits);
  const int place = static_cast<int>(threadIdx.x) % (8 * kUnits);
  const int slice = static_cast<int>(threadIdx.x) / (8 * kUnits);
  const int slices = p.weight.terms / kSliceTerms;
  for (int first = first_token; first < end_token; first += 8) {
    const int token = min(first + place / kUnits, end_token - 1);
    const std::uint8_t* from = p.a + p.experts.row_of_a(token) * p.a_pitch + place % kUnits * kUnit;
    for (int s = slice; s < slices; s += kAtOnce) {
      copy_async_if(true, to + (s * (8 * kUnits) + place) * kUnit, from + s * (kSliceTerms * kElement));
    }
    to += slices * (8 * kUnits * kUnit);
  }
}

// A panel of the tile's expert by the tile's kCount blocks of 8 tokens, to y.
template <int kCount, class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_panel(const GroupedArguments& p, UnitRing<Shape, Arithmetic, kZeros>& ring,
                               const StreamTile<Shape>& tile, int panel) {
  constexpr int kChunk = Arithmetic::kChunk;
  constexpr int kElement = Arithmetic::kElement;
  constexpr int kTokenSlice = 8 * kSliceTerms * kElement;  // bytes, of 8 tokens
  using Unit = StreamUnit<Arithmetic>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int units = p.weight.terms / kUnitTerms;
  const int block_bytes = 8 * p.weight.terms * kElement;
  const Arithmetic arithmetic(kZeros);
  std::uint32_t tokens = tile.at + lane * (8 * kElement);
  typename Arithmetic::Total totals[kCount][4] = {};
#pragma unroll 1
  for (int u = 0; u < units; ++u) {
    const std::uint32_t unit = ring.next();
#pragma unroll
    for (int chunk = 0; chunk < Unit::kChunks; ++chunk) {
      typename Arithmetic::Offset offsets[2];
      if (kZeros) {
        const std::uint32_t at = unit + Unit::kZeros + chunk * kPanelRows + lane / 4 * 2;
        const std::uint32_t two = load_shared_word(at & ~3u) >> (at & 2) * 8;
        offsets[0] = typename Arithmetic::Offset(two & 255);
        offsets[1] = typename Arithmetic::Offset(two >> 8 & 255);
      }
      typename Arithmetic::Slice slices[kChunk];
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        const uint2 words = load_shared_pair(unit + (chunk * kChunk + s) * kSliceBytes + lane % 4 * 64 + lane / 4 * 8);
        arithmetic.convert(words.x, words.y, offsets[0], offsets[1], slices[s]);
      }
      typename Arithmetic::Sum sums[kCount][4];
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          const auto a = Arithmetic::read(tokens + (chunk * kChunk + s) * kTokenSlice + t * block_bytes);
          if constexpr (Arithmetic::kRow) {
            Arithmetic::multiply(totals[t], slices[s], a, false);
          } else {
            Arithmetic::multiply(sums[t], slices[s], a, s == 0);
          }
        }
      }
      if constexpr (!Arithmetic::kRow) {
        float scales[2];
        read_scales(unit + Unit::kScales + chunk * (kPanelRows * 4) + lane / 4 * 8, scales);
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
#pragma unroll
          for (int e = 0; e < 4; ++e) totals[t][e] = arithmetic.fold(sums[t][e], scales[e / 2], totals[t][e]);
        }
      }
    }
    tokens += kUnitSlices * kTokenSlice;
  }

  const int col = panel * kPanelRows + lane / 4 * 2;
  Bias bias = p.bias;
  if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + tile.expert * p.experts.bias;
  float scales[2], biases[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    biases[i] = bias.at(col + i, p.weight.rows, -0.0f);
    if constexpr (Arithmetic::kRow) {
      const auto* const of_expert = static_cast<const std::uint8_t*>(p.weight.scales) + tile.expert * p.experts.b_scale;
      scales[i] = __ldcg(reinterpret_cast<const float*>(of_expert) + p.weight.scale.at(col + i, 0));
    }
  }
#pragma unroll
  for (int t = 0; t < kCount; ++t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_tile = t * 8 + lane % 4 * 2 + e;
      const int token = tile.first_token + of_tile;
      if (token >= tile.end_token) continue;
      const float a_scale = kElement == 1 ? tile.scales[of_tile] : 1;
      float values[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto total = totals[t][i * 2 + e];
        values[i] = fmaf(Arithmetic::kRow ? arithmetic.fold_row(total, scales[i]) : static_cast<float>(total), a_scale,
                         biases[i]);
      }
      store_rows(p, token, col, values);
    }
  }
}

template <int kCount, class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_panel_of(int token_blocks, const GroupedArguments& p,
                                  UnitRing<Shape, Arithmetic, kZeros>& ring, const StreamTile<Shape>& tile, int panel) {
  if constexpr (kCount < Shape::kTokenBlocks) {
    if (token_blocks > kCount) return multiply_panel_of<kCount + 1>(token_blocks, p, ring, tile, panel);
  }
  multiply_panel<kCount>(p, ring, tile, panel);
}

// shared_size: of the tokens, bytes.
template <class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_stream(const GroupedArguments& p, std::uint32_t shared, int shared_size) {
  constexpr int kElement = Arithmetic::kElement;
  __shared__ StreamTile<Shape> tiles[Shape::kTiles];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int panels = (p.weight.rows + kPanelRows - 1) / kPanelRows;

  TileFinder finder(p.experts, Shape::kTokens);
  const std::int64_t all = static_cast<std::int64_t>(finder.count()) * panels;
  const int begin = static_cast<int>(all * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) return;

  int number = begin + warp;
  UnitRing<Shape, Arithmetic, kZeros> ring(p, finder, shared + warp * (Shape::kRing * StreamUnit<Arithmetic>::kBytes),
                                           number, end);
  shared += kRingBytes<Shape, Arithmetic>;
#pragma unroll 1
  for (int first_tile = begin / panels; first_tile * panels < end;) {
    int count = 0;
    int used = 0;
    for (; count < Shape::kTiles && (first_tile + count) * panels < end; ++count) {
      const ExpertTile t = finder.find(first_tile + count);
      const int first_token = t.first + t.tile * Shape::kTokens;
      const int end_token = min(first_token + Shape::kTokens, t.end);
      const int bytes = (end_token - first_token + 7) / 8 * 8 * p.weight.terms * kElement;
      if (count > 0 && used + bytes > shared_size) break;
      StreamTile<Shape>& tile = tiles[count];
      const int thread = static_cast<int>(threadIdx.x);
      if (thread == 0) {
        tile.expert = t.expert;
        tile.first_token = first_token;
        tile.end_token = end_token;
        tile.at = shared + used;
      }
      if (kElement == 1 && first_token + thread < end_token) tile.scales[thread] = p.a_scale_of(first_token + thread);
      copy_tokens<Shape, kElement>(p, first_token, end_token, shared + used);
      used += bytes;
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    const int stop = min((first_tile + count) * panels, end);
#pragma unroll 1
    for (; number < stop; number += Shape::kWarps) {
      const int of_tiles = number / panels - first_tile;
      const StreamTile<Shape>& tile = tiles[of_tiles];
      multiply_panel_of<1>((tile.end_token - tile.first_token + 7) / 8, p, ring, tile,
                           number - (first_tile + of_tiles) * panels);
    }
    first_tile += count;
    if (first_tile * panels < end) __syncthreads();
  }
}

template <class Shape, class Arithmetic, bool kZeros>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    experts_stream_kernel(const __grid_constant__ GroupedArguments p, int shared_size) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  wait_for_previous();
  let_next_start();
  multiply_stream<Shape, Arithmetic, kZeros>(p, shared_address(shared), shared_size);
}

}  // namespace octile::cuda::grouped_weight_sm80
