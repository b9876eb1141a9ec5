// What the int8 backward needs of dY (m, n) in blocks of T terms of either contraction:
//
//   s1[m, g] = max(max_{n in g} |dY[m, n] w[n]| / 127, min_scale)    q1[m, n] = rint(dY[m, n] w[n] / s1[m, g])
//   s2[g, n] = max(max_{m in g} |dY[m, n] x[m]| / 127, min_scale)    q2[n, m] = rint(dY[m, n] x[m] / s2[g, n])
//   dB[n] = sum_m dY[m, n]
//
// A block of threads has a tile of 128 rows by 128 columns in its registers: a thread has one vector of 16 bytes of
// several rows below one another, and the lanes that share a row have all of its tile. Where T is 128, a tile is one
// block of both contractions, and all is local: dY is read once. So it is where a cluster has all tiles of a block,
// whose maxima it exchanges. Otherwise there are two passes.
//
// Of experts, each one's rows are such a matrix: the grid goes down the tiles of all their blocks of T rows, the last
// of an expert's short, and finds in the offsets which rows those are. q2 has 128 terms for each tile, 0 where it has
// no row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/ceil_div.h"
#include "base/message.h"
#include "cuda/device/experts.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/dispatch.h"

namespace octile::cuda::blocked_gradient {

using tiles::LevelRule;

constexpr int kTile = 128;
constexpr int kThreads = 256;
// The grid goes down a band of at most this many columns of tiles, and then down the next, so that the tiles under way
// at one time have long runs of rows of dY, of q and of q_transposed.
constexpr int kBand = 8;

// fused: T is 128. clustered: a cluster has the tiles of a block. measure writes the maxima of tiles, and levels has
// those of blocks from them.
enum class Pass { fused, clustered, measure, levels };
constexpr int kMaxSide = 4;  // of a cluster, in tiles

template <class T>
struct Arguments {
  tiles::Matrices<T> m;  // q and q_transposed may be null
  RowScale<float> column_factor, row_factor;
  float* row_scale;     // of q: per row, and block of columns
  float* column_scale;  // of q_transposed: per block of rows, and column
  std::int64_t row_scale_stride, row_scale_block_stride;
  std::int64_t column_scale_stride, column_scale_block_stride;
  std::uint32_t* row_max;     // (tiles across, rows): largest magnitudes, as bits, whose order is theirs, NaN last
  std::uint32_t* column_max;  // (tiles down, cols)
  float* partial_sums;        // (tiles down, cols); null: no sums
  int tiles_down, tiles_across;
  int block_shift;  // a block is 1 << block_shift tiles long
  float q_min, q_max, min_scale;
  std::uint64_t seed;
  // With experts. Tiles down, and their sums and maxima, are then those of the grid.
  Experts experts;
  std::int64_t column_factor_stride;  // elements from an expert's to the next one's
};

template <class T>
struct Layout {
  static constexpr int n = kVectorSize<T>;
  static constexpr int kHalves = n / 4;              // of a vector: four columns are worked on at a time
  static constexpr int kLanes = kTile / n;           // that share a row
  static constexpr int kGroups = kThreads / kLanes;  // of rows
  static constexpr int kRows = kTile / kGroups;      // of a group: those of a thread
  static constexpr int kBlocks = n == 8 ? 3 : 2;     // on an SM
  static constexpr int kBatches = kRows / 4;
  static_assert(kLanes == 2 * kRows);

