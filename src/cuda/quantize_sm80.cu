// q = clamp(rint(x / s) + z, q_min, q_max), scales found on the way; into (rows, cols), (cols, rows) or both.
// Stochastic: floor(x / s + u) + z.
//
//   quantize_rows        segments along rows, row-major out, symmetric, to nearest, into bytes, aligned: x is read once
//                        and kept in registers until the scale is known
//   quantize_loose_rows  the same wherever the rows lie
//   quantize_runs        the same with any option and type
//   everything else      scales by a pass of their own (segments_sm80.cu), then the levels: QuantizeElements row-major,
//                        quantize_tiles by way of shared memory
#include "device/plain.cuh"
#include "segments.cuh"

namespace octile::cuda {

namespace {

constexpr int kMostThreads = 1024;
constexpr int kRowThreads = 512;                 // at most, for a row of the usual kind
constexpr std::int64_t kMostFactors = 24 << 10;  // of columns, that fit shared memory twice
constexpr int kVectorsOfMany = 4;                // of 16 bytes, that a thread keeps where there are rows enough

// Rows as most callers have them: symmetric, to nearest, into bytes, all in whole aligned vectors.
template <class T>
struct RowsArguments {
  const T* x;
  std::int64_t x_stride;
  std::uint8_t* q;
  std::int64_t q_stride;
  std::int64_t rows;
  int vectors;  // of a row
  PlainRules rules;
  RowScale<float> given_scale;
  float* scale;  // may be null
  std::int64_t scale_stride;
  const float* factors;  // of the columns
};

// A row of the block, a power of two up to 32 threads or whole warps, keeps a row: kVectors vectors for each thread.
// With factors a block goes on to other rows, so that it fetches those once: into shared memory, (n / 4, vectors, 4).
template <class T, int kVectors, bool kFactors>
__global__ void __launch_bounds__(kRowThreads, kVectors > 4 ? 2 : 3) quantize_rows(RowsArguments<T> a) {
  constexpr int n = kVectorSize<T>;
  __shared__ float warp_most[kRowThreads / 32];
  __shared__ PlainScale of_block;
  extern __shared__ float4 factors[];
  const int lane = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  std::int64_t r = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;

  let_next_start();
  wait_for_previous();
  if constexpr (kFactors) {
    for (int i = static_cast<int>(threadIdx.y) * width + lane; i < a.vectors * (n / 4); i += width * blockDim.y) {
      factors[i % (n / 4) * a.vectors + i / (n / 4)] = __ldcg(reinterpret_cast<const float4*>(a.factors) + i);
    }
    __syncthreads();
  }
  const auto widen_at = [&](const Vector<T>& v, int vector, float(&x)[n]) {
    widen(v, x);
    if constexpr (kFactors) {
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        const float4 f = factors[i / 4 * a.vectors + vector];
        x[i] = __fmul_rn(x[i], f.x);
        x[i + 1] = __fmul_rn(x[i + 1], f.y);
        x[i + 2] = __fmul_rn(x[i + 2], f.z);
        x[i + 3] = __fmul_rn(x[i + 3], f.w);
      }
    }
  };

  for (; r - threadIdx.y < a.rows; r += std::int64_t{gridDim.x} * blockDim.y) {
    const int vectors = r < a.rows ? a.vectors : 0;
    const T* const row = a.x + r * a.x_stride + lane * n;
    Vector<T> v[kVectors] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * width + lane < vectors) v[k] = load_vector(row + k * width * n, n, true);
    }

    float most = 0;
    if constexpr (kFactors) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (k * width + lane >= vectors) break;
        float x[n];
        widen_at(v[k], k * width + lane, x);
#pragma unroll
        for (int i = 0; i < n; ++i) most = max_nan(most, fabsf(x[i]));
      }
    } else {
      Magnitude<T> magnitude;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) magnitude.include(v[k]);
      most = magnitude.value();
    }
    PlainScale g;
    if (width <= 32) {
      g = plain_scale(a.rules, max_of_lanes(most, width), a.rules.given ? a.given_scale[vectors > 0 ? r : 0] : 0.0f);
    } else {
      // One warp resolves for all: the divisions cost as much as rounding a dozen elements.
      most = max_of_lanes(most);
      if (lane % 32 == 0) warp_most[lane / 32] = most;
      __syncthreads();
      if (lane < 32) {
        most = max_of_lanes(lane < width / 32 ? warp_most[lane] : 0.0f);
        g = plain_scale(a.rules, most, a.rules.given ? a.given_scale[r] : 0.0f);
        if (lane == 0) of_block = g;
      }
      __syncthreads();
      g = of_block;
    }
    if (lane == 0 && vectors > 0 && a.scale) a.scale[r * a.scale_stride] = g.s;

    std::uint8_t* const out = a.q + r * a.q_stride + lane * n;
    unsigned suspects = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * width + lane >= vectors) break;
      float x[n];
      std::int32_t levels[n];
      widen_at(v[k], k * width + lane, x);
      if (!plain_levels(x, g, a.rules, levels)) suspects |= 1u << k;
      LevelBytes<n>(levels, g.good()).store(out + k * width * n);
    }
    // Few vectors are divided: from memory, and written again.
    for (; suspects != 0; suspects &= suspects - 1) {
      const int first = (__ffs(static_cast<int>(suspects)) - 1) * width;
      float x[n];
      std::int32_t levels[n];
      widen_at(load_vector(row + first * n, n, true), first + lane, x);
      divided_levels(x, {g.s, 0}, a.rules.q_min, a.rules.q_max, levels);
      LevelBytes<n>(levels, true).store(out + first * n);
    }
  }
}

