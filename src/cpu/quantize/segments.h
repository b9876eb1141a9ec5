// The walk of the two kernels that find their own scales, quantize and fake quantize: first the extremes of a segment,
// then its scale, then its elements. Whatever can be is read from memory once: the second look at a row finds it in the
// caches while the next row is fetched.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "cpu/quantize/extremes.h"
#include "cpu/quantize/levels.h"
#include "cpu/support/rows.h"
#include "plan/kernel.h"

namespace octile::cpu {

// Elements of a row at a time. Their scales are on the stack.
template <class Real>
inline constexpr std::int64_t kChunk = 4096 / sizeof(Real);
// The same where they have one scale, or the scales lie elsewhere.
template <class Real>
inline constexpr std::int64_t kRun = 2 * kChunk<Real>;
// Products with a multiplier that are kept from the one look at a row to the other.
template <class Real>
inline constexpr std::int64_t kKept = 4 * kChunk<Real>;
inline constexpr std::int64_t kBlockRows = 128;     // rows of a block at most
inline constexpr std::int64_t kDistance = 8 << 10;  // bytes from what is read to what is fetched, along a row

struct Multiply {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* x, const Real* factors, std::int64_t n, Real* out) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] * factors[i];
  }
};

struct MultiplyByOne {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* x, Real factor, std::int64_t n, Real* out) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
  }
};

// A piece of one row, and where it stands in its block.
template <class Real>
struct Piece {
  std::int64_t row = 0, col = 0, n = 0;
  std::int64_t block_row = 0, block_col = 0;
  Ahead ahead = {};
  const Real* x = nullptr;               // null: not yet read
  const std::uint16_t* noise = nullptr;  // null: nearest
};

// How x is cut into blocks, and `bytes` of memory for each worker.
struct Blocks {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t first_rows = 0;  // of the first block, at most `rows`
  std::uint8_t* memory = nullptr;
  std::int64_t bytes = 0;
  std::uint8_t* columns = nullptr;  // ColumnMemory
};

// What is known of all columns: extremes, of each worker's rows, then scales. 0 bytes for other granularities.
template <class Real>
struct ColumnMemory {
  std::uint8_t* extremes = nullptr;
  std::int64_t extremes_bytes = 0;  // of a worker
  Real* s = nullptr;
  Real* inverses = nullptr;
  std::int32_t* z = nullptr;
  std::int64_t bytes = 0;

  ColumnMemory(const QuantizeProblem& p, std::int64_t cols, int workers, std::uint8_t* memory) {
    if (p.granularity != Granularity::column) return;
    const std::int64_t array = round_up(cols * static_cast<std::int64_t>(sizeof(Real)), 64);
    Pieces pieces(memory);
    extremes_bytes = 2 * array;
    extremes = pieces.take(workers * extremes_bytes);
    s = reinterpret_cast<Real*>(pieces.take(array));
    inverses = reinterpret_cast<Real*>(pieces.take(array));
    z = reinterpret_cast<std::int32_t*>(pieces.take(array));
    bytes = pieces.size();
  }
};

// What a quantizer reads and writes.
inline double bytes_moved(const QuantizeOperands& o) {
  const int outputs = (o.q.present() ? 1 : 0) + (o.q_transposed.present() ? 1 : 0);
  return static_cast<double>(o.x.rows()) * static_cast<double>(o.x.cols()) * (bits(o.x.dtype) / 8 + outputs);
}

inline int quantizing_threads(const QuantizeProblem& p, std::int64_t rows) {
  return useful_threads(p.threads, static_cast<double>(rows) * static_cast<double>(p.cols));
}
inline std::int64_t column_bytes(const QuantizeProblem& p) {
  const int threads = quantizing_threads(p, p.rows);
  return p.x == DType::f64 ? ColumnMemory<double>(p, p.cols, threads, nullptr).bytes
                           : ColumnMemory<float>(p, p.cols, threads, nullptr).bytes;
}

