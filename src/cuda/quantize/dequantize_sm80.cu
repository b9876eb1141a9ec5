// x = (q - z) * s, and its gradient dq = dy * s.
#include "cuda/device/vectors.cuh"
#include "cuda/quantize/segments_sm80.cuh"

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

  bool aligned() const { return x.aligned && q.aligned && q.dtype != DType::s4; }

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

  bool aligned() const { return dy.aligned && dq.aligned; }

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

// An element is one byte of a word between those of 2^23, less 2^23.
template <class T, class Scales>
struct DequantizeVectors {
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 4;
  static constexpr int kBlocks = Scales::kColumns ? 4 : 5;
  static constexpr bool kColumns = Scales::kColumns;
  using Place = typename Scales::Place;

  IntegerRows q;
  Scales scales;
  Rows<T> x;

  DequantizeVectors(const Dequantize<T>& op, const Scales& scales_) : q(op.q), scales(scales_), x(op.x) {}

  struct Loaded {
    std::uint32_t words[kElements / 4];
    typename Scales::Held g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, const Place& place) const {
    Loaded loaded;
    const std::uint8_t* const p = q.data + r * q.stride + c;
    if constexpr (kElements == 8) {
      const uint2 both = __ldcg(reinterpret_cast<const uint2*>(p));
      loaded.words[0] = both.x;
      loaded.words[1] = both.y;
    } else {
      loaded.words[0] = __ldcg(reinterpret_cast<const unsigned*>(p));
    }
    loaded.g = scales.hold(place, r);
    return loaded;
  }
  __device__ void finish(const Loaded& loaded, const Place& place, std::int64_t r, std::int64_t c) const {
    const auto& g = scales.of(place, loaded.g);
    const bool is_signed = q.dtype == DType::s8;
    const float middle = is_signed ? 0x1p23f + 128.0f : 0x1p23f;
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const std::uint32_t word = is_signed ? loaded.words[i / 4] ^ 0x80808080u : loaded.words[i / 4];
      float level = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i % 4)) - middle;
      if (scales.all.zero) level = static_cast<float>(static_cast<std::int32_t>(level) - g[i].z);
      v.at[i] = narrow<T>(product(level, g[i].s));
    }
    store_vector(x.at(r, c), v, kElements, true);
  }
};

template <class T, class Scales>
struct DequantizeBackwardVectors {
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 4;
  static constexpr int kBlocks = Scales::kColumns ? 4 : 5;
  static constexpr bool kColumns = Scales::kColumns;
  using Place = typename Scales::Place;

  Rows<const T> dy;
  Scales scales;
  Rows<T> dq;

  DequantizeBackwardVectors(const DequantizeBackward<T>& op, const Scales& scales_)
      : dy(op.dy), scales(scales_), dq(op.dq) {}

  struct Loaded {
    Vector<T> dy;
    typename Scales::Held g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, const Place& place) const {
    return {load_vector(dy.at(r, c), kElements, true), scales.hold(place, r)};
  }
  __device__ void finish(const Loaded& loaded, const Place& place, std::int64_t r, std::int64_t c) const {
    const auto& g = scales.of(place, loaded.g);
    float values[kElements];
    widen(loaded.dy, values);
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) v.at[i] = narrow<T>(product(values[i], g[i].s));
    store_vector(dq.at(r, c), v, kElements, true);
  }
};

constexpr std::string_view kName = "dequantize_sm80";
constexpr std::string_view kBackward = "dequantize_backward_sm80";

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&]<class T>(T) {
    const Dequantize<T> op = {integer_rows(o.q_in, kVectorSize<T>), given_scales<RealOf<T>>(o), rows_of<T>(o.y)};
    enqueue_elementwise<DequantizeVectors>(kName, o.q_in, op, launch.stream);
  });
}

void launch_backward(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&]<class T>(T) {
    const DequantizeBackward<T> op = {rows_of<T>(o.dy), given_scales<RealOf<T>>(o), rows_of<T>(o.y)};
    enqueue_elementwise<DequantizeBackwardVectors>(kBackward, o.dy, op, launch.stream);
  });
}

void load(const QuantizeProblem& p) { prepare_elementwise<DequantizeVectors, Dequantize>(kName, p); }

void load_backward(const QuantizeProblem& p) {
  prepare_elementwise<DequantizeBackwardVectors, DequantizeBackward>(kBackward, p);
}

}  // namespace

extern constinit const QuantizeKernel dequantize_sm80 = elementwise_row(kName, Operation::dequantize, launch, load);
extern constinit const QuantizeKernel dequantize_backward_sm80 =
    elementwise_row(kBackward, Operation::dequantize_backward, launch_backward, load_backward);

}  // namespace octile::cuda
