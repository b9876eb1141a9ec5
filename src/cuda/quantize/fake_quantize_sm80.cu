// y = (clamp(rint(x / s) + z, q_min, q_max) - z) * s. NaN where x is not finite, and with dynamic scales, which a pass
// before this one finds, in the whole of its segment.
#include "cuda/device/quantize_rows.cuh"
#include "cuda/device/vectors.cuh"
#include "cuda/quantize/segments_sm80.cuh"

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

  bool aligned() const { return x.aligned && y.aligned && !rules.stochastic; }

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

// Whole aligned vectors, to nearest.
template <class T, class Scales>
struct FakeQuantizeVectors {
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = Scales::kColumns ? 2 : 4;
  static constexpr int kBlocks = 4;
  static constexpr int kCorrections = sizeof(T) == 2 ? 1 : 2;
  static constexpr bool kColumns = Scales::kColumns;
  using Place = typename Scales::Place;

  Rows<const T> x;
  Scales scales;
  float q_min, q_max;
  Rows<T> y;

  FakeQuantizeVectors(const FakeQuantize<T>& op, const Scales& scales_)
      : x(op.x), scales(scales_), q_min(op.rules.q_min), q_max(op.rules.q_max), y(op.y) {}

  struct Loaded {
    Vector<T> x;
    typename Scales::Held g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, const Place& place) const {
    return {load_vector(x.at(r, c), kElements, true), scales.hold(place, r)};
  }
  __device__ void finish(const Loaded& loaded, const Place& place, std::int64_t r, std::int64_t c) const {
    const auto& g = scales.of(place, loaded.g);
    float values[kElements];
    widen(loaded.x, values);
    bool fast = can_divide_by<kElements>(g);
    if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) fast = fast && fabsf(values[i]) * g[i].inv < 0x1p100f;
    }
    if (!fast) return by_division(r, c);
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float z = static_cast<float>(g[i].z);
      const float ratio = quotient_by<kCorrections>(values[i], g[i].s, g[i].inv);
      const float level = fminf(fmaxf(ratio + rounder(ratio) - rounder(ratio), q_min - z), q_max - z);
      v.at[i] = narrow<T>(isfinite(values[i]) ? level * g[i].s : not_a_number(z));
    }
    store_vector(y.at(r, c), v, kElements, true);
  }

 private:
  __device__ __noinline__ void by_division(std::int64_t r, std::int64_t c) const {
#pragma unroll 1
    for (std::int64_t at = c; at < c + kElements; ++at) {
      const Segment<float> g = scales.all.at(r, at);
      const float z = static_cast<float>(g.z);
      const float value = widen(__ldcg(x.at(r, at)));
      const float level = fminf(fmaxf(rint(quotient(value, g.s)) + z, q_min), q_max);
      const bool good = isfinite(value) && g.s == g.s;
      *y.at(r, at) = narrow<T>(good ? (level - z) * g.s : not_a_number(z));
    }
  }
};

constexpr std::string_view kName = "fake_quantize_sm80";
constexpr std::string_view kRows = "fake_quantize_sm80 (rows)";

bool keeps_rows(const QuantizeProblem& p) {
  return p.granularity == Granularity::row && p.mapping == Mapping::symmetric && p.x != DType::f64 &&
         p.scale == ScaleSource::dynamic && p.rounding == Rounding::nearest;
}

// In one pass over x; false if the tensors do not suit it.
template <class T>
bool launch_rows(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  constexpr int n = kVectorSize<T>;
  const Rows<const T> x = rows_of<T>(o.x);
  const Rows<T> y = rows_of<T>(o.y);
  if (!x.aligned || !y.aligned || o.x.cols() % n != 0 || o.x.cols() > kMaxVectors<PlainRows> * n) return false;
  RowsArguments<T> a = {};
  a.x = x.data;
  a.x_stride = x.stride;
  a.out = y.data;
  a.out_stride = y.stride;
  a.rows = o.x.rows();
  a.vectors = static_cast<int>(o.x.cols() / n);
  a.rules = plain_rules(p);
  a.scale = static_cast<float*>(o.scale.data);
  a.scale_stride = o.scale.row_stride;
  enqueue_rows<T, FakeRows>(kRows, a, p.device, launch.stream);
  return true;
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    using Real = RealOf<T>;
    if constexpr (!std::is_same_v<T, double>) {
      if (keeps_rows(p) && launch_rows<T>(p, o, launch)) return;
    }
    const SegmentScales<Real> scales =
        p.scale == ScaleSource::given ? given_scales<Real>(o) : measure_segments<T>(p, o, launch);
    const FakeQuantize<T> op = {rows_of<T>(o.x), scales, rules_of<Real>(p, o), rows_of<T>(o.y), o.x.cols()};
    enqueue_elementwise<FakeQuantizeVectors>(kName, o.x, op, launch.stream);
  });
}

std::size_t workspace(const QuantizeProblem& p) {
  return p.scale == ScaleSource::given ? 0 : measure_segments_workspace(p);
}

void load(const QuantizeProblem& p) {
  if (p.scale == ScaleSource::dynamic) measure_segments_prepare(p);
  prepare_elementwise<FakeQuantizeVectors, FakeQuantize>(kName, p);
  if (keeps_rows(p)) with_narrow_type(p.x, []<class T>(T) { prepare_rows<T, FakeRows>(kRows); });
}

}  // namespace

extern constinit const QuantizeKernel fake_quantize_sm80 = {
    .name = kName,
    .task = {Operation::fake_quantize},
    .device = DeviceType::cuda,
    .supports = quantizer_sm80_supports,
    .cost = quantizer_sm80_cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