  // What belongs to columns is in shared memory so that the lanes of a row read 16 bytes side by side: first all
  // first halves of vectors. The column at a place:
  __device__ static int column_at(int place) {
    const auto at = static_cast<unsigned>(place);
    return static_cast<int>(at % (4 * kLanes) / 4 * n + at / (4 * kLanes) * 4 + at % 4);
  }
};

// Four columns of a vector.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// Four rows by four columns of a tile, some of which products do not decide.
template <class T>
struct Suspect {
  Four<T> rows[4];
  std::uint8_t group, lane;  // of the thread
  std::uint8_t first, half;  // the first of the four among its rows, and which half of the vectors
};
constexpr int kSuspects = 24;  // that a block of threads keeps: of normal values every second tile has one

template <class T>
struct Shared {
  using Its = Layout<T>;
  struct Row {
    float factor, low, high, s;
  };
  // Levels of columns, 128 bytes each; before that the maxima and the sums of the groups.
  union {
    alignas(16) std::uint8_t transposed[kTile * kTile];
    struct {
      alignas(16) float largest[Its::kGroups][kTile];
      alignas(16) float sum[Its::kGroups][kTile];
    } of_groups;
  };
  alignas(16) Row rows[Its::kGroups][Its::kRows + 1];  // two groups are read at a time: in other banks
  alignas(16) float row_factor[kTile];
  alignas(16) float column_factor[kTile];
  alignas(16) float column_low[kTile];
  alignas(16) float column_high[kTile];
  alignas(16) float column_s[kTile];
  alignas(16) std::uint32_t column_max[kTile];  // at their places
  alignas(16) std::uint32_t row_max[kTile];
  // Of the tiles of a cluster in these columns, and in these rows; `arrived`: all of them are here.
  alignas(16) std::uint32_t columns_of_cluster[kMaxSide][kTile];
  alignas(16) std::uint32_t rows_of_cluster[kMaxSide][kTile];
  std::uint64_t arrived;
  Suspect<T> suspects[kSuspects];
  int suspects_found;
};

// The compiler must not keep what it has made of them before, floats in twice as many registers.
template <class T, int count>
__device__ void forget_origin(Vector<T> (&v)[count]) {
#pragma unroll
  for (int k = 0; k < count; ++k) {
    auto& words = *reinterpret_cast<uint4*>(&v[k]);
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  }
}

__device__ inline float4 load4(const float* p, int i) { return reinterpret_cast<const float4*>(p)[i]; }

// Columns 4 half .. 4 half + 3 of a vector.
template <class T>
__device__ void widen_half(const Vector<T>& v, int half, float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = v.at[i];
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const auto* words = reinterpret_cast<const unsigned*>(&v) + 2 * half;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      x[i] = __uint_as_float(words[i / 2] << 16);
      x[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = widen(v.at[4 * half + i]);
  }
}

// x / s as IEEE has it, where the segment is not bad.
__device__ inline float settled_ratio(float x, const LevelRule& rule) {
  if (LevelRule::bad(rule.high)) return divided(x, rule.s);
  return quotient_by<2>(x, rule.s, rule.inverse());
}

// The level as the low byte, 0 in a bad segment.
__device__ inline std::uint32_t exact_level(float x, const LevelRule& rule) {
  const std::uint32_t level = __float_as_uint(settled_ratio(x, rule) + tiles::kRounder);
  return rule.s == rule.s ? level & 0xff : 0;
}
__device__ inline std::uint32_t stochastic_level(float x, const LevelRule& rule, float u, float q_min, float q_max) {
  const float level = fminf(fmaxf(floorf(settled_ratio(x, rule) + u), q_min), q_max);
  return rule.s == rule.s ? __float_as_uint(level + tiles::kRounder) & 0xff : 0;
}

template <class T, bool kWhole, bool kExperts = false>
struct Tile {
  using Its = Layout<T>;
  static constexpr int n = Its::n;
  static constexpr int kRows = Its::kRows;
  static constexpr int kLanes = Its::kLanes;

  const Arguments<T>& a;
  Shared<T>& shared;
  int thread, lane, group;  // lane: among those of a row
  int down, across;         // which tile
  int end_down;             // of the tiles that blocks of rows may have: those of the matrix, or of the expert
  int first_row;            // of the tile
  int rows, cols;           // of the tile that are inside the matrix
  int row, column;          // the first of this thread
  int expert = 0, row_of_expert;

  __device__ Tile(const Arguments<T>& arguments, Shared<T>& memory)
      : a(arguments),
        shared(memory),
        thread(static_cast<int>(threadIdx.x)),
        lane(static_cast<int>(threadIdx.x % kLanes)),
        group(static_cast<int>(threadIdx.x / kLanes)) {
    down = static_cast<int>(blockIdx.y);
    across = static_cast<int>(blockIdx.z * gridDim.x + blockIdx.x);
    if constexpr (kExperts) {
      const ExpertTile block = find_tile(a.experts, down >> a.block_shift, kTile << a.block_shift);
      expert = block.expert;
      const int of_expert = (block.tile << a.block_shift) + down % (1 << a.block_shift);
      first_row = block.first + of_expert * kTile;
      rows = min(kTile, block.end - first_row);
      end_down = down - of_expert + (block.end - block.first + kTile - 1) / kTile;
      row_of_expert = of_expert * kTile + group * kRows;
    } else {
      first_row = down * kTile;
      rows = min(kTile, a.m.rows - first_row);
      end_down = a.tiles_down;
      row_of_expert = first_row + group * kRows;
    }
    cols = min(kTile, a.m.cols - across * kTile);
    row = first_row + group * kRows;
    column = across * kTile + lane * n;
  }

  __device__ int columns_inside() const { return cols - lane * n; }
  // Of this thread's rows: any number up to kRows, none where that is not above 0.
  __device__ int rows_inside() const { return columns_inside() > 0 ? rows - group * kRows : 0; }
  __device__ Vector<T> load_row(const T* x) const {
    if constexpr (!kWhole) return load_vector(x, columns_inside(), false);
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(x));
    return *reinterpret_cast<const Vector<T>*>(&v);
  }

  __device__ void load(Vector<T> (&v)[kRows]) const {
    const T* x = a.m.x + row * a.m.x_stride + column;
    const int inside = rows_inside();
#pragma unroll
    for (int k = 0; k < kRows; ++k, x += a.m.x_stride) {
      *reinterpret_cast<uint4*>(&v[k]) = {};
      if (k < inside) v[k] = load_row(x);
    }
  }

