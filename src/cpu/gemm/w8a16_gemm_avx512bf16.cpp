// w8a16 of bf16 with vdpbf16ps: y[i, j] = sum_c a[i, c] * (b[j, c] * b_scale[j, g]) + bias[j]; b s8. Any number of
// rows: a row has the same bits among few and many.
#include <bit>

#include "cpu/gemm/bf16_pairs.h"

namespace octile::cpu {

namespace {

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

extern constinit const GemmKernel w8a16_gemm_avx512bf16 = {
    .name = "w8a16_gemm_avx512bf16",
    .task = {Operation::gemm, kW8A16},
    .supports = needs_bf16,
    .cost = bf16_cost,
    .workspace = weight_workspace<BytePairs>,
    .launch = multiply_weight<BytePairs>,
    .bound = Bound::flushed_sum,
};

}  // namespace octile::cpu
