// Products by mma.sync with a 4-bit or 8-bit weight that has a scale for each group of a row's terms, of
// w4a8_gemm_sm80, w4a16_gemm_sm80, w8a8_group_gemm_sm80 and w8a16_group_gemm_sm80: y (m, n), rows of a are tokens.
//
// The instructions compute y^T = weight * a^T. A block has a tile of kRows of the weight by kTokens, and streams kStep
// terms of both at a time through a ring of stages by cp.async. A warp has all terms of its part of the tile. Of 32
// terms, a slice, a lane has 8 in a row: a word of the weight for each of its rows, or two of bytes, which it converts
// in registers, and the same 8 of a, natural in shared memory, which one load brings. Its rows of the weight are
// neighbours, so that sums go to y from registers, several elements at once.
//
// An Arithmetic says how words are converted and multiplied, kChunk slices at a time, and how their sums are folded
// into totals with the scales of the chunk. Launches and rows: grouped_weight_gemm_sm80_launch.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/bands.cuh"
#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/output.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/operands.h"

namespace octile::cuda::grouped_weight_sm80 {

constexpr int kUnit = 16;  // bytes of a copy
constexpr int kSliceTerms = 32;

template <int kRows_, int kTokens_, int kStep_, int kStages_, int kRowWarps_, int kTokenWarps_, int kBlocks_>
struct TileShape {
  static constexpr int kRows = kRows_;      // of the weight
  static constexpr int kTokens = kTokens_;  // rows of a
  static constexpr int kStep = kStep_;      // terms
  static constexpr int kStages = kStages_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kTokenWarps = kTokenWarps_;
  static constexpr int kThreads = 32 * kRowWarps_ * kTokenWarps_;
  static constexpr int kBlocks = kBlocks_;  // on an SM, which bounds the registers
  static constexpr int kWarpRows = kRows / kRowWarps_;
  static constexpr int kWarpTokens = kTokens / kTokenWarps_;
  static constexpr int kRowBlocks = kWarpRows / 16;
  static constexpr int kTokenBlocks = kWarpTokens / 8;
  static constexpr int kLaneRows = 2 * kRowBlocks;  // neighbours
  static constexpr bool kStreams = false;
  static_assert(kRowBlocks == 1 || kRowBlocks == 2);
};

struct Arguments {
  GroupedWeight weight;
  int group_shift;  // a term's group is term >> group_shift
  const std::uint8_t* a;
  std::int64_t a_pitch;  // bytes
  int tokens;
  int row_tiles, token_tiles;
  RowScale<float> a_scale;  // of an s8 a
  Bias bias;
  void* y;
  std::int64_t y_pitch;
  DType y_type;
  bool y_aligned;  // to the rows of a lane
  // Where several blocks share a tile, each multiplies this many of its steps, and its totals go to
  // sums[part][token][row]; sum_parts_kernel does the rest.
  int parts, part_steps;
  float* sums;
  std::int64_t sums_pitch;  // a multiple of 4

  static constexpr bool kGrouped = false;
  __device__ float a_scale_of(int token) const { return a_scale[token]; }
};

// Of experts, whose rows are gathered from a: of expert 0, or, with its rows from the block's tile to the end of its
// tokens, of one of them.
struct GroupedArguments : Arguments {
  Experts experts;