  // Zeros outside of the matrix.
  __device__ void load_factors() const {
    if (thread < kTile) {
      shared.row_factor[thread] = thread < rows ? a.row_factor[first_row + thread] : 0.0f;
      return;
    }
    const int place = thread - kTile;
    const int c = Its::column_at(place);
    RowScale<float> factor = a.column_factor;
    if (kExperts && factor.data) factor.data += expert * a.column_factor_stride;
    shared.column_factor[place] = c < cols ? factor[across * kTile + c] : 0.0f;
  }

  // Each exchange leaves a lane with half as many rows, in the end with row lane / 2.
  template <int count>
  __device__ void exchange(float (&of_rows)[kRows]) const {
    const bool upper = lane & 2 * count;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float sent = upper ? of_rows[i] : of_rows[i + count];
      const float kept = upper ? of_rows[i + count] : of_rows[i];
      of_rows[i] = max_nan(kept, __shfl_xor_sync(~0u, sent, 2 * count));
    }
    if constexpr (count > 1) exchange<count / 2>(of_rows);
  }

  // Maxima of rows, and maxima and sums of the columns of a group, to shared memory.
  __device__ void measure(const Vector<T> (&v)[kRows]) const {
    float of_rows[kRows] = {};
#pragma unroll
    for (int half = 0; half < Its::kHalves; ++half) {
      const int place = half * kLanes + lane;
      const float4 w = load4(shared.column_factor, place);
      const float factor[4] = {w.x, w.y, w.z, w.w};
      float largest[4] = {};
      float sum[4] = {};
#pragma unroll
      for (int batch = 0; batch < kRows / 4; ++batch) {
        const float4 f = load4(shared.row_factor, group * (kRows / 4) + batch);
        const float row_factor[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int k = 4 * batch + j;
          float x[4];
          widen_half(v[k], half, x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            largest[i] = max_nan(largest[i], fabsf(__fmul_rn(x[i], row_factor[j])));
            of_rows[k] = max_nan(of_rows[k], fabsf(__fmul_rn(x[i], factor[i])));
            sum[i] += x[i];
          }
        }
      }
      reinterpret_cast<float4*>(shared.of_groups.largest[group])[place] = {largest[0], largest[1], largest[2],
                                                                           largest[3]};
      reinterpret_cast<float4*>(shared.of_groups.sum[group])[place] = {sum[0], sum[1], sum[2], sum[3]};
    }
    exchange<kRows / 2>(of_rows);
    const float all = max_nan(of_rows[0], __shfl_xor_sync(~0u, of_rows[0], 1));
    if (lane % 2 == 0) shared.row_max[group * kRows + lane / 2] = __float_as_uint(all);
  }

  // Of the column at a place, all groups.
  __device__ std::uint32_t measured_column(int place) const {
    float largest = 0;
#pragma unroll
    for (int g = 0; g < Its::kGroups; ++g) largest = max_nan(largest, shared.of_groups.largest[g][place]);
    return __float_as_uint(largest);
  }
  __device__ void put_sum(int place) const {
    const int c = Its::column_at(place);
    if (!a.partial_sums || c >= cols) return;
    float sum = 0;
#pragma unroll
    for (int g = 0; g < Its::kGroups; ++g) sum += shared.of_groups.sum[g][place];
    a.partial_sums[std::int64_t{down} * a.m.cols + across * kTile + c] = sum;
  }

  // The end of the first of two passes.
  __device__ void put_maxima() const {
    if (thread < kTile) {
      const int c = Its::column_at(thread);
      const std::uint32_t largest = measured_column(thread);
      if (c < cols) a.column_max[std::int64_t{down} * a.m.cols + across * kTile + c] = largest;
      return;
    }
    const int r = thread - kTile;
    if (r < rows) a.row_max[std::int64_t{across} * a.m.rows + first_row + r] = shared.row_max[r];
    put_sum(r);
  }

  // Of the tiles of a block: `tile` is one of `all`, whose maxima are `pitch` apart.
  __device__ std::uint32_t block_max(const std::uint32_t* maxima, int tile, int all, std::int64_t pitch) const {
    const int first = tile >> a.block_shift << a.block_shift;
    const int end = min(first + (1 << a.block_shift), all);
    std::uint32_t largest = 0;
    for (int i = first; i < end; ++i) largest = max(largest, __ldcg(maxima + i * pitch));
    return largest;
  }
  // The tiles of a cluster that lie in a line with this one and within the matrix.
  struct Line {
    int count, own;        // this tile is number `own`
    int first_rank, step;  // of the blocks that have them
  };
  __device__ Line line_of(int tile, int all, int step) const {
    const int first = tile >> a.block_shift << a.block_shift;
    const int own = tile - first;
    return {min(1 << a.block_shift, all - first), own, static_cast<int>(ptx::cluster_rank()) - own * step, step};
  }
  __device__ Line line_down() const { return line_of(down, end_down, 1 << a.block_shift); }
  __device__ Line line_across() const { return line_of(across, a.tiles_across, 1); }
  __device__ static std::uint32_t largest_of(const std::uint32_t (&maxima)[kMaxSide][kTile], int at, int count) {
    std::uint32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = max(largest, maxima[i][at]);
    return largest;
  }
  __device__ bool first_of_block(int tile) const { return (tile & ((1 << a.block_shift) - 1)) == 0; }

  // Blocks of the cluster that lie wholly outside of the matrix have ended: no barrier waits for them.
  __device__ void expect_maxima() const {
    if (thread == 0) {
      ptx::mbarrier_init(shared.arrived, 1);
      ptx::fence_mbarrier_init();
      const int lines = line_down().count + line_across().count;
      ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&shared.arrived), static_cast<unsigned>(lines * kTile) * 4);
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }

  // Those of this tile to all in a line with it, one warp each, and theirs to here.
  __device__ void share_maxima() const {
    if (thread < kTile) shared.column_max[thread] = measured_column(thread);
    ptx::cluster_wait();  // all barriers are initialized
    __syncthreads();
    const int i = thread / 32 % kMaxSide;
    const int four = thread % 32 * 4;
    const bool of_rows = thread / 32 >= kMaxSide;
    const Line line = of_rows ? line_across() : line_down();
    if (i < line.count) {
      const auto rank = static_cast<std::uint32_t>(line.first_rank + i * line.step);
      auto& to = of_rows ? shared.rows_of_cluster : shared.columns_of_cluster;
      const uint4 maxima = *reinterpret_cast<const uint4*>((of_rows ? shared.row_max : shared.column_max) + four);
      ptx::store_cluster_async(ptx::mapa(ptx::shared_address(&to[line.own][four]), rank), maxima,
                               ptx::mapa(ptx::shared_address(&shared.arrived), rank));
    }
    if (thread >= kTile) put_sum(thread - kTile);
    ptx::mbarrier_wait_acquire_cluster(ptx::shared_address(&shared.arrived));
  }

  // Rules to shared memory, scales to where they are wanted. Whether all has to be divided: products do not always show
  // a bad segment, since NaNs are alike.
  template <Pass kPass>
  __device__ bool resolve() const {
    if (thread < kTile) {
      const int c = Its::column_at(thread);
      const int at = across * kTile + c;
      std::uint32_t largest = 0;
      if constexpr (kPass == Pass::fused) largest = measured_column(thread);
      if constexpr (kPass == Pass::clustered) {
        largest = largest_of(shared.columns_of_cluster, thread, line_down().count);
      }
      if constexpr (kPass == Pass::levels) {
        if (c < cols) largest = block_max(a.column_max + at, down, end_down, a.m.cols);
      }
      const LevelRule rule = tiles::level_rule(largest, a.q_max, a.min_scale);
      shared.column_low[thread] = rule.low;
      shared.column_high[thread] = rule.high;
      shared.column_s[thread] = rule.s;
      if (a.column_scale && c < cols && first_of_block(down)) {
        a.column_scale[(down >> a.block_shift) * a.column_scale_block_stride + at * a.column_scale_stride] = rule.s;
      }
      return LevelRule::bad(rule.high) != 0;
    }
    const int r = thread - kTile;
    const int at = first_row + r;
    std::uint32_t largest = 0;
    if constexpr (kPass == Pass::fused) largest = shared.row_max[r];
    if constexpr (kPass == Pass::clustered) largest = largest_of(shared.rows_of_cluster, r, line_across().count);
    if constexpr (kPass == Pass::levels) {
      if (r < rows) largest = block_max(a.row_max + at, across, a.tiles_across, a.m.rows);
    }
    const LevelRule rule = tiles::level_rule(largest, a.q_max, a.min_scale);
    shared.rows[r / kRows][r % kRows] = {shared.row_factor[r], rule.low, rule.high, rule.s};
    if (a.row_scale && r < rows && first_of_block(across)) {
      a.row_scale[at * a.row_scale_stride + (across >> a.block_shift) * a.row_scale_block_stride] = rule.s;
    }
    if constexpr (kPass == Pass::fused) put_sum(r);
    return LevelRule::bad(rule.high) != 0;
  }

  __device__ std::uint8_t* row_of_q(int k) const { return a.m.q + (row + k) * a.m.q_stride + column; }

  // A vector of levels to a row.
  __device__ void put_row(std::uint8_t* q, const std::uint32_t (&bytes)[Its::kHalves]) const {
    if constexpr (kWhole && n == 8) {
      *reinterpret_cast<uint2*>(q) = {bytes[0], bytes[1]};
    } else if constexpr (kWhole) {
      *reinterpret_cast<std::uint32_t*>(q) = bytes[0];
    } else {
      const int count = columns_inside();
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (i < count) q[i] = static_cast<std::uint8_t>(bytes[i / 4] >> i % 4 * 8);
      }
    }
  }

  // Where 16 levels of a column lie. Eight lanes that store one column each, or load the chunks of a column, meet eight
  // different places of 128 bytes.
  __device__ std::uint8_t* chunk(int c, int high) const {
    return shared.transposed + c * kTile + (high ^ static_cast<int>(static_cast<unsigned>(c) / n % 8)) * 16;
  }
  // Where this thread's levels of its column i lie.
  __device__ std::uint8_t* levels_of(int i) const {
    return chunk(lane * n + i, group * kRows / 16) + group * kRows % 16;
  }

  // Levels to q, and those of columns to shared memory. By products; where they do not decide, four rows by four
  // columns are kept for settle(). By division, all of them, if `divides`.
  template <bool kByRows, bool kByColumns>
  __device__ void nearest(const Vector<T> (&v)[kRows], bool divides) const {
    std::uint32_t left = divides ? (1u << Its::kHalves * Its::kBatches) - 1 : 0;
    std::uint32_t of_rows[kRows][Its::kHalves];
    std::uint8_t* q = kByRows ? row_of_q(0) : nullptr;
    const int inside = rows_inside();
#pragma unroll
    for (int half = 0; half < Its::kHalves; ++half) {
      const int place = half * kLanes + lane;
      const float4 f = load4(shared.column_factor, place);
      const float4 l = load4(shared.column_low, place);
      const float4 h = load4(shared.column_high, place);
      const float factor[4] = {f.x, f.y, f.z, f.w};
      const float low[4] = {l.x, l.y, l.z, l.w};
      const float high[4] = {h.x, h.y, h.z, h.w};
      std::uint32_t words[Its::kBatches][4];
#pragma unroll
      for (int batch = 0; batch < Its::kBatches; ++batch) {
        std::uint32_t differ = 0;
        std::uint32_t before[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int k = 4 * batch + j;
          const float4 of_row = load4(&shared.rows[group][k].factor, 0);
          float x[4];
          std::uint32_t levels[4];
          widen_half(v[k], half, x);
          if constexpr (kByRows) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              levels[i] = tiles::product_level(__fmul_rn(x[i], factor[i]), of_row.y, of_row.z, differ);
            }
            of_rows[k][half] = low_bytes(levels[0], levels[1], levels[2], levels[3]);
            if (half + 1 == Its::kHalves) {
              if (k < inside) put_row(q, of_rows[k]);
              q += a.m.q_stride;
            }
          }
          if constexpr (kByColumns) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              levels[i] = tiles::product_level(__fmul_rn(x[i], of_row.x), low[i], high[i], differ);
            }
            tiles::pack_columns(j, levels, before, words[batch]);
          }
        }
        if (differ != 0 && !keep(v, half, 4 * batch)) left |= 1u << (half * Its::kBatches + batch);
      }
      if constexpr (kByColumns) put_words(half, words);
    }
    divide<kByRows, kByColumns>(left);
  }

  // False: there is no room for it.
  __device__ bool keep(const Vector<T> (&v)[kRows], int half, int first) const {
    const int at = atomicAdd(&shared.suspects_found, 1);
    if (at >= kSuspects) return false;
    Suspect<T>& suspect = shared.suspects[at];
#pragma unroll
    for (int j = 0; j < 4; ++j) suspect.rows[j] = reinterpret_cast<const Four<T>*>(&v[first + j])[half];
    suspect.group = group, suspect.lane = lane, suspect.first = first, suspect.half = half;
    return true;
  }

  // Divides those that were kept, a warp each: half of its lanes as rows, half as columns.
  template <bool kByRows, bool kByColumns>
  __device__ void settle() const {
    const bool of_row = thread % 32 < 16;
    const int j = thread % 16 / 4, i = thread % 4;
#pragma unroll 1
    for (int at = thread / 32; at < min(shared.suspects_found, kSuspects); at += kThreads / 32) {
      const Suspect<T>& suspect = shared.suspects[at];
      const int k = suspect.first + j;
      const int r = suspect.group * kRows + k, c = suspect.lane * n + 4 * suspect.half + i;
      if (r >= rows || c >= cols) continue;
      const float x = widen(suspect.rows[j].at[i]);
      const typename Shared<T>::Row& of = shared.rows[suspect.group][k];
      const int place = 4 * (suspect.half * kLanes + suspect.lane) + i;
      if (kByRows && of_row) {
        const std::uint32_t level = tiles::divided_level(__fmul_rn(x, shared.column_factor[place]), of.s);
        a.m.q[(first_row + r) * a.m.q_stride + across * kTile + c] = static_cast<std::uint8_t>(level);
      }
      if (kByColumns && !of_row) {
        const std::uint32_t level = tiles::divided_level(__fmul_rn(x, of.factor), shared.column_s[place]);
        chunk(c, r / 16)[r % 16] = static_cast<std::uint8_t>(level);
      }
    }
  }

  __device__ void put_words(int half, const std::uint32_t (&words)[Its::kBatches][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint8_t* const to = levels_of(4 * half + i);
      if constexpr (kRows == 8) {
        *reinterpret_cast<uint2*>(to) = {words[0][i], words[1][i]};
      } else {
        *reinterpret_cast<uint4*>(to) = {words[0][i], words[1][i], words[2][i], words[3][i]};
      }
    }
  }

  // Where a segment is bad, or where there are too many suspects: read again from memory, and written over the first
  // result.
  template <bool kByRows, bool kByColumns>
  __device__ void divide(std::uint32_t suspects) const {
    for (; suspects != 0; suspects &= suspects - 1) {
      const int at = __ffs(static_cast<int>(suspects)) - 1;
      const int half = at / Its::kBatches;
      const int first = at % Its::kBatches * 4;
      const int inside = rows_inside() - first;
      const int columns = columns_inside() - 4 * half;
      const int place = half * kLanes + lane;
      const float4 f = load4(shared.column_factor, place);
      const float4 s = load4(shared.column_s, place);
      const float4 l = load4(shared.column_low, place);
      const float4 h = load4(shared.column_high, place);
      const float factor[4] = {f.x, f.y, f.z, f.w};
      const LevelRule of_columns[4] = {{s.x, l.x, h.x}, {s.y, l.y, h.y}, {s.z, l.z, h.z}, {s.w, l.w, h.w}};
      std::uint32_t words[4] = {};
#pragma unroll 1
      for (int j = 0; j < 4 && j < inside; ++j) {
        const float4 r = load4(&shared.rows[group][first + j].factor, 0);
        float x[4];
        load_four(a.m.x + (row + first + j) * a.m.x_stride + column + 4 * half, columns, x);
        std::uint32_t bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kByRows) bytes |= exact_level(__fmul_rn(x[i], factor[i]), {r.w, r.y, r.z}) << i * 8;
          if constexpr (kByColumns) words[i] |= exact_level(__fmul_rn(x[i], r.x), of_columns[i]) << j * 8;
        }
        if constexpr (kByRows) put_four(row_of_q(first + j) + 4 * half, bytes, columns);
      }
      if constexpr (kByColumns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) *reinterpret_cast<std::uint32_t*>(levels_of(4 * half + i) + first) = words[i];
      }
    }
  }

  __device__ static void load_four(const T* from, int count, float (&x)[4]) {
    if constexpr (kWhole) {
      using Words = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
      const Words v = __ldcg(reinterpret_cast<const Words*>(from));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = widen(reinterpret_cast<const T*>(&v)[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = i < count ? widen(__ldcg(from + i)) : 0.0f;
    }
  }
  __device__ static void put_four(std::uint8_t* q, std::uint32_t bytes, int count) {
    if constexpr (kWhole) {
      *reinterpret_cast<std::uint32_t*>(q) = bytes;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) q[i] = static_cast<std::uint8_t>(bytes >> i * 8);
      }
    }
  }

  // The same with noise: all is divided. The rows move up through the registers, since unrolled they are 290 KB of
  // code.
  template <bool kByRows, bool kByColumns>
  __device__ void stochastic(Vector<T> (&v)[kRows]) const {
#pragma unroll 1
    for (int k = 0; k < kRows; ++k) {
      const float4 r = load4(&shared.rows[group][k].factor, 0);
      const LevelRule of_row = {r.w, r.y, r.z};
      const Noise<n> noise(static_cast<std::uint64_t>(row_of_expert + k) * static_cast<std::uint64_t>(a.m.cols) +
                               static_cast<std::uint64_t>(column),
                           a.seed + static_cast<std::uint64_t>(expert));
      std::uint32_t bytes[Its::kHalves] = {};
#pragma unroll
      for (int half = 0; half < Its::kHalves; ++half) {
        float x[4];
        widen_half(v[0], half, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int place = 4 * (half * kLanes + lane) + i;
          const float u = static_cast<float>(noise[4 * half + i]) * 0x1p-16f;
          if constexpr (kByRows) {
            const float scaled = __fmul_rn(x[i], shared.column_factor[place]);
            bytes[half] |= stochastic_level(scaled, of_row, u, a.q_min, a.q_max) << i * 8;
          }
          if constexpr (kByColumns) {
            const LevelRule of_column = {shared.column_s[place], shared.column_low[place], shared.column_high[place]};
            const std::uint32_t level = stochastic_level(__fmul_rn(x[i], r.x), of_column, u, a.q_min, a.q_max);
            levels_of(4 * half + i)[k] = static_cast<std::uint8_t>(level);
          }
        }
      }
      if (kByRows && k < rows_inside()) put_row(row_of_q(k), bytes);
#pragma unroll
      for (int i = 1; i < kRows; ++i) v[i - 1] = v[i];
    }
  }

  // The columns' levels: eight lanes have 16 bytes each of a column.
  __device__ void put_columns() const {
    constexpr int kStep = kThreads / 8;
    const int high = static_cast<int>(threadIdx.x % 8);
    const int first = static_cast<int>(threadIdx.x / 8);
    const int left = (kExperts ? kTile : rows) - high * 16;
    const std::int64_t step = kStep * a.m.q_transposed_stride;
    std::uint8_t* to = a.m.q_transposed + (across * kTile + first) * a.m.q_transposed_stride + down * kTile + high * 16;
    if (kWhole && left >= 16) {
      constexpr int kPeriod = 8 * n / kStep;  // of the pattern of chunks
      const std::uint8_t* from[kPeriod];
#pragma unroll
      for (int i = 0; i < kPeriod; ++i) from[i] = chunk(first + i * kStep, high);
#pragma unroll
      for (int i = 0; i < kTile / kStep; ++i, to += step) {
        if (first + i * kStep < cols) {
          const auto* const chunks = from[i % kPeriod] + i / kPeriod * kPeriod * kStep * kTile;
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunks);
        }
      }
      return;
    }
