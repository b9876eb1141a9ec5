// Experts with few rows each, of w4a8_grouped_gemm_sm80 and w4a16_grouped_gemm_sm80, whose weight is packed.
//
// The grid has at most a block for each SM. All strips, 16 or 32 rows of an expert's weight, of all tiles of tokens are
// numbered, and each block has a stretch of them that is expected to take as long as the others'. It copies its tiles'
// tokens to shared memory, as many tiles at a time as fit there; then each warp multiplies every kWarps-th strip alone,
// without barriers: units of 1 KB go by cp.async through a ring of its own in shared memory, kRing - 1 ahead, also from
// one strip to the next. The order of the sums is that of grouped_weight_gemm_sm80.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80.cuh"

namespace octile::cuda::grouped_weight_sm80 {

constexpr int kStreamStep = 128;  // terms
constexpr int kPanelRows = 16;
constexpr int kSliceBytes = kPanelRows * kSliceTerms / 2;

// Two panels at once are two chains of products, and share what is read of the tokens.
template <int kTokenBlocks_, int kPanels_, int kRing_>
struct StreamShape {
  static constexpr int kTokenBlocks = kTokenBlocks_;
  static constexpr int kTokens = 8 * kTokenBlocks;  // of a tile, at most
  static constexpr int kPanels = kPanels_;          // of a strip
  static constexpr int kRing = kRing_;              // units
  static constexpr int kWarps = 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kPanelRows * kPanels;
  static constexpr int kUnitTerms = kStreamStep / kPanels;
  static constexpr int kUnitSlices = kUnitTerms / kSliceTerms;
  static constexpr int kTiles = 8;  // in shared memory, at most
  static constexpr int kLaneRows = 2;
  static constexpr int kStep = kStreamStep;
  static constexpr bool kStreams = true;
  static_assert(kPanels == 1 || kPanels == 2);
};

struct StreamOrder {
  int tile_time, block_time;  // expected, in 1/256 ns: of a tile of tokens, and for each 8 of them
  int token_shift;            // a tile has up to 1 << token_shift tokens
  int shared_size;            // for tokens, bytes

  __device__ int tiles(int rows) const { return (rows + (1 << token_shift) - 1) >> token_shift; }
  __device__ int time(int rows) const {
    const int blocks = token_shift < 3 ? tiles(rows) : (rows + 7) / 8;
    return tiles(rows) * tile_time + blocks * block_time;
  }
};

// In shared memory: kUnitTerms terms of a strip. The panels' words come first, as they are packed, except that in every
// second pair of 64-byte lines 16 bytes c lie at c ^ 2, so that 8-byte loads meet no bank twice. Then come the scales
// [panel][chunk][row], and 8 + z likewise. A unit smaller than a chunk has those of the chunk.
template <class Shape, class Arithmetic>
struct StreamUnit {
  static constexpr int kChunks = Shape::kUnitSlices > Arithmetic::kChunk ? Shape::kUnitSlices / Arithmetic::kChunk : 1;
  static constexpr int kEntries = Shape::kPanels * kChunks;
  static constexpr int kPanelBytes = Shape::kUnitSlices * kSliceBytes;
  static constexpr int kScales = Shape::kPanels * kPanelBytes;
  static constexpr int kZeros = kScales + (Arithmetic::kRow ? 0 : kEntries * (kPanelRows * 4));
  static constexpr int kBytes = kZeros + kEntries * kPanelRows;
};

template <class Shape, class Arithmetic>
constexpr int kRingBytes = Shape::kWarps* Shape::kRing* StreamUnit<Shape, Arithmetic>::kBytes;

// In shared memory: tokens first_token .. end_token - 1 of y, where they are, their rows of a, and their scales.
template <class Shape>
struct StreamTile {
  int expert;
  int first_token, end_token;
  std::uint32_t at;
  int rows[Shape::kTokens];
  float scales[Shape::kTokens];

