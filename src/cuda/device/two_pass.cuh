// two_pass_kernel: for segments that are more than a cluster keeps. One cooperative launch reads a matrix for the
// maxima of its columns, and then backwards for their levels; of a gradient it also finds the maxima of the rows and
// the sums of the columns. A block still has the tile that it read last: 17 MB in all on an H200.
//
// Tiles are 128 rows high, numbered down a strip of columns, then strip after strip. A block has a run of them; the
// runs are of about equal length.
#pragma once

#include <cooperative_groups.h>

#include "cuda/device/tiles.cuh"

namespace octile::cuda {

// Columns: q and q_transposed are both of x[r, c] * row_factor[r], and either may be null. A gradient: q is of rows of
// x[r, c] * column_factor[c].
template <class T>
struct TwoPassArguments {
  tiles::Matrices<T> m;
  RowScale<float> column_factor, row_factor;
  float* row_scale;     // may be null
  float* column_scale;  // may be null
  std::int64_t row_scale_stride, column_scale_stride;
  T* sum;  // of columns; may be null
  std::int64_t sum_stride;
  float q_max, min_scale;
  std::uint32_t* row_max;     // of a gradient. Largest magnitudes, as bits, whose order is theirs, NaN last
  std::uint32_t* column_max;  // behind row_max
  float* partial_sums;        // (blocks of a strip, cols)
};

namespace two_pass {

using namespace tiles;

constexpr int kHigh = kWarps;
constexpr int kTileRows = kHigh * kWarpRows;

// Which block owns which tiles. Block b begins at tile all * b / blocks.
struct Tiling {
  int high, wide, all, blocks;

  __host__ __device__ Tiling(std::int64_t rows, std::int64_t cols, int tile_cols, int max_blocks)
      : high(static_cast<int>(ceil_div(rows, kTileRows))),
        wide(static_cast<int>(ceil_div(cols, tile_cols))),
        all(high * wide),
        blocks(all < max_blocks ? all : max_blocks) {}
  __host__ __device__ int begin(int block) const { return static_cast<int>(std::int64_t{all} * block / blocks); }
  __host__ __device__ int owner(int tile) const {
    return static_cast<int>(((tile + std::int64_t{1}) * blocks - 1) / all);
  }
  // At most this many blocks have tiles of one strip.
  __host__ __device__ int max_owners() const {
    if (all == 0) return 0;
    const int owners = ceil_div(blocks, wide) + 1;
    return owners < high ? owners : high;
  }
};

// Where a tile is, in tiles.
struct Place {
  int strip, down;

  __device__ Place(const Tiling& tiling, int tile) : strip(tile / tiling.high), down(tile % tiling.high) {}
  __device__ void next(const Tiling& tiling) {
    if (++down == tiling.high) down = 0, ++strip;
  }
  __device__ void previous(const Tiling& tiling) {
    if (down-- == 0) down = tiling.high - 1, --strip;
  }
};

// A block's state while it works on a tile.
template <class T>
struct Shared {
  struct Row {
    float factor, low, high, s;
  };
  alignas(16) Row rows[kTileRows];
  float column_factor[kWarpCols<T>];
  float column_s[kWarpCols<T>];
  float column_low[kWarpCols<T>];
  float column_high[kWarpCols<T>];
};

template <class T, bool kWhole, bool kGradient>
struct Block : Tile<T, kHigh, kWhole> {
  using Base = Tile<T, kHigh, kWhole>;
  using Base::kCols;
  using Base::lane;
  using Base::m;
  using Base::n;
  using Base::thread;
  using Base::warp;

  const TwoPassArguments<T>& a;
  const Tiling& tiling;
  Shared<T>& shared;

  __device__ Block(const TwoPassArguments<T>& arguments, const Tiling& its, unsigned char* memory, Shared<T>& known)
      : Base(arguments.m, memory), a(arguments), tiling(its), shared(known) {}

  __device__ Spot<T> spot_at(const Place& p) const { return this->spot(p.down * kTileRows, p.strip * kCols); }
  __device__ void put_columns_of(const Place& p) const { this->put_columns(p.down * kTileRows, p.strip * kCols); }

  // First pass.

