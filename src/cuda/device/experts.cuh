// Rows of y by expert: which expert's rows a block has. The offsets are in device memory. A grid has as many blocks as
// the experts can have tiles: each warp looks for its block's tile, and blocks without one end at once. The blocks of a
// persistent grid keep a table instead, or divide all tiles among themselves (experts_stream_sm80.cuh).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/ceil_div.h"
#include "cuda/device/bands.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "plan/kernel.h"

namespace octile::cuda {

struct Experts {
  const std::int32_t* offsets;
  std::int64_t offsets_stride;
  const std::int32_t* token;  // null: rows of a are those of y
  std::int64_t token_stride;
  int count;
  // Bytes from an expert's to the next one's.
  std::int64_t b, b_scale, zero_point, bias;

  __device__ int offset(int e) const { return __ldcg(offsets + e * offsets_stride); }
  // The row of a that a row of y is of.
  __device__ int row_of_a(int row) const { return token ? __ldcg(token + row * token_stride) : row; }
};

// Rows first .. end - 1 of y are those of an expert; a tile is one of this many of them.
struct ExpertTile {
  int expert;  // -1: there is no such tile
  int first, end;
  int tile, tiles;
};

// Finds tiles of `rows` rows of all experts. All lanes of a warp call it with the same arguments, and each knows kEach
// neighbouring experts; more than 32 kEach of them are read in turns.
class TileFinder {
 public:
  __device__ TileFinder(const Experts& experts, int rows) : experts_(experts), rows_(rows) { read(0); }

  // Tiles of all experts.
  __device__ int count() {
    for (;; read(begin_ + kAtOnce)) {
      const int tiles = __shfl_sync(kAll, up_to_, 31);
      if (begin_ + kAtOnce >= experts_.count) return before_ + tiles;
      before_ += tiles;
    }
  }

  // Numbers that rise take the fewest reads.
  __device__ ExpertTile find(int number) {
    if (number < before_) before_ = 0, read(0);
    for (;;) {
      const int tiles = __shfl_sync(kAll, up_to_, 31);
      if (number - before_ < tiles) return of_these(number - before_);
      if (begin_ + kAtOnce >= experts_.count) return {-1, 0, 0, 0, 0};
      before_ += tiles;
      read(begin_ + kAtOnce);
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kEach = 4;
  static constexpr int kAtOnce = 32 * kEach;

  __device__ int tiles(int i) const { return (offsets_[i + 1] - offsets_[i] + rows_ - 1) / rows_; }

  __device__ void read(int begin) {
    begin_ = begin;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i <= kEach; ++i) offsets_[i] = experts_.offset(min(begin + lane * kEach + i, experts_.count));
    up_to_ = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) up_to_ += tiles(i);
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(kAll, up_to_, i);
      if (lane >= i) up_to_ += other;
    }
  }

  __device__ ExpertTile of_these(int number) const {
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAll, number < up_to_))) - 1;
    const int mine = begin_ + static_cast<int>(threadIdx.x) % 32 * kEach;
    int before = up_to_;
#pragma unroll
    for (int i = 0; i < kEach; ++i) before -= tiles(i);
    ExpertTile t = {mine, offsets_[0], offsets_[1], number - before, tiles(0)};
#pragma unroll
    for (int i = 1; i < kEach; ++i) {
      if (t.expert == mine + i - 1 && t.tile >= tiles(i - 1)) {
        t = {mine + i, offsets_[i], offsets_[i + 1], t.tile - tiles(i - 1), tiles(i)};
      }
    }
    const auto of_owner = [&](int value) { return __shfl_sync(kAll, value, owner); };
    return {of_owner(t.expert), of_owner(t.first), of_owner(t.end), of_owner(t.tile), of_owner(t.tiles)};
  }

  const Experts& experts_;
  int rows_;
  int begin_;
  int before_ = 0;  // tiles of the experts before begin_
  int offsets_[kEach + 1];
  int up_to_;  // tiles of the experts of this lane and of those before it
};

__device__ inline ExpertTile find_tile(const Experts& experts, int number, int rows) {
  return TileFinder(experts, rows).find(number);
}

// In shared memory, of a block that goes from tile to tile.
inline constexpr int kMaxExperts = 512;
struct ExpertTable {
  int first_row[kMaxExperts + 1];   // of an expert
  int first_tile[kMaxExperts + 1];  // tiles of rows of all experts before it
};