  static constexpr bool kGrouped = true;
  __device__ float a_scale_of(int token) const { return a_scale[a_scale.data ? experts.row_of_a(token) : 0]; }
};

// A stage in shared memory: tiles of the weight and of a; scales and zero points, one for each chunk and row.
template <class Tile, class Arithmetic>
struct Stage {
  static constexpr int kChunks = Tile::kStep / (kSliceTerms * Arithmetic::kChunk);
  static constexpr int kEntries = kChunks * Tile::kRows;
  static constexpr int kLine = Tile::kStep * Arithmetic::kElement;  // of a
  static constexpr int kA = Tile::kRows * Tile::kStep * Arithmetic::kWeightBits / 8;
  static constexpr int kScales = kA + Tile::kTokens * kLine;
  static constexpr int kZeros = kScales + (Arithmetic::kRow ? 0 : kEntries * 4);
  static constexpr int kBytes = kZeros + (Arithmetic::kWeightBits == 4 ? kEntries * 4 : 0);
  static_assert(kLine >= 128 && kChunks > 0 && kA % 128 == 0 && kScales % 128 == 0 && kBytes % 128 == 0);
};

// ---- From global to shared memory.

// The weight's order in shared memory, in units of 16 bytes, so that the lanes of a load meet different banks:
//   packed  panels of kStep / 8 lines of 64 bytes; unit c of line l where c ^ 2 * (l / 2 % 2) would
//   plain   rows of kStep values; with g and i a row's lane and place in that lane's rows, 128 bytes hold kLines rows
//           of the same i and neighbouring g, and a slice of a row, one unit or two, lies where slice ^ g / kLines would
template <class Tile, int kWeightBits>
struct PlainPlace {
  static constexpr int kRowBytes = Tile::kStep * kWeightBits / 8;
  static constexpr int kLines = 128 / kRowBytes;
  static constexpr int kSlice = kSliceTerms * kWeightBits / 8;
  static_assert(kLines == 1 || kLines == 2 || kLines == 4);

  // The first unit of a row, of which XOR with 16 * unit makes another one; the next row of a lane is 128 bytes on.
  __device__ static int first_unit(int row) {
    const int g = row / Tile::kLaneRows % 8;
    const int of_line = row / (8 * Tile::kLaneRows) * (8 / kLines) + g / kLines;
    return (of_line * Tile::kLaneRows + row % Tile::kLaneRows) * 128 + g % kLines * kRowBytes +
           g / kLines * kSlice % kRowBytes;
  }
};

// One thread's part of copying tiles of the weight: the same unit of every lines_at_once_-th panel or row.
template <class Tile, int kWeightBits>
class WeightFiller {
 public:
  __device__ WeightFiller(const GroupedWeight& w, int first_row, int first_term) {
    const int thread = static_cast<int>(threadIdx.x);
    const int across = w.packed ? kPanelUnits : kRowUnits;
    const int line = thread / across;
    const int unit = thread % across;
    const int first = w.packed ? first_row / 16 : first_row;
    lines_at_once_ = Tile::kThreads / across;
    lines_ = (w.packed ? (w.rows + 15) / 16 : w.rows) - first - line;
    from_ = w.values + (first + line) * w.pitch + unit * kUnit + first_term * kWeightBits / 8 * (w.packed ? 16 : 1);
    if (w.packed) {
      term_ = unit / 4 * 8;
      to_ = line * (kPanelUnits * kUnit) + (unit ^ (unit / 8 % 2 * 2)) * kUnit;
    } else {
      term_ = unit * (kUnit * 8 / kWeightBits);
      to_ = Place::first_unit(line) ^ unit * kUnit;
    }
    term_ += first_term;
    stride_ = lines_at_once_ * w.pitch;
    step_bytes_ = across * kUnit;
  }

  // The next step; steps are copied in order.
  __device__ void copy(std::uint32_t stage, int terms) {
    const bool inside = term_ < terms;
    const std::uint8_t* from = from_;
#pragma unroll
    for (int i = 0; i < kTurns; ++i, from += stride_) {
      copy_async_if(inside && lines_ > i * lines_at_once_, stage + to_ + i * Tile::kThreads * kUnit, from);
    }
    from_ += step_bytes_;
    term_ += Tile::kStep;
  }

