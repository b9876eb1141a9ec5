// x = (q - z) * s, and its gradient dq = dy * s.
#include <type_traits>

#include "cpu/quantize/scale_rows.h"
#include "cpu/support/cost.h"
#include "plan/either.h"

namespace octile::cpu {

namespace {

// A run of integers or floats.
struct MultiplyByScale {
  template <Isa, class X, class Real, class Scale>
  OCTILE_INLINE static void run(const X* __restrict x, Scale scale, std::int64_t n, Ahead ahead, Real* __restrict y) {
    std::int64_t i = 0;
    for (; i + kAheadStep <= n; i += kAheadStep) {
      ahead.prefetch();
      multiply(x + i, scale.from(i).step(), kAheadStep, y + i);
    }
    if (i < n) multiply(x + i, scale.from(i).step(), n - i, y + i);
  }

  template <class X, class Real, class Scale>
  OCTILE_INLINE static void multiply(const X* __restrict x, const Scale& scale, std::int64_t n, Real* __restrict y) {
    for (std::int64_t i = 0; i < n; ++i) {
      if constexpr (std::is_same_v<X, Real>) {
        y[i] = x[i] * scale.s(i);
      } else {
        y[i] = static_cast<Real>(x[i] - scale.z(i)) * scale.s(i);
      }
    }
  }
};

template <class Real>
void dequantize(const QuantizeProblem& p, const QuantizeOperands& o) {
  for_each_scaled_piece<Real>(
      p, o, o.q_in, GivenScales<Real>(o.given_zero_point.data), [&](const RowPiece& piece, auto scale, auto& out) {
        Real buffer[kRowChunk<Real>];
        const std::int64_t from = piece.at(o.q_in);
        const std::int64_t at = piece.at(o.y);
        const Ahead ahead = piece.ahead(o.q_in);
        Real* const y = out.target(at, buffer);
        if (o.q_in.dtype == DType::s8) {
          multiversion<MultiplyByScale>(static_cast<const std::int8_t*>(o.q_in.data) + from, scale, piece.n, ahead, y);
        } else if (o.q_in.dtype == DType::u8) {
          multiversion<MultiplyByScale>(static_cast<const std::uint8_t*>(o.q_in.data) + from, scale, piece.n, ahead, y);
        } else {
          std::int8_t q[kRowChunk<Real>];
          unpack_s4(static_cast<const std::uint8_t*>(o.q_in.data), from, piece.n, q);
          multiversion<MultiplyByScale>(static_cast<const std::int8_t*>(q), scale, piece.n, ahead, y);
        }
        out.put(at, piece.n, y);
      });
}

template <class Real>
void dequantize_backward(const QuantizeProblem& p, const QuantizeOperands& o) {
  for_each_scaled_piece<Real>(p, o, o.dy, GivenScales<Real>(false), [&](const RowPiece& piece, auto scale, auto& out) {
    Real dy_buffer[kRowChunk<Real>];
    Real buffer[kRowChunk<Real>];
    const Real* dy = widened(o.dy.dtype, o.dy.data, piece.at(o.dy), piece.n, dy_buffer);
    const std::int64_t at = piece.at(o.y);
    Real* const y = out.target(at, buffer);
    multiversion<MultiplyByScale>(dy, scale, piece.n, piece.ahead(o.dy), y);
    out.put(at, piece.n, y);
  });
}

}  // namespace

extern constinit const QuantizeKernel dequantize_portable =
    portable_row("dequantize_portable", Operation::dequantize, either<dequantize<float>, dequantize<double>>);

extern constinit const QuantizeKernel dequantize_backward_portable =
    portable_row("dequantize_backward_portable", Operation::dequantize_backward,
                 either<dequantize_backward<float>, dequantize_backward<double>>);

}  // namespace octile::cpu