// Of rows that need not be transposed together: enough for the threads to share, few enough that one thread does not
// wait for another.
inline Blocks row_blocks_of(const QuantizeProblem& p, const ConstTensor& x, std::uint8_t* columns) {
  constexpr std::int64_t kElements = 1 << 18;
  constexpr std::int64_t kMaxColumns = 4096;  // of which the scales are in the L1 cache
  const std::int64_t all = std::max<std::int64_t>(x.cols(), 1);
  const std::int64_t cols = p.granularity == Granularity::column ? std::min(all, kMaxColumns) : all;
  const std::int64_t even = ceil_div(x.rows(), 4 * quantizing_threads(p, x.rows()));
  const std::int64_t rows = std::clamp<std::int64_t>(std::min(even, kElements / cols), 1, kBlockRows / 2);
  return {.rows = rows, .cols = cols, .first_rows = rows, .columns = columns};
}

// Emit is made once per worker and is called with every piece of a block, then with the block:
//   Emit(problem, operands, worker's memory)
//   void piece(const Piece<Real>&, const Scale&)   with ScaleSteps<Real> or ScaleEach<affine, Real>
//   bool takes_narrow(); void narrow(piece, x, scale)   may be missing: f16 and bf16 as stored
//   void block(row, col, rows, cols)
//   void finish()   after the last block
template <class Real, class Emit>
class SegmentWalk {
 public:
  SegmentWalk(const QuantizeProblem& p, const QuantizeOperands& o, const Blocks& blocks)
      : p_(p), o_(o), rows_(o.x.rows()), cols_(o.x.cols()), blocks_(blocks) {
    threads_ = quantizing_threads(p, rows_);
  }

  void run() const {
    switch (p_.granularity) {
      case Granularity::tensor:
        return run_tensor();
      case Granularity::column:
        return run_columns();
      default:
        return run_rows();
    }
  }

 private:
  static constexpr bool kTakesNarrow = requires(Emit e) { e.takes_narrow(); };

  // Of a worker: the input where it has to be converted, and the scales of each element of a piece.
  struct Part {
    Part(const SegmentWalk& walk, std::int64_t worker)
        : emit(walk.p_, walk.o_, walk.blocks_.memory + worker * walk.blocks_.bytes) {}
    Emit emit;
    alignas(64) Real x[kKept<Real>];
    alignas(64) Real s[kChunk<Real>];
    alignas(64) Real inverses[kChunk<Real>];
    alignas(64) std::int32_t z[kChunk<Real>];
    alignas(64) std::uint16_t noise[kRun<Real> + 16];
    OneScale<Real> steps[kChunk<Real> / kAheadStep];
    Segment<Real> segments[kChunk<Real>];
    Extremes<Real> extremes[kChunk<Real>];
    alignas(4) std::byte narrow_extremes[kTakesNarrow ? kChunk<Real> * sizeof(Extremes<Half>) : 1];  // of f16 or bf16
  };

  // Scales of each element of a run.
  struct Each {
    Real* s;
    Real* inverses;
    std::int32_t* z;
  };

  template <class Body>
  void for_each_part(std::int64_t parts, const Body& body) const {
    // Not inlined: a frame would hold a Part for each call.
    share(
        threads_, parts, [&](std::int64_t worker, auto take) __attribute__((noinline)) {
          Part part(*this, worker);
          for (std::int64_t i; (i = take()) < parts;) body(part, i);
          part.emit.finish();
        });
  }

  std::int64_t row_blocks() const { return ceil_div(rows_ + blocks_.rows - blocks_.first_rows, blocks_.rows); }
  // Where a block begins; the last one ends at first_row(row_blocks()).
  std::int64_t first_row(std::int64_t block) const {
    return std::clamp<std::int64_t>(block * blocks_.rows + blocks_.first_rows - blocks_.rows, 0, rows_);
  }
  bool symmetric() const { return p_.mapping == Mapping::symmetric; }

  // A given scale with nothing to check or to report needs no look at the data.
  bool must_measure() const { return p_.scale == ScaleSource::dynamic || Emit::kPoisonsSegments; }

  // What is looked at after (r, c): in blocks as wide as x the rest of the row, else the next row.
  Ahead ahead_in_block(std::int64_t r, std::int64_t c) const {
    return blocks_.cols < cols_ ? ahead_of(o_.x, r + 1, c) : along_row(r, c);
  }
  Ahead along_row(std::int64_t r, std::int64_t c) const {
    return ahead_of(o_.x, r, c + kDistance * 8 / bits(o_.x.dtype));
  }