#pragma unroll 1
    for (int c = first; c < cols; c += kStep, to += step) {
#pragma unroll 1
      for (int i = 0; i < min(left, 16); ++i) to[i] = chunk(c, high)[i];
    }
  }

  template <bool kStochastic, bool kByRows, bool kByColumns>
  __device__ void put_levels(Vector<T> (&v)[kRows], bool divides) const {
    if constexpr (kStochastic) {
      stochastic<kByRows, kByColumns>(v);
    } else {
      nearest<kByRows, kByColumns>(v, divides);
    }
    __syncthreads();
    if (!kStochastic && shared.suspects_found > 0) {
      settle<kByRows, kByColumns>();
      __syncthreads();
    }
    if constexpr (kByColumns) put_columns();
  }
};

template <class T, bool kWhole, Pass kPass, bool kStochastic, bool kExperts = false>
__global__ void __launch_bounds__(kThreads, Layout<T>::kBlocks) quantize_tiles(const __grid_constant__ Arguments<T> a) {
  __shared__ Shared<T> shared;
  if constexpr (kExperts) wait_for_previous();
  const Tile<T, kWhole, kExperts> tile(a, shared);
  if (tile.rows <= 0 || tile.cols <= 0) return;
  Vector<T> v[Layout<T>::kRows];
  if constexpr (kPass == Pass::clustered) tile.expect_maxima();
  let_next_start();
  wait_for_previous();
  tile.load(v);
  tile.load_factors();
  if (threadIdx.x == 0) shared.suspects_found = 0;
  __syncthreads();
  if constexpr (kPass != Pass::levels) {
    tile.measure(v);
    forget_origin(v);
    __syncthreads();
  }
  if constexpr (kPass == Pass::measure) {
    tile.put_maxima();
  } else {
    if constexpr (kPass == Pass::clustered) tile.share_maxima();
    const bool divides = __syncthreads_or(tile.template resolve<kPass>());
    if (a.m.q && a.m.q_transposed) {
      tile.template put_levels<kStochastic, true, true>(v, divides);
    } else if (a.m.q) {
      tile.template put_levels<kStochastic, true, false>(v, divides);
    } else if (a.m.q_transposed) {
      tile.template put_levels<kStochastic, false, true>(v, divides);
    }
  }
}