  __device__ void load_column_factors(const Place& p, float (&factor)[n]) const {
    const int c = p.strip * kCols + lane * n;
#pragma unroll
    for (int i = 0; i < n; ++i) factor[i] = kGradient && c + i < m.cols ? a.column_factor[c + i] : 0.0f;
  }
  // Lane i: of row i of this warp.
  __device__ float load_row_factor(const Spot<T>& s) const {
    const int r = s.row + lane;
    return lane < kWarpRows && r < m.rows ? a.row_factor[r] : 0.0f;
  }

  struct ColumnState {
    float largest[n] = {};
    float sum[n] = {};
  };

  // The batch's rows' maxima to global memory; its columns' into `state`.
  __device__ void measure(const Spot<T>& s, int batch, const float (&column_factor)[n], float row_factors,
                          ColumnState& state) const {
    std::uint32_t own = 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const float row_factor = __shfl_sync(~0u, row_factors, batch * kBatch + k);
      float x[n];
      widen(this->get(batch * kBatch + k), x);
      float largest = 0;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        state.largest[i] = max_nan(state.largest[i], fabsf(__fmul_rn(x[i], row_factor)));
        if constexpr (!kGradient) continue;
        largest = max_nan(largest, fabsf(__fmul_rn(x[i], column_factor[i])));
        state.sum[i] += x[i];
      }
      if constexpr (!kGradient) continue;
      const std::uint32_t of_row = __reduce_max_sync(~0u, __float_as_uint(largest));
      own = lane == k ? of_row : own;
    }
    const int r = s.row + batch * kBatch + lane;
    if (kGradient && lane < kBatch && r < m.rows) atomicMax(a.row_max + r, own);
  }