  // Row r, columns c .. c + n - 1, times the multiplier.
  const Real* input(std::int64_t r, std::int64_t c, std::int64_t n, Real* buffer) const {
    const Real* x = widened(o_.x.dtype, o_.x.data, r * o_.x.strides[0] + c, n, buffer);
    if (p_.multiplier == Multiplier::none) return x;
    const auto* factors = static_cast<const Real*>(o_.multiplier.data);
    const std::int64_t stride = o_.multiplier.strides[0];
    if (p_.multiplier == Multiplier::per_row || stride == 0) {
      multiversion<MultiplyByOne>(x, factors[(p_.multiplier == Multiplier::per_row ? r : 0) * stride], n, buffer);
    } else if (stride == 1) {
      multiversion<Multiply>(x, factors + c, n, buffer);
    } else {
      for (std::int64_t i = 0; i < n; ++i) buffer[i] = x[i] * factors[(c + i) * stride];
    }
    return buffer;
  }

  template <class T>
  void measure_as(const T* x, std::int64_t count, std::int64_t length, Ahead ahead, Extremes<T>* extremes) const {
    symmetric() ? multiversion<Measure<true>>(x, count, length, ahead, extremes)
                : multiversion<Measure<false>>(x, count, length, ahead, extremes);
  }

  // As many of row r from column c on that are to be seen as one segment.
  void measure(std::int64_t r, std::int64_t c, std::int64_t n, Ahead ahead, Extremes<Real>& extremes) const {
    if (p_.multiplier != Multiplier::none) {
      Real buffer[kChunk<Real>];
      for (std::int64_t i = 0; i < n; i += kChunk<Real>) {
        const std::int64_t count = std::min(kChunk<Real>, n - i);
        measure_as(input(r, c + i, count, buffer), 1, count, ahead_of(o_.x, r, c + i), &extremes);
      }
      return;
    }
    with_elements([&](auto* x) {
      Extremes<std::remove_cvref_t<decltype(*x)>> own;
      measure_as(x + r * o_.x.strides[0] + c, 1, n, ahead, &own);
      extremes.add(own);
    });
  }

  // Calls body with x as stored, pointing to its own type.
  template <class Body>
  void with_elements(const Body& body) const {
    if constexpr (sizeof(Real) == 8) {
      body(static_cast<const double*>(o_.x.data));
    } else if (o_.x.dtype == DType::f16) {
      body(static_cast<const Half*>(o_.x.data));
    } else if (o_.x.dtype == DType::bf16) {
      body(static_cast<const BFloat16*>(o_.x.data));
    } else {
      body(static_cast<const float*>(o_.x.data));
    }
  }

  // The scale and zero point of segment k of row r, written where they are wanted.
  Segment<Real> resolve(const Extremes<Real>& extremes, std::int64_t r, std::int64_t k) const {
    const Real q_min = static_cast<Real>(p_.q_min);
    const Real q_max = static_cast<Real>(p_.q_max);
    const auto at = [&](const Scales& scales) { return r * scales.row_stride + k * scales.col_stride; };
    Segment<Real> g{0, 0};
    if (p_.scale == ScaleSource::given) {
      g.s = static_cast<const Real*>(o_.given_scale.data)[at(o_.given_scale)];
      if (o_.given_zero_point.data) {
        g.z = static_cast<const std::int32_t*>(o_.given_zero_point.data)[at(o_.given_zero_point)];
      }
    } else if (symmetric()) {
      g.s = std::max(value_of<Real>(extremes.high) / q_max, static_cast<Real>(p_.min_scale));
    } else if (extremes.finite()) {
      const Real low = value_of<Real>(extremes.low);
      g.s = std::max((value_of<Real>(extremes.high) - low) / (q_max - q_min), static_cast<Real>(p_.min_scale));
      if (std::isfinite(g.s)) g.z = static_cast<std::int32_t>(std::clamp(q_min - std::rint(low / g.s), q_min, q_max));
    }
    if (!extremes.finite() || !std::isfinite(g.s)) g = {std::numeric_limits<Real>::quiet_NaN(), 0};
    if (o_.scale.data) static_cast<Real*>(o_.scale.data)[at(o_.scale)] = g.s;
    if (o_.zero_point.data) static_cast<std::int32_t*>(o_.zero_point.data)[at(o_.zero_point)] = g.z;
    return g;
  }

