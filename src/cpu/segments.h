// The walk of the two kernels that find their own scales, quantize and fake quantize: first the extremes of a segment,
// then its scale, then its elements, in pieces that stay in the first-level cache. Whatever the granularity, the inner
// loops see one scale and one zero point per element, so there is one of each.
#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "access.h"
#include "cpu/multiversion.h"
#include "cpu/rows.h"
#include "kernels.h"
#include "philox.h"

namespace octile::cpu {

inline constexpr std::int64_t kChunk = 512;       // elements of a row at a time
inline constexpr std::int64_t kTurnedBlock = 64;  // rows of a block at most; transposed, their bytes fill a cache line

// Floats as integers in the same order: both zeros apart by one, infinity and NaN beyond every finite value. The
// minimum and the maximum of keys vectorize everywhere, and a NaN cannot hide from them.
template <class Real>
using Key = std::conditional_t<sizeof(Real) == 4, std::int32_t, std::int64_t>;

template <class Real>
inline constexpr Key<Real> kInfinityKey = std::bit_cast<Key<Real>>(std::numeric_limits<Real>::infinity());

template <class Real>
OCTILE_INLINE Key<Real> magnitude_key(Real x) {
  return std::bit_cast<Key<Real>>(x) & std::numeric_limits<Key<Real>>::max();
}

template <class Real>
OCTILE_INLINE Key<Real> key(Real x) {
  const auto bits = std::bit_cast<Key<Real>>(x);
  return bits ^ ((bits >> (8 * sizeof(Real) - 1)) & std::numeric_limits<Key<Real>>::max());
}

template <class Real>
Real value_of(Key<Real> key) {
  return std::bit_cast<Real>(key ^ ((key >> (8 * sizeof(Real) - 1)) & std::numeric_limits<Key<Real>>::max()));
}

// The smallest and the largest key, 0 included. Symmetric problems keep magnitudes, and `low` stays 0.
template <class Real>
struct Extremes {
  Key<Real> low = 0;
  Key<Real> high = 0;

  bool finite() const { return high < kInfinityKey<Real> && low > ~kInfinityKey<Real>; }
  void add(const Extremes& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
  }
};

struct MeasureSymmetric {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict x, std::int64_t n, Extremes<Real>* __restrict extremes) {
    Key<Real> high = extremes->high;
    for (std::int64_t i = 0; i < n; ++i) high = std::max(high, magnitude_key(x[i]));
    extremes->high = high;
  }
};

struct MeasureAffine {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict x, std::int64_t n, Extremes<Real>* __restrict extremes) {
    Key<Real> low = extremes->low;
    Key<Real> high = extremes->high;
    for (std::int64_t i = 0; i < n; ++i) {
      low = std::min(low, key(x[i]));
      high = std::max(high, key(x[i]));
    }
    *extremes = {low, high};
  }
};

// The same down the columns: one pair of extremes for each element of the row.
template <class Real>
struct ColumnExtremes {
  Key<Real> low[kChunk];
  Key<Real> high[kChunk];
};

struct MeasureColumnsSymmetric {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict x, std::int64_t n, ColumnExtremes<Real>* __restrict extremes) {
    for (std::int64_t i = 0; i < n; ++i) extremes->high[i] = std::max(extremes->high[i], magnitude_key(x[i]));
  }
};

struct MeasureColumnsAffine {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict x, std::int64_t n, ColumnExtremes<Real>* __restrict extremes) {
    for (std::int64_t i = 0; i < n; ++i) {
      extremes->low[i] = std::min(extremes->low[i], key(x[i]));
      extremes->high[i] = std::max(extremes->high[i], key(x[i]));
    }
  }
};

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

// Rounds |x| < 2^22 (2^51) to an integer, ties to even: the sum has no bits left for a fraction. It vectorizes without
// SSE4.1's rounding instructions, and the low bits of the sum are the integer.
template <class Real>
inline constexpr Real kRounder = sizeof(Real) == 4 ? static_cast<Real>(0x1.8p23) : static_cast<Real>(0x1.8p52);