 private:
  static constexpr int kRowUnits = Tile::kStep * kWeightBits / 8 / kUnit;
  static constexpr int kPanelUnits = 16 * kRowUnits;
  static constexpr int kTurns = Tile::kRows * kRowUnits / Tile::kThreads;
  static_assert(kTurns * Tile::kThreads == Tile::kRows * kRowUnits);
  static_assert(kWeightBits == 8 || Tile::kThreads % kPanelUnits == 0, "whole panels");
  // Rows so far apart have the same twist, and lie a whole number of 128 bytes apart.
  using Place = PlainPlace<Tile, kWeightBits>;
  static constexpr int kApart = Tile::kLaneRows * (Place::kLines == 1 ? Place::kRowBytes / Place::kSlice : 8);
  static_assert(Tile::kThreads / kRowUnits % kApart == 0);

  const std::uint8_t* from_;
  std::int64_t stride_;
  int to_;
  int term_;  // of this thread's unit
  int lines_;
  int lines_at_once_;
  int step_bytes_;
};

// Of tiles of a: lines of a token's terms; a lane reads 8 of them, four tokens or two at once, so slice s of token i
// lies where s ^ twist(i) would. Beyond k there are zeros; the weight is finite there.
template <class Tile, int kElement, bool kGrouped = false>
class TokenFiller {
 public:
  static constexpr int kLine = Tile::kStep * kElement;
  __device__ static int twist(int token) { return kElement == 1 ? token & 3 : token & 1; }

  template <class Arguments>
  __device__ TokenFiller(const Arguments& p, int first, int first_term)
      : line_(static_cast<int>(threadIdx.x) / kAcross),
        tokens_(min(p.tokens - first, Tile::kTokens) - line_),
        stride_(kAtOnce * p.a_pitch) {
    const int unit = static_cast<int>(threadIdx.x) % kAcross;
    term_ = first_term + unit * (kUnit / kElement);
    if constexpr (kGrouped) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int row = tokens_ > i * kAtOnce ? p.experts.row_of_a(first + line_ + i * kAtOnce) : 0;
        rows_[i] = p.a + row * p.a_pitch + first_term * kElement + unit * kUnit;
      }
    } else {
      from_ = p.a + (first + line_) * p.a_pitch + first_term * kElement + unit * kUnit;
    }
    to_ = line_ * kLine + ((unit * kUnit) ^ twist(line_) * (kSliceTerms * kElement));
  }

  __device__ void copy(std::uint32_t tile, int terms, const void* anything) {
    const bool inside = term_ < terms;
    if constexpr (kGrouped) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const auto* from = inside ? rows_[i] : static_cast<const std::uint8_t*>(anything);
        copy_async_if(tokens_ > i * kAtOnce, tile + to_ + i * kAtOnce * kLine, from, inside ? kUnit : 0);
        rows_[i] += kLine;
      }
    } else {
      const auto* from = inside ? from_ : static_cast<const std::uint8_t*>(anything);
      const std::int64_t stride = inside ? stride_ : 0;
#pragma unroll
      for (int i = 0; i < kTurns; ++i, from += stride) {
        copy_async_if(tokens_ > i * kAtOnce, tile + to_ + i * kAtOnce * kLine, from, inside ? kUnit : 0);
      }
      from_ += kLine;
    }
    term_ += Tile::kStep;
  }

 private:
  static constexpr int kAcross = kLine / kUnit;
  static constexpr int kAtOnce = Tile::kThreads / kAcross;
  static constexpr int kTurns = (Tile::kTokens + kAtOnce - 1) / kAtOnce;
  static_assert(Tile::kThreads % kAcross == 0 && kAtOnce % 4 == 0);

  int line_;
  int tokens_;
  std::int64_t stride_;
  int term_;
  const std::uint8_t* from_;
  const std::uint8_t* rows_[kTurns];  // of tokens that are gathered
  int to_;
};