constexpr int kLooseElements = 32;  // of a row, that a thread keeps

// Rows as plain as those, wherever they lie: neighbouring threads take neighbouring elements. With the vectors of
// quantize_runs, element by element, the loads of a warp touched eight times as many lines.
template <class T>
struct LooseArguments {
  Input<T> x;
  std::uint8_t* q;
  std::int64_t q_stride;
  int length;
  PlainRules rules;
  RowScale<float> given_scale;
  float* scale;  // may be null
  std::int64_t scale_stride;
};

// A block keeps a row.
template <class T>
__global__ void __launch_bounds__(kMostThreads) quantize_loose_rows(LooseArguments<T> a) {
  __shared__ float warp_most[kMostThreads / 32];
  const std::int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  let_next_start();
  wait_for_previous();
  float x[kLooseElements];
#pragma unroll
  for (int k = 0; k < kLooseElements; ++k) {
    const int c = k * width + thread;
    x[k] = c < a.length ? a.x.get_one(r, c) : 0.0f;
  }
  float most = 0;
#pragma unroll
  for (int k = 0; k < kLooseElements; ++k) most = max_nan(most, fabsf(x[k]));
  most = max_of_lanes(most);
  if (thread % 32 == 0) warp_most[thread / 32] = most;
  __syncthreads();
  most = max_of_lanes(thread % 32 < width / 32 ? warp_most[thread % 32] : 0.0f);
  const PlainScale g = plain_scale(a.rules, most, a.rules.given ? a.given_scale[r] : 0.0f);
  if (thread == 0 && a.scale) a.scale[r * a.scale_stride] = g.s;
  std::uint8_t* const q = a.q + r * a.q_stride;
#pragma unroll
  for (int k = 0; k < kLooseElements; ++k) {
    const int c = k * width + thread;
    if (c >= a.length) break;
    const float one[1] = {x[k]};
    std::int32_t level[1];
    if (!plain_levels(one, g, a.rules, level)) level[0] = divided_level(x[k], g.s, a.rules.q_min, a.rules.q_max);
    q[c] = static_cast<std::uint8_t>(g.good() ? level[0] : 0);
  }
}

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
__global__ void __launch_bounds__(kMostThreads) quantize_runs(RunsArguments<T> a) {
  using Real = RealOf<T>;
  constexpr int n = kVectorSize<T>;
  constexpr int kVectors = kVectorsOfMany;
  __shared__ Extremes<Real> scratch[kMostThreads / 32];
  const int lane = static_cast<int>(threadIdx.x);
  const int width = static_cast<int>(blockDim.x);
  const std::int64_t segment = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const std::int64_t r = a.runs.per_row == 1 ? segment : segment / a.runs.per_row;
  const std::int64_t g = a.runs.per_row == 1 ? 0 : segment % a.runs.per_row;
  const std::int64_t first = g * a.runs.length;
  const int length = r < a.runs.rows ? static_cast<int>(a.runs.length) : 0;
  const auto column = [&](int k) { return (k * width + lane) * n; };
  const bool symmetric = a.rules.symmetric;

  let_next_start();
  wait_for_previous();
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
  let_next_start();
  wait_for_previous();
  const auto tiles_down = static_cast<unsigned>((rows + kTile - 1) / kTile);
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
constexpr std::string_view kLooseRows = "quantize_sm80 (loose rows)";
constexpr std::string_view kRuns = "quantize_sm80 (runs)";
constexpr std::string_view kElements = "quantize_sm80 (elements)";
constexpr std::string_view kTiles = "quantize_sm80 (tiles)";

std::int64_t run_length(const QuantizeProblem& p) { return p.granularity == Granularity::group ? p.group : p.cols; }

// Whether quantize_runs can do it: a segment fits the registers of a block, and no two share a byte.
template <class T>
bool keeps_runs(const QuantizeProblem& p) {
  const std::int64_t length = run_length(p);
  return (p.granularity == Granularity::row || p.granularity == Granularity::group) &&
         p.orientation == Orientation::row_major && length <= kMostThreads * kVectorsOfMany * kVectorSize<T> &&
         !(p.q == DType::s4 && p.granularity == Granularity::group && length % 2 != 0);
}

// Whether quantize_rows may do it, if the tensors too are what it needs.
bool is_plain(const QuantizeProblem& p) {
  return p.mapping == Mapping::symmetric && p.rounding == Rounding::nearest && p.x != DType::f64 && p.q != DType::s4 &&
         p.multiplier != Multiplier::per_row;
}

// Threads for a segment of so many vectors: a power of two, or whole warps.
unsigned width_for(std::int64_t vectors, int each) {
  const auto threads = static_cast<unsigned>((vectors + each - 1) / each);
  unsigned width = (threads + 31) / 32 * 32;
  while (width <= 32 && width / 2 >= threads) width /= 2;
  return width;
}

template <class T, int kVectors, bool kFactors>
void launch_plain_rows(const QuantizeProblem& p, const RowsArguments<T>& a, Stream stream) {
  const unsigned width = width_for(a.vectors, kVectors);
  const unsigned height = width <= 32 ? 256 / width : 1;
  std::int64_t blocks = (a.rows + height - 1) / height;
  if (kFactors) blocks = std::min<std::int64_t>(blocks, 5 * properties(p.device).multiprocessors);
  const unsigned shared = kFactors ? static_cast<unsigned>(a.vectors) * kVectorSize<T> * 4 : 0;
  enqueue(kRows, quantize_rows<T, kVectors, kFactors>,
          {dim3(static_cast<unsigned>(blocks)), dim3(width, height), shared}, stream, a);
}

// False if the tensors are not what it needs.
template <class T>
bool launch_plain(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  constexpr int n = kVectorSize<T>;
  const Rows<const T> x = rows_of<T>(o.x);
  const IntegerRows q = integer_rows(o.q, n);
  const std::int64_t length = run_length(p);
  const std::int64_t per_row = o.x.cols() / length;
  const bool factors = p.multiplier != Multiplier::none;
  if (!x.aligned || !q.aligned || length % n != 0 || length > 2 * kRowThreads * kVectorsOfMany * n) return false;
  if (factors &&
      (per_row > 1 || o.multiplier.device.type == DeviceType::cpu || o.multiplier.strides[0] != 1 ||
       !aligned_rows(o.multiplier.data, 0, 16) || length > kMostFactors || length > kRowThreads * kVectorsOfMany * n)) {
    return false;
  }
  RowsArguments<T> a = {};
  a.x = x.data;
  a.x_stride = x.stride;
  a.q = q.data;
  a.q_stride = q.stride;
  a.rows = o.x.rows();
  a.vectors = static_cast<int>(length / n);
  a.rules = plain_rules(p);
  const SegmentScales<float> given = given_scales<float>(o);
  a.given_scale = {given.scale, given.row_stride, given.value};
  a.scale = static_cast<float*>(o.scale.data);
  a.scale_stride = o.scale.row_stride;
  a.factors = static_cast<const float*>(o.multiplier.data);
  if (per_row > 1) {
    // Groups are short rows, if the ends of rows leave no gaps, here and in the scales.
    const auto in_line = [&](const Scales& s) { return !s.data || s.row_stride == per_row; };
    if (x.stride != o.x.cols() || q.stride != x.stride || !in_line(o.scale) ||
        (p.scale == ScaleSource::given && (!in_line(o.given_scale) || o.given_scale.on_host))) {
      return false;
    }
    a.rows *= per_row;
    a.x_stride = a.q_stride = length;
    a.scale_stride = a.given_scale.stride = 1;
  }
  const bool few = a.rows <= 4 * properties(p.device).multiprocessors;
  if (factors) {
    launch_plain_rows<T, kVectorsOfMany, true>(p, a, launch.stream);
  } else if (few && a.vectors <= kRowThreads) {
    launch_plain_rows<T, 1, false>(p, a, launch.stream);
  } else if (a.vectors <= kRowThreads * kVectorsOfMany) {
    launch_plain_rows<T, kVectorsOfMany, false>(p, a, launch.stream);
  } else {
    launch_plain_rows<T, 2 * kVectorsOfMany, false>(p, a, launch.stream);
  }
  return true;
}

// False if there are no whole rows, or they are too long or too short to share among a block.
template <class T>
bool launch_loose(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  const std::int64_t length = o.x.cols();
  if (p.granularity != Granularity::row || length > kMostThreads * kLooseElements || length < 512) return false;
  const SegmentScales<float> given = given_scales<float>(o);
  const LooseArguments<T> a = {input_of<T>(p, o),
                               static_cast<std::uint8_t*>(o.q.data),
                               o.q.strides[0],
                               static_cast<int>(length),
                               plain_rules(p),
                               {given.scale, given.row_stride, given.value},
                               static_cast<float*>(o.scale.data),
                               o.scale.row_stride};
  const auto width = static_cast<unsigned>(std::max<std::int64_t>((length + kLooseElements - 1) / kLooseElements, 128));
  enqueue(kLooseRows, quantize_loose_rows<T>, {dim3(static_cast<unsigned>(o.x.rows())), dim3((width + 31) / 32 * 32)},
          launch.stream, a);
  return true;
}

template <class T>
void launch_runs(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  using Real = RealOf<T>;
  constexpr int n = kVectorSize<T>;
  if constexpr (!std::is_same_v<T, double>) {
    if (is_plain(p) && (launch_plain<T>(p, o, launch) || launch_loose<T>(p, o, launch))) return;
  }
  const std::int64_t length = run_length(p);
  const Runs runs = {o.x.rows(), o.x.cols(), o.x.cols() / length, length};
  RunsArguments<T> a = {input_of<T>(p, o),     runs,
                        integer_rows(o.q, n),  rules_of<Real>(p, o),
                        given_scales<Real>(o), scale_outputs<Real>(o, runs.per_row)};
  if (runs.per_row > 1 && length % n != 0) a.x.x.aligned = a.q.aligned = false;
  const unsigned width = width_for((length + n - 1) / n, kVectorsOfMany);
  const unsigned height = width <= 32 ? 256 / width : 1;
  const std::int64_t blocks = (runs.rows * runs.per_row + height - 1) / height;
  enqueue(kRuns, quantize_runs<T>, {dim3(static_cast<unsigned>(blocks)), dim3(width, height)}, launch.stream, a);
}

template <class T>
void prepare_runs(const QuantizeProblem& p) {
  prepare(kRuns, quantize_runs<T>);
  if constexpr (!std::is_same_v<T, double>) {
    if (!is_plain(p)) return;
    prepare(kRows, quantize_rows<T, kVectorsOfMany, true>, kMostFactors * sizeof(float));
    prepare(kRows, quantize_rows<T, kVectorsOfMany, false>);
    prepare(kRows, quantize_rows<T, 2 * kVectorsOfMany, false>);
    prepare(kRows, quantize_rows<T, 1, false>);
    prepare(kLooseRows, quantize_loose_rows<T>);
  }
}

}  // namespace