template <class Real>
OCTILE_INLINE std::int32_t rounded_to_integer(Real x) {
  return static_cast<std::int32_t>(std::bit_cast<Key<Real>>(x + kRounder<Real>) -
                                   std::bit_cast<Key<Real>>(kRounder<Real>));
}

template <class Real>
OCTILE_INLINE Real clamped(Real x, Real low, Real high) {
  const Real above = x < low ? low : x;
  return above > high ? high : above;
}

// clamp(rint(x / s) + z, q_min, q_max) - z. Clamping first changes nothing, for the limits are integers, and keeps the
// ratio small enough to be rounded by an addition.
template <bool stochastic, class Real>
OCTILE_INLINE std::int32_t offset_level(Real ratio, Real low, Real high, std::uint16_t noise) {
  if constexpr (!stochastic) return rounded_to_integer(clamped(ratio, low, high));
  const Real shifted = clamped(ratio + static_cast<Real>(noise) * static_cast<Real>(0x1p-16), low, high);
  const Real nearest = (shifted + kRounder<Real>)-kRounder<Real>;
  return rounded_to_integer(shifted) - static_cast<std::int32_t>(nearest > shifted);
}

// The 16-bit halves that `uniform` takes for elements index .. index + n - 1; the first is noise[index % 8].
struct FillNoise {
  template <Isa>
  OCTILE_INLINE static void run(std::uint64_t first_block, std::int64_t blocks, std::uint64_t seed,
                                std::uint16_t* __restrict noise) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::uint64_t counter = first_block + static_cast<std::uint64_t>(b);
      const std::array<std::uint32_t, 4> words = philox_4x32_10(counter, seed);
      for (int w = 0; w < 4; ++w) {
        noise[8 * b + 2 * w] = static_cast<std::uint16_t>(words[static_cast<std::size_t>(w)]);
        noise[8 * b + 2 * w + 1] = static_cast<std::uint16_t>(words[static_cast<std::size_t>(w)] >> 16);
      }
    }
  }
};

// The scale and zero point of a segment; s is NaN if the segment is bad.
template <class Real>
struct Segment {
  Real s;
  std::int32_t z;
};

// A piece of one row with everything that its elements need.
template <class Real>
struct Piece {
  std::int64_t row = 0, col = 0, n = 0;
  const Real* x = nullptr;
  const Real* s = nullptr;
  const std::int32_t* z = nullptr;
  const std::uint16_t* noise = nullptr;  // null: nearest
};

