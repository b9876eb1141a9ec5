// y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, c / group]) * b_scale[j, c / group]) + bias[j]; a (m, k) float, b (n, k)
// s4.
#include "cpu/panel_gemm.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kTurnedTerms =
    128;  // (kTurnedRows, kTurnedTerms) nibbles are turned at a time, a line of each row
constexpr std::int64_t kTurnedRows = 32;

template <class Real>
struct DequantizeRun {
  const std::int8_t* q;  // (terms, kTurnedRows)
  std::int64_t terms, rows;
  const Real* s;          // one per row
  const std::int32_t* z;  // one per row
  Real* out;              // (terms, width)
  std::int64_t width;
};

struct DequantizeTerms {
  template <Isa, class Real>
  OCTILE_INLINE static void run(DequantizeRun<Real> p) {
    for (std::int64_t c = 0; c < p.terms; ++c) {
      const std::int8_t* __restrict q = p.q + c * kTurnedRows;
      const Real* __restrict s = p.s;
      const std::int32_t* __restrict z = p.z;
      Real* __restrict out = p.out + c * p.width;
      for (std::int64_t r = 0; r < p.rows; ++r) out[r] = static_cast<Real>(q[r] - z[r]) * s[r];
    }
  }
};

// (b[j, c] - z[j, c / group]) * b_scale[j, c / group].
template <class Real>
class Nibbles final : public PanelSource<Real> {
 public:
  Nibbles(const GemmOperands& o, std::int64_t group)
      : b_(o.b), scale_(o.b_scale), zero_point_(o.zero_point), group_(group) {}

  void fetch(const PanelRange& range, Real* out, std::int64_t width) const override {
    for (std::int64_t r = 0; r < range.rows; r += kTurnedRows) {
      const std::int64_t rows = std::min(kTurnedRows, range.rows - r);
      for (std::int64_t c = 0; c < range.terms;) {
        const std::int64_t term = range.term + c;
        const std::int64_t end_of_group = (term / group_ + 1) * group_;
        const std::int64_t terms = std::min({kTurnedTerms, range.terms - c, end_of_group - term});
        dequantize({range.row + r, rows, term, terms}, out + c * width + r, width);
        c += terms;
      }
    }
  }

 private:
  // At most (kTurnedRows, kTurnedTerms), and of one group.
  void dequantize(const PanelRange& range, Real* out, std::int64_t width) const {
    Real s[kTurnedRows];
    std::int32_t z[kTurnedRows];
    std::int8_t q[kTurnedRows * kTurnedTerms];
    std::int8_t turned[kTurnedTerms * kTurnedRows];
    for (std::int64_t r = 0; r < range.rows; ++r) {
      const std::int64_t row = range.row + r;
      s[r] = load<Real>(scale_, row, range.term / group_);
      z[r] = zero_point_.present() ? load_integer(zero_point_, row, range.term / group_) : 0;
      unpack_s4(static_cast<const std::uint8_t*>(b_.data), row * b_.strides[0] + range.term, range.terms,
                q + r * kTurnedTerms);
    }
    transpose({reinterpret_cast<const std::uint8_t*>(q), kTurnedTerms},
              {reinterpret_cast<std::uint8_t*>(turned), kTurnedRows}, range.rows, range.terms);
    multiversion<DequantizeTerms>(DequantizeRun<Real>{turned, range.terms, range.rows, s, z, out, width});
  }

  ConstTensor b_;
  ConstTensor scale_;
  ConstTensor zero_point_;
  std::int64_t group_;
};

template <class Real>
void multiply(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  PanelProduct<Real>::oriented(FloatSource<Real>(o.a), Nibbles<Real>(o, p.group), p.y_major, o)
      .run(p.threads, launch.workspace.data);
}

}  // namespace

void w4a16_gemm_portable(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  p.scale == DType::f64 ? multiply<double>(p, o, launch) : multiply<float>(p, o, launch);
}

std::size_t w4a16_gemm_portable_workspace(const GemmProblem& p) {
  return p.scale == DType::f64 ? PanelProduct<double>::workspace(p) : PanelProduct<float>::workspace(p);
}

}  // namespace octile::cpu
