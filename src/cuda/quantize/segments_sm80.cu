// The minima and maxima of segments, and the scales and zero points that follow from them.
//
//   rows, groups   one launch: some lanes, or a block, for each segment
//   tensor         blocks find the extremes of parts, and one block those of all
//   columns        blocks find the extremes of 32 columns over a part of the rows, threads those of whole columns
#include <algorithm>
#include <string>

#include "cuda/quantize/segments_sm80.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr std::int64_t kChunk = 8192;        // elements of a row that a block reads together
constexpr std::int64_t kTensorParts = 1056;  // eight blocks for each SM of the largest GPU
constexpr std::int64_t kColumnParts = 32;

// How a matrix is cut into segments along its rows.
struct Cut {
  std::int64_t rows, per_row, length;
};

template <bool kSymmetric, class T>
__device__ void measure_run_as(const Input<T>& x, std::int64_t r, std::int64_t c, int length, int lane, int width,
                               Extremes<RealOf<T>>& e) {
  constexpr int n = kVectorSize<T>;
  constexpr int kAhead = 4;
  for (int first = lane * n; first < length; first += kAhead * width * n) {
    Vector<T> v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * width * n;
      v[k] = load_vector(x.x.at(r, c + at), length - at, x.x.aligned);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = first + k * width * n;
      RealOf<T> values[n];
      x.widen_all(v[k], r, c + at, length - at, values);
#pragma unroll
      for (int i = 0; i < n; ++i) e.include(values[i], kSymmetric);
    }
  }
}

// Columns c .. c + length - 1 of row r, by `width` threads of which this is number `lane`.
template <class T>
__device__ void measure_run(const Input<T>& x, std::int64_t r, std::int64_t c, std::int64_t length, int lane, int width,
                            bool symmetric, Extremes<RealOf<T>>& e) {
  for (; length > 0; c += kChunk, length -= kChunk) {
    const int now = static_cast<int>(length < kChunk ? length : kChunk);
    symmetric ? measure_run_as<true>(x, r, c, now, lane, width, e)
              : measure_run_as<false>(x, r, c, now, lane, width, e);
  }
}

