// s8 matrices in the form that TMA and cp.async read: to[r, c] = from[r, c], rows of `to` contiguous, each at a
// multiple of 16 bytes. `from` has either of its strides 1 and any pitch and base.
//
// Where rows of `from` are contiguous, a warp copies a row, 16 aligned bytes a lane, which neighbouring lanes exchange.
// Where columns are, a block transposes a tile of 128 x 128 bytes: four words of four columns become four of four rows
// in registers, and a shared tile lets both sides move 128 bytes a warp.
#include <algorithm>

#include "cuda/device/bytes.cuh"
#include "cuda/device/experts.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/gemm/repack.h"
#include "cuda/launch.h"

namespace octile::cuda {

namespace {

constexpr char kName[] = "repack_sm80";
constexpr int kTile = 128;
constexpr int kWords = kTile / 4;  // of a tile's row
constexpr int kWarps = 8;

struct From {
  const std::int8_t* data;
  std::int64_t pitch;  // between contiguous lines
  std::int64_t lines;
  std::int64_t length;  // of a line
};

// Four neighbours of a line; 0 beyond its end.
template <bool aligned>
__device__ std::uint32_t load_word(const From& from, std::int64_t line, std::int64_t at) {
  if (line >= from.lines || at >= from.length) return 0;
  const std::int8_t* const p = from.data + line * from.pitch + at;
  if (aligned && at + 4 <= from.length) return *reinterpret_cast<const std::uint32_t*>(p);
  std::uint32_t word = 0;
  for (int i = 0; i < 4 && at + i < from.length; ++i) word |= std::uint32_t{static_cast<std::uint8_t>(p[i])} << (8 * i);
  return word;
}

__device__ void store_word(std::int8_t* row, std::int64_t at, std::int64_t pitch, std::uint32_t word) {
  if (at < pitch) *reinterpret_cast<std::uint32_t*>(row + at) = word;
}

// Of this block. Rows of tiles are counted along y, and what y cannot count along z.
__device__ std::int64_t row_of_tiles() { return (std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * kTile; }

// 16 bytes, as far as they come before `end`: memory from there on may belong to another tensor.
template <bool kWhole>
__device__ uint4 load_unit(const std::int8_t* at, const std::int8_t* end) {
  if (kWhole || at + 16 <= end) return __ldcg(reinterpret_cast<const uint4*>(at));
  std::uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (at + i < end) words[i / 4] |= std::uint32_t{static_cast<std::uint8_t>(__ldcg(at + i))} << (8 * (i % 4));
  }
  return {words[0], words[1], words[2], words[3]};
}

// kTurns * 512 bytes from `first` on of a line that begins `shift` bytes behind `units`. The bytes before a line share
// a unit with it, so they can be read.
constexpr int kTurns = 4;
template <bool kWhole>
__device__ void copy_part(const std::int8_t* units, unsigned shift, std::int64_t first, std::int64_t length,
                          const std::int8_t* end, std::int8_t* to) {
  const int lane = threadIdx.x % 32;
  uint4 own[kTurns], behind[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const std::int64_t at = first + (i * 32 + lane) * 16;
    const bool last = lane == 31 || at + 16 >= length;
    own[i] = at < length ? load_unit<kWhole>(units + at, end) : uint4{};
    behind[i] = at < length && last && shift > 0 ? load_unit<kWhole>(units + at + 16, end) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const std::int64_t at = first + (i * 32 + lane) * 16;
    uint4 next = {__shfl_down_sync(~0u, own[i].x, 1), __shfl_down_sync(~0u, own[i].y, 1),
                  __shfl_down_sync(~0u, own[i].z, 1), __shfl_down_sync(~0u, own[i].w, 1)};
    if (lane == 31 || at + 16 >= length) next = behind[i];
    if (at < length) *reinterpret_cast<uint4*>(to + at) = shifted_bytes(own[i], next, shift);
  }
}

// Copies of which lines are rows.
struct Rows {
  From from[2];
  std::int8_t* to[2];
  std::int64_t to_pitch[2];
};
constexpr int kPart = kTurns * 512;

__global__ void __launch_bounds__(32 * kWarps) copy_rows(const __grid_constant__ Rows rows) {
  let_next_start();
  wait_for_previous();
  const std::int64_t line_of_all = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const bool second = line_of_all >= rows.from[0].lines;
  const From& from = rows.from[second];
  const std::int64_t line = line_of_all - (second ? rows.from[0].lines : 0);
  if (line >= from.lines) return;
  const std::int8_t* const begin = from.data + line * from.pitch;
  const std::int8_t* const end = from.data + (from.lines - 1) * from.pitch + from.length;
  const auto shift = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(begin) % 16);
  const std::int8_t* const units = begin - shift;
  std::int8_t* const to = rows.to[second] + line * rows.to_pitch[second];
  const bool whole = units + (from.length + 15) / 16 * 16 + 16 <= end;
#pragma unroll 1
  for (std::int64_t first = std::int64_t{blockIdx.y} * kPart; first < from.length;
       first += std::int64_t{gridDim.y} * kPart) {
    if (whole) {
      copy_part<true>(units, shift, first, from.length, end, to);
    } else {
      copy_part<false>(units, shift, first, from.length, end, to);
    }
  }
}

// Lines of `from`, from first_line on, are columns of `to`, from first_column on.
template <bool aligned>
__device__ void transpose_tile(const From& from, std::int64_t first_line, std::int8_t* to, std::int64_t to_pitch,
                               std::int64_t first_column) {
  // Row r of `to` in the tile, word w of it, lies at [r][w ^ r / 4]: neither side meets a bank twice.
  __shared__ std::uint32_t tile[kTile][kWords];
  const int lane = threadIdx.x % 32;
  const std::int64_t first_row = row_of_tiles();
  for (int w = threadIdx.x / 32; w < kWords; w += kWarps) {
    std::uint32_t lines[4];
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) lines[i] = load_word<aligned>(from, first_line + 4 * w + i, first_row + 4 * lane);
    transpose_4x4(lines, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[4 * lane + i][w ^ lane] = words[i];
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < kTile; i += kWarps) {
    const std::int64_t row = first_row + i;
    if (row < from.length) {
      store_word(to + row * to_pitch, first_column + 4 * lane, to_pitch, tile[i][lane ^ i / 4]);
    }
  }
}

template <bool aligned>
__global__ void __launch_bounds__(32 * kWarps) transpose(From from, std::int8_t* to, std::int64_t to_pitch) {
  let_next_start();
  wait_for_previous();
  const std::int64_t first = std::int64_t{blockIdx.x} * kTile;
  transpose_tile<aligned>(from, first, to, to_pitch, first);
}

template <bool aligned>
__global__ void __launch_bounds__(32 * kWarps)
    transpose_terms(From from, Experts experts, int block, std::int8_t* to, std::int64_t to_pitch) {
  let_next_start();
  wait_for_previous();
  const int number = static_cast<int>(blockIdx.x), tiles = block / kTile;
  const ExpertTile terms = find_tile(experts, number / tiles, block);
  const std::int64_t first = terms.first + terms.tile * std::int64_t{block} + number % tiles * kTile;
  if (first >= terms.end) return;
  from.lines = terms.end;
  transpose_tile<aligned>(from, first, to, to_pitch, std::int64_t{number} * kTile);
}

bool words_aligned(const From& from) {
  return reinterpret_cast<std::uintptr_t>(from.data) % 4 == 0 && from.pitch % 4 == 0;
}

From from_of(const ConstTensor& t) {
  const bool rows = t.strides[1] == 1;
  return {static_cast<const std::int8_t*>(t.data), t.strides[rows ? 0 : 1], rows ? t.rows() : t.cols(),
          rows ? t.cols() : t.rows()};
}

LaunchShape transpose_shape(const ConstTensor& to) {
  constexpr unsigned kMaxAlongY = 65535;
  const unsigned blocks = blocks_for(to.rows(), kTile);
  const unsigned high = std::min(blocks, kMaxAlongY);
  return {{blocks_for(to.cols(), kTile), high, ceil_div(blocks, high)}, {32 * kWarps}};
}

void enqueue_transpose(const ConstTensor& from, const ConstTensor& to, Stream stream) {
  const LaunchShape shape = transpose_shape(to);
  const From columns = from_of(from);
  enqueue(kName, words_aligned(columns) ? transpose<true> : transpose<false>, shape, stream, columns,
          static_cast<std::int8_t*>(const_cast<void*>(to.data)), to.strides[0]);
}

}  // namespace

