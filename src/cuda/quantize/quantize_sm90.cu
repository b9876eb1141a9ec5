// q = clamp(rint(x / s), q_min, q_max) for segments larger than the registers of a block: bands of rows
// (quantize_bands); columns (device/two_pass.cuh, or bands where scales are given or levels clamped); a whole tensor in
// row-major order (quantize_tensor). A whole tensor transposed or in both orientations: the first half of
// quantize_tensor, then quantize_bands with the scale known.
#include <algorithm>
#include <string>

#include "cuda/device/two_pass.cuh"
#include "cuda/quantize/quantize_sm90.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

constexpr std::string_view kBands = "quantize_sm90 (bands)";
constexpr std::string_view kColumns = "quantize_sm90 (columns)";
constexpr std::string_view kTensor = "quantize_sm90 (tensor)";

struct BandShape {
  Part part;
  int cluster;
  unsigned shared;
};

constexpr unsigned kThird = 64 << 10;
constexpr unsigned kHalf = 100 << 10;  // room for two blocks, with their other shared memory

// The maximum shared memory of a part. A block with more than half of an SM's has the SM to itself, and then 16 free
// SMs for a cluster are certain only where that was tried: on chips with at least an H200's number of SMs.
unsigned max_shared(Device device) { return properties(device).sms < 132 ? kHalf : kMaxShared; }

// The smallest cluster whose parts leave room for three blocks on an SM, or for as many as possible.
template <class T>
BandShape band_shape(const QuantizeProblem& p, std::int64_t rows, std::int64_t cols) {
  const auto vectors = ceil_div(cols, kVectorSize<T>);
  const auto make = [&](int cluster) {
    Part part = {kKnownRows, kKnownVectors};
    if (p.granularity == Granularity::row) part = {kBandRows, static_cast<int>(ceil_div(vectors, cluster))};
    if (p.granularity == Granularity::column) {
      part = {static_cast<int>(ceil_div(ceil_div(rows, cluster), 32)) * 32, kColumnVectors};
    }
    return BandShape{part, cluster, static_cast<unsigned>(part.rows) * static_cast<unsigned>(part.vectors) * 16};
  };
  int cluster = 1;
  while (cluster < kMaxCluster && make(cluster).shared > kThird) cluster *= 2;
  return make(cluster);
}

template <class T>
QuantizeArguments<T> arguments(const QuantizeProblem& p, const QuantizeOperands& o) {
  QuantizeArguments<T> a = {};
  a.x = static_cast<const T*>(o.x.data);
  a.x_stride = o.x.strides[0];
  a.q = static_cast<std::uint8_t*>(o.q.data);
  a.q_stride = o.q.strides[0];
  a.q_transposed = static_cast<std::uint8_t*>(o.q_transposed.data);
  a.q_transposed_stride = o.q_transposed.strides[0];
  a.rows = o.x.rows();
  a.cols = o.x.cols();
  a.rules = plain_rules(p);
  const SegmentScales<float> given = given_scales<float>(o);
  const bool columns = p.granularity == Granularity::column;
  a.given_scale = {given.scale, columns ? given.col_stride : given.row_stride, given.value};
  a.scale = static_cast<float*>(o.scale.data);
  a.scale_stride = columns ? o.scale.col_stride : o.scale.row_stride;
  a.factors = p.multiplier != Multiplier::none;
  if (a.factors) a.row_factors = row_scale<float>(o.multiplier);
  a.aligned_out = aligned_rows(o.q_transposed.data, o.q_transposed.strides[0], 16);
  return a;
}

template <class T>
auto* band_kernel(const QuantizeProblem& p) {
  return p.granularity == Granularity::row      ? quantize_bands<T, Scope::row>
         : p.granularity == Granularity::column ? quantize_bands<T, Scope::column>
                                                : quantize_bands<T, Scope::known>;
}

template <class T>
void launch_bands(const QuantizeProblem& p, const QuantizeArguments<T>& a, const float* known, Stream stream) {
  const BandShape shape = band_shape<T>(p, a.rows, a.cols);
  const auto wide = blocks_for(a.cols, std::int64_t{shape.part.vectors} * kVectorSize<T>);
  const auto high = blocks_for(a.rows, shape.part.rows);
  const auto cluster = static_cast<unsigned>(shape.cluster);
  LaunchShape launch = {dim3(wide, high), dim3(kBandThreads), shape.shared};
  if (p.granularity == Granularity::row) {
    launch.grid.x = cluster;
    launch.cluster = dim3(cluster, 1, 1);
  } else if (p.granularity == Granularity::column) {
    launch.grid.y = cluster;
    launch.cluster = dim3(1, cluster, 1);
  }
  enqueue(kBands, band_kernel<T>(p), launch, stream, a, shape.part, known);
}

bool takes_two_passes(const QuantizeProblem& p) { return p.granularity == Granularity::column && plain_rules(p).fits; }

template <class T>
void launch_columns(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  TwoPassArguments<T> a = {};
  a.m = tiles::matrices<T>(o);
  if (p.multiplier != Multiplier::none) a.row_factor = row_scale<float>(o.multiplier);
  a.column_scale = static_cast<float*>(o.scale.data);
  a.column_scale_stride = o.scale.col_stride;
  a.q_max = static_cast<float>(p.q_max);
  a.min_scale = static_cast<float>(p.min_scale);
  a.column_max = static_cast<std::uint32_t*>(launch.workspace.data);
  const int blocks = tiling_of<T>(p.device, o.x.rows(), o.x.cols()).blocks;
  enqueue_two_pass<T, false>(kColumns, a, blocks, tiles::moves_whole<T>(o), launch.stream);
}

