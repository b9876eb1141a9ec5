// An s8 matrix in the form that TMA reads: to[r, c] = from[r, c], rows of `to` contiguous, each at a multiple of
// 16 bytes. `from` has either of its strides 1 and any pitch and base.
//
// A tile of 128 x 128 bytes a block. Where columns of `from` are contiguous, four words of four rows become four of
// four columns in registers, and a shared tile lets both sides move 128 bytes a warp.
#include <algorithm>

#include "cuda/device/bytes.cuh"
#include "cuda/device/grid.cuh"
#include "cuda/gemm/repack.h"
#include "cuda/launch.h"

namespace octile::cuda {

namespace {

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

// Lines of `from` are rows of `to`.
template <bool aligned>
__global__ void __launch_bounds__(32 * kWarps) copy_rows(From from, std::int8_t* to, std::int64_t to_pitch) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % 32;
  const std::int64_t at = std::int64_t{blockIdx.x} * kTile + 4 * lane;
  for (int i = threadIdx.x / 32; i < kTile; i += kWarps) {
    const std::int64_t row = row_of_tiles() + i;
    if (row < from.lines) store_word(to + row * to_pitch, at, to_pitch, load_word<aligned>(from, row, at));
  }
}

// Lines of `from` are columns of `to`.
template <bool aligned>
__global__ void __launch_bounds__(32 * kWarps) transpose(From from, std::int8_t* to, std::int64_t to_pitch) {
  let_next_start();
  wait_for_previous();
  // Row r of `to` in the tile, word w of it, lies at [r][w ^ r / 4]: neither side meets a bank twice.
  __shared__ std::uint32_t tile[kTile][kWords];
  const int lane = threadIdx.x % 32;
  const std::int64_t first_row = row_of_tiles();
  const std::int64_t first_column = std::int64_t{blockIdx.x} * kTile;
  for (int w = threadIdx.x / 32; w < kWords; w += kWarps) {
    std::uint32_t lines[4];
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) lines[i] = load_word<aligned>(from, first_column + 4 * w + i, first_row + 4 * lane);
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

bool words_aligned(const ConstTensor& t, std::int64_t pitch) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 4 == 0 && pitch % 4 == 0;
}

}  // namespace

void prepare_repack() {
  prepare("repack_sm80", copy_rows<true>);
  prepare("repack_sm80", copy_rows<false>);
  prepare("repack_sm80", transpose<true>);
  prepare("repack_sm80", transpose<false>);
}

ConstTensor repack(const ConstTensor& from, std::byte* memory, Stream stream) {
  const std::int64_t rows = from.rows();
  const std::int64_t columns = from.cols();
  ConstTensor to = from;
  to.data = memory;
  to.strides = {repacked_pitch(columns), 1};
  auto* const out = reinterpret_cast<std::int8_t*>(memory);
  const auto* const in = static_cast<const std::int8_t*>(from.data);
  constexpr unsigned kMaxAlongY = 65535;
  const unsigned high = std::min(blocks_for(rows, kTile), kMaxAlongY);
  const LaunchShape shape{{blocks_for(columns, kTile), high, ceil_div(blocks_for(rows, kTile), high)}, {32 * kWarps}};
  if (from.strides[1] == 1) {
    const std::int64_t pitch = from.strides[0];
    enqueue("repack_sm80", words_aligned(from, pitch) ? copy_rows<true> : copy_rows<false>, shape, stream,
            From{in, pitch, rows, columns}, out, to.strides[0]);
  } else {
    const std::int64_t pitch = from.strides[1];
    enqueue("repack_sm80", words_aligned(from, pitch) ? transpose<true> : transpose<false>, shape, stream,
            From{in, pitch, columns, rows}, out, to.strides[0]);
  }
  return to;
}

}  // namespace octile::cuda
