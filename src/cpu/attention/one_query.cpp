// Attention of one query token per sequence over its cache. The positions of the cache are cut into splits; a part of
// the work is one split of one KV head, for all query heads that share it:
//
//   scores   s[h, i] = scale log2(e) query[h] . key[p_i]     of the visible positions p_i of the split
//   weights  w[h, i] = 2^(s[h, i] - max_i s[h, i])
//   values   o[h] = sum_i w[h, i] value[p_i]
//
// The thread that finishes the last split of a KV head adds them up, each times 2^(its max - the largest max), and
// divides by the sum of weights. So keys and values are read once, hidden positions not at all, and all sums are f32.
// The splits, and so the bits, depend only on the number of positions: not on the threads, the batch or which thread
// comes last. The bits also depend on the instruction set, through the order of the sums and FMA.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/float_environment.h"
#include "cpu/attention/exp2.h"
#include "cpu/gemm/transpose_lanes.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/attention.h"

namespace octile::cpu {

namespace {

// Positions of a split. Long ones read longer stretches of memory, short ones give more threads work.
constexpr std::int64_t kMaxSplit = 256;
constexpr std::int64_t split_of(std::int64_t positions) {
  return positions > 2 * kMaxSplit ? kMaxSplit : kMaxSplit / 2;
}
constexpr int kMaxHeads = 4;              // query heads per pass; later passes find the split in the cache
constexpr std::int64_t kRowBlock = 16;    // rows of values between two visits of the sums in memory
constexpr std::int64_t kPrefetch = 4096;  // bytes of rows that are fetched ahead
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNothing = -1;  // the sum of weights of a split with no visible position, whose values are not written

// ---- Vectors ----

template <Isa isa>
struct Vectors {
  static constexpr std::int64_t kLanes = isa >= Isa::avx512 ? 16 : isa >= Isa::avx2 ? 8 : 4;
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef std::uint32_t Words __attribute__((vector_size(4 * kLanes)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  static constexpr int kRegisters = isa >= Isa::avx512 ? 32 : 16;
};

template <class V>
OCTILE_INLINE void load(const float* from, typename V::Floats& x) {
  std::memcpy(&x, from, sizeof x);
}

template <class V>
OCTILE_INLINE void load(const BFloat16* from, typename V::Floats& x) {
  typename V::Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  x = reinterpret_cast<typename V::Floats>(__builtin_convertvector(bits, typename V::Words) << 16);
}

template <class V>
OCTILE_INLINE void load(const Half* from, typename V::Floats& x) {
  using Words = typename V::Words;
  using Floats = typename V::Floats;
  typename V::Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words), magnitude = bits & 0x7fff, shifted = magnitude << 13;
  const Words subnormal = reinterpret_cast<Words>(reinterpret_cast<Floats>(shifted + 0x38800000) - 0x1p-14f);
  const Words finite = magnitude < 0x400 ? subnormal : shifted + 0x38000000;
  const Words all = magnitude < 0x7c00 ? finite : shifted | 0x7f800000;
  x = reinterpret_cast<Floats>(all | (bits & 0x8000) << 16);
}

// The first n lanes, and zeros.
template <class V, class T>
OCTILE_INLINE void load_some(const T* from, std::int64_t n, typename V::Floats& x) {
  T some[V::kLanes] = {};
  std::memcpy(some, from, static_cast<std::size_t>(n) * sizeof(T));
  load<V>(some, x);
}

typedef float Four __attribute__((vector_size(16)));

// Four sums of lanes.
template <class Floats>
OCTILE_INLINE void fold(const Floats& x, Four& sum) {
  constexpr std::size_t kFours = sizeof(Floats) / sizeof(Four);
  Four four[kFours];
  std::memcpy(four, &x, sizeof x);
  sum = four[0];
  if constexpr (kFours == 2) sum = four[0] + four[1];
  if constexpr (kFours == 4) sum = (four[0] + four[1]) + (four[2] + four[3]);
}

// ---- One split ----

// One split, for `heads` query heads.
template <class T>
struct SplitRun {
  const T *key, *value;
  std::int64_t key_stride, value_stride;
  const std::int32_t* visible;  // positions, counted from key and value
  std::int64_t count, size;
  std::int64_t split, following;  // key rows of the next split to prefetch
  int heads;
  const float* query;  // (heads, kMaxHeadSize), times the scale
  float* weights;      // (heads, kMaxSplit)
  float *max, *sum;    // (heads), of scores and of weights
  float* out;          // (heads, out_stride)
  std::int64_t out_stride;