// One warp: first_tile[e] = tiles_of(0) + ... + tiles_of(e - 1).
template <class TilesOf>
__device__ void count_tiles(int* first_tile, int experts, const TilesOf& tiles_of) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int each = (experts + 31) / 32;
  const int begin = min(lane * each, experts), end = min(begin + each, experts);
  int tiles = 0;
  for (int e = begin; e < end; ++e) tiles += tiles_of(e);
  int up_to = tiles;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(kAll, up_to, i);
    if (lane >= i) up_to += other;
  }
  int before = up_to - tiles;
  for (int e = begin; e < end; ++e) {
    first_tile[e] = before;
    before += tiles_of(e);
  }
  if (lane == 31) first_tile[experts] = up_to;
}

// All threads of the block: the table of tiles of `rows` rows.
__device__ inline void fill_table(ExpertTable& table, const Experts& experts, int rows) {
  for (int e = static_cast<int>(threadIdx.x); e <= experts.count; e += static_cast<int>(blockDim.x)) {
    table.first_row[e] = experts.offset(e);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const auto tiles_of = [&](int e) { return (table.first_row[e + 1] - table.first_row[e] + rows - 1) / rows; };
    count_tiles(table.first_tile, experts.count, tiles_of);
  }
  __syncthreads();
}

// All experts' tiles, `col_tiles` of them across, as a role of a persistent kernel walks them: in rising order.
struct ExpertWalk {
  const ExpertTable& table;
  int experts;
  int col_tiles;
  int expert = 0;

  __device__ int count() const { return table.first_tile[experts] * col_tiles; }

  // {row, column} of a tile among those of `expert`, which is set.
  __device__ int2 operator[](int number) {
    while (table.first_tile[expert + 1] <= number / col_tiles) ++expert;
    const int before = table.first_tile[expert];
    return tile_in_bands(number - before * col_tiles, table.first_tile[expert + 1] - before, col_tiles);
  }
  __device__ int first_row() const { return table.first_row[expert]; }
  __device__ int end_row() const { return table.first_row[expert + 1]; }
};

template <int kRows>
__device__ ExpertTile find_tile(const Experts& experts, int number) {
  return find_tile(experts, number, kRows);
}

// How many tiles of `rows` rows the experts before e have. All lanes of a warp call it alike.
__device__ inline int tiles_before(const Experts& experts, int e, int rows) {
  int sum = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < e; i += 32) {
    sum += (experts.offset(i + 1) - experts.offset(i) + rows - 1) / rows;
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  return sum;
}

__device__ inline void move_to_expert(GroupedWeight& w, const Experts& experts, std::int64_t e) {
  w.values += e * experts.b;
  w.scales = static_cast<const std::uint8_t*>(w.scales) + e * experts.b_scale;
  if (w.zeros) w.zeros = static_cast<const std::uint8_t*>(w.zeros) + e * experts.zero_point;
}

// ---- The host's side.

// offsets: (experts + 1).
inline Experts experts_at(const ConstTensor& offsets) {
  Experts experts = {};
  experts.offsets = static_cast<const std::int32_t*>(offsets.data);
  experts.offsets_stride = offsets.strides[0];
  experts.count = static_cast<int>(offsets.rows()) - 1;
  return experts;
}

inline Experts experts_of(const GemmProblem& p, const GemmOperands& o) {
  const ExpertOperands& e = o.experts;
  Experts experts = experts_at(e.offsets);
  if (p.gather) {
    experts.token = static_cast<const std::int32_t*>(e.token.data);
    experts.token_stride = e.token.strides[0];
  }
  experts.b = p.b_packed ? e.b_stride : e.b_stride * bits(p.b.type) / 8;
  experts.b_scale = p.b_packed ? e.b_stride : e.b_scale_stride * (bits(p.scale) / 8);
  experts.zero_point = p.b_packed ? e.b_stride : e.zero_point_stride * 4;
  experts.bias = e.bias_stride * (bits(o.bias.dtype) / 8);
  return experts;
}

// The maximum number of tiles of `rows` rows that all experts can have together, and the expected number if rows are
// distributed over experts at random.
inline std::int64_t max_tiles(const GemmProblem& p, std::int64_t m, int rows) { return max_blocks(p.experts, m, rows); }
inline double experts_with_rows(const GemmProblem& p, std::int64_t m) {
  const auto experts = static_cast<double>(p.experts);
  return experts == 0 ? 0 : -experts * std::expm1(-static_cast<double>(m) / experts);
}
inline double expected_tiles(const GemmProblem& p, std::int64_t m, int rows) {
  const double experts = experts_with_rows(p, m);
  return std::max(experts, static_cast<double>(m) / rows + 0.5 * experts);
}

// Operations, and bytes of the experts that have rows.
inline Cost grouped_work(const GemmProblem& p) {
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  return {2 * m * n * k,
          (m * k * bits(p.a) + experts_with_rows(p, p.m) * n * k * bits(p.b.type) + m * n * bits(p.y)) / 8};
}

}  // namespace octile::cuda
