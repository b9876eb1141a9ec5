// The straight-through gradients of quantize and fake quantize:
//   dx = dy / s (or dy) where q_min <= rint(x / s) + z <= q_max, 0 elsewhere; NaN where x or s is not finite.
#include <limits>

#include "cpu/quantize/levels.h"
#include "cpu/quantize/scale_rows.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

namespace {

template <class Real>
struct StraightThroughRun {
  const Real* x;
  const Real* dy;
  Real low, high;  // of the range, both inclusive
  std::int64_t n;
  Ahead ahead, ahead_dy;
  Real* dx;
};

// The slope where x rounds into the range by quotients, or by products (`multiply`) unless one of them is near a tie or
// not finite: then it returns false. See levels.h.
template <bool divide, bool multiply, class Real, class Scale>
OCTILE_INLINE bool pass_slopes(const StraightThroughRun<Real>& p, const Scale& scale, std::int64_t n) {
  const Real* __restrict dy = p.dy;
  Real* __restrict dx = p.dx;
  Key<Real> nearest_tie = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const Real x = p.x[i];
    const Real s = scale.s(i);
    const Real low = p.low - static_cast<Real>(scale.z(i));
    const Real high = p.high - static_cast<Real>(scale.z(i));
    // Just outside the range is outside enough, and small enough to be rounded by an addition.
    const Real near = clamped(multiply ? x * scale.inv(i) : x / s, low - 1, high + 1);
    const Real level = (near + kRounder<Real>)-kRounder<Real>;
    const Real slope = divide ? dy[i] / s : dy[i];
    // 0 / 0 is in no range.
    const Real not_below = level >= low ? slope : Real{0};
    const Real inside = level <= high ? not_below : Real{0};
    if constexpr (multiply) {
      nearest_tie = std::max(nearest_tie, magnitude_key((near - level) + (x - x)));
      dx[i] = inside;
    } else {
      const Real poison = (x - x) + (s - s);
      dx[i] = poison == 0 ? inside : std::numeric_limits<Real>::quiet_NaN();
    }
  }
  if constexpr (multiply) return nearest_tie < tie_key(p.low - 1, p.high + 1);
  return true;
}

template <bool divide>
struct StraightThrough {
  template <Isa, class Real, class Scale>
  OCTILE_INLINE static void run(StraightThroughRun<Real> p, Scale scale) {
    if constexpr (sizeof(Real) == 4) {
      for (; p.n >= kAheadStep; advance(p, scale)) {
        p.ahead.prefetch();
        p.ahead_dy.prefetch();
        if (!pass_slopes<divide, true>(p, scale, kAheadStep)) pass_slopes<divide, false>(p, scale, kAheadStep);
      }
    }
    pass_slopes<divide, false>(p, scale, p.n);
  }

  template <class Run, class Scale>
  OCTILE_INLINE static void advance(Run& p, Scale& scale) {
    p.x += kAheadStep;
    p.dy += kAheadStep;
    p.dx += kAheadStep;
    p.n -= kAheadStep;
    scale = scale.from(kAheadStep);
  }
};

template <bool divide, class Real>
void straight_through(const QuantizeProblem& p, const QuantizeOperands& o) {
  const int inset = p.mask == Mask::exclusive ? 1 : 0;
  const Real low = static_cast<Real>(p.q_min + inset);
  const Real high = static_cast<Real>(p.q_max - inset);
  for_each_scaled_piece<Real>(p, o, o.x, [&](const RowPiece& piece, auto scale, auto& out) {
    Real x_buffer[kRowChunk<Real>];
    Real dy_buffer[kRowChunk<Real>];
    Real dx_buffer[kRowChunk<Real>];
    const Real* x = widened(o.x.dtype, o.x.data, piece.at(o.x), piece.n, x_buffer);
    const Real* dy = widened(o.dy.dtype, o.dy.data, piece.at(o.dy), piece.n, dy_buffer);
    const std::int64_t at = piece.at(o.y);
    Real* const dx = out.target(at, dx_buffer);
    multiversion<StraightThrough<divide>>(
        StraightThroughRun<Real>{x, dy, low, high, piece.n, piece.ahead(o.x), piece.ahead(o.dy), dx}, scale);
    out.put(at, piece.n, dx);
  });
}

void launch_quantize_backward(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? straight_through<true, double>(p, o) : straight_through<true, float>(p, o);
}

void launch_fake_quantize_backward(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? straight_through<false, double>(p, o) : straight_through<false, float>(p, o);
}

}  // namespace

extern constinit const QuantizeKernel quantize_backward_portable = {
    .name = "quantize_backward_portable",
    .task = {Operation::quantize_backward},
    .cost = portable_quantize_cost,
    .launch = launch_quantize_backward,
};

extern constinit const QuantizeKernel fake_quantize_backward_portable = {
    .name = "fake_quantize_backward_portable",
    .task = {Operation::fake_quantize_backward},
    .cost = portable_quantize_cost,
    .launch = launch_fake_quantize_backward,
};

}  // namespace octile::cpu
