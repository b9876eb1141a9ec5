// y = (clamp(rint(x / s) + z, q_min, q_max) - z) * s, scales found on the way. NaN where x is not finite, and with
// dynamic scales in the whole of its segment.
#include "cpu/quantize/segments.h"
#include "cpu/support/cost.h"
#include "plan/either.h"

namespace octile::cpu {

namespace {

template <class Real>
class WriteFloats {
 public:
  static constexpr bool kPoisonsSegments = false;

  WriteFloats(const QuantizeProblem& p, const QuantizeOperands& o, const std::uint8_t*)
      : p_(p), o_(o), out_(o.y, 2 * static_cast<double>(o.x.rows()) * static_cast<double>(o.x.cols())) {}

  template <class Scale>
  void piece(const Piece<Real>& piece, const Scale& scale) {
    const std::int64_t at = piece.row * o_.y.strides[0] + piece.col;
    Real* y = out_.target(at, y_);
    round_to_levels(LevelRun<Real, Real>{piece.x, piece.noise, static_cast<Real>(p_.q_min), static_cast<Real>(p_.q_max),
                                         piece.n, piece.ahead, y},
                    scale);
    out_.put(at, piece.n, y);
  }

  void block(std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}
  void finish() {}

 private:
  const QuantizeProblem& p_;
  const QuantizeOperands& o_;
  FloatsOut<Real> out_;
  alignas(64) Real y_[kRun<Real>];
};

template <class Real>
void fake_quantize(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch) {
  auto* columns = static_cast<std::uint8_t*>(launch.workspace.data);
  SegmentWalk<Real, WriteFloats<Real>>(p, o, row_blocks_of(p, o.x, columns)).run();
}

std::size_t workspace(const QuantizeProblem& p) { return static_cast<std::size_t>(column_bytes(p)); }

}  // namespace

extern constinit const QuantizeKernel fake_quantize_portable = portable_row(
    "fake_quantize_portable", Operation::fake_quantize, either<fake_quantize<float>, fake_quantize<double>>, workspace);

}  // namespace octile::cpu