// One thread's part of copying scales and zero points, one for each chunk and row of a step; zeros beyond the weight.
template <class Tile, class Arithmetic>
class GroupFiller {
 public:
  __device__ GroupFiller(const Arguments& p, int first_row) : shift_(p.group_shift) {
    const GroupedWeight& w = p.weight;
    const int thread = static_cast<int>(threadIdx.x);
    const int row = first_row + thread % Tile::kRows;
    scales_inside_ = row < w.rows;
    chunk_ = thread / Tile::kRows;
    scales_ = static_cast<const float*>(w.scales) + (scales_inside_ ? w.scale.at(row, 0) : 0);
    scale_col_ = w.scale.col;
    if (w.zeros == nullptr) return;
    const int size = w.packed ? 1 : 4;
    const int across = w.packed ? Tile::kRows / 4 : Tile::kRows;  // words of a chunk
    const int zero_row = first_row + thread % across * (4 / size);
    zeros_inside_ = zero_row < w.rows;
    zero_chunk_ = thread / across;
    zero_chunks_at_once_ = Tile::kThreads / across;
    zeros_ = static_cast<const std::uint8_t*>(w.zeros) + (zeros_inside_ ? w.zero.at(zero_row, 0) * size : 0);
    zero_col_ = w.zero.col * size;
  }

  __device__ void copy(std::uint32_t stage, int first_term, int terms) const {
    const std::uint32_t to = stage + threadIdx.x * 4;
    if constexpr (!Arithmetic::kRow) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int chunk = chunk_ + i * (Tile::kThreads / Tile::kRows);
        if (chunk >= S::kChunks) break;
        const int term = first_term + chunk * kTerms;
        const bool inside = scales_inside_ && term < terms;
        copy_word_async(to + S::kScales + i * Tile::kThreads * 4,
                        inside ? scales_ + (term >> shift_) * scale_col_ : scales_, inside);
      }
    }
    if (zeros_ == nullptr) return;
    int to_zero = S::kZeros;
#pragma unroll 1
    for (int chunk = zero_chunk_; chunk < S::kChunks; chunk += zero_chunks_at_once_, to_zero += Tile::kThreads * 4) {
      const int term = first_term + chunk * kTerms;
      const bool inside = zeros_inside_ && term < terms;
      copy_word_async(to + to_zero, inside ? zeros_ + (term >> shift_) * zero_col_ : zeros_, inside);
    }
  }

 private:
  using S = Stage<Tile, Arithmetic>;
  static constexpr int kTerms = kSliceTerms * Arithmetic::kChunk;
  static constexpr int kTurns = (S::kEntries + Tile::kThreads - 1) / Tile::kThreads;
  static_assert(Tile::kThreads % Tile::kRows == 0);

  int shift_;
  bool scales_inside_, zeros_inside_;
  int chunk_, zero_chunk_, zero_chunks_at_once_;
  const float* scales_;
  const std::uint8_t* zeros_ = nullptr;
  std::int64_t scale_col_, zero_col_;
};

// ---- From shared memory to registers.