  // Those of segments k .. k + count - 1 of row r, from part.extremes.
  void resolve_all(Part& part, std::int64_t r, std::int64_t k, std::int64_t count) const {
    if (p_.scale == ScaleSource::dynamic && symmetric()) {
      multiversion<ScalesOfMagnitudes>(static_cast<const Extremes<Real>*>(part.extremes), count,
                                       static_cast<Real>(p_.q_max), static_cast<Real>(p_.min_scale),
                                       static_cast<Segment<Real>*>(part.segments));
      if (o_.scale.data) {
        auto* s = static_cast<Real*>(o_.scale.data) + r * o_.scale.row_stride + k * o_.scale.col_stride;
        for (std::int64_t i = 0; i < count; ++i) s[i * o_.scale.col_stride] = part.segments[i].s;
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) part.segments[i] = resolve(part.extremes[i], r, k + i);
    }
  }

  // Of part.segments, for each of their elements.
  void spread(const Part& part, std::int64_t count, std::int64_t length, const Each& each) const {
    const auto with = [&](auto kernel) {
      multiversion<decltype(kernel)>(static_cast<const Segment<Real>*>(part.segments), count, length, each.s,
                                     each.inverses, each.z);
    };
    symmetric() ? with(SpreadScales<false>()) : with(SpreadScales<true>());
  }

  template <class Scale>
  void emit(Part& part, const Piece<Real>& where, const Scale& scale) const {
    Piece<Real> piece = where;
    if constexpr (kTakesNarrow) {
      if (!piece.x && part.emit.takes_narrow()) {
        return with_elements([&](auto* x) {
          if constexpr (sizeof(*x) == 2) part.emit.narrow(piece, x + piece.row * o_.x.strides[0] + piece.col, scale);
        });
      }
    }
    if (!piece.x) piece.x = input(piece.row, piece.col, piece.n, part.x);
    if (p_.rounding == Rounding::stochastic) {
      const auto index = static_cast<std::uint64_t>(piece.row * cols_ + piece.col);
      const auto skipped = static_cast<std::int64_t>(index % 8);
      multiversion<FillNoise>(index / 8, ceil_div(skipped + piece.n, 8), o_.seed,
                              static_cast<std::uint16_t*>(part.noise));
      piece.noise = part.noise + skipped;
    }
    part.emit.piece(piece, scale);
  }

  void emit_each(Part& part, const Piece<Real>& piece, const Each& each) const {
    symmetric() ? emit(part, piece, ScaleEach<false, Real>{each.s, each.inverses, each.z})
                : emit(part, piece, ScaleEach<true, Real>{each.s, each.inverses, each.z});
  }

  // Columns c .. c + width - 1 of row r, all with one scale.
  // `x`: they have been read.
  void emit_run(Part& part, std::int64_t r, std::int64_t c, std::int64_t width, std::int64_t block_row, Ahead ahead,
                Segment<Real> g, const Real* x = nullptr) const {
    const OneScale<Real> one(g.s, g.z);
    for (std::int64_t i = 0; i < width; i += kRun<Real>) {
      emit(part,
           {.row = r,
            .col = c + i,
            .n = std::min(kRun<Real>, width - i),
            .block_row = block_row,
            .block_col = i,
            .ahead = ahead.after(i),
            .x = x ? x + i : nullptr},
           ScaleSteps<Real>{&one, 0});
    }
  }

  void run_tensor() const {
    if (p_.scale == ScaleSource::given && must_measure()) return run_given_tensor();
    constexpr std::int64_t kMeasureParts = 256;
    Extremes<Real> partial[kMeasureParts];
    Extremes<Real> all;
    if (must_measure()) {
      const std::int64_t step = std::max(ceil_div(rows_, kMeasureParts), std::min(blocks_.rows, rows_));
      const std::int64_t parts = ceil_div(rows_, step);
      parallel_for(threads_, parts, [&](std::int64_t part) {
        for (std::int64_t r = part * step; r < std::min(rows_, (part + 1) * step); ++r) {
          measure(r, 0, cols_, along_row(r, 0), partial[part]);
        }
      });
      for (std::int64_t part = 0; part < parts; ++part) all.add(partial[part]);
    }
    const Segment<Real> g = resolve(all, 0, 0);
    emit_tensor([&](Part& part, std::int64_t r, std::int64_t c, std::int64_t width, std::int64_t block_row) {
      emit_run(part, r, c, width, block_row, ahead_in_block(r, c), g);
    });
  }

