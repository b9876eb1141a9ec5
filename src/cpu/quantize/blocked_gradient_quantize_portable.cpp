// dY quantized for both products of a backward, in blocks of T terms, and its column sums:
//
//   q1[r, c] = rint(dY[r, c] * w[c] / s1), s1 of row r and T columns
//   q2[r, c] = rint(dY[r, c] * x[r] / s2), s2 of T rows and column c; transposed
//
// A tile has T rows and at least T columns. Its first pass finds s2, adds up its columns and does all of q1; its
// second, which finds it in the caches, does q2. So dY is read from memory once. Sums of tiles are added in the order
// of their rows, whichever thread had them.
#include <algorithm>

#include "cpu/quantize/segments.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kMinRowBytes = 2048;  // 128 such rows: a quarter of a 1 MiB L2
constexpr std::int64_t kMaxTileCols = std::max(kMinRowBytes / 2, kMaxGradientBlock);
constexpr std::int64_t kBandRows = 128;    // transposed together: two lines of each transposed row
constexpr std::int64_t kMeasuredRows = 4;  // measured at a time

std::int64_t tile_cols(const QuantizeProblem& p) { return std::max(p.group, kMinRowBytes * 8 / bits(p.x)); }

// Rows of a band lie 64 bytes further apart than they are long, since a power of two would drive the bytes of a column
// into the same few places of a cache.
std::int64_t band_stride(const QuantizeProblem& p) { return tile_cols(p) + 64; }

// The column sums of `rows` rows of x, and the largest magnitudes of x times each row's factor.
template <bool sums, bool magnitudes>
struct MeasureRows {
  template <Isa>
  OCTILE_INLINE static void run(const float* __restrict x, std::int64_t stride, std::int64_t rows, std::int64_t n,
                                const float* __restrict factors, float* __restrict sum, Key<float>* __restrict high) {
    if (rows == kMeasuredRows) {
      const float f[kMeasuredRows] = {factors[0], factors[1], factors[2], factors[3]};
      for (std::int64_t j = 0; j < n; ++j) {
        const float v[kMeasuredRows] = {x[j], x[stride + j], x[2 * stride + j], x[3 * stride + j]};
        if constexpr (sums) sum[j] = (((sum[j] + v[0]) + v[1]) + v[2]) + v[3];
        if constexpr (magnitudes) {
          const Key<float> first = std::max(magnitude_key(v[0] * f[0]), magnitude_key(v[1] * f[1]));
          const Key<float> second = std::max(magnitude_key(v[2] * f[2]), magnitude_key(v[3] * f[3]));
          high[j] = std::max(high[j], std::max(first, second));
        }
      }
      return;
    }
    for (std::int64_t r = 0; r < rows; ++r, x += stride) {
      for (std::int64_t j = 0; j < n; ++j) {
        if constexpr (sums) sum[j] += x[j];
        if constexpr (magnitudes) high[j] = std::max(high[j], magnitude_key(x[j] * factors[r]));
      }
    }
  }
};

class GradientWalk {
 public:
  GradientWalk(const QuantizeProblem& p, const QuantizeOperands& o, void* workspace)
      : p_(p),
        o_(o),
        rows_(o.x.rows()),
        cols_(o.x.cols()),
        width_(tile_cols(p)),
        around_caches_(outgrows_caches(bytes_moved(o))),
        threads_(useful_threads(p.threads, static_cast<double>(rows_) * static_cast<double>(cols_))) {
    Pieces pieces(workspace);
    bands_ = pieces.take(bytes_of_bands(p));
    sums_ = reinterpret_cast<float*>(pieces.take(bytes_of_sums(p)));
  }

  static std::size_t workspace(const QuantizeProblem& p) {
    return static_cast<std::size_t>(bytes_of_bands(p) + bytes_of_sums(p));
  }