  // Of the columns of a strip, all that this block has seen; the place of the transposed levels serves as scratch.
  __device__ void add_columns(const Place& p, const ColumnState& state) const {
    auto* const largest = reinterpret_cast<float*>(this->transposed);
    float* const sum = largest + kWarps * kCols;
    static_assert(2 * kWarps * sizeof(float) <= kTileRows);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < n; ++i) {
      largest[warp * kCols + lane * n + i] = state.largest[i];
      if constexpr (kGradient) sum[warp * kCols + lane * n + i] = state.sum[i];
    }
    __syncthreads();
    const int c = thread;
    const int column = p.strip * kCols + c;
    if (c >= kCols || column >= m.cols) return;
    float all = 0;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      all = max_nan(all, largest[w * kCols + c]);
      if constexpr (kGradient) total += sum[w * kCols + c];
    }
    atomicMax(a.column_max + column, __float_as_uint(all));
    if (!kGradient || !a.sum) return;
    const int slot = static_cast<int>(blockIdx.x) - tiling.owner(p.strip * tiling.high);
    a.partial_sums[std::int64_t{slot} * m.cols + column] = total;
  }

  // Second pass.

  // The rules of this warp's rows of a tile, one for each of its first lanes: loaded early, worked out late.
  struct RowSource {
    std::uint32_t largest;
    float factor;
  };
  __device__ RowSource load_rows(const Spot<T>& s) const {
    const int r = s.row + lane;
    if (lane >= kWarpRows || r >= m.rows) return {};
    return {kGradient ? __ldcg(a.row_max + r) : 0, a.row_factor[r]};
  }
  __device__ void resolve_rows(const Spot<T>& s, const RowSource& source) const {
    const int r = s.row + lane;
    __syncwarp();
    if (lane < kWarpRows && r < m.rows) {
      const LevelRule rule = level_rule(source.largest, a.q_max, a.min_scale);
      shared.rows[warp * kWarpRows + lane] = {source.factor, rule.low, rule.high, rule.s};
      if (kGradient && s.column < kCols && a.row_scale) a.row_scale[r * a.row_scale_stride] = rule.s;
    }
    __syncwarp();
  }

  // The rules of the strip's columns. The block that has the strip's first tile writes scales and sums.
  __device__ void resolve_columns(const Place& p, bool first_tile) const {
    const int i = thread;
    const int c = p.strip * kCols + i;
    if (i >= kCols) return;
    if (c >= m.cols) {
      shared.column_s[i] = 1, shared.column_low[i] = 0, shared.column_high[i] = 0;
      return;
    }
    const LevelRule rule = level_rule(__ldcg(a.column_max + c), a.q_max, a.min_scale);
    if constexpr (kGradient) shared.column_factor[i] = a.column_factor[c];
    shared.column_s[i] = rule.s;
    shared.column_low[i] = rule.low;
    shared.column_high[i] = rule.high;
    if (!first_tile) return;
    if (a.column_scale) a.column_scale[c * a.column_scale_stride] = rule.s;
    if (!kGradient || !a.sum) return;
    const int owners = tiling.owner((p.strip + 1) * tiling.high - 1) - tiling.owner(p.strip * tiling.high);
    float sum = 0;
    for (int k = 0; k <= owners; ++k) sum += __ldcg(a.partial_sums + std::int64_t{k} * m.cols + c);
    a.sum[c * a.sum_stride] = narrow<T>(sum);
  }

  struct ColumnRules {
    float factor[n], low[n], high[n];
    std::uint32_t bad = 0;
  };
  __device__ void load_column_rules(ColumnRules& rules) const {
    rules.bad = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (kGradient) rules.factor[i] = shared.column_factor[lane * n + i];
      rules.low[i] = shared.column_low[lane * n + i];
      rules.high[i] = shared.column_high[lane * n + i];
      rules.bad |= LevelRule::bad(shared.column_s[lane * n + i]);
    }
  }

  // A batch: its rows' levels to q, its columns' as one word each. Returns the rows that have to be divided, as bits.
  __device__ std::uint32_t quantize(Spot<T>& s, int batch, const ColumnRules& rules, std::uint32_t (&words)[n]) const {
    std::uint32_t before[n];
    std::uint32_t suspects = 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k, s.q += m.q_stride) {
      const int r = batch * kBatch + k;
      const float4 of_row = *reinterpret_cast<const float4*>(&shared.rows[warp * kWarpRows + r]);
      float x[n];
      std::uint32_t of_rows[n];
      std::uint32_t of_columns[n];
      std::uint32_t differ = kGradient ? LevelRule::bad(of_row.w) | rules.bad : rules.bad;
      widen(this->get(r), x);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        of_columns[i] = product_level(__fmul_rn(x[i], of_row.x), rules.low[i], rules.high[i], differ);
        of_rows[i] = of_columns[i];
        if constexpr (kGradient) {
          of_rows[i] = product_level(__fmul_rn(x[i], rules.factor[i]), of_row.y, of_row.z, differ);
        }
      }
      std::uint32_t bytes[2] = {low_bytes(of_rows[0], of_rows[1], of_rows[2], of_rows[3]), 0};
      if constexpr (n == 8) bytes[1] = low_bytes(of_rows[4], of_rows[5], of_rows[6], of_rows[7]);
      if (differ != 0) suspects |= 1u << r;
      if ((kGradient || m.q) && r < s.rows) this->put_row(s.q, bytes, s.column);
      pack_columns(k, of_columns, before, words);
    }
    return suspects;
  }

  // Divides what could not be multiplied, one vector in a hundred to ten thousand: read again from memory, since its
  // place holds the next tile, and written over the first result.
  __device__ void divide(const Spot<T>& s, std::uint32_t suspects) const {
    for (; suspects != 0; suspects &= suspects - 1) {
      const int r = __ffs(static_cast<int>(suspects)) - 1;
      if (r >= s.rows) return;
      const Vector<T> v = load_vector(m.x + (s.row + r) * m.x_stride + s.column, this->valid(s.column), kWhole);
      const typename Shared<T>::Row of_row = shared.rows[warp * kWarpRows + r];
      float x[n];
      widen(v, x);
      std::uint32_t bytes[2] = {};
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const int c = lane * n + i;
        const LevelRule of_column = {shared.column_s[c], shared.column_low[c], shared.column_high[c]};
        const std::uint32_t level = settled_level(__fmul_rn(x[i], of_row.factor), of_column);
        this->transpose_one(i, r, level);
        std::uint32_t of_rows = level;
        if constexpr (kGradient) {
          of_rows = settled_level(__fmul_rn(x[i], shared.column_factor[c]), {of_row.s, of_row.low, of_row.high});
        }
        bytes[i / 4] |= of_rows << i % 4 * 8;
      }
      if (kGradient || m.q) this->put_row(m.q + (s.row + r) * m.q_stride + s.column, bytes, s.column);
    }
  }
};

}  // namespace two_pass

