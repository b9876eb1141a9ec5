// q = clamp(rint(x / s) + z, q_min, q_max), with scales found on the way; into (rows, cols), (cols, rows) or both.
// Stochastic: floor(x / s + u) + z.
//
//   quantize_rows            segments along rows, row-major out, symmetric, into bytes, aligned: x is read once and
//                            stays in registers until the scale is known (device/quantize_rows.cuh)
//   quantize_unaligned_rows  the same to nearest, at any address (quantize_sm80.cuh)
//   quantize_runs            the same with any option and type
//   everything else          scales by a pass of their own (segments_sm80.cu), then the levels: QuantizeElements
//                            row-major, quantize_tiles through shared memory
#include "cuda/device/quantize_rows.cuh"
#include "cuda/dispatch.h"
#include "cuda/quantize/quantize_sm80.cuh"
#include "cuda/quantize/segments_sm80.cuh"
#include "plan/cost.h"

namespace octile::cuda {

namespace {

constexpr int kMaxThreads = 1024;

// Segments of `length` neighbours, `per_row` in each row.
struct Runs {
  std::int64_t rows, cols, per_row, length;
};

template <class T>
struct RunsArguments {
  Input<T> x;
  Runs runs;
  IntegerRows q;
  Rules<RealOf<T>> rules;
  SegmentScales<RealOf<T>> given;
  ScaleOutputs<RealOf<T>> out;
};

// A row of the block, a power of two up to 32 threads or whole warps, keeps a segment, with whatever options.
template <class T>
__global__ void __launch_bounds__(kMaxThreads) quantize_runs(RunsArguments<T> a) {
  using Real = RealOf<T>;
  constexpr int n = kVectorSize<T>;
  constexpr int kVectors = kVectorsOfMany;
  __shared__ Extremes<Real> scratch[kMaxThreads / 32];
  const int lane = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  const std::int64_t segment = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const std::int64_t r = a.runs.per_row == 1 ? segment : segment / a.runs.per_row;
  const std::int64_t g = a.runs.per_row == 1 ? 0 : segment % a.runs.per_row;
  const std::int64_t first = g * a.runs.length;
  const int length = r < a.runs.rows ? static_cast<int>(a.runs.length) : 0;
  const auto column = [&](int k) { return (k * width + lane) * n; };
  const bool symmetric = a.rules.symmetric;

  wait_for_previous();
  let_next_start();
  Vector<T> v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    v[k] = load_vector(a.x.x.at(r, first + column(k)), length - column(k), a.x.x.aligned);
  }

  Extremes<Real> e;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Real x[n];
    a.x.widen_all(v[k], r, first + column(k), length - column(k), x);
#pragma unroll
    for (int i = 0; i < n; ++i) e.include(x[i], symmetric);
  }
  if (width <= 32) {
    reduce_lanes(e, width, symmetric);
  } else {
    e = reduce_block(e, symmetric, scratch);
  }

  const Segment<Real> fixed = a.rules.given && length > 0 ? a.given.at(r, first) : Segment<Real>{1, 0};
  const Segment<Real> s = resolve(e, fixed, a.rules);
  const Real inv = inverse(s.s);
  if (lane == 0 && length > 0) a.out.put(r, g, s);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (column(k) >= length) break;
    const std::int64_t c = first + column(k);
    Real x[n];
    std::int32_t q[n];
    a.x.widen_all(v[k], r, c, length - column(k), x);
    to_levels(x, s, inv, a.rules, static_cast<std::uint64_t>(r * a.runs.cols + c), q);
    a.q.put(r, c, q, length - column(k));
  }
}

// The levels of x, with the scales that a pass before this one has found.
template <class T>
struct Levels {
  using Real = RealOf<T>;
  static constexpr int n = kVectorSize<T>;

  Input<T> x;
  SegmentScales<Real> scales;
  Rules<Real> rules;
  std::int64_t cols;

  __device__ void round(const Real (&values)[n], std::int64_t r, std::int64_t c, const Segment<Real>& g,
                        std::int32_t (&q)[n]) const {
    to_levels(values, g, inverse(g.s), rules, static_cast<std::uint64_t>(r * cols + c), q);
  }
  __device__ std::int32_t one(std::int64_t r, std::int64_t c) const {
    const Real value[1] = {x.get_one(r, c)};
    std::int32_t level[1];
    to_levels(value, scales.at(r, c), Real(0), rules, static_cast<std::uint64_t>(r * cols + c), level);
    return level[0];
  }
};