// The nibbles q of terms 0 to 7 as a packed weight has them: q + 8, the low nibbles terms 0 to 3.
__device__ inline std::uint32_t packed_word(std::uint32_t word) {
  word ^= 0x88888888u;
  const std::uint32_t low = __byte_perm(word, word >> 4, 0x5140);
  const std::uint32_t high = __byte_perm(word << 4, word, 0x7362);
  return (low & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
}

// A lane's words of a slice, of a weight of nibbles.
template <class Tile, int kWeightBits>
class WordReader {
 public:
  __device__ WordReader(bool packed, int first_row, int lane) {
    const int g = lane / 4, t = lane % 4;
    if (packed) {
      const int row = first_row + g * Tile::kLaneRows;
      const int unit = row % 16 / 4 ^ t / 2 * 2;
      place_ = row / 16 * (Tile::kStep * 8) + t * 64 + unit * kUnit + row % 4 * 4;
    } else {
      place_ = PlainPlace<Tile, kWeightBits>::first_unit(first_row + g * Tile::kLaneRows) + t * 4;
    }
  }

  __device__ void read(bool packed, std::uint32_t stage, int slice, std::uint32_t (&words)[Tile::kLaneRows]) const {
    if (packed) {
      const std::uint32_t at = stage + place_ + slice * 256;
      if constexpr (Tile::kLaneRows == 4) {
        const uint4 v = load_shared(at);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      } else {
        const uint2 v = load_shared_pair(at);
        words[0] = v.x, words[1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kLaneRows; ++i) {
        words[i] = packed_word(load_shared_word(stage + (place_ ^ slice * kUnit) + i * 128));
      }
    }
  }

 private:
  int place_;
};

// The same for bytes, which are not packed: two words for each row.
template <class Tile>
class WordReader<Tile, 8> {
 public:
  __device__ WordReader(bool, int first_row, int lane)
      : place_(PlainPlace<Tile, 8>::first_unit(first_row + lane / 4 * Tile::kLaneRows) + lane % 4 * 8) {}

  __device__ void read(bool, std::uint32_t stage, int slice, uint2 (&words)[Tile::kLaneRows]) const {
#pragma unroll
    for (int i = 0; i < Tile::kLaneRows; ++i) {
      words[i] = load_shared_pair(stage + (place_ ^ slice * kSliceTerms) + i * 128);
    }
  }

 private:
  int place_;
};

// 8 + z of a lane's rows, of an entry of a stage.
template <class Tile>
__device__ void read_zeros(bool packed, std::uint32_t zeros, int entry, unsigned (&u)[Tile::kLaneRows]) {
  if (packed) {
    const std::uint32_t bytes = load_shared_word(zeros + entry / 4 * 4) >> entry % 4 * 8;
#pragma unroll
    for (int i = 0; i < Tile::kLaneRows; ++i) u[i] = bytes >> 8 * i & 255;
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kLaneRows; ++i) u[i] = 8 + load_shared_word(zeros + (entry + i) * 4);
  }
}

template <int kCount>
__device__ void read_scales(std::uint32_t from, float (&scales)[kCount]) {
  if constexpr (kCount == 4) {
    const uint4 v = load_shared(from);
    scales[0] = __uint_as_float(v.x), scales[1] = __uint_as_float(v.y);
    scales[2] = __uint_as_float(v.z), scales[3] = __uint_as_float(v.w);
  } else {
    const uint2 v = load_shared_pair(from);
    scales[0] = __uint_as_float(v.x), scales[1] = __uint_as_float(v.y);
  }
}

// ---- Arithmetics. One has besides kWeightBits, Words of a row, an Offset made of 8 + z, and convert().

struct NoOffset {
  NoOffset() = default;
  __device__ explicit NoOffset(unsigned) {}
};

// 16-bit tokens by a weight as floats of their type. kChunk_ 0: a group is a row.
template <class T, int kChunk_>
struct FloatArithmetic {
  static constexpr int kElement = 2;
  static constexpr bool kSplits = true;
  static constexpr bool kRow = kChunk_ == 0;
  static constexpr int kChunk = kRow ? 2 : kChunk_;
  using Sum = float;
  using Total = float;
  struct Slice {
    std::uint32_t a[2][4];  // terms 0 to 3 of a lane's eight, and 4 to 7
  };

  __device__ static uint4 read(std::uint32_t from) { return load_shared(from); }

  __device__ static void multiply(Sum (&sums)[4], const Slice& b, uint4 a, bool first) {
    first ? multiply_16(T(), sums, b.a[0], {a.x, a.y}) : multiply_add_16(T(), sums, b.a[0], {a.x, a.y});
    multiply_add_16(T(), sums, b.a[1], {a.z, a.w});
  }

  __device__ static float fold(Sum sum, float scale, float total) { return __fmaf_rn(sum, scale, total); }
  __device__ static float fold_row(Sum sum, float scale) { return sum * scale; }
};

// s8 tokens by a weight as bytes, exact sums of a group. kGroup: slices of a group; 0: a group is a row.
template <int kGroup>
struct ByteArithmetic {
  static constexpr int kElement = 1;
  static constexpr bool kSplits = false;
  static constexpr bool kRow = kGroup == 0;
  static constexpr int kChunk = kRow ? 4 : kGroup;
  using Sum = std::int32_t;
  using Total = std::conditional_t<kRow, std::int32_t, float>;
  struct Slice {
    std::uint32_t a[4];
  };

  float share;  // what counts 1 in a sum: 1 or 1/16
  float base;

  __device__ explicit ByteArithmetic(float share_) : share(share_), base(-0x1.8p23f * share_) {}

  __device__ static uint2 read(std::uint32_t from) { return load_shared_pair(from); }

  // A sum of a group is below 2^22 and starts at the bits of the float 1.5 * 2^23: those of that float plus the sum.
  __device__ static void multiply(Sum (&sums)[4], const Slice& b, uint2 a, bool first) {
    if (first) {
      multiply_s8(sums, b.a, a.x, a.y, 0x4b400000);
    } else {
      multiply_add_s8(sums, b.a, a.x, a.y);
    }
  }

  __device__ float fold(Sum sum, float scale, float total) const {
    return __fmaf_rn(__fmaf_rn(__int_as_float(sum), share, base), scale, total);
  }
  __device__ float fold_row(Sum sum, float scale) const {
    return __fmaf_rn(__int2float_rn(share == 1 ? sum : sum / 16), scale, 0);
  }
};

// ---- The kernel.

template <int kCount>
__device__ void store_floats(float* to, const float (&values)[kCount]) {
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
  } else {
    *reinterpret_cast<float2*>(to) = {values[0], values[1]};
  }
}

