// y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, c / group]) * b_scale[j, c / group]) + bias[j]; a (m, k) float, b (n, k) s4.
#include "cpu/panel_gemm.h"

namespace octile::cpu {

namespace {

struct DequantizeTerms {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const std::int8_t* __restrict q, std::int64_t rows, const Real* __restrict s,
                                const std::int32_t* __restrict z, Real* __restrict out) {
    for (std::int64_t r = 0; r < rows; ++r) out[r] = static_cast<Real>(q[r] - z[r]) * s[r];
  }
};

// (b[j, c] - z[j, c / group]) * b_scale[j, c / group].
template <class Real>
class Nibbles final : public PanelSource<Real> {
 public:
  Nibbles(const GemmOperands& o, std::int64_t group)
      : b_(o.b), scale_(o.b_scale), zero_point_(o.zero_point), group_(group) {}

  void fetch(const PanelRange& range, Real* out, std::int64_t width) const override {
    Real s[kFetchRows];
    std::int32_t z[kFetchRows];
    std::int64_t loaded = -1;  // the group whose scales are in s and z
    for (std::int64_t c = 0; c < range.terms;) {
      const std::int64_t term = range.term + c;
      const std::int64_t group = term / group_;
      if (group != loaded) load_scales(range, group, s, z);
      loaded = group;
      const std::int64_t terms = std::min({kFetchTerms, range.terms - c, (group + 1) * group_ - term});
      dequantize({range.row, range.rows, term, terms}, s, z, {out + c * width, width});
      c += terms;
    }
  }

 private:
  struct Out {
    Real* data;
    std::int64_t width;
  };

  void load_scales(const PanelRange& range, std::int64_t group, Real* s, std::int32_t* z) const {
    for (std::int64_t r = 0; r < range.rows; ++r) {
      s[r] = load<Real>(scale_, range.row + r, group);
      z[r] = zero_point_.present() ? load_integer(zero_point_, range.row + r, group) : 0;
    }
  }

  void dequantize(const PanelRange& range, const Real* s, const std::int32_t* z, Out out) const {
    std::int8_t rows[kFetchRows * kFetchTerms];    // (kFetchRows, kFetchTerms)
    std::int8_t turned[kFetchTerms * kFetchRows];  // (kFetchTerms, kFetchRows)
    for (std::int64_t r = 0; r < range.rows; ++r) {
      unpack_s4(static_cast<const std::uint8_t*>(b_.data), (range.row + r) * b_.strides[0] + range.term, range.terms,
                rows + r * kFetchTerms);
    }
    transpose({reinterpret_cast<const std::uint8_t*>(rows), kFetchTerms},
              {reinterpret_cast<std::uint8_t*>(turned), kFetchRows}, range.rows, range.terms);
    for (std::int64_t c = 0; c < range.terms; ++c) {
      multiversion<DequantizeTerms>(static_cast<const std::int8_t*>(turned + c * kFetchRows), range.rows, s, z,
                                    out.data + c * out.width);
    }
  }

  ConstTensor b_;
  ConstTensor scale_;
  ConstTensor zero_point_;
  std::int64_t group_;
};

template <class Real>
void multiply(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  PanelProduct<Real>::oriented(FloatSource<Real>(o.a), Nibbles<Real>(o, p.group), o)
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
