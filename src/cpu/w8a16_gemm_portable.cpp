// y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]); a (m, k) float, b (n, k) s8, either of them along either dimension.
#include "cpu/panel_gemm.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kTurnedTerms = 64;  // (kTurnedRows, kTurnedTerms) bytes are turned at a time, a line of each row
constexpr std::int64_t kTurnedRows = 32;

template <class Real>
struct ScaleRun {
  const std::int8_t* q;  // (terms, rows)
  std::int64_t stride;
  std::int64_t terms, rows;
  const Real* scale;  // one per term
  Real* out;          // (terms, width)
  std::int64_t width;
};

struct ScaleTerms {
  template <Isa, class Real>
  OCTILE_INLINE static void run(ScaleRun<Real> p) {
    for (std::int64_t c = 0; c < p.terms; ++c) {
      const std::int8_t* __restrict q = p.q + c * p.stride;
      Real* __restrict out = p.out + c * p.width;
      const Real scale = p.scale[c];
      for (std::int64_t r = 0; r < p.rows; ++r) out[r] = static_cast<Real>(q[r]) * scale;
    }
  }
};

// b[j, c] * c_scale[c].
template <class Real>
class ScaledBytes final : public PanelSource<Real> {
 public:
  explicit ScaledBytes(const GemmOperands& o) : b_(o.b), scale_(o.c_scale) {}

  void fetch(const PanelRange& range, Real* out, std::int64_t width) const override {
    for (std::int64_t c = 0; c < range.terms; c += kTurnedTerms) {
      const std::int64_t terms = std::min(kTurnedTerms, range.terms - c);
      Real scale[kTurnedTerms];
      for (std::int64_t t = 0; t < terms; ++t) scale[t] = load<Real>(scale_, range.term + c + t);
      for (std::int64_t r = 0; r < range.rows; r += kTurnedRows) {
        const std::int64_t rows = std::min(kTurnedRows, range.rows - r);
        const auto* q = static_cast<const std::uint8_t*>(b_.data) + (range.row + r) * b_.strides[0] +
                        (range.term + c) * b_.strides[1];
        std::uint8_t turned[kTurnedTerms * kTurnedRows];
        const bool turn = b_.strides[1] == 1;
        if (turn) transpose({q, b_.strides[0]}, {turned, kTurnedRows}, rows, terms);
        multiversion<ScaleTerms>(ScaleRun<Real>{reinterpret_cast<const std::int8_t*>(turn ? turned : q),
                                                turn ? kTurnedRows : b_.strides[1], terms, rows, scale,
                                                out + c * width + r, width});
      }
    }
  }

 private:
  ConstTensor b_;
  ConstTensor scale_;
};

template <class Real>
void multiply(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  PanelProduct<Real>::oriented(FloatSource<Real>(o.a), ScaledBytes<Real>(o), p.y_major, o)
      .run(p.threads, launch.workspace.data);
}

}  // namespace

void w8a16_gemm_portable(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  p.scale == DType::f64 ? multiply<double>(p, o, launch) : multiply<float>(p, o, launch);
}

std::size_t w8a16_gemm_portable_workspace(const GemmProblem& p) {
  return p.scale == DType::f64 ? PanelProduct<double>::workspace(p) : PanelProduct<float>::workspace(p);
}

}  // namespace octile::cpu