// `values` of a lane's rows of one token, from this column of y on.
template <int kCount>
__device__ void store_rows(const Arguments& p, int token, int col, const float (&values)[kCount]) {
  const std::int64_t at = token * p.y_pitch + col;
  if (p.y_aligned && col + kCount <= p.weight.rows) {
    if (p.y_type == DType::f32) return store_floats(static_cast<float*>(p.y) + at, values);
    std::uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      words[i] = p.y_type == DType::f16 ? pack<__half>(values[2 * i], values[2 * i + 1])
                                        : pack<__nv_bfloat16>(values[2 * i], values[2 * i + 1]);
    }
    std::uint16_t* const to = static_cast<std::uint16_t*>(p.y) + at;
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = words[0];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (col + i < p.weight.rows) store_float(p.y, at + i, p.y_type, values[i]);
  }
}

// A tile, from its first token and row of the weight on; of its terms those of one part.
template <class Tile, class Arithmetic, class Arguments>
__device__ void multiply_and_store(const Arguments& p, int2 first, int part, std::uint8_t* shared) {
  using S = Stage<Tile, Arithmetic>;
  constexpr int kLaneRows = Tile::kLaneRows;
  constexpr int kChunk = Arithmetic::kChunk;
  constexpr int kSliceBytes = kSliceTerms * Arithmetic::kElement;  // of a token
  constexpr int kUnroll = Tile::kTokenBlocks <= 2 ? 4 / kChunk : 1;
  constexpr bool kGrouped = Arguments::kGrouped;
  const std::uint32_t ring = shared_address(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / Tile::kTokenWarps * Tile::kWarpRows;
  const int warp_token = warp % Tile::kTokenWarps * Tile::kWarpTokens;
  const int first_token = first.x;
  const int first_row = first.y;
  constexpr int kWeightBits = Arithmetic::kWeightBits;
  const bool packed = kWeightBits == 4 && p.weight.packed;
  const bool zeros = kWeightBits == 4 && p.weight.zeros != nullptr;
  const int terms = p.weight.terms;
  const int first_term = part * p.part_steps * Tile::kStep;
  const int steps = min((terms - first_term + Tile::kStep - 1) / Tile::kStep, p.part_steps);

  WeightFiller<Tile, kWeightBits> weight_filler(p.weight, first_row, first_term);
  TokenFiller<Tile, Arithmetic::kElement, kGrouped> token_filler(p, first_token, first_term);
  const GroupFiller<Tile, Arithmetic> group_filler(p, first_row);
  const auto fill = [&](int step, std::uint32_t stage) {
    if (step < steps) {
      weight_filler.copy(stage, terms);
      token_filler.copy(stage + S::kA, terms, p.a);
      group_filler.copy(stage, first_term + step * Tile::kStep, terms);
    }
    commit_copies();
  };
  const WordReader<Tile, kWeightBits> word_reader(packed, warp_row, lane);
  const int lane_row = warp_row + lane / 4 * kLaneRows;
  const int token = warp_token + lane / 4;
  const std::uint32_t a_place = S::kA + token * S::kLine + lane % 4 * (8 * Arithmetic::kElement);
  const int twist = TokenFiller<Tile, Arithmetic::kElement>::twist(token) * kSliceBytes;

  Arithmetic arithmetic(zeros);
  typename Arithmetic::Offset offsets[kLaneRows];
  typename Arithmetic::Total totals[Tile::kTokenBlocks][Tile::kRowBlocks][4] = {};

  wait_for_previous();
  let_next_start();
  constexpr int kAhead = Tile::kStages - 1;
#pragma unroll 1
  for (int step = 0; step < kAhead; ++step) fill(step, ring + step * S::kBytes);

  std::uint32_t stage = ring;
  std::uint32_t filling = ring + kAhead * S::kBytes;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kAhead - 1>();
    __syncthreads();
    fill(step + kAhead, filling);
    filling = stage;
#pragma unroll kUnroll
    for (int chunk = 0; chunk < S::kChunks; ++chunk) {
      const int entry = chunk * Tile::kRows + lane_row;
      if (zeros) {
        unsigned u[kLaneRows];
        read_zeros<Tile>(packed, stage + S::kZeros, entry, u);
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) offsets[i] = typename Arithmetic::Offset(u[i]);
      }
      typename Arithmetic::Slice slices[kChunk][Tile::kRowBlocks];
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        typename Arithmetic::Words words[kLaneRows];
        word_reader.read(packed, stage, chunk * kChunk + s, words);
#pragma unroll
        for (int r = 0; r < Tile::kRowBlocks; ++r) {
          arithmetic.convert(words[2 * r], words[2 * r + 1], offsets[2 * r], offsets[2 * r + 1], slices[s][r]);
        }
      }
      float scales[kLaneRows];
      if constexpr (!Arithmetic::kRow) read_scales(stage + S::kScales + entry * 4, scales);
#pragma unroll
      for (int t = 0; t < Tile::kTokenBlocks; ++t) {
        typename Arithmetic::Sum sums[Tile::kRowBlocks][4];
#pragma unroll
        for (int s = 0; s < kChunk; ++s) {
          const int slice = ((chunk * kChunk + s) * kSliceBytes) ^ twist;
          const auto a = Arithmetic::read(stage + a_place + t * (8 * S::kLine) + slice);
#pragma unroll
          for (int r = 0; r < Tile::kRowBlocks; ++r) {
            if constexpr (Arithmetic::kRow) {
              Arithmetic::multiply(totals[t][r], slices[s][r], a, false);
            } else {
              Arithmetic::multiply(sums[r], slices[s][r], a, s == 0);
            }
          }
        }
        if constexpr (!Arithmetic::kRow) {
#pragma unroll
          for (int r = 0; r < Tile::kRowBlocks; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              totals[t][r][e] = arithmetic.fold(sums[r][e], scales[2 * r + e / 2], totals[t][r][e]);
            }
          }
        }
      }
    }
    stage = stage == ring + kAhead * S::kBytes ? ring : stage + S::kBytes;
  }

  const int col = first_row + lane_row;
  float scales[kLaneRows], bias[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    bias[i] = p.bias.at(col + i, p.weight.rows, -0.0f);
    if constexpr (Arithmetic::kRow) {
      const bool inside = col + i < p.weight.rows;
      scales[i] = inside ? __ldcg(static_cast<const float*>(p.weight.scales) + p.weight.scale.at(col + i, 0)) : 0;
    }
  }