  void run() const {
    const std::int64_t across = ceil_div(cols_, width_);
    const std::int64_t tiles = ceil_div(rows_, p_.group) * across;
    share(threads_, tiles, [&](std::int64_t worker, auto take) {
      Part part;
      part.band = bands_ + worker * kBandRows * band_stride(p_);
      const auto tile = [&](std::int64_t i) {
        const std::int64_t row = i / across * p_.group;
        const std::int64_t col = i % across * width_;
        return Tile{row, col, std::min(p_.group, rows_ - row), std::min(width_, cols_ - col)};
      };
      for (std::int64_t i = take(); i < tiles;) {
        const std::int64_t next = take();
        run_tile(part, tile(i), next < tiles ? tile(next) : Tile());
        i = next;
      }
      if (around_caches_) end_copies();
    });
    if (!o_.y.present()) return;
    parallel_for(threads_, across,
                 [&](std::int64_t i) { finish_sums(i * width_, std::min(width_, cols_ - i * width_)); });
  }

 private:
  struct Tile {
    std::int64_t row = 0, col = 0, rows = 0, cols = 0;
  };

  // Of a worker.
  struct Part {
    std::uint8_t* band;
    alignas(64) float x[kMeasuredRows][kMaxTileCols];
    alignas(64) float product[kMaxTileCols];
    alignas(64) float multiplier[kMaxTileCols];
    alignas(64) float sums[kMaxTileCols];
    alignas(64) float scales[kMaxTileCols];
    alignas(64) float inverses[kMaxTileCols];
    alignas(64) Key<float> high[kMaxTileCols];
    alignas(64) std::uint8_t q[kMaxTileCols];
    alignas(64) std::uint16_t noise[kMaxTileCols + 16];
    Extremes<float> extremes[kMaxTileCols];
    Segment<float> segments[kMaxTileCols];
  };

  static std::int64_t bytes_of_bands(const QuantizeProblem& p) {
    const int threads = useful_threads(p.threads, static_cast<double>(p.rows) * static_cast<double>(p.cols));
    return threads * kBandRows * band_stride(p);
  }
  static std::int64_t bytes_of_sums(const QuantizeProblem& p) {
    return ceil_div(p.rows, p.group) * p.cols * static_cast<std::int64_t>(sizeof(float));
  }

  // `next` is fetched while q2 is written.
  void run_tile(Part& part, const Tile& tile, const Tile& next) const {
    std::fill_n(part.sums, tile.cols, 0.0f);
    std::fill_n(part.high, tile.cols, 0);
    if (o_.q.present()) {
      const auto* factors = static_cast<const float*>(o_.multiplier.data);
      const std::int64_t stride = o_.multiplier.strides[0];
      for (std::int64_t i = 0; i < tile.cols; ++i) part.multiplier[i] = factors[(tile.col + i) * stride];
    }
    for (std::int64_t r = 0; r < tile.rows; r += kMeasuredRows) {
      measure(part, {tile.row + r, tile.col, std::min(kMeasuredRows, tile.rows - r), tile.cols});
    }
    if (o_.y.present()) std::copy_n(part.sums, tile.cols, sums_ + tile.row / p_.group * cols_ + tile.col);
    if (!o_.q_transposed.present()) return;
    find_column_scales(part, tile);
    for (std::int64_t r = 0; r < tile.rows; r += kBandRows) {
      write_band(part, {tile.row + r, tile.col, std::min(kBandRows, tile.rows - r), tile.cols}, next, r);
    }
  }

  const float* row_of_x(std::int64_t r, std::int64_t c, std::int64_t n, float* buffer) const {
    return widened(o_.x.dtype, o_.x.data, r * o_.x.strides[0] + c, n, buffer);
  }