  OCTILE_INLINE const T* key_row(std::int64_t i) const { return key + visible[i] * key_stride; }
  OCTILE_INLINE const T* value_row(std::int64_t i) const { return value + visible[i] * value_stride; }

  OCTILE_INLINE void prefetch(const T* row) const {
    const auto* const bytes = reinterpret_cast<const char*>(row);
    const auto end = size * static_cast<std::int64_t>(sizeof(T));
    for (std::int64_t i = 0; i < end; i += 64) __builtin_prefetch(bytes + i, 0, 3);
  }
};

template <class T, int kHeads>
struct AttendSplit {
  template <Isa isa>
  OCTILE_INLINE static void run(SplitRun<T> r) {
    using V = Vectors<isa>;
    scores<V>(r);
    for (int h = 0; h < kHeads; ++h) weigh<V>(r.weights + h * kMaxSplit, r.count, r.max[h], r.sum[h]);
    for (std::int64_t first = 0; first < r.count; first += kRowBlock) {
      add_rows<V, columns_at_once<V>()>(r, first, std::min(kRowBlock, r.count - first), 0);
    }
  }

 private:
  // Sums, a vector of each row and one of a query stay in registers.
  template <class V>
  static constexpr int rows_at_once() {
    return 4 * kHeads + 5 <= V::kRegisters ? 4 : 2 * kHeads + 3 <= V::kRegisters ? 2 : 1;
  }
  // Sums, a vector of each column and a weight.
  template <class V>
  static constexpr int columns_at_once() {
    for (int columns : {8, 4, 2}) {
      if (columns * (kHeads + 1) < V::kRegisters) return columns;
    }
    return 1;
  }

  template <class V>
  OCTILE_INLINE static void scores(const SplitRun<T>& r) {
    constexpr int kRows = rows_at_once<V>();
    constexpr std::int64_t kLanes = V::kLanes;
    const std::int64_t ahead = kPrefetch / (r.size * static_cast<std::int64_t>(sizeof(T))) + kRows;
    for (std::int64_t i = 0; i < r.count; i += kRows) {
      const T* rows[kRows];
      for (int p = 0; p < kRows; ++p) {
        rows[p] = r.key_row(std::min(i + p, r.count - 1));
        const std::int64_t next = i + p + ahead;
        if (next < r.count) {
          r.prefetch(r.key_row(next));
        } else if (next < 2 * r.count) {
          r.prefetch(r.value_row(next - r.count));
        }
      }
      Sums<V> sums;
      clear(sums);
      std::int64_t c = 0;
      for (; c + kLanes <= r.size; c += kLanes) add_products<V, true>(r, rows, c, sums);
      if (c < r.size) add_products<V, false>(r, rows, c, sums);
      add_lanes<V>(sums, i, r);
    }
  }

  template <class V>
  using Sums = typename V::Floats[kHeads][rows_at_once<V>()];

  // One by one: an initializer is a loop over memory.
  template <class Floats, int kFirst, int kSecond>
  OCTILE_INLINE static void clear(Floats (&sums)[kFirst][kSecond]) {
#pragma GCC unroll 8
    for (int i = 0; i < kFirst; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kSecond; ++j) sums[i][j] = Floats{};
    }
  }

