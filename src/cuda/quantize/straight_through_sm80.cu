// The straight-through gradients of quantize and fake quantize:
//   dx = dy / s (or dy) where q_min <= rint(x / s) + z <= q_max, 0 elsewhere; NaN where x or s is not finite.
#include "cuda/device/plain.cuh"
#include "cuda/device/vectors.cuh"
#include "cuda/quantize/segments_sm80.cuh"

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

  bool aligned() const { return x.aligned && dy.aligned && dx.aligned; }

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

// Whole aligned vectors.
template <class T, class Scales, bool kDivide>
struct StraightThroughVectors {
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 2;
  static constexpr int kBlocks = Scales::kColumns ? 3 : 4;
  static constexpr int kCorrections = sizeof(T) == 2 ? 1 : 2;
  static constexpr bool kColumns = Scales::kColumns;
  using Place = typename Scales::Place;

  Rows<const T> x;
  Rows<const T> dy;
  Scales scales;
  Rows<T> dx;
  float low, high;

  StraightThroughVectors(const StraightThrough<T>& op, const Scales& scales_)
      : x(op.x), dy(op.dy), scales(scales_), dx(op.dx), low(op.low), high(op.high) {}

  struct Loaded {
    Vector<T> x, dy;
    typename Scales::Held g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, const Place& place) const {
    return {load_vector(x.at(r, c), kElements, true), load_vector(dy.at(r, c), kElements, true), scales.hold(place, r)};
  }
  __device__ void finish(const Loaded& loaded, const Place& place, std::int64_t r, std::int64_t c) const {
    const auto& g = scales.of(place, loaded.g);
    float values[kElements];
    float gradients[kElements];
    widen(loaded.x, values);
    widen(loaded.dy, gradients);
    if (!can_divide_by<kElements>(g) || (kDivide && !divides(loaded.dy, g))) return by_division(r, c);
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      // Beyond 2^100 it may be NaN, which is as far outside.
      const float ratio = quotient_by<kCorrections>(values[i], g[i].s, g[i].inv);
      const float level = ratio + rounder(ratio) - rounder(ratio) + static_cast<float>(g[i].z);
      float one = gradients[i];
      if (kDivide) one = copysignf(quotient_by<kCorrections>(one, g[i].s, g[i].inv), one);
      one = low <= level && level <= high ? one : 0.0f;
      v.at[i] = narrow<T>(isfinite(values[i]) ? one : not_a_number(one));
    }
    store_vector(dx.at(r, c), v, kElements, true);
  }

 private:
  // Whether the quotients of all elements, and their remainders, are normal numbers or 0: those of a finite f16 are.
  template <class Scalings>
  __device__ static bool divides(const Vector<T>& dy, const Scalings& g) {
    if constexpr (std::is_same_v<T, __half>) {
      Magnitude<T> magnitude;
      magnitude.include(dy);
      return magnitude.value() < 0x1p16f;
    }
    float gradients[kElements];
    widen(dy, gradients);
    bool all = true;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float size = fabsf(gradients[i]);
      all = all && 0x1p-30f < g[i].s && g[i].s < 0x1p30f && (size == 0 || (0x1p-60f < size && size < 0x1p60f));
    }
    return all;
  }
  __device__ __noinline__ void by_division(std::int64_t r, std::int64_t c) const {
#pragma unroll 1
    for (std::int64_t at = c; at < c + kElements; ++at) {
      const Segment<float> g = scales.all.at(r, at);
      const float value = widen(__ldcg(x.at(r, at)));
      const float gradient = widen(__ldcg(dy.at(r, at)));
      const float level = rint(quotient(value, g.s)) + static_cast<float>(g.z);
      float one = low <= level && level <= high ? (kDivide ? quotient(gradient, g.s) : gradient) : 0.0f;
      if (!isfinite(value) || !isfinite(g.s)) one = not_a_number(one);
      *dx.at(r, at) = narrow<T>(one);
    }
  }
};

template <bool divide>
struct Row {
  static constexpr std::string_view kName = divide ? "quantize_backward_sm80" : "fake_quantize_backward_sm80";
  template <class T, class Scales>
  using Vectors = StraightThroughVectors<T, Scales, divide>;

  static void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
    const int inset = p.mask == Mask::exclusive ? 1 : 0;
    with_float_type(p.x, [&]<class T>(T) {
      using Real = RealOf<T>;
      const StraightThrough<T> op = {rows_of<T>(o.x),
                                     rows_of<T>(o.dy),
                                     given_scales<Real>(o),
                                     rows_of<T>(o.y),
                                     static_cast<Real>(p.q_min + inset),
                                     static_cast<Real>(p.q_max - inset),
                                     divide};
      enqueue_elementwise<Vectors>(kName, o.x, op, launch.stream);
    });
  }
  static void load(const QuantizeProblem& p) { prepare_elementwise<Vectors, StraightThrough>(kName, p); }

  static constexpr QuantizeKernel of(Operation operation) { return elementwise_row(kName, operation, launch, load); }
};

}  // namespace

extern constinit const QuantizeKernel quantize_backward_sm80 = Row<true>::of(Operation::quantize_backward);
extern constinit const QuantizeKernel fake_quantize_backward_sm80 = Row<false>::of(Operation::fake_quantize_backward);

}  // namespace octile::cuda