#pragma unroll
  for (int t = 0; t < Tile::kTokenBlocks; ++t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_y = first_token + warp_token + t * 8 + lane % 4 * 2 + e;
      if (of_y >= p.tokens) continue;
      float values[kLaneRows];
      if constexpr (Arithmetic::kSplits && !kGrouped) {
        if (p.parts > 1) {
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) {
            const auto total = totals[t][i / 2][i % 2 * 2 + e];
            values[i] = Arithmetic::kRow ? arithmetic.fold_row(total, scales[i]) : total;
          }
          if (col < p.sums_pitch)
            store_floats(p.sums + (std::int64_t{part} * p.tokens + of_y) * p.sums_pitch + col, values);
          continue;
        }
      }
      const float a_scale = Arithmetic::kElement == 1 ? p.a_scale_of(of_y) : 1;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const auto total = totals[t][i / 2][i % 2 * 2 + e];
        values[i] = fmaf(Arithmetic::kRow ? arithmetic.fold_row(total, scales[i]) : static_cast<float>(total), a_scale,
                         bias[i]);
      }
      store_rows(p, of_y, col, values);
    }
  }
}

template <class Tile, class Arithmetic>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    grouped_weight_gemm_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int2 tile = tile_in_bands(static_cast<int>(blockIdx.x), p.token_tiles, p.row_tiles);
  multiply_and_store<Tile, Arithmetic>(p, {tile.x * Tile::kTokens, tile.y * Tile::kRows}, static_cast<int>(blockIdx.y),
                                       shared);
}

