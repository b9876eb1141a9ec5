// y[i, j] = sum_c a[i, c] * (b[j, c] * c_scale[c]); a (m, k) float, b (n, k) s8, either of them along either dimension.
#include "cpu/panel_gemm.h"

namespace octile::cpu {

namespace {

struct ScaleTerms {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const std::int8_t* __restrict q, std::int64_t rows, Real scale, Real* __restrict out) {
    for (std::int64_t r = 0; r < rows; ++r) out[r] = static_cast<Real>(q[r]) * scale;
  }
};

// b[j, c] * c_scale[c].
template <class Real>
class ScaledBytes final : public PanelSource<Real> {
 public:
  explicit ScaledBytes(const GemmOperands& o) : b_(o.b), scale_(o.c_scale) {}

  void fetch(const PanelRange& range, Real* out, std::int64_t width) const override {
    const auto* data = static_cast<const std::uint8_t*>(b_.data);
    if (b_.strides[1] != 1) {
      convert({data + range.term * b_.strides[1] + range.row, b_.strides[1]}, range, out, width);
      return;
    }
    std::uint8_t turned[kFetchTerms * kFetchRows];  // (kFetchTerms, kFetchRows)
    for (std::int64_t c = 0; c < range.terms; c += kFetchTerms) {
      const PanelRange piece{range.row, range.rows, range.term + c, std::min(kFetchTerms, range.terms - c)};
      transpose({data + piece.row * b_.strides[0] + piece.term, b_.strides[0]}, {turned, kFetchRows}, piece.rows,
                piece.terms);
      convert({turned, kFetchRows}, piece, out + c * width, width);
    }
  }

 private:
  // `bytes` is (terms, rows).
  void convert(ConstBytes bytes, const PanelRange& range, Real* out, std::int64_t width) const {
    for (std::int64_t c = 0; c < range.terms; ++c) {
      multiversion<ScaleTerms>(reinterpret_cast<const std::int8_t*>(bytes.data) + c * bytes.stride, range.rows,
                               load<Real>(scale_, range.term + c), out + c * width);
    }
  }

  ConstTensor b_;
  ConstTensor scale_;
};

template <class Real>
void multiply(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  PanelProduct<Real>::oriented(FloatSource<Real>(o.a), ScaledBytes<Real>(o), o).run(p.threads, launch.workspace.data);
}

}  // namespace

void w8a16_gemm_portable(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  p.scale == DType::f64 ? multiply<double>(p, o, launch) : multiply<float>(p, o, launch);
}

std::size_t w8a16_gemm_portable_workspace(const GemmProblem& p) {
  return p.scale == DType::f64 ? PanelProduct<double>::workspace(p) : PanelProduct<float>::workspace(p);
}

}  // namespace octile::cpu
