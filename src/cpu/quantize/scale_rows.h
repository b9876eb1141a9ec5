// The walk of the four kernels that are given their scales: elementwise, a piece of a row at a time.
#pragma once

#include <algorithm>

#include "cpu/quantize/levels.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/kernel.h"

namespace octile::cpu {

// Elements of a piece. What a worker keeps for one is on its stack.
template <class Real>
inline constexpr std::int64_t kRowChunk = 4096 / sizeof(Real);

// A piece of a row, and the piece that is to be fetched meanwhile.
struct RowPiece {
  std::int64_t row = 0, col = 0, n = 0;
  std::int64_t next_row = 0, next_col = 0;

  std::int64_t at(const ConstTensor& t) const { return row * t.strides[0] + col; }
  Ahead ahead(const ConstTensor& t) const { return ahead_of(t, next_row, next_col); }
};

// Columns of which the scales are kept for all rows of a block. Three arrays of them fit half of an L1 cache: with
// twice as many a straight-through gradient took 1.5 times as long.
template <class Real>
inline constexpr std::int64_t kWindow = 2 * kRowChunk<Real>;

// What the kernels are given for each element: scales and zero points.
template <class Real>
class GivenScales {
 public:
  explicit GivenScales(bool affine) : affine_(affine) {}
  GivenScales(const GivenScales& other) : affine_(other.affine_) {}
  GivenScales& operator=(const GivenScales&) = delete;

  ScaleSteps<Real> one(const Segment<Real>& g) {
    steps_[0] = OneScale<Real>(g.s, g.z);
    return {steps_, 0};
  }
  // Of `count` segments of `length` elements, which are columns `col` and on of the window.
  void spread(const Segment<Real>* segments, std::int64_t count, std::int64_t length, std::int64_t col) {
    in_steps_ = length % kAheadStep == 0;
    for (std::int64_t i = 0; in_steps_ && i < count * length / kAheadStep; ++i) {
      const Segment<Real>& g = segments[i * kAheadStep / length];
      steps_[i] = OneScale<Real>(g.s, g.z);
    }
    if (in_steps_) return;
    const auto with = [&](auto kernel) {
      multiversion<decltype(kernel)>(segments, count, length, s_ + col, inverses_ + col, z_ + col);
    };
    affine_ ? with(SpreadScales<true>()) : with(SpreadScales<false>());
  }
  // Whether scales of single columns serve as stored: the window is the whole row then, and nothing is spread.
  bool takes(const Real* scales) {
    in_place_ = affine_ ? nullptr : scales;
    return !affine_;
  }
  template <class Body>
  void visit(std::int64_t col, const Body& body) const {
    if (in_place_) return body(ScaleEach<false, Real>{in_place_ + col, in_place_ + col, nullptr});
    if (in_steps_) return body(ScaleSteps<Real>{steps_, 1});
    affine_ ? body(ScaleEach<true, Real>{s_ + col, inverses_ + col, z_ + col})
            : body(ScaleEach<false, Real>{s_ + col, inverses_ + col, z_ + col});
  }

 private:
  bool affine_;
  bool in_steps_ = false;
  const Real* in_place_ = nullptr;
  OneScale<Real> steps_[kRowChunk<Real> / kAheadStep];
  alignas(64) Real s_[kWindow<Real>];
  alignas(64) Real inverses_[kWindow<Real>];
  alignas(64) std::int32_t z_[kWindow<Real>];
};

// Calls body(piece, scale, out) for pieces of at most kRowChunk<Real> elements, with what Given makes of one segment,
// or of several, and the FloatsOut of o.y.
template <class Real, class Given, class Body>
class ScaledRows {
 public:
  ScaledRows(const QuantizeProblem& p, const QuantizeOperands& o, const ConstTensor& shape, const Given& given,
             const Body& body)
      : o_(o), given_(given), body_(body), rows_(shape.rows()), cols_(shape.cols()) {
    elements_ = static_cast<double>(rows_) * static_cast<double>(cols_);
    threads_ = useful_threads(p.threads, elements_);
  }

  void run() const {
    // Scales of columns are spread once for a block, so that it is long.
    const std::int64_t even = ceil_div(rows_, 4 * threads_);
    const std::int64_t few = std::min<std::int64_t>(256, (1 << 18) / std::max<std::int64_t>(cols_, 1));
    const std::int64_t block = std::max<std::int64_t>(1, one_per_column() ? even : std::min(even, few));
    share(threads_, ceil_div(rows_, block), [&](std::int64_t, auto take) {
      Worker worker(o_.y, 2 * elements_, given_);
      for (std::int64_t first; (first = take() * block) < rows_;) {
        run_block(worker, first, std::min(rows_, first + block));
      }
    });
  }