// Of the rows of experts.
template <class Tile, class Arithmetic>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    experts_gemm_kernel(const __grid_constant__ GroupedArguments all) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  wait_for_previous();
  const ExpertTile t = find_tile<Tile::kTokens>(all.experts, static_cast<int>(blockIdx.x) / all.row_tiles);
  if (t.expert < 0) return;
  GroupedArguments p = all;
  p.tokens = t.end;
  move_to_expert(p.weight, all.experts, t.expert);
  if (p.bias.data) p.bias.data = static_cast<const std::uint8_t*>(p.bias.data) + t.expert * all.experts.bias;
  const int of_expert = t.tile * p.row_tiles + static_cast<int>(blockIdx.x) % p.row_tiles;
  const int2 tile = tile_in_bands(of_expert, t.tiles, p.row_tiles);
  multiply_and_store<Tile, Arithmetic>(p, {t.first + tile.x * Tile::kTokens, tile.y * Tile::kRows}, 0, shared);
}

inline constexpr int kSumThreads = 128;

// Adds up the parts, in order, and the bias: four columns of y a thread.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const __grid_constant__ Arguments p) {
  wait_for_previous();
  let_next_start();
  const int col = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * 4;
  if (col >= p.weight.rows) return;
  // Outside of the loop, out of which the compiler moves the loads of a bias but not the test whether there is one.
  float bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bias[i] = p.bias.at(col + i, p.weight.rows, -0.0f);
  for (int token = static_cast<int>(blockIdx.y); token < p.tokens; token += static_cast<int>(gridDim.y)) {
    const float* from = p.sums + token * p.sums_pitch + col;
    float values[4] = {};
#pragma unroll 4
    for (int part = 0; part < p.parts; ++part, from += p.tokens * p.sums_pitch) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
      values[0] += v.x, values[1] += v.y, values[2] += v.z, values[3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] += bias[i];
    store_rows(p, token, col, values);
  }
}

}  // namespace octile::cuda::grouped_weight_sm80
