// The straight-through gradients of quantize and fake quantize:
//   dx = dy / s (or dy) where q_min <= rint(x / s) + z <= q_max, 0 elsewhere; NaN where x or s is not finite.
#include <limits>

#include "cpu/scale_rows.h"
#include "cpu/segments.h"

namespace octile::cpu {

namespace {

template <class Real>
struct StraightThroughRun {
  const Real* x;
  const Real* dy;
  const Real* s;
  const std::int32_t* z;
  Real low, high;  // of the range, both inclusive
  std::int64_t n;
  Real* dx;
};

template <bool divide>
struct StraightThrough {
  template <Isa, class Real>
  OCTILE_INLINE static void run(StraightThroughRun<Real> p) {
    const Real* __restrict s = p.s;
    const std::int32_t* __restrict z = p.z;
    for (std::int64_t i = 0; i < p.n; ++i) {
      const Real x = p.x[i];
      const Real low = p.low - static_cast<Real>(z[i]);
      const Real high = p.high - static_cast<Real>(z[i]);
      // Just outside the range is outside enough, and small enough to be rounded by an addition.
      const Real near = clamped(x / s[i], low - 1, high + 1);
      const Real level = (near + kRounder<Real>)-kRounder<Real>;
      const Real slope = divide ? p.dy[i] / s[i] : p.dy[i];
      // 0 / 0 is in no range.
      const Real not_below = level >= low ? slope : Real{0};
      const Real inside = level <= high ? not_below : Real{0};
      const Real poison = (x - x) + (s[i] - s[i]);
      p.dx[i] = poison == 0 ? inside : std::numeric_limits<Real>::quiet_NaN();
    }
  }
};

template <bool divide, class Real>
void straight_through(const QuantizeProblem& p, const QuantizeOperands& o) {
  const int inset = p.mask == Mask::exclusive ? 1 : 0;
  const Real low = static_cast<Real>(p.q_min + inset);
  const Real high = static_cast<Real>(p.q_max - inset);
  for_each_scaled_piece<Real>(
      p, o, o.x, [&](std::int64_t r, std::int64_t c, std::int64_t n, const Real* s, const std::int32_t* z) {
        Real x_buffer[kRowChunk];
        Real dy_buffer[kRowChunk];
        Real dx_buffer[kRowChunk];
        const Real* x = widened(o.x.dtype, o.x.data, r * o.x.strides[0] + c, n, x_buffer);
        const Real* dy = widened(o.dy.dtype, o.dy.data, r * o.dy.strides[0] + c, n, dy_buffer);
        const std::int64_t at = r * o.y.strides[0] + c;
        Real* dx = narrowing_target(o.y.dtype, o.y.data, at, dx_buffer);
        multiversion<StraightThrough<divide>>(StraightThroughRun<Real>{x, dy, s, z, low, high, n, dx});
        narrow<Real>(o.y.dtype, o.y.data, at, n, dx);
      });
}

}  // namespace

void quantize_backward_portable(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? straight_through<true, double>(p, o) : straight_through<true, float>(p, o);
}

void fake_quantize_backward_portable(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? straight_through<false, double>(p, o) : straight_through<false, float>(p, o);
}

}  // namespace octile::cpu