// y[c] = the sum of column c over all tiles, rounded once; with experts y[e, c], over those of expert e.
template <class T>
struct SumArguments {
  const float* partial_sums;  // (tiles, cols)
  std::int64_t cols;
  int tiles;
  T* y;
  std::int64_t y_stride;
  Experts experts = {};
  int block_shift = 0;
  std::int64_t y_expert_stride = 0;
};

constexpr int kSumLines = 8;

template <class T, bool kExperts = false>
__global__ void __launch_bounds__(32 * kSumLines) sum_tiles(const __grid_constant__ SumArguments<T> arguments) {
  __shared__ float of_lines[kSumLines][32];
  SumArguments<T> s = arguments;
  const int lane = static_cast<int>(threadIdx.x);
  const int line = static_cast<int>(threadIdx.y);
  constexpr int kAhead = 8;
  let_next_start();
  wait_for_previous();
  std::int64_t c = std::int64_t{blockIdx.x} * 32 + lane;
  if constexpr (kExperts) {
    const unsigned across = static_cast<unsigned>((s.cols + 31) / 32);
    const int e = static_cast<int>(blockIdx.x / across);
    c = std::int64_t{blockIdx.x % across} * 32 + lane;
    const std::int64_t before = std::int64_t{tiles_before(s.experts, e, kTile << s.block_shift)} << s.block_shift;
    s.partial_sums += before * s.cols;
    s.tiles = (s.experts.offset(e + 1) - s.experts.offset(e) + kTile - 1) / kTile;
    s.y += e * s.y_expert_stride;
  }
  float sum = 0;
  for (int tile = line; c < s.cols && tile < s.tiles; tile += kAhead * kSumLines) {
    float values[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = tile + k * kSumLines;
      values[k] = at < s.tiles ? __ldcg(s.partial_sums + at * s.cols + c) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) sum += values[k];
  }
  of_lines[line][lane] = sum;
  __syncthreads();
  if (line != 0 || c >= s.cols) return;
  for (int k = 1; k < kSumLines; ++k) sum += of_lines[k][lane];
  s.y[c * s.y_stride] = narrow<T>(sum);
}