template <class T>
struct QuantizeElements {
  using Real = RealOf<T>;
  static constexpr int kElements = kVectorSize<T>;
  static constexpr int kBatch = 4;

  SegmentScales<Real> scales;
  Levels<T> levels;
  IntegerRows q;

  struct Loaded {
    Vector<T> x;
    Segment<Real> g;
  };

  __device__ Loaded load(std::int64_t r, std::int64_t c, int count) const {
    return {load_vector(levels.x.x.at(r, c), count, levels.x.x.aligned), scales.at(r, c)};
  }
  __device__ void finish(const Loaded& loaded, std::int64_t r, std::int64_t c, int count) const {
    Real values[kElements];
    std::int32_t of_values[kElements];
    levels.x.widen_all(loaded.x, r, c, count, values);
    levels.round(values, r, c, loaded.g, of_values);
    q.put(r, c, of_values, count);
  }
  __device__ void pair(std::int64_t r, std::int64_t c, int count) const {
    const std::int32_t both[2] = {levels.one(r, c), count > 1 ? levels.one(r, c + 1) : 0};
    q.put_bytes(r, c, both, count);
  }
};

constexpr int kTile = 64;  // rows and columns
constexpr int kTileThreads = 256;
constexpr int kRun = 16;  // elements of a transposed row that a thread writes
constexpr int kTilePitch = kTile + 4;

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    quantize_tiles(Levels<T> levels, std::int64_t rows, IntegerRows q, IntegerRows q_transposed) {
  constexpr int n = kVectorSize<T>;
  __shared__ std::uint8_t tile[kTile][kTilePitch];
  wait_for_previous();
  let_next_start();
  const auto tiles_down = static_cast<unsigned>(ceil_div(rows, kTile));
  const std::int64_t r0 = std::int64_t{blockIdx.x % tiles_down} * kTile;
  const std::int64_t c0 = std::int64_t{blockIdx.x / tiles_down} * kTile;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile / n; i += kTileThreads) {
    const int row = i / (kTile / n);
    const int col = i % (kTile / n) * n;
    const std::int64_t left = levels.cols - c0 - col;
    if (r0 + row >= rows || left <= 0) continue;
    const int count = static_cast<int>(left < n ? left : n);
    std::int32_t values[n];
    if (levels.scales.shared_by(n)) {
      RealOf<T> x[n];
      levels.x.get(r0 + row, c0 + col, count, x);
      levels.round(x, r0 + row, c0 + col, levels.scales.at(r0 + row, c0 + col), values);
    } else {
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        tile[row][col + k] = static_cast<std::uint8_t>(levels.one(r0 + row, c0 + col + k));
      }
#pragma unroll
      for (int k = 0; k < n; ++k) values[k] = k < count ? tile[row][col + k] : 0;
    }
    if (q.data) q.put(r0 + row, c0 + col, values, count);
#pragma unroll
    for (int k = 0; k < n; ++k) tile[row][col + k] = static_cast<std::uint8_t>(values[k]);
  }
  __syncthreads();
  const int col = static_cast<int>(threadIdx.x) / (kTile / kRun);
  const int row = static_cast<int>(threadIdx.x) % (kTile / kRun) * kRun;
  const std::int64_t left = rows - r0 - row;
  if (c0 + col >= levels.cols || left <= 0) return;
  for (int half = 0; half < kRun; half += 8) {
    std::int32_t values[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = tile[row + half + k][col];
    q_transposed.put(c0 + col, r0 + row + half, values, static_cast<int>(left - half < 8 ? left - half : 8));
  }
}

constexpr std::string_view kRows = "quantize_sm80 (rows)";
constexpr std::string_view kUnalignedRows = "quantize_sm80 (unaligned rows)";
constexpr std::string_view kRuns = "quantize_sm80 (runs)";
constexpr std::string_view kElements = "quantize_sm80 (elements)";
constexpr std::string_view kTiles = "quantize_sm80 (tiles)";

std::int64_t run_length(const QuantizeProblem& p) { return p.granularity == Granularity::group ? p.group : p.cols; }

