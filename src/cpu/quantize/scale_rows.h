// The walk of the four kernels that are given their scales: elementwise, a piece of a row at a time.
#pragma once

#include <algorithm>

#include "cpu/quantize/levels.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/kernel.h"

namespace octile::cpu {

// Elements of a piece. What a worker keeps for one lies on its stack.
template <class Real>
inline constexpr std::int64_t kRowChunk = 4096 / sizeof(Real);

// A piece of a row, and the piece that is to be fetched meanwhile.
struct RowPiece {
  std::int64_t row = 0, col = 0, n = 0;
  std::int64_t next_row = 0, next_col = 0;

  std::int64_t at(const ConstTensor& t) const { return row * t.strides[0] + col; }
  Ahead ahead(const ConstTensor& t) const {
    const int size = bits(t.dtype);
    return {static_cast<const char*>(t.data), (next_row * t.strides[0] + next_col) * size / 8,
            static_cast<int>(kAheadStep) * size / 512};
  }
};

// Calls body(piece, scale, out) for pieces of at most kRowChunk<Real> elements, with OneScale<Real> or
// ScaleEach<affine, Real> and the FloatsOut of o.y.
template <class Real, class Body>
class ScaledRows {
 public:
  ScaledRows(const QuantizeProblem& p, const QuantizeOperands& o, const ConstTensor& shape, const Body& body)
      : o_(o), body_(body), rows_(shape.rows()), cols_(shape.cols()) {
    elements_ = static_cast<double>(rows_) * static_cast<double>(cols_);
    threads_ = useful_threads(p.threads, elements_);
  }

  void run() const {
    const std::int64_t even = ceil_div(rows_, 4 * threads_);
    const std::int64_t block =
        std::clamp<std::int64_t>(std::min(even, (1 << 18) / std::max<std::int64_t>(cols_, 1)), 1, 256);
    share(threads_, ceil_div(rows_, block), [&](std::int64_t, auto take) {
      Worker worker(o_.y, 2 * elements_);
      for (std::int64_t first; (first = take() * block) < rows_;) {
        run_block(worker, first, std::min(rows_, first + block));
      }
    });
  }

 private:
  struct Worker {
    Worker(const Tensor& y, double elements) : out(y, elements) {}
    FloatsOut<Real> out;
    Segment<Real> segments[kRowChunk<Real>];
    alignas(64) Real s[kRowChunk<Real>];
    alignas(64) Real inverses[kRowChunk<Real>];
    alignas(64) std::int32_t z[kRowChunk<Real>];
  };

  void run_block(Worker& w, std::int64_t r0, std::int64_t r1) const {
    const Scales& s = o_.given_scale;
    if (s.col_stride == 0 && (o_.given_zero_point.col_stride == 0 || !o_.given_zero_point.data)) {
      for (std::int64_t r = r0; r < r1; ++r) run_one(w, r, 0, cols_);
    } else if (s.group > kRowChunk<Real>) {
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = 0; c < cols_; c += s.group) run_one(w, r, c, s.group);
      }
    } else if (s.row_stride == 0 && (o_.given_zero_point.row_stride == 0 || !o_.given_zero_point.data)) {
      for (std::int64_t c = 0; c < cols_; c += step()) {
        spread(w, r0, c);
        for (std::int64_t r = r0; r < r1; ++r) run_each(w, {r, c, std::min(step(), cols_ - c), r + 1, c});
      }
    } else {
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = 0; c < cols_; c += step()) {
          spread(w, r, c);
          run_each(w, {r, c, std::min(step(), cols_ - c), r, c + kDistance});
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
    const OneScale<Real> one(g.s, g.z);
    for (std::int64_t i = 0; i < width; i += kRowChunk<Real>) {
      call(RowPiece{r, c + i, std::min(kRowChunk<Real>, width - i), r, c + i + kDistance}, one, w.out);
    }
  }

  // The scales of each element of a piece.
  void spread(Worker& w, std::int64_t r, std::int64_t c) const {
    const std::int64_t group = o_.given_scale.group;
    const std::int64_t count = std::min(step(), cols_ - c) / group;
    for (std::int64_t k = 0; k < count; ++k) w.segments[k] = segment(r, c + k * group);
    const auto with = [&](auto kernel) {
      multiversion<decltype(kernel)>(static_cast<const Segment<Real>*>(w.segments), count, group,
                                     static_cast<Real*>(w.s), static_cast<Real*>(w.inverses),
                                     static_cast<std::int32_t*>(w.z));
    };
    o_.given_zero_point.data ? with(SpreadScales<true>()) : with(SpreadScales<false>());
  }

  void run_each(Worker& w, const RowPiece& piece) const {
    o_.given_zero_point.data ? call(piece, ScaleEach<true, Real>{w.s, w.inverses, w.z}, w.out)
                             : call(piece, ScaleEach<false, Real>{w.s, w.inverses, w.z}, w.out);
  }

  // Not inlined: each copy would have its buffers in the one frame.
  template <class Scale>
  __attribute__((noinline)) void call(const RowPiece& piece, const Scale& scale, const FloatsOut<Real>& out) const {
    body_(piece, scale, out);
  }

  const QuantizeOperands& o_;
  const Body& body_;
  std::int64_t rows_;
  std::int64_t cols_;
  double elements_;
  int threads_;
};

template <class Real, class Body>
void for_each_scaled_piece(const QuantizeProblem& p, const QuantizeOperands& o, const ConstTensor& shape,
                           const Body& body) {
  ScaledRows<Real, Body>(p, o, shape, body).run();
}

}  // namespace octile::cpu