  __device__ int tokens() const { return end_token - first_token; }
  __device__ int blocks() const { return (tokens() + 7) / 8; }
  // Rows in shared memory for 8 tokens: 8, or for fewer than 5 tokens the next power of two.
  __device__ int stored() const { return tokens() > 4 ? 8 : tokens() > 2 ? 4 : tokens(); }
};

// ---- Which strips a block has.

template <class Shape>
struct alignas(128) StreamShared {
  int tiles[Shape::kWarps], times[Shape::kWarps];
  int begin, end;
  StreamTile<Shape> tile[Shape::kTiles];
};

// All experts' tiles; each thread holds the counts of some neighbouring experts. All threads of a block must call it.
template <class Shape>
class StreamTiles {
 public:
  __device__ StreamTiles(const Experts& experts, const StreamOrder& order, StreamShared<Shape>& shared)
      : experts_(experts), order_(order), shared_(shared) {
    const int thread = static_cast<int>(threadIdx.x);
    const int each = (experts.count + Shape::kThreads - 1) / Shape::kThreads;
    begin_ = min(thread * each, experts.count), end_ = min(begin_ + each, experts.count);
    first_row_ = experts.offset(begin_), end_row_ = experts.offset(min(begin_ + 1, experts.count));
    tiles_ = 0, time_ = 0;
    for_each([&](int, int first, int end) {
      tiles_ += order_.tiles(end - first);
      time_ += order_.time(end - first);
    });
    // Of this thread and those before it.
    const int lane = thread % 32, warp = thread / 32;
    int tiles = tiles_, time = time_;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int more_tiles = __shfl_up_sync(kAll, tiles, i), more_time = __shfl_up_sync(kAll, time, i);
      if (lane >= i) tiles += more_tiles, time += more_time;
    }
    if (lane == 31) shared.tiles[warp] = tiles, shared.times[warp] = time;
    if (thread == 0) shared.begin = shared.end = 0;
    __syncthreads();
    all_time_ = 0;
#pragma unroll
    for (int i = 0; i < Shape::kWarps; ++i) {
      if (i < warp) tiles += shared.tiles[i], time += shared.times[i];
      all_time_ += shared.times[i];
    }
    tiles_before_ = tiles - tiles_, time_before_ = time - time_;
  }

  // First and end strip of a block. All blocks get the same share of the time.
  __device__ int2 strips(int block, int strips_of_tile) const {
    const int blocks = static_cast<int>(gridDim.x);
    find(block, blocks, strips_of_tile, shared_.begin);
    find(block + 1, blocks, strips_of_tile, shared_.end);
    __syncthreads();
    return {shared_.begin, shared_.end};
  }

  // Writes kTiles tiles, from number `first` on, to shared memory.
  __device__ void list(int first) const {
    if (tiles_before_ >= first + Shape::kTiles || tiles_before_ + tiles_ <= first) return;
    int number = tiles_before_ - first;
    for_each([&](int expert, int row, int end) {
      for (; row < end; row += 1 << order_.token_shift, ++number) {
        if (number < 0 || number >= Shape::kTiles) continue;
        StreamTile<Shape>& tile = shared_.tile[number];
        tile.expert = expert, tile.first_token = row, tile.end_token = min(row + (1 << order_.token_shift), end);
      }
    });
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  // body(expert, its first row, its end row), of this thread's.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    int first = first_row_, end = end_row_;
#pragma unroll 1
    for (int e = begin_; e < end_; ++e) {
      body(e, first, end);
      first = end;
      if (e + 1 < end_) end = experts_.offset(e + 2);
    }
  }

  // The strip at that share of the time, by the thread that knows its tile. Neighbouring blocks find the same one.
  __device__ void find(int share, int shares, int strips_of_tile, int& to) const {
    const float part = __fdividef(static_cast<float>(share), static_cast<float>(shares));
    const int point = share == shares ? all_time_ : static_cast<int>(static_cast<float>(all_time_) * part);
    int before = point - time_before_;
    if (before <= 0 || before > time_) return;
    int number = tiles_before_;
    for_each([&](int, int row, int end) {
      for (; row < end; row += 1 << order_.token_shift, ++number) {
        const int time = order_.time(min(end - row, 1 << order_.token_shift));
        if (before > 0 && before <= time) {
          const float of_tile = __fdividef(static_cast<float>(before), static_cast<float>(time));
          to = number * strips_of_tile +
               (before == time ? strips_of_tile : static_cast<int>(static_cast<float>(strips_of_tile) * of_tile));
        }
        before -= time;
      }
    });
  }

