// w4a16 of bf16 with vdpbf16ps: y[i, j] = sum_c a[i, c] * ((b[j, c] - z[j, g]) * b_scale[j, g]) + bias[j]; b s4. Any
// number of rows: a row has the same bits among few and many.
#include <bit>

#include "cpu/gemm/bf16_pairs.h"

namespace octile::cpu {

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
  // In the lowest four bits of a lane's words; what lies above them is any.
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

Cost cost(const GemmProblem& p) {
  Cost cost = bf16_cost(p);
  cost.seconds += packing_seconds(p, 30e9);
  return cost;
}

}  // namespace

extern constinit const GemmKernel w4a16_gemm_avx512bf16 = {
    .name = "w4a16_gemm_avx512bf16",
    .task = {Operation::gemm, kW4A16},
    .supports = needs_bf16,
    .cost = cost,
    .workspace = weight_workspace<NibblePairs>,
    .launch = multiply_weight<NibblePairs>,
    .bound = Bound::flushed_sum,
};

}  // namespace octile::cpu