 private:
  struct Worker {
    Worker(const Tensor& y, double elements, const Given& g) : out(y, elements), given(g) {}
    FloatsOut<Real> out;
    Given given;
    Segment<Real> segments[kRowChunk<Real>];
  };

  bool one_per_column() const {
    return o_.given_scale.row_stride == 0 && (o_.given_zero_point.row_stride == 0 || !o_.given_zero_point.data) &&
           o_.given_scale.col_stride != 0;
  }

  void run_block(Worker& w, std::int64_t r0, std::int64_t r1) const {
    const Scales& s = o_.given_scale;
    if (s.col_stride == 0 && (o_.given_zero_point.col_stride == 0 || !o_.given_zero_point.data)) {
      for (std::int64_t r = r0; r < r1; ++r) run_one(w, r, 0, cols_);
    } else if (s.group > kRowChunk<Real>) {
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = 0; c < cols_; c += s.group) run_one(w, r, c, s.group);
      }
    } else if (one_per_column()) {
      const bool in_place = s.group == 1 && s.col_stride == 1 && w.given.takes(static_cast<const Real*>(s.data));
      const std::int64_t window = in_place ? cols_ : 2 * step();  // whole groups, at most kWindow
      for (std::int64_t c0 = 0; c0 < cols_; c0 += window) {
        const std::int64_t c1 = std::min(cols_, c0 + window);
        for (std::int64_t c = c0; c < c1 && !in_place; c += step()) spread(w, r0, c, c - c0);
        for (std::int64_t r = r0; r < r1; ++r) {
          for (std::int64_t c = c0; c < c1; c += step()) {
            const RowPiece piece = {r, c, std::min(step(), c1 - c), in_place ? r : r + 1, in_place ? c + kDistance : c};
            w.given.visit(c - c0, [&](const auto& scale) { call(piece, scale, w.out); });
          }
        }
      }
    } else {
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = 0; c < cols_; c += step()) {
          spread(w, r, c, 0);
          const RowPiece piece = {r, c, std::min(step(), cols_ - c), r, c + kDistance};
          w.given.visit(0, [&](const auto& scale) { call(piece, scale, w.out); });
        }
      }
    }
  }

  static constexpr std::int64_t kDistance = 2048;  // elements

  std::int64_t step() const { return kRowChunk<Real> / o_.given_scale.group * o_.given_scale.group; }

  Segment<Real> segment(std::int64_t r, std::int64_t c) const {
    const auto* zeros = static_cast<const std::int32_t*>(o_.given_zero_point.data);
    return {static_cast<const Real*>(o_.given_scale.data)[o_.given_scale.index(r, c)],
            zeros ? zeros[o_.given_zero_point.index(r, c)] : 0};
  }

  // Columns c .. c + width - 1 of a row have one scale.
  void run_one(Worker& w, std::int64_t r, std::int64_t c, std::int64_t width) const {
    const Segment<Real> g = segment(r, c);
    const auto one = w.given.one(g);
    for (std::int64_t i = 0; i < width; i += kRowChunk<Real>) {
      call(RowPiece{r, c + i, std::min(kRowChunk<Real>, width - i), r, c + i + kDistance}, one, w.out);
    }
  }

  // The scales of each element of a piece, which is column `at` and on of the window.
  void spread(Worker& w, std::int64_t r, std::int64_t c, std::int64_t at) const {
    const std::int64_t group = o_.given_scale.group;
    const std::int64_t count = std::min(step(), cols_ - c) / group;
    for (std::int64_t k = 0; k < count; ++k) w.segments[k] = segment(r, c + k * group);
    w.given.spread(w.segments, count, group, at);
  }

  // Not inlined: each copy would have its buffers in the one frame.
  template <class Scale>
  __attribute__((noinline)) void call(const RowPiece& piece, const Scale& scale, const FloatsOut<Real>& out) const {
    body_(piece, scale, out);
  }

  const QuantizeOperands& o_;
  const Given& given_;
  const Body& body_;
  std::int64_t rows_;
  std::int64_t cols_;
  double elements_;
  int threads_;
};

template <class Real, class Given, class Body>
void for_each_scaled_piece(const QuantizeProblem& p, const QuantizeOperands& o, const ConstTensor& shape,
                           const Given& given, const Body& body) {
  ScaledRows<Real, Given, Body>(p, o, shape, given, body).run();
}

}  // namespace octile::cpu
