// x = (q - z) * s, and its gradient dq = dy * s.
#include "cpu/scale_rows.h"

namespace octile::cpu {

namespace {

struct Dequantize {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const std::int16_t* __restrict q, const Real* __restrict s,
                                const std::int32_t* __restrict z, std::int64_t n, Real* __restrict y) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = static_cast<Real>(q[i] - z[i]) * s[i];
  }
};

struct Scale {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* x, const Real* s, std::int64_t n, Real* y) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * s[i];
  }
};

template <class Real>
void dequantize(const QuantizeProblem& p, const QuantizeOperands& o) {
  for_each_scaled_piece<Real>(
      p, o, o.q_in, [&](std::int64_t r, std::int64_t c, std::int64_t n, const Real* s, const std::int32_t* z) {
        std::int16_t q[kRowChunk];
        Real buffer[kRowChunk];
        widen_integers(o.q_in.dtype, o.q_in.data, r * o.q_in.strides[0] + c, n, q);
        const std::int64_t at = r * o.y.strides[0] + c;
        Real* y = narrowing_target(o.y.dtype, o.y.data, at, buffer);
        multiversion<Dequantize>(static_cast<const std::int16_t*>(q), s, z, n, y);
        narrow<Real>(o.y.dtype, o.y.data, at, n, y);
      });
}

template <class Real>
void dequantize_backward(const QuantizeProblem& p, const QuantizeOperands& o) {
  for_each_scaled_piece<Real>(p, o, o.dy,
                              [&](std::int64_t r, std::int64_t c, std::int64_t n, const Real* s, const std::int32_t*) {
                                Real dy_buffer[kRowChunk];
                                Real buffer[kRowChunk];
                                const Real* dy = widened(o.dy.dtype, o.dy.data, r * o.dy.strides[0] + c, n, dy_buffer);
                                const std::int64_t at = r * o.y.strides[0] + c;
                                Real* y = narrowing_target(o.y.dtype, o.y.data, at, buffer);
                                multiversion<Scale>(dy, s, n, y);
                                narrow<Real>(o.y.dtype, o.y.data, at, n, y);
                              });
}

}  // namespace

void dequantize_portable(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? dequantize<double>(p, o) : dequantize<float>(p, o);
}

void dequantize_backward_portable(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? dequantize_backward<double>(p, o) : dequantize_backward<float>(p, o);
}

}  // namespace octile::cpu