// `width` lanes of a warp, or the whole block, for each segment.
template <class T>
__global__ void __launch_bounds__(kThreads) measure_runs(Input<T> x, Cut cut, int width, Rules<RealOf<T>> rules,
                                                         SegmentScales<RealOf<T>> given, ScaleOutputs<RealOf<T>> out) {
  wait_for_previous();
  let_next_start();
  __shared__ Extremes<RealOf<T>> scratch[kWarps];
  const int per_block = kThreads / width;
  const std::int64_t segment = std::int64_t{blockIdx.x} * per_block + threadIdx.x / width;
  const std::int64_t r = segment / cut.per_row;
  const std::int64_t g = segment % cut.per_row;
  const int lane = static_cast<int>(threadIdx.x) % width;
  Extremes<RealOf<T>> e;
  if (r < cut.rows) measure_run(x, r, g * cut.length, cut.length, lane, width, rules.symmetric, e);
  if (width <= 32) {
    reduce_lanes(e, width, rules.symmetric);
  } else {
    e = reduce_block(e, rules.symmetric, scratch);
  }
  if (lane != 0 || r >= cut.rows) return;
  const Segment<RealOf<T>> fixed = rules.given ? given.at(r, g * cut.length) : Segment<RealOf<T>>{0, 0};
  out.put(r, g, resolve(e, fixed, rules));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    measure_tensor(Input<T> x, std::int64_t rows, std::int64_t cols, bool symmetric, Extremes<RealOf<T>>* parts) {
  wait_for_previous();
  let_next_start();
  __shared__ Extremes<RealOf<T>> scratch[kWarps];
  const std::int64_t per_row = ceil_div(cols, kChunk);
  Extremes<RealOf<T>> e;
  for (std::int64_t chunk = blockIdx.x; chunk < rows * per_row; chunk += gridDim.x) {
    const std::int64_t c = chunk % per_row * kChunk;
    const std::int64_t length = cols - c < kChunk ? cols - c : kChunk;
    measure_run(x, chunk / per_row, c, length, static_cast<int>(threadIdx.x), kThreads, symmetric, e);
  }
  e = reduce_block(e, symmetric, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = e;
}

// A warp's row of a block covers 32 columns; the block's warps, and the blocks of a column, share the rows.
template <class T>
__global__ void __launch_bounds__(kThreads)
    measure_columns(Input<T> x, std::int64_t rows, std::int64_t cols, bool symmetric, Extremes<RealOf<T>>* parts) {
  using Real = RealOf<T>;
  wait_for_previous();
  let_next_start();
  __shared__ Extremes<Real> scratch[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t c = std::int64_t{blockIdx.x} * 32 + lane;
  Extremes<Real> e;
  constexpr int kAhead = 8;
  const std::int64_t step = std::int64_t{gridDim.y} * kWarps;
  for (std::int64_t first = std::int64_t{blockIdx.y} * kWarps + warp; first < rows && c < cols;
       first += kAhead * step) {
    Real values[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const std::int64_t r = first + k * step;
      values[k] = r < rows ? x.get_one(r, c) : Real(0);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) e.include(values[k], symmetric);
  }
  scratch[warp][lane] = e;
  __syncthreads();
  if (warp != 0 || c >= cols) return;
  for (int w = 1; w < kWarps; ++w) e.add(scratch[w][lane]);
  parts[blockIdx.y * cols + c] = e;
}

// parts: (parts, segments). A block for the one segment of a tensor, a thread for each column.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    resolve_parts(const Extremes<Real>* partial, int parts, std::int64_t segments, Rules<Real> rules,
                  SegmentScales<Real> given, ScaleOutputs<Real> out) {
  wait_for_previous();
  let_next_start();
  __shared__ Extremes<Real> scratch[kWarps];
  Extremes<Real> e;
  std::int64_t segment = 0;
  if (segments == 1) {
    for (int i = static_cast<int>(threadIdx.x); i < parts; i += kThreads) e.add(partial[i]);
    e = reduce_block(e, rules.symmetric, scratch);
    if (threadIdx.x != 0) return;
  } else {
    segment = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (segment >= segments) return;
    for (int i = 0; i < parts; ++i) e.add(partial[i * segments + segment]);
  }
  const Segment<Real> fixed = rules.given ? given.at(0, segment) : Segment<Real>{0, 0};
  out.put(0, segment, resolve(e, fixed, rules));
}

std::int64_t segments_of(const QuantizeProblem& p, std::int64_t rows) {
  switch (p.granularity) {
    case Granularity::tensor:
      return 1;
    case Granularity::row:
      return rows;
    case Granularity::column:
      return p.cols;
    case Granularity::group:
      break;
  }
  return rows * (p.cols / p.group);
}

std::int64_t parts_of(const QuantizeProblem& p) {
  return p.granularity == Granularity::tensor ? kTensorParts : p.granularity == Granularity::column ? kColumnParts : 0;
}

constexpr std::string_view kMeasureRuns = "measure_runs";
constexpr std::string_view kMeasureTensor = "measure_tensor";
constexpr std::string_view kMeasureColumns = "measure_columns";
constexpr std::string_view kResolveParts = "resolve_parts";

}  // namespace

// The workspace: partial extremes (none for rows and groups), scales, zero points.
std::size_t measure_segments_workspace(const QuantizeProblem& p) {
  const std::size_t real = p.x == DType::f64 ? 8 : 4;
  const auto segments = static_cast<std::size_t>(segments_of(p, p.rows));
  return segments * (static_cast<std::size_t>(parts_of(p)) * 2 * real + real + sizeof(std::int32_t));
}

template <class T>
SegmentScales<RealOf<T>> measure_segments(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  using Real = RealOf<T>;
  const std::int64_t rows = o.x.rows();
  const std::int64_t cols = o.x.cols();
  const std::int64_t segments = segments_of(p, rows);
  const std::int64_t per_row = p.granularity == Granularity::column  ? cols
                               : p.granularity == Granularity::group ? cols / p.group
                                                                     : 1;
  auto* const partial = static_cast<Extremes<Real>*>(launch.workspace.data);
  ScaleOutputs<Real> out = scale_outputs<Real>(o, per_row);
  out.kept_scale = reinterpret_cast<Real*>(partial + parts_of(p) * segments);
  out.kept_zero = reinterpret_cast<std::int32_t*>(out.kept_scale + segments);
  const bool by_rows = p.granularity == Granularity::row || p.granularity == Granularity::group;
  const bool by_columns = p.granularity == Granularity::column || p.granularity == Granularity::group;
  const SegmentScales<Real> scales = {out.kept_scale,
                                      out.kept_zero,
                                      by_rows ? per_row : 0,
                                      by_columns ? 1 : 0,
                                      by_rows ? per_row : 0,
                                      by_columns ? 1 : 0,
                                      p.granularity == Granularity::group ? p.group : 1,
                                      Real(1)};
  Input<T> x = input_of<T>(p, o);
  const Rules<Real> rules = rules_of<Real>(p, o);
  const SegmentScales<Real> given = given_scales<Real>(o);
  if (by_rows) {
    const std::int64_t length = p.granularity == Granularity::row ? cols : p.group;
    if (length % kVectorSize<T> != 0 && per_row > 1) x.x.aligned = false;
    int width = 1;
    while (width < 32 && width * kVectorSize<T> < length) width *= 2;
    if (length > 2048) width = kThreads;
    enqueue(kMeasureRuns, measure_runs<T>, {dim3(blocks_for(segments, kThreads / width)), dim3(kThreads)},
            launch.stream, x, Cut{rows, per_row, length}, width, rules, given, out);
    return scales;
  }
  std::int64_t parts = kColumnParts;
  if (p.granularity == Granularity::tensor) {
    parts = std::min(kTensorParts, rows * ceil_div(cols, kChunk));
    enqueue(kMeasureTensor, measure_tensor<T>, {dim3(static_cast<unsigned>(parts)), dim3(kThreads)}, launch.stream, x,
            rows, cols, rules.symmetric, partial);
  } else {
    parts = std::min<std::int64_t>(kColumnParts, blocks_for(rows, 8 * kWarps));
    enqueue(kMeasureColumns, measure_columns<T>, {dim3(blocks_for(cols, 32), static_cast<unsigned>(parts)), kThreads},
            launch.stream, x, rows, cols, rules.symmetric, partial);
  }
  enqueue(kResolveParts, resolve_parts<Real>, {dim3(blocks_for(segments, kThreads)), dim3(kThreads)}, launch.stream,
          partial, static_cast<int>(parts), segments, rules, given, out);
  return scales;
}

void measure_segments_prepare(const QuantizeProblem& p) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    if (p.granularity == Granularity::row || p.granularity == Granularity::group) {
      return prepare(kMeasureRuns, measure_runs<T>);
    }
    p.granularity == Granularity::tensor ? prepare(kMeasureTensor, measure_tensor<T>)
                                         : prepare(kMeasureColumns, measure_columns<T>);
    prepare(kResolveParts, resolve_parts<RealOf<T>>);
  });
}

std::string quantizer_sm80_supports(const QuantizeProblem& p) { return reason_against(p.device, 80); }

// On an H200, launch included (docs/notes/gpu.md).
Cost quantizer_sm80_cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, 3.8e12);
  cost.seconds += 3e-6;
  return cost;
}

template SegmentScales<float> measure_segments<__half>(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
template SegmentScales<float> measure_segments<__nv_bfloat16>(const QuantizeProblem&, const QuantizeOperands&,
                                                              const Launch&);
template SegmentScales<float> measure_segments<float>(const QuantizeProblem&, const QuantizeOperands&, const Launch&);
template SegmentScales<double> measure_segments<double>(const QuantizeProblem&, const QuantizeOperands&, const Launch&);

}  // namespace octile::cuda
