// y = (clamp(rint(x / s) + z, q_min, q_max) - z) * s. NaN where x is not finite, and with dynamic scales, which a pass
// before this one finds, in the whole of its segment.
#include "segments.cuh"

namespace octile::cuda {

namespace {

template <class T>
struct FakeQuantize {
  using Real = RealOf<T>;
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 4;

  Rows<const T> x;
  SegmentScales<Real> scales;
  Rules<Real> rules;
  Rows<T> y;
  std::int64_t cols;

  struct Loaded {
    Vector<T> x;
    Segment<Real> g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, int count) const {
    return {load_vector(x.at(r, c), count, x.aligned), scales.at(r, c)};
  }
  __device__ void finish(const Loaded& loaded, std::int64_t r, std::int64_t c, int count) const {
    Vector<T> v = loaded.x;
    fake<kElements>(v.at, r, c, loaded.g);
    store_vector(y.at(r, c), v, count, y.aligned);
  }
  __device__ void pair(std::int64_t r, std::int64_t c, int count) const {
#pragma unroll 1
    for (std::int64_t at = c; at < c + count; ++at) {
      T one[1] = {__ldcg(x.at(r, at))};
      fake<1>(one, r, at, scales.at(r, at));
      *y.at(r, at) = one[0];
    }
  }

 private:
  template <int n>
  __device__ void fake(T (&elements)[n], std::int64_t r, std::int64_t c, const Segment<Real>& g) const {
    Real values[n];
    std::int32_t q[n];
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = widen(elements[i]);
    to_levels(values, g, n > 1 ? inverse(g.s) : Real(0), rules, static_cast<std::uint64_t>(r * cols + c), q);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Real level = static_cast<Real>(q[i] - g.z);
      elements[i] = narrow<T>(isfinite(values[i]) ? level * g.s : not_a_number(Real()));
    }
  }
};

}  // namespace

void fake_quantize_sm80(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    using Real = RealOf<T>;
    const SegmentScales<Real> scales =
        p.scale == ScaleSource::given ? given_scales<Real>(o) : measure_segments<T>(p, o, launch);
    const FakeQuantize<T> op = {rows_of<T>(o.x), scales, rules_of<Real>(p, o), rows_of<T>(o.y), o.x.cols()};
    enqueue_walk("fake_quantize_sm80", o.x, op, launch.stream);
  });
}

std::size_t fake_quantize_sm80_workspace(const QuantizeProblem& p) {
  return p.scale == ScaleSource::given ? 0 : measure_segments_workspace(p);
}

void fake_quantize_sm80_prepare(const QuantizeProblem& p) {
  if (p.scale == ScaleSource::dynamic) measure_segments_prepare(p);
  with_float_type(p.x, [](auto x) { prepare("fake_quantize_sm80", walk_elements<FakeQuantize<decltype(x)>>); });
}

}  // namespace octile::cuda