// ---- The host side.

// Of the sums of tiles, in elements of 4 bytes: the first part of the workspace.
inline std::size_t sum_words(std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>(ceil_div(rows, kTile) * cols);
}

// Those of x, or of all that experts' blocks may have.
inline std::int64_t rows_of_tiles(const QuantizeProblem& p, const QuantizeOperands& o) {
  if (!o.offsets.present()) return o.x.rows();
  return max_blocks(o.offsets.rows() - 1, o.x.rows(), p.group) * p.group;
}

// All but the maxima.
template <class T>
Arguments<T> arguments(const QuantizeProblem& p, const QuantizeOperands& o, void* workspace) {
  Arguments<T> a = {};
  a.m = tiles::matrices<T>(o);
  if (o.q.present()) {
    a.column_factor = row_scale<float>(o.multiplier);
    a.row_scale = static_cast<float*>(o.scale.data);
    a.row_scale_stride = o.scale.row_stride;
    a.row_scale_block_stride = o.scale.col_stride;
  }
  if (o.q_transposed.present()) {
    a.row_factor = row_scale<float>(o.row_multiplier);
    a.column_scale = static_cast<float*>(o.column_scale.data);
    a.column_scale_stride = o.column_scale.col_stride;
    a.column_scale_block_stride = o.column_scale.row_stride;
  }
  if (o.y.present()) a.partial_sums = static_cast<float*>(workspace);
  a.tiles_down = static_cast<int>(ceil_div(rows_of_tiles(p, o), kTile));
  if (o.offsets.present()) {
    a.experts = experts_at(o.offsets);
    a.column_factor_stride = o.multiplier_stride;
  }
  a.tiles_across = static_cast<int>(ceil_div(o.x.cols(), kTile));
  for (std::int64_t length = kTile; length < p.group; length *= 2) ++a.block_shift;
  a.q_min = static_cast<float>(p.q_min);
  a.q_max = static_cast<float>(p.q_max);
  a.min_scale = static_cast<float>(p.min_scale);
  a.seed = o.seed;
  return a;
}