  // One look: the levels are right unless x is not finite somewhere, and then all are 0.
  void run_given_tensor() const {
    const Segment<Real> g = resolve({}, 0, 0);
    std::atomic<bool> finite = true;
    emit_tensor([&](Part& part, std::int64_t r, std::int64_t c, std::int64_t width, std::int64_t block_row) {
      Extremes<Real> extremes;
      measure(r, c, width, {}, extremes);
      if (!extremes.finite()) finite.store(false, std::memory_order_relaxed);
      emit_run(part, r, c, width, block_row, ahead_of(o_.x, r + 1, c), g);
    });
    if (finite.load(std::memory_order_relaxed)) return;
    const Segment<Real> bad = resolve({.high = kInfinityKey<Real>}, 0, 0);
    emit_tensor([&](Part& part, std::int64_t r, std::int64_t c, std::int64_t width, std::int64_t block_row) {
      emit_run(part, r, c, width, block_row, {}, bad);
    });
  }

  // Calls emit(part, row, first column, width, row of the block) for all rows of all blocks, the last ones first: of
  // what has been measured before some are in the last cache still.
  template <class EmitRow>
  void emit_tensor(const EmitRow& emit) const {
    for_each_part(row_blocks(), [&](Part& part, std::int64_t turn) {
      const std::int64_t r0 = first_row(row_blocks() - 1 - turn);
      const std::int64_t r1 = first_row(row_blocks() - turn);
      for (std::int64_t c = 0; c < cols_; c += blocks_.cols) {
        const std::int64_t width = std::min(blocks_.cols, cols_ - c);
        for (std::int64_t r = r0; r < r1; ++r) emit(part, r, c, width, r - r0);
        part.emit.block(r0, c, r1 - r0, width);
      }
    });
  }

  // Rows and groups. A long segment is measured whole and then walked in pieces; short ones share a piece.
  void run_rows() const {
    const std::int64_t length = p_.granularity == Granularity::row ? cols_ : p_.group;
    for_each_part(row_blocks(), [&](Part& part, std::int64_t block) {
      const std::int64_t r0 = first_row(block);
      const std::int64_t r1 = first_row(block + 1);
      if (length < cols_ && length <= kChunk<Real>) return short_segments(part, r0, r1, length);
      for (std::int64_t c = 0; c < cols_; c += length) long_segments(part, r0, r1, c, length);
    });
  }

  // Columns c .. c + length - 1 are a segment of each row.
  void long_segments(Part& part, std::int64_t r0, std::int64_t r1, std::int64_t c, std::int64_t length) const {
    Segment<Real> segments[kBlockRows];
    Real* const products =
        must_measure() && p_.multiplier != Multiplier::none && length <= kKept<Real> ? part.x : nullptr;
    for (std::int64_t done = 0; done < length; done += blocks_.cols) {
      const std::int64_t width = std::min(blocks_.cols, length - done);
      for (std::int64_t r = r0; r < r1; ++r) {
        if (done == 0) {
          Extremes<Real> extremes;
          if (products) {
            measure_as(input(r, c, length, products), 1, length, {}, &extremes);
          } else if (must_measure()) {
            measure(r, c, length, {}, extremes);
          }
          segments[r - r0] = resolve(extremes, r, c / length);
        }
        const Ahead ahead = r + 1 < r1 ? ahead_of(o_.x, r + 1, c + done) : Ahead();
        emit_run(part, r, c + done, width, r - r0, ahead, segments[r - r0], products);
      }
      part.emit.block(r0, c + done, r1 - r0, width);
    }
  }