  const Experts& experts_;
  const StreamOrder& order_;
  StreamShared<Shape>& shared_;
  int begin_, end_;          // experts
  int first_row_, end_row_;  // of the first of them
  int tiles_, time_;         // of theirs
  int tiles_before_, time_before_, all_time_;
};

// ---- From global to shared memory.

// A tile, counted from the first one in shared memory, and a strip of its expert's weight.
struct StripPlace {
  int tile, strip;

  __device__ void move(int by, int strips) {
    for (strip += by; strip >= strips; strip -= strips) ++tile;
  }
};

// A warp's ring of units: those of its strips, one after another.
template <class Shape, class Arithmetic, bool kZeros>
class UnitRing {
  using Unit = StreamUnit<Shape, Arithmetic>;

 public:
  __device__ UnitRing(const GroupedArguments& p, const StreamTile<Shape>* tiles, int strips, std::uint32_t ring)
      : p_(p), tiles_(tiles), strips_(strips), ring_(ring) {}

  // `count` strips, kWarps apart. All lanes have read all earlier units.
  __device__ void start(StripPlace at, int count) {
    at_ = at, left_ = count;
    filling_ = reading_ = ring_;
    find();
#pragma unroll 1
    for (int i = 0; i < Shape::kRing - 1; ++i) fill();
  }

  // To L2: the next 8 KB of the strip that is being filled.
  __device__ void prefetch() const {
    if (left_ <= 0) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint8_t* const words = words_ - lane * kUnit;
    const int bytes = (p_.weight.terms - term_) * (kPanelRows / 2);  // of a panel
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = (lane + (Shape::kPanels == 1 ? i * 32 : 0)) * kLine;
      if (at < bytes) prefetch_to_l2(words + at + (Shape::kPanels == 1 ? 0 : i * second_));
    }
  }

  // The next unit in shared memory; the one before it is overwritten.
  __device__ std::uint32_t next() {
    wait_for_copies<Shape::kRing - 2>();
    __syncwarp();
    fill();
    const std::uint32_t unit = reading_;
    reading_ = after(unit);
    return unit;
  }

 private:
  static constexpr int kLine = 128;
  static constexpr int kBytes = Shape::kRing * Unit::kBytes;
  static constexpr int kScaleLanes = Arithmetic::kRow ? 0 : 4 * Unit::kEntries;
  static constexpr int kZeroLanes = kZeros ? Unit::kEntries : 0;
  static_assert(kScaleLanes + kZeroLanes <= 32);

  __device__ std::uint32_t after(std::uint32_t unit) const {
    return unit + Unit::kBytes == ring_ + kBytes ? ring_ : unit + Unit::kBytes;
  }

  __device__ void find() {
    if (left_ <= 0) return;
    GroupedWeight w = p_.weight;
    move_to_expert(w, p_.experts, tiles_[at_.tile].expert);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int panel = at_.strip * Shape::kPanels;
    const int last = (w.rows - 1) / kPanelRows;
    words_ = w.values + panel * w.pitch + lane * kUnit;
    second_ = panel < last ? w.pitch : 0;
    const std::int64_t row = w.scale.at(min(panel + entry() / Unit::kChunks, last) * kPanelRows, 0);
    if (has_zero()) {
      more_ = static_cast<const std::uint8_t*>(w.zeros) + row;
    } else {
      more_ = static_cast<const std::uint8_t*>(w.scales) + row * 4 + lane % 4 * kUnit;
    }
    term_ = 0;
  }

  // A lane beyond the first ones, which copy scales, copies zero points: of a panel and chunk.
  __device__ static bool has_zero() { return kZeros && static_cast<int>(threadIdx.x) % 32 >= kScaleLanes; }
  __device__ static int entry() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return has_zero() ? lane - kScaleLanes : lane / 4;
  }

  __device__ void fill() {
    if (left_ > 0) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const std::uint32_t to = filling_ + lane * kUnit;
      const std::uint32_t to_words = filling_ + (lane ^ lane / 8 % 2 * 2) * kUnit;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_async(to_words + i * (32 * kUnit), words_ + (Shape::kPanels == 1 ? i * (32 * kUnit) : i * second_));
      }
      if (lane < kScaleLanes + kZeroLanes) {
        const int group = (term_ + entry() % Unit::kChunks * Arithmetic::kChunk * kSliceTerms) >> p_.group_shift;
        copy_async(to + Unit::kScales, more_ + group * (has_zero() ? kPanelRows : kPanelRows * 4));
      }
      words_ += Unit::kPanelBytes;
      term_ += Shape::kUnitTerms;
      if (term_ == p_.weight.terms) {
        --left_;
        at_.move(Shape::kWarps, strips_);
        find();
      }
    }
    commit_copies();
    filling_ = after(filling_);
  }

  const GroupedArguments& p_;
  const StreamTile<Shape>* tiles_;
  int strips_;
  std::uint32_t ring_, filling_, reading_;
  StripPlace at_;
  int left_;  // strips
  const std::uint8_t* words_;
  std::int64_t second_;       // bytes from a panel to the second one
  const std::uint8_t* more_;  // a scale or a zero point
  int term_;
};