// Whether quantize_runs can do it: a segment fits the registers of a block, and no two share a byte.
template <class T>
bool keeps_runs(const QuantizeProblem& p) {
  const std::int64_t length = run_length(p);
  return (p.granularity == Granularity::row || p.granularity == Granularity::group) &&
         p.orientation == Orientation::row_major && length <= kMaxThreads * kVectorsOfMany * kVectorSize<T> &&
         !(p.q == DType::s4 && p.granularity == Granularity::group && length % 2 != 0);
}

bool keeps_runs(const QuantizeProblem& p) {
  return with_float_type(p.x, [&](auto x) { return keeps_runs<decltype(x)>(p); });
}

// Whether quantize_rows can do it, if the tensors suit it too.
bool is_plain(const QuantizeProblem& p) {
  return p.mapping == Mapping::symmetric && p.x != DType::f64 && p.q != DType::s4 &&
         p.multiplier != Multiplier::per_row;
}

// Calls body.operator()<Kind>() with the kind of the problem.
template <class Body>
void with_row_kind(const QuantizeProblem& p, const Body& body) {
  const auto with = [&]<bool factors, bool stochastic>() {
    body.template operator()<RowKind<factors, stochastic, false>>();
  };
  with_flags(with, p.multiplier != Multiplier::none, p.rounding == Rounding::stochastic);
}

// False if the tensors do not suit it.
template <class T>
bool launch_plain(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  constexpr int n = kVectorSize<T>;
  const Rows<const T> x = rows_of<T>(o.x);
  const IntegerRows q = integer_rows(o.q, n);
  const std::int64_t length = run_length(p);
  const std::int64_t per_row = o.x.cols() / length;
  const bool factors = p.multiplier != Multiplier::none;
  if (!x.aligned || !q.aligned || length % n != 0 || length > kMaxVectors<PlainRows> * n) return false;
  if (factors && (per_row > 1 || o.multiplier.device.type == DeviceType::cpu || o.multiplier.strides[0] != 1 ||
                  !aligned_rows(o.multiplier.data, 0, 16) || length > kMaxFactors ||
                  length > kMaxVectors<RowKind<true, false, false>> * n)) {
    return false;
  }
  RowsArguments<T> a = {};
  a.next_reads_early = o.next_reads_early;
  a.x = x.data;
  a.x_stride = x.stride;
  a.out = q.data;
  a.out_stride = q.stride;
  a.rows = o.x.rows();
  a.vectors = static_cast<int>(length / n);
  a.rules = plain_rules(p);
  const SegmentScales<float> given = given_scales<float>(o);
  a.given_scale = {given.scale, given.row_stride, given.value};
  a.scale = static_cast<float*>(o.scale.data);
  a.scale_stride = o.scale.row_stride;
  a.factors = static_cast<const float*>(o.multiplier.data);
  a.seed = o.seed;
  if (per_row > 1) {
    // Groups are short rows, if the ends of rows leave no gaps, here and in the scales.
    const auto in_line = [&](const Scales& s) { return !s.data || s.row_stride == per_row; };
    if (x.stride != o.x.cols() || q.stride != x.stride || !in_line(o.scale) ||
        (p.scale == ScaleSource::given && (!in_line(o.given_scale) || o.given_scale.on_host))) {
      return false;
    }
    a.rows *= per_row;
    a.x_stride = a.out_stride = length;
    a.scale_stride = a.given_scale.stride = 1;
  }
  with_row_kind(p, [&]<class Kind>() { enqueue_rows<T, Kind>(kRows, a, p.device, launch.stream); });
  return true;
}

// False if there are no whole rows, or they are too long or too short to share among a block.
template <class T>
bool launch_unaligned(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  constexpr std::int64_t kEach = kUnalignedVectors * kVectorSize<T>;
  const std::int64_t length = o.x.cols();
  if (p.granularity != Granularity::row || length > kUnalignedThreads * kEach || length < 512) return false;
  if (p.rounding != Rounding::nearest) return false;
  const SegmentScales<float> given = given_scales<float>(o);
  const IntegerRows q = integer_rows(o.q, kVectorSize<T>);
  const UnalignedArguments<T> a = {input_of<T>(p, o),
                                   static_cast<const T*>(o.x.data) + (o.x.rows() - 1) * o.x.strides[0] + length,
                                   q.data,
                                   q.stride,
                                   q.aligned,
                                   static_cast<int>(length),
                                   plain_rules(p),
                                   {given.scale, given.row_stride, given.value},
                                   static_cast<float*>(o.scale.data),
                                   o.scale.row_stride};
  const auto width = blocks_for(length, kEach);
  enqueue(kUnalignedRows, quantize_unaligned_rows<T>,
          {dim3(static_cast<unsigned>(o.x.rows())), dim3((width + 31) / 32 * 32)}, launch.stream, a);
  return true;
}

