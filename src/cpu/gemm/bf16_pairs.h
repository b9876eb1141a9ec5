// w4a16 and w8a16 by pairs of bf16, which hold every s8 and every s4 less its zero point, times the pairs of a row of
// bf16: with vdpbf16ps, or AMX (bf16_tiles.h). A lane of vdpbf16ps adds the product of the pair's second terms to its
// sum, and then that of the first ones. It rounds to nearest, whatever MXCSR says, and takes subnormal numbers for
// zero: x, and sums as they grow.
#pragma once

#include <immintrin.h>

#include <bit>

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

namespace {

alignas(64) constexpr auto kNumbers = [] {
  struct {
    std::uint16_t signed_5_bits[32], nibble[32];  // of i: the bf16 of i or i - 32, and of i % 16 - 8
  } table{};
  for (int i = 0; i < 32; ++i) {
    const auto bf16 = [](int number) {
      return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(number)) >> 16);
    };
    table.signed_5_bits[i] = bf16(i < 16 ? i : i - 32);
    table.nibble[i] = bf16(i % 16 - 8);
  }
  return table;
}();

// A word's lowest five bits look its bf16 up among 32.
template <Isa>
struct NibblePairs : PairVectors {
  static constexpr int kLineTerms = 8;

  Words zero_points;  // 8 + z in both words of a lane

  // zero_points: 8 + z, null for 8.
  OCTILE_PANEL_INLINE void set(const std::uint8_t* z) {
    const __m512i eight = _mm512_set1_epi16(8);
    zero_points = reinterpret_cast<Words>(eight);
    if (!z) return;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(z));
    const __m512i lanes = _mm512_maskz_cvtepu8_epi32(0xffff, bytes);
    zero_points = reinterpret_cast<Words>(_mm512_or_si512(lanes, _mm512_maskz_slli_epi32(0xffff, lanes, 16)));
  }

  // Terms 2 t and 2 t + 1 of each lane, less their zero points. kLookUp: there are none.
  template <NibbleOrder kOrder, bool kLookUp>
  OCTILE_PANEL_INLINE void element(const Words& line, int t, Elements& value) const {
    __m512i words = nibbles<kOrder>(reinterpret_cast<__m512i>(line), t);
    const void* table = kNumbers.nibble;
    if constexpr (!kLookUp) {
      words = _mm512_sub_epi16(_mm512_and_si512(words, _mm512_set1_epi16(15)), reinterpret_cast<__m512i>(zero_points));
      table = kNumbers.signed_5_bits;
    }
    value = reinterpret_cast<Elements>(_mm512_permutexvar_epi16(words, _mm512_load_si512(table)));
  }

 private:
  // In the lowest four bits of a lane's words; the bits above are arbitrary.
  template <NibbleOrder kOrder>
  static OCTILE_PANEL_INLINE __m512i nibbles(__m512i line, int t) {
    if (kOrder == NibbleOrder::packed) {  // byte i has terms i and i + 4
      const __m512i bytes = shuffled(line, t % 2 == 0 ? 0x80018000 : 0x80038002);
      return t < 2 ? bytes : _mm512_maskz_srli_epi16(kAllWords, bytes, 4);
    }
    const __m512i halves = shuffled(line, t < 2 ? 0x01000100 : 0x03020302);  // four terms, twice
    return _mm512_maskz_srlv_epi16(kAllWords, halves, _mm512_set1_epi32(t % 2 == 0 ? 0x00040000 : 0x000c0008));
  }

  // Each lane's bytes, by the bytes of `from`; 0x80: zero.
  static OCTILE_PANEL_INLINE __m512i shuffled(__m512i line, std::uint32_t from) {
    const auto of_lane = [&](std::uint32_t first) { return static_cast<int>(from + first * 0x01010101); };
    return _mm512_shuffle_epi8(line, _mm512_setr4_epi32(of_lane(0), of_lane(4), of_lane(8), of_lane(12)));
  }

  static constexpr __mmask32 kAllWords = ~__mmask32{0};
};

// The bf16 of an s8 is the upper half of its float.
template <Isa>
struct BytePairs : PairVectors {
  static constexpr int kLineTerms = 4;

  OCTILE_PANEL_INLINE void set(const std::uint8_t*) {}

  // Terms 2 t and 2 t + 1 of each lane.
  template <NibbleOrder, bool>
  OCTILE_PANEL_INLINE void element(const Words& lanes, int t, Elements& value) const {
    const Words bytes = lanes >> (16 * t);
    value = byte_as_float<0>(bytes) >> 16 | byte_as_float<1>(bytes);
  }

 private:
  // q + 128 in the mantissa of 2^(23 - 8 byte), less that and 128: the bits.
  template <int byte>
  static OCTILE_PANEL_INLINE Words byte_as_float(const Words& lanes) {
    constexpr float kOffset = static_cast<float>(1 << (23 - 8 * byte)) + 128;
    const Words mantissa = (lanes & 255u << 8 * byte) ^ std::bit_cast<std::uint32_t>(kOffset);
    return reinterpret_cast<Words>(reinterpret_cast<Sums>(mantissa) - kOffset);
  }
};

}  // namespace

template <Isa isa>
std::string needs_bf16(const GemmProblem& p) {
  if (!usable(isa)) return reason_against(isa);
  if (p.a != DType::bf16) return "takes bf16 activations alone";
  if (p.scale != DType::f32) return "has no f64";
  if (p.b.granularity == Granularity::column) return "has no scales along the contraction";
  if (p.a_major == Major::outer) return "takes x contiguous along the contraction";
  return {};
}

// Of each of these rows, for every problem that it takes, below that of the rows for narrower instruction sets, so that
// one row of the table serves any number of rows: bits do not depend on it.
template <int giga>
Cost bf16_cost(const GemmProblem& p) {
  const double threads = thread_count(p.threads);
  Cost cost = gemm_cost(p, giga * 1e9 * threads, kBytesPerSecond * threads);
  if (p.b.type == DType::s4) cost.seconds += packing_seconds(p, 30e9);
  return cost;
}

}  // namespace octile::cpu