  // A few rows of a tile.
  void measure(Part& part, const Tile& rows) const {
    const float* x[kMeasuredRows];
    float factors[kMeasuredRows] = {};
    for (std::int64_t i = 0; i < rows.rows; ++i) {
      x[i] = row_of_x(rows.row + i, rows.col, rows.cols, part.x[i]);
      if (o_.q_transposed.present()) factors[i] = row_factor(rows.row + i);
    }
    const auto measure_by = [&](auto kernel) {
      multiversion<decltype(kernel)>(x[0], x[0] == part.x[0] ? kMaxTileCols : o_.x.strides[0], rows.rows, rows.cols,
                                     static_cast<const float*>(factors), static_cast<float*>(part.sums),
                                     static_cast<Key<float>*>(part.high));
    };
    if (o_.y.present() && o_.q_transposed.present()) {
      measure_by(MeasureRows<true, true>());
    } else if (o_.y.present()) {
      measure_by(MeasureRows<true, false>());
    } else if (o_.q_transposed.present()) {
      measure_by(MeasureRows<false, true>());
    }
    if (!o_.q.present()) return;
    for (std::int64_t i = 0; i < rows.rows; ++i) write_row(part, {rows.row + i, rows.col, 1, rows.cols}, x[i]);
  }

  float row_factor(std::int64_t r) const {
    return static_cast<const float*>(o_.row_multiplier.data)[r * o_.row_multiplier.strides[0]];
  }

  // Those of elements col .. col + n - 1 of a row; null: nearest.
  const std::uint16_t* noise(Part& part, const Tile& row) const {
    if (p_.rounding != Rounding::stochastic) return nullptr;
    const auto index = static_cast<std::uint64_t>(row.row * cols_ + row.col);
    const auto skipped = static_cast<std::int64_t>(index % 8);
    multiversion<FillNoise>(index / 8, ceil_div(skipped + row.cols, 8), o_.seed,
                            static_cast<std::uint16_t*>(part.noise));
    return part.noise + skipped;
  }

  // All but the elements.
  LevelRun<float, std::uint8_t> levels() const {
    LevelRun<float, std::uint8_t> run{};
    run.q_min = static_cast<float>(p_.q_min);
    run.q_max = static_cast<float>(p_.q_max);
    run.fits = p_.q_min <= -p_.q_max;
    return run;
  }

  void find_scales(Part& part, std::int64_t count) const {
    multiversion<ScalesOfMagnitudes>(static_cast<const Extremes<float>*>(part.extremes), count,
                                     static_cast<float>(p_.q_max), static_cast<float>(p_.min_scale),
                                     static_cast<Segment<float>*>(part.segments));
  }

  // A row of q, and its scales.
  void write_row(Part& part, const Tile& row, const float* x) const {
    const std::int64_t whole = row.cols / p_.group;
    const std::int64_t rest = row.cols % p_.group;
    const std::int64_t segments = whole + (rest > 0 ? 1 : 0);
    multiversion<Multiply>(x, static_cast<const float*>(part.multiplier), row.cols, static_cast<float*>(part.product));
    const float* product = part.product;
    std::fill_n(part.extremes, segments, Extremes<float>{});
    multiversion<Measure<true>>(product, whole, p_.group, Ahead(), static_cast<Extremes<float>*>(part.extremes));
    if (rest > 0) {
      multiversion<Measure<true>>(product + whole * p_.group, std::int64_t{1}, rest, Ahead(), part.extremes + whole);
    }
    find_scales(part, segments);
    auto* scale = static_cast<float*>(o_.scale.data) + o_.scale.index(row.row, row.col);
    auto* q = static_cast<std::uint8_t*>(o_.q.data) + row.row * o_.q.strides[0] + row.col;
    std::uint8_t* out = around_caches_ ? part.q : q;
    const std::uint16_t* u = noise(part, row);
    LevelRun<float, std::uint8_t> run = levels();
    // Else write_band has fetched them.
    const Ahead ahead = o_.q_transposed.present() ? Ahead() : ahead_of(o_.x, row.row + kMeasuredRows, row.col);
    OneScale<float> steps[kMaxTileCols / kAheadStep];
    for (std::int64_t k = 0; k < segments; ++k) scale[k * o_.scale.col_stride] = part.segments[k].s;
    for (std::int64_t i = 0; i * kAheadStep < row.cols; ++i) {
      steps[i] = OneScale<float>(part.segments[i * kAheadStep / p_.group].s, 0);
    }
    run.x = product;
    run.noise = u;
    run.n = row.cols;
    run.ahead = ahead;
    run.out = out;
    round_to_levels(run, ScaleSteps<float>{steps, 1});
    if (around_caches_) copy_around_caches(q, part.q, row.cols);
  }