  // Of columns c and following ones, a vector or the rest of a row.
  template <class V, bool kWhole, std::size_t kRows>
  OCTILE_INLINE static void add_products(const SplitRun<T>& r, const T* const (&rows)[kRows], std::int64_t c,
                                         Sums<V>& sums) {
    typename V::Floats key[kRows], query;
#pragma GCC unroll 4
    for (std::size_t p = 0; p < kRows; ++p) {
      kWhole ? load<V>(rows[p] + c, key[p]) : load_some<V>(rows[p] + c, r.size - c, key[p]);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      load<V>(r.query + h * kMaxHeadSize + c, query);
#pragma GCC unroll 4
      for (std::size_t p = 0; p < kRows; ++p) sums[h][p] += query * key[p];
    }
  }

  // The sums of their lanes are scores of the positions from i on.
  template <class V>
  OCTILE_INLINE static void add_lanes(const Sums<V>& sums, std::int64_t i, const SplitRun<T>& r) {
    constexpr int kRows = rows_at_once<V>(), kSums = kHeads * kRows;
#pragma GCC unroll 8
    for (int n = 0; n < kSums; n += 4) {
      Four four[4] = {};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (n + j < kSums) fold(sums[(n + j) / kRows][(n + j) % kRows], four[j]);
      }
      transpose_lanes(four);
      const Four sum = (four[0] + four[1]) + (four[2] + four[3]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (n + j < kSums) r.weights[(n + j) / kRows * kMaxSplit + i + (n + j) % kRows] = sum[j];
      }
    }
  }

  // Scores become weights.
  template <class V>
  OCTILE_INLINE static void weigh(float* weights, std::int64_t count, float& max, float& sum) {
    using Floats = typename V::Floats;
    const std::int64_t padded = round_up(count, V::kLanes);
    std::fill(weights + count, weights + padded, -kInfinity);
    Floats maxima = Floats{} - kInfinity, sums = {}, x;
    for (std::int64_t i = 0; i < padded; i += V::kLanes) {
      load<V>(weights + i, x);
      maxima = x > maxima ? x : maxima;  // not NaN
    }
    max = -kInfinity;
    for (std::int64_t i = 0; i < V::kLanes; ++i) max = std::max(max, maxima[i]);
    const float base = max == -kInfinity ? 0.0f : max;
    for (std::int64_t i = 0; i < padded; i += V::kLanes) {
      load<V>(weights + i, x);
      x -= base;
      exp2_below_0(x);
      std::memcpy(weights + i, &x, sizeof x);
      sums += x;
    }
    Four four;
    fold(sums, four);
    sum = (four[0] + four[2]) + (four[1] + four[3]);
  }

  // Adds rows first .. first + rows - 1 to all columns of the output from c on.
  template <class V, int kColumns>
  OCTILE_INLINE static void add_rows(const SplitRun<T>& r, std::int64_t first, std::int64_t rows, std::int64_t c) {
    constexpr std::int64_t kWidth = kColumns * V::kLanes;
    for (; c + kWidth <= r.size; c += kWidth) add_values<V, kColumns>(r, first, rows, c);
    if constexpr (kColumns > 1) {
      add_rows<V, kColumns / 2>(r, first, rows, c);
    } else if (c < r.size) {
      add_values<V, 1>(r, first, rows, c);
    }
  }