template <class T, bool kWhole, bool kGradient>
__global__ void __launch_bounds__(tiles::kThreads, tiles::kBlocks) two_pass_kernel(TwoPassArguments<T> a) {
  using namespace two_pass;
  constexpr int n = kVectorSize<T>;
  using Here = Block<T, kWhole, kGradient>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared<T> shared;
  const Tiling tiling(a.m.rows, a.m.cols, kWarpCols<T>, static_cast<int>(gridDim.x));
  const Here block(a, tiling, memory, shared);
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const int begin = tiling.begin(static_cast<int>(blockIdx.x));
  const int end = tiling.begin(static_cast<int>(blockIdx.x) + 1);
  Place place(tiling, begin);
  Spot<T> spot = block.spot_at(place);

  wait_for_previous();
  let_next_start();
  for (int b = 0; b < kBatches; ++b) block.fetch(spot, b, true);
  std::uint32_t* const largest = kGradient ? a.row_max : a.column_max;
  const std::int64_t maxima = (kGradient ? std::int64_t{a.m.rows} : 0) + a.m.cols;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::int64_t i = first; i < maxima; i += gridDim.x * kThreads) largest[i] = 0;
  const auto cleared = grid.barrier_arrive();

  // The maxima and the sums, tile after tile.
  float column_factor[n];
  typename Here::ColumnState state;
  block.load_column_factors(place, column_factor);
  float next_row_factor = block.load_row_factor(spot);
  for (int t = begin; t < end; ++t) {
    const bool more = t + 1 < end;
    Place next = place;
    if (more) next.next(tiling);
    Spot<T> next_spot = block.spot_at(next);
    const float row_factor = next_row_factor;
    next_row_factor = block.load_row_factor(next_spot);
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      wait_for_copies<kBatches - 1>();
      if (t == begin && b == 0) grid.barrier_wait(cooperative_groups::grid_group::arrival_token(cleared));
      block.measure(spot, b, column_factor, row_factor, state);
      block.fetch(next_spot, b, more);
    }
    if (!more || next.strip != place.strip) {
      block.add_columns(place, state);
      state = {};
      block.load_column_factors(next, column_factor);
    }
    place = next;
    spot = next_spot;
  }
  grid.sync();

  // The levels, from the last tile to the first.
  typename Here::ColumnRules rules;
  block.resolve_rows(spot, block.load_rows(spot));
  int strip = -1;
  for (int t = end - 1; t >= begin; --t) {
    const bool more = t > begin;
    Place next = place;
    if (more) next.previous(tiling);
    Spot<T> next_spot = block.spot_at(next);
    const auto next_rows = block.load_rows(next_spot);
    if (place.strip != strip) {
      strip = place.strip;
      block.resolve_columns(place, begin <= strip * tiling.high);
      __syncthreads();
      block.load_column_rules(rules);
    }
    std::uint32_t words[kBatches][n];
    std::uint32_t suspects = 0;
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      wait_for_copies<kBatches - 1>();
      suspects |= block.quantize(spot, b, rules, words[b]);
      block.fetch(next_spot, b, more);
    }
    if (kGradient || a.m.q_transposed) block.transpose(words);
    block.divide(spot, suspects);
    __syncthreads();
    if (kGradient || a.m.q_transposed) block.put_columns_of(place);
    block.resolve_rows(next_spot, next_rows);
    __syncthreads();
    place = next;
    spot = next_spot;
  }
}

// How a matrix is cut for a GPU.
template <class T>
two_pass::Tiling tiling_of(Device device, std::int64_t rows, std::int64_t cols) {
  return {rows, cols, tiles::kWarpCols<T>, properties(device).sms * tiles::kBlocks};
}

template <class T, bool kGradient>
void prepare_two_pass(std::string_view name) {
  prepare(name, two_pass_kernel<T, false, kGradient>, tiles::kSharedBytes<T>);
  prepare(name, two_pass_kernel<T, true, kGradient>, tiles::kSharedBytes<T>);
}

template <class T, bool kGradient>
void enqueue_two_pass(std::string_view name, const TwoPassArguments<T>& a, int blocks, bool whole, Stream stream) {
  const LaunchShape shape = {dim3(static_cast<unsigned>(blocks)), dim3(tiles::kThreads), tiles::kSharedBytes<T>,
                             dim3(1), true};
  enqueue(name, whole ? two_pass_kernel<T, true, kGradient> : two_pass_kernel<T, false, kGradient>, shape, stream, a);
}

}  // namespace octile::cuda
