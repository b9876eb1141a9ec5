// w4a16 and w8a16 with vdpbf16ps: weights as pairs of bf16, which hold every s8 and every s4 less its zero point, times
// the pairs of a row of bf16. A lane adds the product of the pair's second terms to its sum, and then that of the first
// ones. It rounds to nearest, whatever MXCSR says, and takes subnormal numbers for zero: x, and sums as they grow.
#pragma once

#include <immintrin.h>

#define OCTILE_PANEL_INLINE inline __attribute__((always_inline, target(OCTILE_TARGET_AVX512BF16)))
#include "cpu/gemm/weight_gemm.h"
#include "cpu/support/cost.h"

namespace octile::cpu {

template <>
struct Products<Bf16Pair> {
  template <class Pairs, class Sums>
  OCTILE_PANEL_INLINE static void add(const Pairs& a, const Pairs& b, Sums& sum) {
    sum = reinterpret_cast<Sums>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
};

// What the codecs of pairs have in common.
struct PairVectors {
  static constexpr std::int64_t kLanes = kPanelChannels;
  using Element = Bf16Pair;
  typedef Bf16Pair Elements __attribute__((vector_size(64)));
  typedef float Sums __attribute__((vector_size(64)));
  using Words = Elements;
};

inline std::string needs_bf16(const GemmProblem& p) {
  if (!usable(Isa::avx512bf16)) return reason_against(Isa::avx512bf16);
  if (p.a != DType::bf16) return "takes bf16 activations alone";
  if (p.scale != DType::f32) return "has no f64";
  if (p.b.granularity == Granularity::column) return "has no scales along the contraction";
  if (p.a_major == Major::outer) return "takes x contiguous along the contraction";
  return {};
}

// Below that of the portable rows for every problem, so that bits do not depend on the number of rows.
inline Cost bf16_cost(const GemmProblem& p) {
  const double threads = thread_count(p.threads);
  return gemm_cost(p, 330e9 * threads, kBytesPerSecond * threads);
}

}  // namespace octile::cpu