  // To kColumns vectors of columns, or to the last columns.
  template <class V, int kColumns>
  OCTILE_INLINE static void add_values(const SplitRun<T>& r, std::int64_t first, std::int64_t rows, std::int64_t c) {
    using Floats = typename V::Floats;
    Floats sums[kHeads][kColumns];
    clear(sums);
    if (first > 0) {
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
        for (int j = 0; j < kColumns; ++j) load<V>(r.out + h * r.out_stride + c + j * V::kLanes, sums[h][j]);
      }
    }
    const bool whole = c + kColumns * V::kLanes <= r.size;
    for (std::int64_t i = first; i < first + rows; ++i) {
      if (const std::int64_t next = i + kRowBlock; c == 0 && next < r.count + r.following) {
        r.prefetch(next < r.count ? r.value_row(next) : r.key + (r.split + next - r.count) * r.key_stride);
      }
      const T* const row = r.value_row(i) + c;
      Floats x[kColumns];
      if (whole) {
#pragma GCC unroll 8
        for (int j = 0; j < kColumns; ++j) load<V>(row + j * V::kLanes, x[j]);
      } else {
        load_some<V>(row, r.size - c, x[0]);
      }
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Floats weight = r.weights[h * kMaxSplit + i] - Floats{};  // broadcast once
#pragma GCC unroll 8
        for (int j = 0; j < kColumns; ++j) sums[h][j] += weight * x[j];
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) {
        std::memcpy(r.out + h * r.out_stride + c + j * V::kLanes, &sums[h][j], sizeof(Floats));
      }
    }
  }
};

// ---- All splits of a head ----

struct SplitSums {
  const float *max, *sum, *values;  // (splits), (splits), (splits, stride)
  std::int64_t splits, stride, size;
  float* out;  // (size)
};

struct AddSplits {
  template <Isa>
  OCTILE_INLINE static void run(SplitSums s) {
    float max = -kInfinity, sum = 0;
    for (std::int64_t i = 0; i < s.splits; ++i) max = s.max[i] > max ? s.max[i] : max;
    std::fill_n(s.out, s.size, 0.0f);
    for (std::int64_t i = 0; i < s.splits; ++i) {
      if (s.sum[i] == kNothing) continue;
      Four factor = Four{} + (s.max[i] - (max == -kInfinity ? 0.0f : max));
      exp2_below_0(factor);
      const float* const values = s.values + i * s.stride;
      sum += factor[0] * s.sum[i];
      for (std::int64_t c = 0; c < s.size; ++c) s.out[c] += factor[0] * values[c];
    }
    for (std::int64_t c = 0; c < s.size && sum != 0; ++c) s.out[c] /= sum;
  }
};

// ---- The whole ----

template <class T>
class Attention {
 public:
  explicit Attention(const OneQuery& o)
      : o_(o),
        split_(split_of(o.positions)),
        splits_(ceil_div(o.positions, split_)),
        pairs_(o.batch * o.kv_heads),
        stride_(round_up(o.size, 16)),
        memory_(std::make_unique_for_overwrite<float[]>(
            static_cast<std::size_t>(pairs_ * o.group * splits_ * (stride_ + 2)))),
        done_(static_cast<std::size_t>(pairs_)) {
    max_ = memory_.get();
    sum_ = max_ + pairs_ * o.group * splits_;
    values_ = sum_ + pairs_ * o.group * splits_;
  }

