// q = clamp(rint(x / s), q_min, q_max) where a segment is more than the registers of a block hold: bands of rows
// (device/quantize_bands.cuh), columns (device/two_looks.cuh, and with given scales or clamped levels bands again), or
// a whole tensor in row-major order (device/quantize_tensor.cuh). A whole tensor transposed or in both orientations:
// the first half of quantize_tensor, then quantize_bands with the scale known.
#include <algorithm>
#include <string>

#include "cuda/device/quantize_bands.cuh"
#include "cuda/device/quantize_tensor.cuh"
#include "cuda/device/two_looks.cuh"

namespace octile::cuda {

namespace {

constexpr std::string_view kBands = "launch (bands)";
constexpr std::string_view kColumns = "launch (columns)";
constexpr std::string_view kTensor = "launch (tensor)";

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct BandShape {
  Part part;
  int cluster;
  unsigned shared;
};

constexpr unsigned kThird = 64 << 10;
constexpr unsigned kHalf = 100 << 10;  // room for two blocks, with what else they have

// What a part may take. Blocks of more than half a multiprocessor's memory have one each, and 16 neighbours for a
// cluster are sure to exist where they have been seen: on chips with at least an H200's number.
unsigned most_shared(Device device) { return properties(device).multiprocessors < 132 ? kHalf : kMostShared; }

// The smallest cluster whose parts leave room for three blocks on a multiprocessor, or as near to that as it goes.
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
  while (cluster < kMostCluster && make(cluster).shared > kThird) cluster *= 2;
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
  const auto wide = static_cast<unsigned>(ceil_div(a.cols, std::int64_t{shape.part.vectors} * kVectorSize<T>));
  const auto high = static_cast<unsigned>(ceil_div(a.rows, shape.part.rows));
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

bool looks_twice(const QuantizeProblem& p) { return p.granularity == Granularity::column && plain_rules(p).fits; }

template <class T>
void launch_columns(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  LookTwiceArguments<T> a = {};
  a.m = tiles::matrices<T>(o);
  if (p.multiplier != Multiplier::none) a.row_factor = row_scale<float>(o.multiplier);
  a.column_scale = static_cast<float*>(o.scale.data);
  a.column_scale_stride = o.scale.col_stride;
  a.q_max = static_cast<float>(p.q_max);
  a.least_scale = static_cast<float>(p.min_scale);
  a.column_most = static_cast<std::uint32_t*>(launch.workspace.data);
  const int blocks = tiling_of<T>(p.device, o.x.rows(), o.x.cols()).blocks;
  enqueue_two_looks<T, false>(kColumns, a, blocks, tiles::moves_whole<T>(o), launch.stream);
}

constexpr unsigned kTensorShared = kStashed * kTensorThreads * 16;

template <class T>
void launch_tensor(const QuantizeProblem& p, const QuantizeArguments<T>& a, const Launch& launch) {
  auto* const partial = static_cast<float*>(launch.workspace.data);
  const int multiprocessors = properties(p.device).multiprocessors;
  float* const known = a.q_transposed ? partial + multiprocessors : nullptr;
  const std::int64_t all = a.rows * (a.cols / kVectorSize<T>);
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(multiprocessors, ceil_div(all, kTensorThreads)));
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
  if (looks_twice(p) && p.cols > 1 << 30) return "counts columns in 32 bits";
  if (p.granularity == Granularity::group) return "does not do groups";
  if (p.granularity == Granularity::row && p.orientation == Orientation::row_major) {
    return "leaves rows in row-major order to quantize_sm80";
  }
  return with_narrow_type(p.x, [&](auto x) -> std::string {
    using T = decltype(x);
    if (p.cols % kVectorSize<T> != 0) return "needs columns in whole 16 bytes";
    if (p.rows > 65535 * kBandRows) return "counts bands of 32 rows in 16 bits";
    if (p.granularity == Granularity::tensor || looks_twice(p)) return {};
    const bool too_wide = p.granularity == Granularity::row && p.cols > 1 << 24;  // to be counted in 32 bits
    if (too_wide || band_shape<T>(p, p.rows, p.cols).shared > most_shared(p.device)) {
      return "needs a band to fit the shared memory of 16 blocks";
    }
    return {};
  });
}

// On an H200, 8192 x 8192 f16.
Cost cost(const QuantizeProblem& p) {
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.cols);
  const double bytes = elements * (bits(p.x) + bits(p.q) * (p.orientation == Orientation::both ? 2 : 1)) / 8;
  const double rate = p.granularity == Granularity::row      ? 3.0e12
                      : p.granularity == Granularity::tensor ? 2.3e12
                      : looks_twice(p)                       ? 2.1e12
                                                             : 1.6e12;
  return {2 * elements, bytes, bytes / rate + 4e-6};
}

std::size_t workspace(const QuantizeProblem& p) {
  const auto blocks = static_cast<std::size_t>(properties(p.device).multiprocessors);
  const std::size_t own = p.granularity == Granularity::tensor ? blocks + 3
                          : looks_twice(p)                     ? static_cast<std::size_t>(p.cols)
                                                               : 0;
  return std::max(quantize_sm80_workspace(p), own * sizeof(float));
}

void load(const QuantizeProblem& p) {
  quantize_sm80_prepare(p);
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    if (p.granularity == Granularity::tensor) prepare(kTensor, quantize_tensor<T>, kTensorShared);
    if (p.granularity == Granularity::tensor && p.orientation == Orientation::row_major) return;
    if (looks_twice(p)) return prepare_to_look_twice<T, false>(kColumns);
    // Fewer rows have a smaller cluster, or smaller parts.
    prepare(kBands, band_kernel<T>(p), std::max(kThird, band_shape<T>(p, p.rows, p.cols).shared));
    check(cudaFuncSetAttribute(band_kernel<T>(p), cudaFuncAttributeNonPortableClusterSizeAllowed, 1), kBands);
  });
}

// Tensors that are not aligned to 16 bytes, and whole tensors with gaps between their rows, are the sm80 row's.
void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_narrow_type(p.x, [&](auto x) {
    using T = decltype(x);
    const bool aligned = rows_of<T>(o.x).aligned && (!o.q.present() || integer_rows(o.q, kVectorSize<T>).aligned);
    const bool gaps = o.x.strides[0] != o.x.cols() || (o.q.present() && o.q.strides[0] != o.x.cols());
    if (!aligned || (gaps && p.granularity == Granularity::tensor)) return quantize_sm80(p, o, launch);
    if (looks_twice(p)) return launch_columns<T>(p, o, launch);
    const QuantizeArguments<T> a = arguments<T>(p, o);
    if (p.granularity == Granularity::tensor) launch_tensor(p, a, launch);
    if (p.granularity == Granularity::tensor && !a.q_transposed) return;
    const float* const known = static_cast<const float*>(launch.workspace.data) + properties(p.device).multiprocessors;
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
};

}  // namespace octile::cuda