// The block's threads copy the tokens of a tile to [8 tokens][slice][token][32 terms], so that what a warp reads at
// once is contiguous. There are stored() tokens in place of 8; the last one is repeated up to there.
template <int kElement, class Shape>
__device__ void copy_tokens(const GroupedArguments& p, const StreamTile<Shape>& tile) {
  constexpr int kUnits = kSliceTerms * kElement / kUnit;  // of a token's slice
  const int stored = tile.stored();
  const int units = stored * kUnits;  // of a slice
  const int place = static_cast<int>(threadIdx.x) & (units - 1);
  const int slice = static_cast<int>(threadIdx.x) / units;
  const int at_once = Shape::kThreads / units;
  const int slices = p.weight.terms / kSliceTerms;
  const int tokens = tile.tokens();
  std::uint32_t to = tile.at;
#pragma unroll 1
  for (int first = 0; first < tokens; first += stored) {
    const int row = tile.rows[min(first + place / kUnits, tokens - 1)];
    const std::uint8_t* from = p.a + row * p.a_pitch + place % kUnits * kUnit;
    for (int s = slice; s < slices; s += at_once) {
      copy_async(to + (s * units + place) * kUnit, from + s * (kSliceTerms * kElement));
    }
    to += slices * units * kUnit;
  }
}

// ---- The products.