// Emit is made once per part, and is called with every piece of a block of rows, then with the block:
//   Emit(problem, operands); void piece(const Piece<Real>&, block row); void block(row, col, rows, n)
template <class Real, class Emit>
class SegmentWalk {
 public:
  SegmentWalk(const QuantizeProblem& p, const QuantizeOperands& o, std::int64_t block_rows)
      : p_(p), o_(o), rows_(o.x.rows()), cols_(o.x.cols()), block_rows_(block_rows) {
    threads_ = useful_threads(p.threads, static_cast<double>(rows_) * static_cast<double>(cols_));
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
  // The scales of one piece, one per element, and the input where it has to be converted.
  struct Buffers {
    alignas(64) Real x[kChunk];
    alignas(64) Real s[kChunk];
    alignas(64) std::int32_t z[kChunk];
    alignas(64) std::uint16_t noise[kChunk + 16];
  };

  std::int64_t blocks() const { return ceil_div(rows_, block_rows_); }
  bool symmetric() const { return p_.mapping == Mapping::symmetric; }

  // A given scale with nothing to check or to report needs no look at the data.
  bool must_measure() const { return p_.scale == ScaleSource::dynamic || Emit::kPoisonsSegments; }

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

  void measure(std::int64_t r, std::int64_t c, std::int64_t n, Extremes<Real>& extremes) const {
    Real buffer[kChunk];
    for (std::int64_t done = 0; done < n; done += kChunk) {
      const std::int64_t count = std::min(kChunk, n - done);
      const Real* x = input(r, c + done, count, buffer);
      symmetric() ? multiversion<MeasureSymmetric>(x, count, &extremes)
                  : multiversion<MeasureAffine>(x, count, &extremes);
    }
  }

  // The scale and zero point of the segment that begins at (r, c), written where they are wanted.
  Segment<Real> resolve(const Extremes<Real>& extremes, std::int64_t r, std::int64_t c) const {
    const Real q_min = static_cast<Real>(p_.q_min);
    const Real q_max = static_cast<Real>(p_.q_max);
    Segment<Real> g{0, 0};
    if (p_.scale == ScaleSource::given) {
      g.s = static_cast<const Real*>(o_.given_scale.data)[o_.given_scale.index(r, c)];
      if (o_.given_zero_point.data) {
        g.z = static_cast<const std::int32_t*>(o_.given_zero_point.data)[o_.given_zero_point.index(r, c)];
      }
    } else if (symmetric()) {
      g.s = std::max(value_of<Real>(extremes.high) / q_max, static_cast<Real>(1e-8));
    } else if (extremes.finite()) {
      const Real low = value_of<Real>(extremes.low);
      g.s = std::max((value_of<Real>(extremes.high) - low) / (q_max - q_min), static_cast<Real>(1e-8));
      if (std::isfinite(g.s)) g.z = static_cast<std::int32_t>(std::clamp(q_min - std::rint(low / g.s), q_min, q_max));
    }
    if (!extremes.finite() || !std::isfinite(g.s)) g = {std::numeric_limits<Real>::quiet_NaN(), 0};
    if (o_.scale.data) static_cast<Real*>(o_.scale.data)[o_.scale.index(r, c)] = g.s;
    if (o_.zero_point.data) static_cast<std::int32_t*>(o_.zero_point.data)[o_.zero_point.index(r, c)] = g.z;
    return g;
  }

  // Elements (r, c) .. (r, c + n - 1), with the scales in the buffers.
  void emit(Emit& out, Buffers& buffers, const Piece<Real>& where, std::int64_t block_row) const {
    Piece<Real> piece = where;
    piece.x = input(piece.row, piece.col, piece.n, buffers.x);
    piece.s = buffers.s;
    piece.z = buffers.z;
    piece.noise = nullptr;
    if (p_.rounding == Rounding::stochastic) {
      const auto index = static_cast<std::uint64_t>(piece.row * cols_ + piece.col);
      const auto skipped = static_cast<std::int64_t>(index % 8);
      multiversion<FillNoise>(index / 8, ceil_div(skipped + piece.n, 8), o_.seed, buffers.noise);
      piece.noise = buffers.noise + skipped;
    }
    out.piece(piece, piece.row - block_row);
  }

  static void fill(Buffers& buffers, std::int64_t at, std::int64_t n, Segment<Real> g) {
    std::fill_n(buffers.s + at, n, g.s);
    std::fill_n(buffers.z + at, n, g.z);
  }

  void run_tensor() const {
    constexpr std::int64_t kMeasureParts = 256;
    Extremes<Real> partial[kMeasureParts];
    Extremes<Real> all;
    if (must_measure()) {
      const std::int64_t step = std::max(ceil_div(rows_, kMeasureParts), std::min(block_rows_, rows_));
      const std::int64_t parts = ceil_div(rows_, step);
      parallel_for(threads_, parts, [&](std::int64_t part) {
        for (std::int64_t r = part * step; r < std::min(rows_, (part + 1) * step); ++r) {
          measure(r, 0, cols_, partial[part]);
        }
      });
      for (std::int64_t part = 0; part < parts; ++part) all.add(partial[part]);
    }
    const Segment<Real> g = resolve(all, 0, 0);
    parallel_for(threads_, blocks(), [&](std::int64_t part) {
      Buffers buffers;
      Emit out(p_, o_);
      fill(buffers, 0, std::min(kChunk, cols_), g);
      for_each_chunk(part, 0, cols_, [&](std::int64_t r0, std::int64_t r1, std::int64_t c, std::int64_t n) {
        for (std::int64_t r = r0; r < r1; ++r) emit(out, buffers, {.row = r, .col = c, .n = n}, r0);
        out.block(r0, c, r1 - r0, n);
      });
    });
  }

  // Calls body(r0, r1, c, n) for the chunks of columns c0 .. c0 + width - 1 of one block of rows.
  template <class Body>
  void for_each_chunk(std::int64_t block, std::int64_t c0, std::int64_t width, const Body& body) const {
    const std::int64_t r0 = block * block_rows_;
    const std::int64_t r1 = std::min(rows_, r0 + block_rows_);
    for (std::int64_t c = 0; c < width; c += kChunk) body(r0, r1, c0 + c, std::min(kChunk, width - c));
  }

  // Rows and groups. A long segment is measured whole and then walked in chunks; short ones share a chunk.
  void run_rows() const {
    const std::int64_t length = p_.granularity == Granularity::row ? cols_ : p_.group;
    parallel_for(threads_, blocks(), [&](std::int64_t part) {
      Buffers buffers;
      Emit out(p_, o_);
      length > kChunk ? long_segments(part, length, buffers, out) : short_segments(part, length, buffers, out);
    });
  }

  void long_segments(std::int64_t part, std::int64_t length, Buffers& buffers, Emit& out) const {
    Segment<Real> segments[kTurnedBlock];
    for (std::int64_t c0 = 0; c0 < cols_; c0 += length) {
      for_each_chunk(part, c0, length, [&](std::int64_t r0, std::int64_t r1, std::int64_t c, std::int64_t n) {
        for (std::int64_t r = r0; r < r1; ++r) {
          Segment<Real>& g = segments[r - r0];
          if (c == c0) {
            Extremes<Real> extremes;
            if (must_measure()) measure(r, c0, length, extremes);
            g = resolve(extremes, r, c0);
          }
          fill(buffers, 0, n, g);
          emit(out, buffers, {.row = r, .col = c, .n = n}, r0);
        }
        out.block(r0, c, r1 - r0, n);
      });
    }
  }

  void short_segments(std::int64_t part, std::int64_t length, Buffers& buffers, Emit& out) const {
    const std::int64_t r0 = part * block_rows_;
    const std::int64_t r1 = std::min(rows_, r0 + block_rows_);
    const std::int64_t step = kChunk / length * length;
    for (std::int64_t c = 0; c < cols_; c += step) {
      const std::int64_t n = std::min(step, cols_ - c);
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t i = 0; i < n; i += length) {
          Extremes<Real> extremes;
          if (must_measure()) measure(r, c + i, length, extremes);
          fill(buffers, i, length, resolve(extremes, r, c + i));
        }
        emit(out, buffers, {.row = r, .col = c, .n = n}, r0);
      }
      out.block(r0, c, r1 - r0, n);
    }
  }

  // Columns, in stripes narrow enough that the second look at them finds them in the second-level cache.
  void run_columns() const {
    const std::int64_t in_cache =
        (std::int64_t{1} << 19) / (std::max<std::int64_t>(rows_, 1) * std::int64_t{sizeof(Real)});
    const std::int64_t balanced = cols_ / (2 * threads_);
    const std::int64_t stripe = std::clamp(std::min(in_cache, balanced) / 64 * 64, std::int64_t{64}, kChunk);
    parallel_for(threads_, ceil_div(cols_, stripe), [&](std::int64_t part) {
      const std::int64_t c = part * stripe;
      const std::int64_t n = std::min(stripe, cols_ - c);
      Buffers buffers;
      Emit out(p_, o_);
      column_scales(c, n, buffers);
      for (std::int64_t block = 0; block < blocks(); ++block) {
        for_each_chunk(block, c, n, [&](std::int64_t r0, std::int64_t r1, std::int64_t, std::int64_t) {
          for (std::int64_t r = r0; r < r1; ++r) emit(out, buffers, {.row = r, .col = c, .n = n}, r0);
          out.block(r0, c, r1 - r0, n);
        });
      }
    });
  }

  void column_scales(std::int64_t c, std::int64_t n, Buffers& buffers) const {
    ColumnExtremes<Real> extremes{};
    for (std::int64_t r = 0; must_measure() && r < rows_; ++r) {
      const Real* x = input(r, c, n, buffers.x);
      symmetric() ? multiversion<MeasureColumnsSymmetric>(x, n, &extremes)
                  : multiversion<MeasureColumnsAffine>(x, n, &extremes);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      fill(buffers, i, 1, resolve({extremes.low[i], extremes.high[i]}, 0, c + i));
    }
  }

  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t block_rows_;
  int threads_;
};

}  // namespace octile::cpu