void prepare_repack() {
  prepare(kName, copy_rows);
  prepare(kName, transpose<true>);
  prepare(kName, transpose<false>);
}

std::int64_t ExpertTerms::padded(std::int64_t terms) const {
  return max_blocks(offsets.rows() - 1, terms, block) * block;
}

void prepare_repack_terms() {
  prepare(kName, transpose_terms<true>);
  prepare(kName, transpose_terms<false>);
}

void repack_terms(ConstTensor& operand, const ExpertTerms& terms, std::byte* memory, Stream stream) {
  const From columns = {static_cast<const std::int8_t*>(operand.data), operand.strides[1], operand.cols(),
                        operand.rows()};
  operand.data = memory;
  operand.shape[1] = terms.padded(operand.cols());
  operand.strides = {repacked_pitch(operand.cols()), 1};
  enqueue(kName, words_aligned(columns) ? transpose_terms<true> : transpose_terms<false>, transpose_shape(operand),
          stream, columns, experts_at(terms.offsets), static_cast<int>(terms.block),
          reinterpret_cast<std::int8_t*>(memory), operand.strides[0]);
}

void repack(std::initializer_list<ConstTensor*> operands, std::byte* memory, Stream stream) {
  Rows rows = {};
  std::size_t count = 0;
  for (ConstTensor* const operand : operands) {
    if (operand == nullptr) continue;
    const ConstTensor from = *operand;
    operand->data = memory;
    operand->strides = {repacked_pitch(from.cols()), 1};
    if (from.strides[1] == 1) {
      rows.from[count] = from_of(from);
      rows.to[count] = reinterpret_cast<std::int8_t*>(memory);
      rows.to_pitch[count++] = operand->strides[0];
    } else {
      enqueue_transpose(from, *operand, stream);
    }
    memory += repacked_size(from.rows(), from.cols());
  }
  if (count == 0) return;
  const unsigned blocks = blocks_for(rows.from[0].lines + rows.from[1].lines, kWarps);
  const unsigned parts = blocks_for(std::max(rows.from[0].length, rows.from[1].length), kPart);
  enqueue(kName, copy_rows, LaunchShape{{blocks, std::min(parts, 65535u)}, 32 * kWarps}, stream, rows);
}

}  // namespace octile::cuda