  void find_column_scales(Part& part, const Tile& tile) const {
    for (std::int64_t i = 0; i < tile.cols; ++i) part.extremes[i] = {0, part.high[i]};
    find_scales(part, tile.cols);
    multiversion<SpreadScales<false>>(static_cast<const Segment<float>*>(part.segments), tile.cols, std::int64_t{1},
                                      static_cast<float*>(part.scales), static_cast<float*>(part.inverses),
                                      static_cast<std::int32_t*>(nullptr));
    auto* scale = static_cast<float*>(o_.column_scale.data) + o_.column_scale.index(tile.row, tile.col);
    for (std::int64_t i = 0; i < tile.cols; ++i) scale[i * o_.column_scale.col_stride] = part.scales[i];
  }

  // Rows of a tile, from its row `done` on, of q_transposed.
  void write_band(Part& part, const Tile& band, const Tile& next, std::int64_t done) const {
    const std::int64_t stride = band_stride(p_);
    LevelRun<float, std::uint8_t> run = levels();
    run.x = part.product;
    run.n = band.cols;
    for (std::int64_t i = 0; i < band.rows; ++i) {
      const Tile row = {band.row + i, band.col, 1, band.cols};
      const float* x = row_of_x(row.row, row.col, row.cols, part.product);
      multiversion<MultiplyByOne>(x, row_factor(row.row), row.cols, static_cast<float*>(part.product));
      run.noise = noise(part, row);
      run.ahead = done + i < next.rows ? ahead_of(o_.x, next.row + done + i, next.col) : Ahead();
      run.out = part.band + i * stride;
      round_to_levels(run, ScaleEach<false, float>{part.scales, part.inverses, nullptr});
    }
    const std::int64_t to_stride = o_.q_transposed.strides[0];
    auto* to = static_cast<std::uint8_t*>(o_.q_transposed.data) + band.col * to_stride + band.row;
    transpose({part.band, stride}, {to, to_stride}, band.rows, band.cols, around_caches_);
  }

  void finish_sums(std::int64_t col, std::int64_t n) const {
    alignas(64) float total[kMaxTileCols] = {};
    const std::int64_t blocks = ceil_div(rows_, p_.group);
    for (std::int64_t b = 0; b < blocks; ++b) add<float>(total, 0, n, sums_ + b * cols_ + col);
    const Tensor& y = o_.y;
    const std::int64_t stride = y.rank == 1 ? y.strides[0] : y.strides[1];
    if (stride == 1) return narrow<float>(y.dtype, y.data, col, n, total);
    for (std::int64_t i = 0; i < n; ++i) narrow<float>(y.dtype, y.data, (col + i) * stride, 1, total + i);
  }

  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t width_;
  bool around_caches_;
  int threads_;
  std::uint8_t* bands_;
  float* sums_;  // (blocks of rows, cols)
};

std::string supports(const QuantizeProblem& p) { return p.x == DType::f64 ? "has no f64" : ""; }

Cost cost(const QuantizeProblem& p) { return quantize_cost(p, 8e9 * thread_count(p.threads)); }

void launch(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  GradientWalk(p, o, launch.workspace.data).run();
}

}  // namespace

extern constinit const QuantizeKernel blocked_gradient_quantize_portable = {
    .name = "blocked_gradient_quantize_portable",
    .task = {Operation::blocked_gradient_quantize},
    .supports = supports,
    .cost = cost,
    .workspace = GradientWalk::workspace,
    .launch = launch,
};

}  // namespace octile::cpu
