// The straight-through gradients of quantize and fake quantize:
//   dx = dy / s (or dy) where q_min <= rint(x / s) + z <= q_max, 0 elsewhere; NaN where x or s is not finite.
#include <limits>

#include "cpu/quantize/levels.h"
#include "cpu/quantize/scale_rows.h"
#include "cpu/support/cost.h"
#include "plan/either.h"

namespace octile::cpu {

namespace {

// rint(x / s) grows with x, or falls where s is negative, so which x round into the range is decided by two comparisons
// with x itself: `low` and `high` are the smallest and the largest of them. NaN for a scale that is 0 or not finite.
template <class Real>
struct OneRange {
  Real scale, lowest, highest;

  OCTILE_INLINE Real s(std::int64_t) const { return scale; }
  OCTILE_INLINE Real low(std::int64_t) const { return lowest; }
  OCTILE_INLINE Real high(std::int64_t) const { return highest; }
};

template <class Real>
struct RangeEach {
  const Real* scales;
  const Real* lowest;
  const Real* highest;

  OCTILE_INLINE Real s(std::int64_t i) const { return scales[i]; }
  OCTILE_INLINE Real low(std::int64_t i) const { return lowest[i]; }
  OCTILE_INLINE Real high(std::int64_t i) const { return highest[i]; }
};

// The largest x with rint(x / s) <= level, s not negative. The quotient and (level + 0.5) * s are rounded once each, so
// it is at most three floats away from that product: three steps of a bisection find it.
template <class Real>
OCTILE_INLINE Real last_in_range(Real s, Real level) {
  const bool ordinary = s > 0 && s < std::numeric_limits<Real>::infinity();
  const Real ordinary_s = ordinary ? s : Real{1};  // a key of NaN would overflow
  const auto in_range = [&](Key<Real> x) {
    const Real near = clamped(value_of<Real>(x) / ordinary_s, level - 1, level + 1);
    return (near + kRounder<Real>)-kRounder<Real> <= level;
  };
  Key<Real> last = key((level + static_cast<Real>(0.5)) * ordinary_s) - 4;
  last += in_range(last + 4) ? 4 : 0;
  last += in_range(last + 2) ? 2 : 0;
  last += in_range(last + 1) ? 1 : 0;
  return ordinary ? value_of<Real>(last) : std::numeric_limits<Real>::quiet_NaN();
}

struct FindRanges {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Segment<Real>* __restrict segments, std::int64_t count, Real low, Real high,
                                Real* __restrict scales, Real* __restrict lowest, Real* __restrict highest) {
    for (std::int64_t k = 0; k < count; ++k) {
      const Real offset = static_cast<Real>(segments[k].z);
      const Real s = segments[k].s;
      const Real magnitude = s < 0 ? -s : s;
      const Real down = last_in_range(magnitude, offset - low);
      const Real up = last_in_range(magnitude, high - offset);
      scales[k] = s;
      lowest[k] = s < 0 ? -up : -down;
      highest[k] = s < 0 ? down : up;
    }
  }
};

// Those of each element.
template <class Real>
class GivenRanges {
 public:
  GivenRanges(Real low, Real high) : low_(low), high_(high) {}
  GivenRanges(const GivenRanges& other) : low_(other.low_), high_(other.high_) {}
  GivenRanges& operator=(const GivenRanges&) = delete;

  OneRange<Real> one(const Segment<Real>& g) const {
    OneRange<Real> range;
    multiversion<FindRanges>(&g, std::int64_t{1}, low_, high_, &range.scale, &range.lowest, &range.highest);
    return range;
  }
  void spread(const Segment<Real>* segments, std::int64_t count, std::int64_t length, std::int64_t col) {
    Real* const arrays[] = {scales_ + col, lowest_ + col, highest_ + col};
    multiversion<FindRanges>(segments, count, low_, high_, arrays[0], arrays[1], arrays[2]);
    for (Real* array : arrays) {
      // In place, from the last one down.
      for (std::int64_t k = count - 1; k >= 0 && length > 1; --k) std::fill_n(array + k * length, length, array[k]);
    }
  }
  static bool takes(const Real*) { return false; }
  template <class Body>
  void visit(std::int64_t col, const Body& body) const {
    body(RangeEach<Real>{scales_ + col, lowest_ + col, highest_ + col});
  }

 private:
  Real low_, high_;  // levels, both inclusive
  alignas(64) Real scales_[kWindow<Real>];
  alignas(64) Real lowest_[kWindow<Real>];
  alignas(64) Real highest_[kWindow<Real>];
};

template <class Real>
struct StraightThroughRun {
  const Real* x;
  const Real* dy;
  std::int64_t n;
  Ahead ahead, ahead_dy;
  Real* dx;
};

template <bool divide>
struct StraightThrough {
  template <Isa, class Real, class Range>
  OCTILE_INLINE static void run(StraightThroughRun<Real> p, Range range) {
    std::int64_t i = 0;
    for (; i + kAheadStep <= p.n; i += kAheadStep) {
      p.ahead.prefetch();
      p.ahead_dy.prefetch();
      pass_slopes(p, range, i, i + kAheadStep);
    }
    pass_slopes(p, range, i, p.n);
  }

  template <class Real, class Range>
  OCTILE_INLINE static void pass_slopes(const StraightThroughRun<Real>& p, const Range& range, std::int64_t begin,
                                        std::int64_t end) {
    const Real* __restrict x = p.x;
    const Real* __restrict dy = p.dy;
    Real* __restrict dx = p.dx;
    for (std::int64_t i = begin; i < end; ++i) {
      const Real slope = divide ? dy[i] / range.s(i) : dy[i];
      const Real outside = (x[i] - x[i]) + (range.s(i) - range.s(i));  // 0, or NaN
      const bool not_below = x[i] >= range.low(i), not_above = x[i] <= range.high(i);
      dx[i] = (static_cast<int>(not_below) & static_cast<int>(not_above)) != 0 ? slope : outside;
    }
  }
};

template <bool divide, class Real>
void straight_through(const QuantizeProblem& p, const QuantizeOperands& o) {
  const int inset = p.mask == Mask::exclusive ? 1 : 0;
  const Real low = static_cast<Real>(p.q_min + inset);
  const Real high = static_cast<Real>(p.q_max - inset);
  const GivenRanges<Real> ranges(low, high);
  for_each_scaled_piece<Real>(p, o, o.x, ranges, [&](const RowPiece& piece, const auto& range, auto& out) {
    Real x_buffer[kRowChunk<Real>];
    Real dy_buffer[kRowChunk<Real>];
    Real dx_buffer[kRowChunk<Real>];
    const Real* x = widened(o.x.dtype, o.x.data, piece.at(o.x), piece.n, x_buffer);
    const Real* dy = widened(o.dy.dtype, o.dy.data, piece.at(o.dy), piece.n, dy_buffer);
    const std::int64_t at = piece.at(o.y);
    Real* const dx = out.target(at, dx_buffer);
    multiversion<StraightThrough<divide>>(
        StraightThroughRun<Real>{x, dy, piece.n, piece.ahead(o.x), piece.ahead(o.dy), dx}, range);
    out.put(at, piece.n, dx);
  });
}

}  // namespace

extern constinit const QuantizeKernel quantize_backward_portable =
    portable_row("quantize_backward_portable", Operation::quantize_backward,
                 either<straight_through<true, float>, straight_through<true, double>>);

extern constinit const QuantizeKernel fake_quantize_backward_portable =
    portable_row("fake_quantize_backward_portable", Operation::fake_quantize_backward,
                 either<straight_through<false, float>, straight_through<false, double>>);

}  // namespace octile::cpu