void quantize_sm80(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
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
    const std::int64_t tiles = ((o.x.rows() + kTile - 1) / kTile) * ((o.x.cols() + kTile - 1) / kTile);
    enqueue(kTiles, quantize_tiles<T>, {dim3(static_cast<unsigned>(tiles)), dim3(kTileThreads)}, launch.stream, levels,
            o.x.rows(), q, integer_rows(o.q_transposed, 8));
  });
}

// On an H200, 8192 x 8192 f16: one look at x, or two.
Cost quantize_sm80_cost(const QuantizeProblem& p) {
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.cols);
  const double bytes = elements * (bits(p.x) + bits(p.q) * (p.orientation == Orientation::both ? 2 : 1)) / 8;
  if (with_float_type(p.x, [&](auto x) { return keeps_runs<decltype(x)>(p); })) {
    return {2 * elements, bytes, bytes / 3.9e12 + 2e-6};
  }
  return {2 * elements, bytes, (bytes + elements * bits(p.x) / 8) / 1.5e12 + 7e-6};
}

std::size_t quantize_sm80_workspace(const QuantizeProblem& p) {
  const bool keeps = with_float_type(p.x, [&](auto x) { return keeps_runs<decltype(x)>(p); });
  return keeps ? 0 : measure_segments_workspace(p);
}

void quantize_sm80_prepare(const QuantizeProblem& p) {
  with_float_type(p.x, [&](auto x) {
    using T = decltype(x);
    if (keeps_runs<T>(p)) return prepare_runs<T>(p);
    measure_segments_prepare(p);
    p.orientation == Orientation::row_major ? prepare(kElements, walk_elements<QuantizeElements<T>>)
                                            : prepare(kTiles, quantize_tiles<T>);
  });
}

}  // namespace octile::cuda