constexpr unsigned kTensorShared = kStashed * kTensorThreads * 16;

template <class T>
void launch_tensor(const QuantizeProblem& p, const QuantizeArguments<T>& a, const Launch& launch) {
  auto* const partial = static_cast<float*>(launch.workspace.data);
  const int sms = properties(p.device).sms;
  float* const known = a.q_transposed ? partial + sms : nullptr;
  const std::int64_t all = a.rows * (a.cols / kVectorSize<T>);
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(sms, ceil_div(all, kTensorThreads)));
  const LaunchShape shape = {dim3(grid), dim3(kTensorThreads), kTensorShared, dim3(1), true};
  enqueue(kTensor, quantize_tensor<T>, shape, launch.stream, a, all, partial, known);
}

std::string supports(const QuantizeProblem& p) {
  if (std::string reason = reason_against(p.device, 90, 91); !reason.empty()) return reason;
  if (p.x == DType::f64 || p.q == DType::s4 || p.mapping != Mapping::symmetric || p.rounding != Rounding::nearest) {
    return "does f16, bf16 and f32 to bytes, symmetric, to nearest";
  }
  const bool columns = p.granularity == Granularity::column;
  if (p.multiplier != Multiplier::none && !(columns && p.multiplier == Multiplier::per_row)) {
    return "multiplies columns' rows alone";
  }
  if (takes_two_passes(p) && p.cols > 1 << 30) return "counts columns in 32 bits";
  if (p.granularity == Granularity::group) return "does not do groups";
  if (p.granularity == Granularity::row && p.orientation == Orientation::row_major) {
    return "leaves rows in row-major order to quantize_sm80";
  }
  return with_narrow_type(p.x, [&](auto x) -> std::string {
    using T = decltype(x);
    if (p.cols % kVectorSize<T> != 0) return "needs columns in whole 16 bytes";
    if (p.rows > 65535 * kBandRows) return "counts bands of 32 rows in 16 bits";
    if (p.granularity == Granularity::tensor || takes_two_passes(p)) return {};
    const bool too_wide = p.granularity == Granularity::row && p.cols > 1 << 24;  // to be counted in 32 bits
    if (too_wide || band_shape<T>(p, p.rows, p.cols).shared > max_shared(p.device)) {
      return "needs a band to fit the shared memory of 16 blocks";
    }
    return {};
  });
}

// On an H200, 8192 x 8192 f16.
Cost cost(const QuantizeProblem& p) {
  const double rate = p.granularity == Granularity::row      ? 3.0e12
                      : p.granularity == Granularity::tensor ? 2.3e12
                      : takes_two_passes(p)                  ? 2.1e12
                                                             : 1.6e12;
  Cost cost = quantize_cost(p, rate);
  cost.seconds += 4e-6;
  return cost;
}

std::size_t workspace(const QuantizeProblem& p) {
  const auto blocks = static_cast<std::size_t>(properties(p.device).sms);
  if (p.granularity == Granularity::tensor) return (blocks + 3) * sizeof(float);
  return takes_two_passes(p) ? static_cast<std::size_t>(p.cols) * sizeof(float) : 0;
}

void load(const QuantizeProblem& p) {
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    if (p.granularity == Granularity::tensor) prepare(kTensor, quantize_tensor<T>, kTensorShared);
    if (p.granularity == Granularity::tensor && p.orientation == Orientation::row_major) return;
    if (takes_two_passes(p)) return prepare_two_pass<T, false>(kColumns);
    // Fewer rows have a smaller cluster, or smaller parts.
    prepare(kBands, band_kernel<T>(p), std::max(kThird, band_shape<T>(p, p.rows, p.cols).shared));
    check(cudaFuncSetAttribute(band_kernel<T>(p), cudaFuncAttributeNonPortableClusterSizeAllowed, 1), kBands);
  });
}

// Takes vectors of 16 bytes, and a whole tensor without gaps between its rows.
bool aligned(const QuantizeProblem& p, const QuantizeOperands& o) {
  return with_narrow_type(p.x, [&]<class T>(T) {
    const bool vectors = rows_of<T>(o.x).aligned && (!o.q.present() || integer_rows(o.q, kVectorSize<T>).aligned);
    const bool gaps = o.x.strides[0] != o.x.cols() || (o.q.present() && o.q.strides[0] != o.x.cols());
    return vectors && !(gaps && p.granularity == Granularity::tensor);
  });
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    if (takes_two_passes(p)) return launch_columns<T>(p, o, launch);
    const QuantizeArguments<T> a = arguments<T>(p, o);
    if (p.granularity == Granularity::tensor) launch_tensor(p, a, launch);
    if (p.granularity == Granularity::tensor && !a.q_transposed) return;
    const float* const known = static_cast<const float*>(launch.workspace.data) + properties(p.device).sms;
    launch_bands(p, a, known, launch.stream);
  });
}

}  // namespace

extern constinit const QuantizeKernel quantize_sm90 = {
    .name = "quantize_sm90",
    .task = {Operation::quantize},
    .device = DeviceType::cuda,
    .supports = supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
    .aligned = aligned,
};

}  // namespace octile::cuda