// A strip of the tile's expert by the tile's kCount blocks of 8 tokens, above 4 also by one block less, to y.
template <int kCount, class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_strip(const GroupedArguments& p, UnitRing<Shape, Arithmetic, kZeros>& ring,
                               const StreamTile<Shape>& tile, int strip) {
  constexpr int kChunk = Arithmetic::kChunk;
  constexpr int kElement = Arithmetic::kElement;
  constexpr int kPanels = Shape::kPanels;
  using Unit = StreamUnit<Shape, Arithmetic>;
  const int stored = kCount == 1 ? tile.stored() : 8;
  const int token_slice = stored * kSliceTerms * kElement;  // bytes, of a block of tokens
  const int block_bytes = stored * p.weight.terms * kElement;
  const int last_block = (kCount > 4 ? tile.blocks() - 1 : kCount - 1) * block_bytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int words_at = lane % 4 * 64 + (lane / 4 * 8 ^ lane % 4 / 2 * 32);
  const int steps = p.weight.terms / kStreamStep;
  const Arithmetic arithmetic(kZeros);
  std::uint32_t tokens = tile.at + (lane & (stored * 4 - 1)) * (8 * kElement);
  typename Arithmetic::Total totals[kPanels][kCount][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    typename Arithmetic::Sum sums[kPanels][kCount][4];
#pragma unroll
    for (int u = 0; u < kStreamStep / Shape::kUnitTerms; ++u) {
      const std::uint32_t unit = ring.next();
      typename Arithmetic::Offset offsets[kPanels][2];
#pragma unroll
      for (int s = 0; s < Shape::kUnitSlices; ++s) {
        const int of_chunk = (u * Shape::kUnitSlices + s) % kChunk;
        const int chunk = s / kChunk;  // of the unit
        typename Arithmetic::Slice slices[kPanels];
#pragma unroll
        for (int j = 0; j < kPanels; ++j) {
          if (kZeros && (of_chunk == 0 || s == 0)) {
            const std::uint32_t at = unit + Unit::kZeros + (j * Unit::kChunks + chunk) * kPanelRows + lane / 4 * 2;
            const std::uint32_t two = load_shared_word(at & ~3u) >> (at & 2) * 8;
            offsets[j][0] = typename Arithmetic::Offset(two & 255);
            offsets[j][1] = typename Arithmetic::Offset(two >> 8 & 255);
          }
          const uint2 words = load_shared_pair(unit + j * Unit::kPanelBytes + s * kSliceBytes + words_at);
          arithmetic.convert(words.x, words.y, offsets[j][0], offsets[j][1], slices[j]);
        }
#pragma unroll
        for (int t = 0; t < kCount; ++t) {
          const auto a = Arithmetic::read(tokens + (t == kCount - 1 ? last_block : t * block_bytes));
#pragma unroll
          for (int j = 0; j < kPanels; ++j) {
            if constexpr (Arithmetic::kRow) {
              Arithmetic::multiply(totals[j][t], slices[j], a, false);
            } else {
              Arithmetic::multiply(sums[j][t], slices[j], a, of_chunk == 0);
            }
          }
        }
        tokens += token_slice;
        if (Arithmetic::kRow || of_chunk != kChunk - 1) continue;
#pragma unroll
        for (int j = 0; j < kPanels; ++j) {
          float scales[2];
          read_scales(unit + Unit::kScales + (j * Unit::kChunks + chunk) * (kPanelRows * 4) + lane / 4 * 8, scales);
#pragma unroll
          for (int t = 0; t < kCount; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              totals[j][t][e] = arithmetic.fold(sums[j][t][e], scales[e / 2], totals[j][t][e]);
          }
        }
      }
    }
  }

  Bias bias = p.bias;
  if (bias.data) bias.data = static_cast<const std::uint8_t*>(bias.data) + tile.expert * p.experts.bias;
#pragma unroll
  for (int j = 0; j < kPanels; ++j) {
    const int col = (strip * kPanels + j) * kPanelRows + lane / 4 * 2;
    if (col >= p.weight.rows) break;
    float scales[2], biases[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      biases[i] = bias.at(col + i, p.weight.rows, -0.0f);
      if constexpr (Arithmetic::kRow) {
        const auto* const of_expert =
            static_cast<const std::uint8_t*>(p.weight.scales) + tile.expert * p.experts.b_scale;
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
          const auto total = totals[j][t][i * 2 + e];
          values[i] = fmaf(Arithmetic::kRow ? arithmetic.fold_row(total, scales[i]) : static_cast<float>(total),
                           a_scale, biases[i]);
        }
        store_rows(p, token, col, values);
      }
    }
  }
}

template <int kCount, class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_strip_of(int token_blocks, const GroupedArguments& p,
                                  UnitRing<Shape, Arithmetic, kZeros>& ring, const StreamTile<Shape>& tile, int strip) {
  if constexpr (kCount < Shape::kTokenBlocks) {
    constexpr int kNext = kCount + (kCount < 4 ? 1 : 2);
    if (token_blocks > kCount) return multiply_strip_of<kNext>(token_blocks, p, ring, tile, strip);
  }
  multiply_strip<kCount>(p, ring, tile, strip);
}

