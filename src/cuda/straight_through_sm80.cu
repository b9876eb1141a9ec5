// The straight-through gradients of quantize and fake quantize:
//   dx = dy / s (or dy) where q_min <= rint(x / s) + z <= q_max, 0 elsewhere; NaN where x or s is not finite.
#include "device/elementwise.cuh"

namespace octile::cuda {

namespace {

template <class T>
struct StraightThrough {
  using Real = RealOf<T>;
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 2;

  Rows<const T> x;
  Rows<const T> dy;
  SegmentScales<Real> scales;
  Rows<T> dx;
  Real low, high;  // of the range, both inclusive
  bool divide;

  struct Loaded {
    Vector<T> x, dy;
    Segment<Real> g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, int count) const {
    return {load_vector(x.at(r, c), count, x.aligned), load_vector(dy.at(r, c), count, dy.aligned), scales.at(r, c)};
  }
  __device__ void finish(const Loaded& loaded, std::int64_t r, std::int64_t c, int count) const {
    Real values[kElements];
    Real gradients[kElements];
    widen(loaded.x, values);
    widen(loaded.dy, gradients);
    unsigned inside = 0;  // a bit for each element
    if (!find_inside(values, loaded.g, inside)) {
      Vector<T> v;
#pragma unroll
      for (int i = 0; i < kElements; ++i) v.at[i] = narrow<T>(slope(values[i], gradients[i], loaded.g));
      return store_vector(dx.at(r, c), v, count, dx.aligned);
    }
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const Real one = divide ? quotient(gradients[i], loaded.g.s) : gradients[i];
      v.at[i] = narrow<T>(inside >> i & 1 ? one : Real(0));
    }
    store_vector(dx.at(r, c), v, count, dx.aligned);
  }
  __device__ void pair(std::int64_t r, std::int64_t c, int count) const {
    for (std::int64_t at = c; at < c + count; ++at) {
      *dx.at(r, at) = narrow<T>(slope(widen(__ldcg(x.at(r, at))), widen(__ldcg(dy.at(r, at))), scales.at(r, at)));
    }
  }

 private:
  __device__ Real slope(Real value, Real gradient, const Segment<Real>& g) const {
    if (!isfinite(value) || !isfinite(g.s)) return not_a_number(Real());
    const Real level = rint(quotient(value, g.s)) + static_cast<Real>(g.z);
    if (!(low <= level && level <= high)) return Real(0);
    return divide ? quotient(gradient, g.s) : gradient;
  }

  // By multiplication; false where that does not decide. See device/levels.cuh.
  __device__ bool find_inside(const Real (&values)[kElements], const Segment<Real>& g, unsigned& inside) const {
    if constexpr (sizeof(Real) == 4) {
      const float inv = inverse(g.s);
      const float lowest = low - static_cast<float>(g.z);
      const float highest = high - static_cast<float>(g.z);
      float farthest = 0;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float level = __fmaf_rn(values[i], inv, rounder(inv)) - rounder(inv);
        farthest = max_nan(farthest, fabsf(__fmaf_rn(-level, g.s, values[i])));
        if (lowest <= level && level <= highest) inside |= 1u << i;
      }
      return inv != 0 && farthest < kNearTie * g.s;
    }
    return false;
  }
};

void straight_through(std::string_view kernel, const QuantizeProblem& p, const QuantizeOperands& o,
                      const Launch& launch, bool divide) {
  const int inset = p.mask == Mask::exclusive ? 1 : 0;
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    using Real = RealOf<T>;
    const StraightThrough<T> op = {rows_of<T>(o.x),
                                   rows_of<T>(o.dy),
                                   given_scales<Real>(o),
                                   rows_of<T>(o.y),
                                   static_cast<Real>(p.q_min + inset),
                                   static_cast<Real>(p.q_max - inset),
                                   divide};
    enqueue_walk(kernel, o.x, op, launch.stream);
  });
}

}  // namespace

void quantize_backward_sm80(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  straight_through("quantize_backward_sm80", p, o, launch, true);
}

void fake_quantize_backward_sm80(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  straight_through("fake_quantize_backward_sm80", p, o, launch, false);
}

void straight_through_sm80_prepare(const QuantizeProblem& p) {
  with_float_type(p.x, [](auto x) { prepare("quantize_backward_sm80", walk_elements<StraightThrough<decltype(x)>>); });
}

}  // namespace octile::cuda