template <class T>
void launch_runs(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  using Real = RealOf<T>;
  constexpr int n = kVectorSize<T>;
  if constexpr (!std::is_same_v<T, double>) {
    if (is_plain(p) && (launch_plain<T>(p, o, launch) || launch_unaligned<T>(p, o, launch))) return;
  }
  const std::int64_t length = run_length(p);
  const Runs runs = {o.x.rows(), o.x.cols(), o.x.cols() / length, length};
  RunsArguments<T> a = {input_of<T>(p, o),     runs,
                        integer_rows(o.q, n),  rules_of<Real>(p, o),
                        given_scales<Real>(o), scale_outputs<Real>(o, runs.per_row)};
  if (runs.per_row > 1 && length % n != 0) a.x.x.aligned = a.q.aligned = false;
  const dim3 block = block_for(ceil_div(length, n), kVectorsOfMany);
  enqueue(kRuns, quantize_runs<T>, {dim3(blocks_for(runs.rows * runs.per_row, block.y)), block}, launch.stream, a);
}

template <class T>
void prepare_runs(const QuantizeProblem& p) {
  prepare(kRuns, quantize_runs<T>);
  if constexpr (!std::is_same_v<T, double>) {
    if (!is_plain(p)) return;
    with_row_kind(p, [&]<class Kind>() { prepare_rows<T, Kind>(kRows); });
    prepare(kUnalignedRows, quantize_unaligned_rows<T>);
  }
}

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    using Real = RealOf<T>;
    if (keeps_runs<T>(p)) return launch_runs<T>(p, o, launch);
    const SegmentScales<Real> scales = measure_segments<T>(p, o, launch);
    const Levels<T> levels = {input_of<T>(p, o), scales, rules_of<Real>(p, o), o.x.cols()};
    IntegerRows q = integer_rows(o.q, kVectorSize<T>);
    if (!o.q_transposed.present()) {
      return enqueue_walk(kElements, o.x, QuantizeElements<T>{scales, levels, q}, launch.stream);
    }
    const std::int64_t tiles = ceil_div(o.x.rows(), kTile) * ceil_div(o.x.cols(), kTile);
    enqueue(kTiles, quantize_tiles<T>, {dim3(static_cast<unsigned>(tiles)), dim3(kTileThreads)}, launch.stream, levels,
            o.x.rows(), q, integer_rows(o.q_transposed, 8));
  });
}

// On an H200, 8192 x 8192 f16: one pass over x, or two.
Cost cost(const QuantizeProblem& p) {
  Cost cost = quantize_cost(p, 3.9e12);
  const double x_bytes = static_cast<double>(p.rows) * static_cast<double>(p.cols) * bits(p.x) / 8;
  cost.seconds = keeps_runs(p) ? cost.seconds + 2e-6 : (cost.bytes + x_bytes) / 1.5e12 + 7e-6;
  return cost;
}

std::size_t workspace(const QuantizeProblem& p) { return keeps_runs(p) ? 0 : measure_segments_workspace(p); }

void load(const QuantizeProblem& p) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    if (keeps_runs<T>(p)) return prepare_runs<T>(p);
    measure_segments_prepare(p);
    p.orientation == Orientation::row_major ? prepare(kElements, walk_elements<QuantizeElements<T>>)
                                            : prepare(kTiles, quantize_tiles<T>);
  });
}

}  // namespace

extern constinit const QuantizeKernel quantize_sm80 = {
    .name = "quantize_sm80",
    .task = {Operation::quantize},
    .device = DeviceType::cuda,
    .supports = quantizer_sm80_supports,
    .cost = cost,
    .workspace = workspace,
    .launch = launch,
    .prepare = load,
};

}  // namespace octile::cuda