template <class Shape, class Arithmetic, bool kZeros>
__device__ void multiply_stream(const GroupedArguments& p, const StreamOrder& order, std::uint32_t tokens) {
  constexpr int kElement = Arithmetic::kElement;
  constexpr int kWarps = Shape::kWarps;
  __shared__ StreamShared<Shape> shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int strips = (p.weight.rows + Shape::kRows - 1) / Shape::kRows;

  const StreamTiles<Shape> tiles(p.experts, order, shared);
  const int2 mine = tiles.strips(static_cast<int>(blockIdx.x), strips);
  if (mine.x == mine.y) return;

  UnitRing<Shape, Arithmetic, kZeros> ring(p, shared.tile, strips,
                                           tokens + warp * (kRingBytes<Shape, Arithmetic> / kWarps));
  tokens += kRingBytes<Shape, Arithmetic>;
  // A thread knows the row of one token of one of the tiles.
  static_assert(Shape::kTiles * Shape::kTokens <= Shape::kThreads);
  const int of_tiles = thread / Shape::kTokens;
  const int my_token = thread % Shape::kTokens;
  int number = mine.x + warp;
#pragma unroll 1
  for (int first_tile = mine.x / strips; first_tile * strips < mine.y;) {
    tiles.list(first_tile);
    __syncthreads();
    const int last = min((mine.y - 1) / strips - first_tile + 1, Shape::kTiles);
    StreamTile<Shape>& my_tile = shared.tile[min(of_tiles, last - 1)];
    const bool knows = of_tiles < last && my_token < my_tile.tokens();
    const int row = knows ? p.experts.row_of_a(my_tile.first_token + my_token) : 0;
    // As many tiles as there is room for.
    int count = 0;
    for (int used = 0; count < last; ++count) {
      StreamTile<Shape>& tile = shared.tile[count];
      const int bytes = tile.blocks() * tile.stored() * p.weight.terms * kElement;
      if (count > 0 && used + bytes > order.shared_size) break;
      if (thread == 0) tile.at = tokens + used;
      used += bytes;
    }
    const int stop = min((first_tile + count) * strips, mine.y);
    StripPlace at = {number / strips - first_tile, number % strips};
    ring.start(at, (stop - number + kWarps - 1) / kWarps);
    if (knows) my_tile.rows[my_token] = row;
    __syncthreads();
    const float scale = kElement == 1 && knows ? p.a_scale[row] : 1;
#pragma unroll 1
    for (int i = 0; i < count; ++i) copy_tokens<kElement>(p, shared.tile[i]);
    commit_copies();
    // After the tokens, so that memory stays busy while all warps wait for them.
    ring.prefetch();
    if (kElement == 1 && knows) my_tile.scales[my_token] = scale;
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (; number < stop; number += kWarps) {
      const StreamTile<Shape>& tile = shared.tile[at.tile];
      multiply_strip_of<1>(tile.blocks(), p, ring, tile, at.strip);
      at.move(kWarps, strips);
    }
    first_tile += count;
    if (first_tile * strips < mine.y) __syncthreads();
  }
}

template <class Shape, class Arithmetic, bool kZeros>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    experts_stream_kernel(const __grid_constant__ GroupedArguments p, const __grid_constant__ StreamOrder order) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  // Offsets and token indices, which are read one after the other below: one prefetch for 32 contiguous ones.
  const int first = static_cast<int>(threadIdx.x) * 32;
  if (first <= p.experts.count) prefetch_to_l2(p.experts.offsets + first * p.experts.offsets_stride);
  if (p.experts.token && first < p.tokens) prefetch_to_l2(p.experts.token + first * p.experts.token_stride);
  wait_for_previous();
  let_next_start();
  multiply_stream<Shape, Arithmetic, kZeros>(p, order, shared_address(shared));
}

}  // namespace octile::cuda::grouped_weight_sm80