  void short_segments(Part& part, std::int64_t r0, std::int64_t r1, std::int64_t length) const {
    const std::int64_t window = blocks_.cols / length * length;
    const std::int64_t step = kChunk<Real> / length * length;
    for (std::int64_t c0 = 0; c0 < cols_; c0 += window) {
      const std::int64_t width = std::min(window, cols_ - c0);
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t i = 0; i < width; i += step) {
          const std::int64_t n = std::min(step, width - i);
          const Real* x = measure_groups(part, r, c0 + i, n / length, length);
          resolve_all(part, r, (c0 + i) / length, n / length);
          emit_groups(part, length,
                      {.row = r,
                       .col = c0 + i,
                       .n = n,
                       .block_row = r - r0,
                       .block_col = i,
                       .ahead = ahead_in_block(r, c0 + i),
                       .x = x});
        }
      }
      part.emit.block(r0, c0, r1 - r0, width);
    }
  }

  // Of part.segments, of `length` elements each.
  void emit_groups(Part& part, std::int64_t length, const Piece<Real>& piece) const {
    if (length % kAheadStep == 0) {
      const std::int64_t steps = length / kAheadStep;
      for (std::int64_t i = 0; i < piece.n / kAheadStep; ++i) {
        const Segment<Real>& g = part.segments[i / steps];
        part.steps[i] = OneScale<Real>(g.s, g.z);
      }
      return emit(part, piece, ScaleSteps<Real>{part.steps, 1});
    }
    const Each each = {part.s, part.inverses, part.z};
    spread(part, piece.n / length, length, each);
    emit_each(part, piece, each);
  }

  // Returns what it has read and kept.
  const Real* measure_groups(Part& part, std::int64_t r, std::int64_t c, std::int64_t count,
                             std::int64_t length) const {
    if constexpr (kTakesNarrow) {
      if (symmetric() && part.emit.takes_narrow()) {
        with_elements([&](auto* x) {
          using T = std::remove_cvref_t<decltype(*x)>;
          if constexpr (sizeof(T) == 2) {
            auto* const place = reinterpret_cast<Extremes<T>*>(part.narrow_extremes);
            std::uninitialized_fill_n(place, count, Extremes<T>{});
            Extremes<T>* const own = std::launder(place);
            measure_as(x + r * o_.x.strides[0] + c, count, length, {}, own);
            multiversion<WidenMagnitudes>(static_cast<const Extremes<T>*>(own), count,
                                          static_cast<Extremes<Real>*>(part.extremes));
          }
        });
        return nullptr;
      }
    }
    std::fill_n(part.extremes, count, Extremes<Real>{});
    if (!must_measure()) return nullptr;
    const Real* x = input(r, c, count * length, part.x);
    measure_as(x, count, length, {}, static_cast<Extremes<Real>*>(part.extremes));
    return x;
  }

  // Columns: x is read twice in the order in which it lies, which is faster than once in stripes that stay in a cache.
  void run_columns() const {
    const ColumnMemory<Real> memory(p_, cols_, threads_, blocks_.columns);
    int measured = 0;  // workers with extremes
    if (must_measure() && p_.multiplier != Multiplier::none) {
      measured = measure_columns<Real>(memory, nullptr);
    } else if (must_measure()) {
      with_elements([&](auto* x) { measured = measure_columns<std::remove_cvref_t<decltype(*x)>>(memory, x); });
    }
    for_each_part(ceil_div(cols_, kChunk<Real>), [&](Part& part, std::int64_t chunk) {
      const std::int64_t c = chunk * kChunk<Real>;
      const std::int64_t n = std::min(kChunk<Real>, cols_ - c);
      std::fill_n(part.extremes, n, Extremes<Real>{});
      if (p_.multiplier != Multiplier::none) {
        add_extremes<Real>(memory, measured, c, n, part.extremes);
      } else {
        with_elements(
            [&](auto* x) { add_extremes<std::remove_cvref_t<decltype(*x)>>(memory, measured, c, n, part.extremes); });
      }
      resolve_all(part, 0, c, n);
      spread(part, n, 1, {memory.s + c, memory.inverses + c, memory.z + c});
    });
    const std::int64_t across = ceil_div(cols_, blocks_.cols);
    for_each_part(row_blocks() * across, [&](Part& part, std::int64_t turn) {
      const std::int64_t block = row_blocks() - 1 - turn / across;
      const std::int64_t r0 = first_row(block);
      const std::int64_t r1 = first_row(block + 1);
      const std::int64_t c0 = turn % across * blocks_.cols;
      const std::int64_t width = std::min(blocks_.cols, cols_ - c0);
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t i = 0; i < width; i += kRun<Real>) {
          const std::int64_t c = c0 + i;
          emit_each(part,
                    {.row = r,
                     .col = c,
                     .n = std::min(kRun<Real>, width - i),
                     .block_row = r - r0,
                     .block_col = i,
                     .ahead = ahead_in_block(r, c)},
                    {memory.s + c, memory.inverses + c, memory.z + c});
        }
      }
      part.emit.block(r0, c0, r1 - r0, width);
    });
  }

  // The keys of all columns that a worker has seen.
  template <class T>
  struct ColumnKeys {
    Key<T>* low;
    Key<T>* high;

    ColumnKeys(const ColumnMemory<Real>& memory, std::int64_t worker)
        : low(reinterpret_cast<Key<T>*>(memory.extremes + worker * memory.extremes_bytes)),
          high(reinterpret_cast<Key<T>*>(memory.extremes + worker * memory.extremes_bytes +
                                         memory.extremes_bytes / 2)) {}
  };

  // Of x as stored, or, where x is null, times the multiplier. Returns how many workers have extremes.
  template <class T>
  int measure_columns(const ColumnMemory<Real>& memory, const T* x) const {
    constexpr std::int64_t kStripe = 2048;  // columns: their extremes are in the L1 cache
    const std::int64_t stripe = std::min(cols_, kStripe);
    const std::int64_t across = ceil_div(cols_, stripe);
    const std::int64_t rows = round_up(ceil_div(rows_ * across, 8 * threads_), kRowsAtATime);
    const std::int64_t parts = ceil_div(rows_, rows) * across;
    share(threads_, parts, [&](std::int64_t worker, auto take) {
      const ColumnKeys<T> keys(memory, worker);
      std::fill_n(keys.low, cols_, Key<T>{0});
      std::fill_n(keys.high, cols_, Key<T>{0});
      for (std::int64_t i; (i = take()) < parts;) {
        const std::int64_t r = i / across * rows;
        const std::int64_t c = i % across * stripe;
        const std::int64_t count = std::min(rows, rows_ - r);
        const std::int64_t n = std::min(stripe, cols_ - c);
        if (x) {
          add_rows(x + r * o_.x.strides[0] + c, o_.x.strides[0], count, n, keys.low + c, keys.high + c);
        } else if constexpr (std::is_same_v<T, Real>) {
          add_products(r, c, count, n, keys.low + c, keys.high + c);
        }
      }
    });
    return static_cast<int>(std::min<std::int64_t>(threads_, parts));
  }

  template <class T>
  void add_rows(const T* x, std::int64_t stride, std::int64_t rows, std::int64_t n, Key<T>* low, Key<T>* high) const {
    symmetric() ? multiversion<MeasureColumns<true>>(x, stride, rows, n, low, high)
                : multiversion<MeasureColumns<false>>(x, stride, rows, n, low, high);
  }

  // x times the multiplier.
  __attribute__((noinline)) void add_products(std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t n,
                                              Key<Real>* low, Key<Real>* high) const {
    alignas(64) Real products[kRowsAtATime][kChunk<Real>];
    for (std::int64_t r = 0; r < rows; r += kRowsAtATime) {
      const std::int64_t count = std::min(kRowsAtATime, rows - r);
      for (std::int64_t c = 0; c < n; c += kChunk<Real>) {
        const std::int64_t width = std::min(kChunk<Real>, n - c);
        for (std::int64_t i = 0; i < count; ++i) input(row + r + i, col + c, width, products[i]);
        add_rows(static_cast<const Real*>(products[0]), kChunk<Real>, count, width, low + c, high + c);
      }
    }
  }

  template <class T>
  void add_extremes(const ColumnMemory<Real>& memory, int workers, std::int64_t c, std::int64_t n,
                    Extremes<Real>* extremes) const {
    for (int worker = 0; worker < workers; ++worker) {
      const ColumnKeys<T> keys(memory, worker);
      for (std::int64_t i = 0; i < n; ++i) extremes[i].add(Extremes<T>{keys.low[c + i], keys.high[c + i]});
    }
  }

  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  std::int64_t rows_;
  std::int64_t cols_;
  Blocks blocks_;
  int threads_;
};

}  // namespace octile::cpu
