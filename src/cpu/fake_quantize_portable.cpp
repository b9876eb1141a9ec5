// y = (clamp(rint(x / s) + z, q_min, q_max) - z) * s, scales found on the way. NaN where x is not finite, and with
// dynamic scales in the whole of its segment.
#include "cpu/segments.h"

namespace octile::cpu {

namespace {

template <class Real>
struct FakeQuantizeRun {
  const Real* x;
  const Real* s;
  const std::int32_t* z;
  const std::uint16_t* noise;
  Real q_min, q_max;
  std::int64_t n;
  Real* y;
};

template <bool stochastic>
struct FakeQuantizePiece {
  template <Isa, class Real>
  OCTILE_INLINE static void run(FakeQuantizeRun<Real> p) {
    const Real* __restrict s = p.s;
    const std::int32_t* __restrict z = p.z;
    const std::uint16_t* __restrict noise = p.noise;
    for (std::int64_t i = 0; i < p.n; ++i) {
      const Real x = p.x[i];
      const Real offset = static_cast<Real>(z[i]);
      const std::uint16_t u = stochastic ? noise[i] : std::uint16_t{0};
      const std::int32_t level = offset_level<stochastic>(x / s[i], p.q_min - offset, p.q_max - offset, u);
      const Real y = static_cast<Real>(level) * s[i];
      const Real poison = (x - x) + (s[i] - s[i]);
      p.y[i] = poison == 0 ? y : std::numeric_limits<Real>::quiet_NaN();
    }
  }
};

template <class Real>
class WriteFloats {
 public:
  static constexpr bool kPoisonsSegments = false;

  WriteFloats(const QuantizeProblem& p, const QuantizeOperands& o) : p_(p), o_(o) {}

  void piece(const Piece<Real>& piece, std::int64_t) {
    const std::int64_t at = piece.row * o_.y.strides[0] + piece.col;
    Real* y = narrowing_target(o_.y.dtype, o_.y.data, at, y_);
    const FakeQuantizeRun<Real> run{
        piece.x, piece.s, piece.z, piece.noise, static_cast<Real>(p_.q_min), static_cast<Real>(p_.q_max), piece.n, y};
    piece.noise ? multiversion<FakeQuantizePiece<true>>(run) : multiversion<FakeQuantizePiece<false>>(run);
    narrow<Real>(o_.y.dtype, o_.y.data, at, piece.n, y);
  }

  void block(std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}

 private:
  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  alignas(64) Real y_[kChunk];
};

template <class Real>
void fake_quantize(const QuantizeProblem& p, const QuantizeOperands& o) {
  const std::int64_t cols = std::max<std::int64_t>(o.x.cols(), 1);
  SegmentWalk<Real, WriteFloats<Real>>(p, o, std::clamp<std::int64_t>(16384 / cols, 1, kTurnedBlock)).run();
}

}  // namespace

void fake_quantize_portable(const QuantizeProblem& p, const QuantizeOperands& o, const Launch&) {
  p.x == DType::f64 ? fake_quantize<double>(p, o) : fake_quantize<float>(p, o);
}

std::size_t fake_quantize_portable_workspace(const QuantizeProblem&) { return 0; }

}  // namespace octile::cpu