// Why the tiles cannot serve the problem; empty: they can.
inline std::string refusal(const QuantizeProblem& p) {
  if (p.x == DType::f64 || p.q != DType::s8) return "does f16, bf16 and f32 to s8";
  if (p.mapping != Mapping::symmetric || p.scale != ScaleSource::dynamic || p.q_min > -p.q_max) {
    return "does symmetric dynamic scales with nothing to clamp";
  }
  constexpr std::int64_t kMaxLength = kMaxDown / kMaxSide * kMaxSide * kTile;
  if (p.rows > kMaxLength || p.cols > kMaxLength) return message("does at most ", kMaxLength, " rows and columns");
  return {};
}

// Whether all is in whole aligned vectors.
inline bool moves_whole(const QuantizeProblem& p, const QuantizeOperands& o) {
  return with_narrow_type(p.x, [&](auto x) { return tiles::moves_whole<decltype(x)>(o); });
}

// Calls body.operator()<T, kWhole, kStochastic>().
template <class Body>
void with_variant(const QuantizeProblem& p, bool whole, const Body& body) {
  with_narrow_type(p.x, [&](auto x) {
    with_flags([&]<bool kWhole, bool kStochastic>() { body.template operator()<decltype(x), kWhole, kStochastic>(); },
               whole, p.rounding == Rounding::stochastic);
  });
}

