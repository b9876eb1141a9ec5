// x = (q - z) * s, and its gradient dq = dy * s.
#include "device/elementwise.cuh"

namespace octile::cuda {

namespace {

__device__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ double product(double a, double b) { return __dmul_rn(a, b); }

template <class T>
struct Dequantize {
  using Real = RealOf<T>;
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 4;

  IntegerRows q;
  SegmentScales<Real> scales;
  Rows<T> x;

  struct Loaded {
    std::uint64_t levels;
    Segment<Real> g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, int count) const {
    return {q.template load<kElements>(r, c, count), scales.at(r, c)};
  }
  __device__ void finish(const Loaded& loaded, std::int64_t r, std::int64_t c, int count) const {
    std::int32_t levels[kElements];
    q.unpack(loaded.levels, levels);
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) v.at[i] = value(levels[i], loaded.g);
    store_vector(x.at(r, c), v, count, x.aligned);
  }
  __device__ void pair(std::int64_t r, std::int64_t c, int count) const {
    std::int32_t levels[2];
    q.unpack(q.template load<2>(r, c, count), levels);
    *x.at(r, c) = value(levels[0], scales.at(r, c));
    if (count > 1) *x.at(r, c + 1) = value(levels[1], scales.at(r, c + 1));
  }

 private:
  __device__ T value(std::int32_t level, const Segment<Real>& g) const {
    return narrow<T>(product(static_cast<Real>(level - g.z), g.s));
  }
};

template <class T>
struct DequantizeBackward {
  using Real = RealOf<T>;
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 4;

  Rows<const T> dy;
  SegmentScales<Real> scales;
  Rows<T> dq;

  struct Loaded {
    Vector<T> dy;
    Segment<Real> g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, int count) const {
    return {load_vector(dy.at(r, c), count, dy.aligned), scales.at(r, c)};
  }
  __device__ void finish(const Loaded& loaded, std::int64_t r, std::int64_t c, int count) const {
    Real values[kElements];
    widen(loaded.dy, values);
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) v.at[i] = narrow<T>(product(values[i], loaded.g.s));
    store_vector(dq.at(r, c), v, count, dq.aligned);
  }
  __device__ void pair(std::int64_t r, std::int64_t c, int count) const {
    for (int i = 0; i < count; ++i) {
      *dq.at(r, c + i) = narrow<T>(product(widen(__ldcg(dy.at(r, c + i))), scales.at(r, c + i).s));
    }
  }
};

}  // namespace

void dequantize_sm80(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    const Dequantize<T> op = {integer_rows(o.q_in, kVectorSize<T>), given_scales<RealOf<T>>(o), rows_of<T>(o.y)};
    enqueue_walk("dequantize_sm80", o.q_in, op, launch.stream);
  });
}

void dequantize_sm80_prepare(const QuantizeProblem& p) {
  with_float_type(p.x, [](auto x) { prepare("dequantize_sm80", walk_elements<Dequantize<decltype(x)>>); });
}

void dequantize_backward_sm80(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    const DequantizeBackward<T> op = {rows_of<T>(o.dy), given_scales<RealOf<T>>(o), rows_of<T>(o.y)};
    enqueue_walk("dequantize_backward_sm80", o.dy, op, launch.stream);
  });
}

void dequantize_backward_sm80_prepare(const QuantizeProblem& p) {
  with_float_type(p.x,
                  [](auto x) { prepare("dequantize_backward_sm80", walk_elements<DequantizeBackward<decltype(x)>>); });
}

}  // namespace octile::cuda