  void run() {
    const double elements = 2.0 * static_cast<double>(pairs_ * o_.positions * o_.size);
    parallel_for(useful_threads(o_.threads, elements), pairs_ * splits_, [&](std::int64_t part) {
      const std::int64_t pair = part / splits_;
      attend(pair, part % splits_);
      auto& done = done_[static_cast<std::size_t>(pair)];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == splits_) finish(pair);
    });
  }

 private:
  // Index of a split of a query head, of a pair of a sequence and a KV head.
  std::int64_t at(std::int64_t pair, std::int64_t head, std::int64_t split) const {
    return (pair * o_.group + head) * splits_ + split;
  }

  void attend(std::int64_t pair, std::int64_t split) {
    const std::int64_t b = pair / o_.kv_heads, kv_head = pair % o_.kv_heads, begin = split * split_;
    const std::int64_t end = std::min(begin + split_, o_.positions);
    std::int32_t visible[kMaxSplit];
    SplitRun<T> run{};
    for (std::int64_t p = begin; p < end; ++p) {
      visible[run.count] = static_cast<std::int32_t>(p - begin);
      run.count += o_.visible(b, p);
    }
    const std::int64_t near = std::min(end + kRowBlock, o_.positions);
    for (std::int64_t p = end; p < near && o_.visible(b, p); ++p) ++run.following;
    run.split = split_;
    const auto first_of = [&](const OneQuery::Cache& cache) {
      return static_cast<const T*>(cache.data) + b * cache.batch_stride + kv_head * cache.head_stride +
             begin * cache.position_stride;
    };
    run.key = first_of(o_.key), run.key_stride = o_.key.position_stride;
    run.value = first_of(o_.value), run.value_stride = o_.value.position_stride;
    run.visible = visible, run.size = o_.size;
    alignas(64) float query[kMaxHeads * kMaxHeadSize];
    alignas(64) float weights[kMaxHeads * kMaxSplit];
    float max[kMaxHeads], sum[kMaxHeads];
    run.query = query, run.weights = weights, run.max = max, run.sum = sum, run.out_stride = splits_ * stride_;
    for (std::int64_t first = 0; first < o_.group; first += kMaxHeads) {
      run.heads = static_cast<int>(std::min<std::int64_t>(kMaxHeads, o_.group - first));
      for (int h = 0; h < run.heads; ++h) max[h] = -kInfinity, sum[h] = kNothing;
      if (run.count > 0) {
        run.out = values_ + at(pair, first, split) * stride_;
        for (int h = 0; h < run.heads; ++h) read_query(b, kv_head * o_.group + first + h, query + h * kMaxHeadSize);
        with_heads(run, std::make_index_sequence<kMaxHeads>());
      }
      for (int h = 0; h < run.heads; ++h) {
        const std::int64_t to = at(pair, first + h, split);
        max_[to] = max[h], sum_[to] = sum[h];
      }
    }
  }

  template <std::size_t... kIndex>
  static void with_heads(const SplitRun<T>& run, std::index_sequence<kIndex...>) {
    ((run.heads == kIndex + 1 ? multiversion<AttendSplit<T, kIndex + 1>>(run) : void()), ...);
  }

  // Times the scale, for exp2; zero-padded.
  void read_query(std::int64_t b, std::int64_t head, float* query) const {
    constexpr double kLog2E = 1.4426950408889634;
    const auto factor = static_cast<float>(static_cast<double>(o_.scale) * kLog2E);
    widen(o_.dtype, o_.query, b * o_.query_batch_stride + head * o_.query_head_stride, o_.size, query);
    for (std::int64_t c = 0; c < o_.size; ++c) query[c] *= factor;
    std::fill(query + o_.size, query + stride_, 0.0f);
  }

  void finish(std::int64_t pair) {
    alignas(64) float out[kMaxHeadSize];
    for (std::int64_t h = 0; h < o_.group; ++h) {
      const std::int64_t from = at(pair, h, 0);
      multiversion<AddSplits>(
          SplitSums{max_ + from, sum_ + from, values_ + from * stride_, splits_, stride_, o_.size, out});
      narrow(o_.dtype, o_.y, (pair * o_.group + h) * o_.size, o_.size, out);
    }
  }

  const OneQuery& o_;
  std::int64_t split_, splits_, pairs_, stride_;
  std::unique_ptr<float[]> memory_;
  std::vector<std::atomic<std::int64_t>> done_;  // splits of a pair
  float *max_, *sum_, *values_;                  // (pairs, group, splits), twice, and (pairs, group, splits, stride)
};

}  // namespace

void attend_one_query(const OneQuery& o) {
  if (o.positions == 0) {
    std::memset(o.y, 0, static_cast<std::size_t>(o.batch * o.kv_heads * o.group * o.size * bits(o.dtype) / 8));
  } else if (o.dtype == DType::f32) {
    Attention<float>(o).run();
  } else if (o.dtype == DType::bf16) {
    Attention<BFloat16>(o).run();
  } else {
    Attention<Half>(o).run();
  }
}

}  // namespace octile::cpu
