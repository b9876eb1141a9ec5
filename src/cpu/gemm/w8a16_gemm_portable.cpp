// w8a16 on any CPU; a (m, k) float, b (n, k) s8:
//
//   backward  y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale[c]), a and b along either dimension
//   forward   y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale[j, g]) + bias[j], b packed or not: weight_gemm.h
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <type_traits>

#include "cpu/gemm/weight_gemm.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

namespace {

template <class Real>
struct ScaleRun {
  const std::int8_t* q;  // (terms, kPartCols)
  std::int64_t terms;
  const Real* scale;  // one per term
  Real* out;          // (terms, cols)
  std::int64_t cols;  // panel_cols
};

#if defined(__x86_64__)

// Compilers take the bytes apart one by one (GCC 12: 15 % of the whole product).
__attribute__((target(OCTILE_TARGET_AVX2))) void scale_avx2(const ScaleRun<float>& p) {
  for (std::int64_t c = 0; c < p.terms; ++c) {
    const __m256 scale = _mm256_set1_ps(p.scale[c]);
    for (int r = 0; r < 16; r += 8) {
      const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p.q + c * kPartCols + r));
      _mm256_store_ps(p.out + c * 16 + r, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), scale));
    }
  }
}

__attribute__((target(OCTILE_TARGET_AVX512))) void scale_avx512(const ScaleRun<float>& p) {
  constexpr __mmask16 kAll = 0xffff;
  for (std::int64_t c = 0; c < p.terms; ++c) {
    const __m512 scale = _mm512_set1_ps(p.scale[c]);
    for (int r = 0; r < 32; r += 16) {
      const __m128i q = _mm_load_si128(reinterpret_cast<const __m128i*>(p.q + c * kPartCols + r));
      const __m512 value = _mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, q));
      _mm512_store_ps(p.out + c * 32 + r, _mm512_mul_ps(value, scale));
    }
  }
}

#endif

struct ScaleTerms {
  template <Isa isa, class Real>
  OCTILE_INLINE static void run(ScaleRun<Real> p) {
#if defined(__x86_64__)
    if constexpr (std::is_same_v<Real, float> && isa >= Isa::avx512) return scale_avx512(p);
    if constexpr (std::is_same_v<Real, float> && isa >= Isa::avx2) return scale_avx2(p);
#endif
    for (std::int64_t c = 0; c < p.terms; ++c) {
      const std::int8_t* __restrict q = p.q + c * kPartCols;
      Real* __restrict out = p.out + c * p.cols;
      const Real scale = p.scale[c];
      for (std::int64_t r = 0; r < p.cols; ++r) out[r] = static_cast<Real>(q[r]) * scale;
    }
  }
};

struct CopyRows {
  template <Isa>
  OCTILE_INLINE static void run(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::uint8_t* in = from.data + r * from.stride;
      std::uint8_t* out = to.data + r * to.stride;
      cols == kPartCols ? std::memcpy(out, in, kPartCols) : std::memcpy(out, in, static_cast<std::size_t>(cols));
    }
  }
};

// b[j, c] * b_scale[c]: the scale lies along the sum, so it belongs to each term.
template <class Real>
class ScaledBytes {
 public:
  struct Stage {
    alignas(64) std::uint8_t q[kDepth * kPartCols];  // (terms, kPartCols)
    Real scale[kDepth];
    std::int64_t row;
  };

  explicit ScaledBytes(const GemmOperands& o) : b_(o.b), scale_(o.b_scale) {}

  std::int64_t depth() const { return b_.cols(); }
  std::int64_t segment() const { return kDepth; }
  std::int64_t step() const { return kDepth; }

  void stage(const PanelRange& range, std::int64_t first, Stage& stage) const {
    stage.row = range.row;
    for (std::int64_t t = 0; t < range.terms; ++t) stage.scale[first + t] = load<Real>(scale_, range.term + t);
    const std::uint8_t* q = at(range.row, range.term);
    std::uint8_t* const out = stage.q + first * kPartCols;
    if (range.rows < kPartCols) std::memset(out, 0, static_cast<std::size_t>(range.terms * kPartCols));
    if (b_.strides[1] == 1) {
      if (range.terms > 0) transpose({q, b_.strides[0]}, {out, kPartCols}, range.rows, range.terms);
    } else {
      multiversion<CopyRows>(ConstBytes{q, b_.strides[1]}, Bytes{out, kPartCols}, range.terms, range.rows);
    }
  }

  void prefetch(const PanelRange& range) const {
    if (b_.strides[1] == 1) return;  // long enough rows for the machine to see
    for (std::int64_t t = 0; t < range.terms; ++t) __builtin_prefetch(at(range.row, range.term + t), 0, 2);
  }

  const Real* fetch(const Stage& stage, const PanelRange& range, Real* out, Real*) const {
    const auto* q = reinterpret_cast<const std::int8_t*>(stage.q + range.row - stage.row);
    multiversion<ScaleTerms>(ScaleRun<Real>{q, range.terms, stage.scale, out, panel_cols<Real>(isa())});
    return nullptr;
  }

 private:
  const std::uint8_t* at(std::int64_t row, std::int64_t term) const {
    return static_cast<const std::uint8_t*>(b_.data) + row * b_.strides[0] + term * b_.strides[1];
  }

  ConstTensor b_;
  ConstTensor scale_;
};

template <class Real>
using ColumnProduct = PanelProduct<Real, ScaledBytes<Real>>;

bool along_contraction(const GemmProblem& p) { return p.b.granularity == Granularity::column; }

void launch(const GemmProblem& p, const GemmOperands& o, const Launch& launch) {
  void* const workspace = launch.workspace.data;
  if (!along_contraction(p)) {
    multiply_weight<ByteVectors>(p, o, launch);
  } else if (p.scale == DType::f64) {
    ColumnProduct<double>(p, o, ScaledBytes<double>(o)).run(p.threads, workspace);
  } else {
    ColumnProduct<float>(p, o, ScaledBytes<float>(o)).run(p.threads, workspace);
  }
}

std::size_t workspace(const GemmProblem& p) {
  if (!along_contraction(p)) return weight_workspace<ByteVectors>(p);
  return p.scale == DType::f64 ? ColumnProduct<double>::workspace(p, p.k) : ColumnProduct<float>::workspace(p, p.k);
}

}  // namespace

extern constinit const GemmKernel w8a16_gemm_portable = {
    .name = "w8a16_gemm_portable",
    .task = {Operation::gemm, kW8A16},
    .cost = portable_float_cost,
    .workspace = workspace,
    .launch = launch,
    .bound = Bound::sum,
};

}  // namespace octile::cpu