// A block of threads for each tile, in clusters of side x side, side at most kBand.
template <class T>
LaunchShape shape_of(const Arguments<T>& a, int side) {
  const int down = ceil_div(a.tiles_down, side);
  const int across = ceil_div(a.tiles_across, side);
  const int width = ceil_div(across, ceil_div(across, kBand / side));
  LaunchShape shape = {dim3(static_cast<unsigned>(width * side), static_cast<unsigned>(down * side),
                            static_cast<unsigned>(ceil_div(across, width))),
                       dim3(kThreads)};
  shape.cluster = dim3(static_cast<unsigned>(side), static_cast<unsigned>(side));
  return shape;
}

// The sums of tiles to y (cols), or of each expert to y (experts, cols).
template <bool kExperts, class T>
void enqueue_sums(std::string_view name, const Arguments<T>& a, const Tensor& y, Stream stream) {
  const SumArguments<T> s = {
      a.partial_sums, a.m.cols,      a.tiles_down, static_cast<T*>(y.data), y.strides[kExperts ? 1 : 0],
      a.experts,      a.block_shift, y.strides[0]};
  const unsigned experts = kExperts ? static_cast<unsigned>(a.experts.count) : 1;
  enqueue(name, sum_tiles<T, kExperts>, {dim3(blocks_for(s.cols, 32) * experts), dim3(32, kSumLines)}, stream, s);
}

}  // namespace octile::cuda::blocked_gradient
