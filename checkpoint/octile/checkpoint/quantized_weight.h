// A layer's quantized weight in memory, the layouts that files keep it in, and the way from each to the other.
//
// In memory it is what LinearPlan takes: W'[n, k] = (q[n, k] - z[n, g]) * s[n, g], (N, K) = (OUT, IN), where g = k /
// group. Files store 4-bit levels and zero points unsigned, u = q + 8, eight to a 32-bit word, the first in the lowest
// four bits unless said otherwise:
//   pack-quantized  words (N, ceil(K / 8)) along K; zero points (ceil(N / 8), G) along N; scales (N, G)
//   AWQ             words (K, N / 8) along N, the eight in the order 0, 2, 4, 6, 1, 3, 5, 7; zero points (G, N / 8) in
//                   the same order; scales (G, N)
//   GPTQ            words (K / 8, N) along K; zero points (G, N / 8), one less than they are unless the file is of
//                   version 2; scales (G, N); the group of each k
//   puzzle 12       words (N, K / 8) along K; shifts (N, ceil(G / 8)) along the groups; scales (N, G)
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "octile/checkpoint/elements.h"
#include "octile/tensor.h"

namespace octile::checkpoint {

inline constexpr std::int64_t kInAWord = 8;  // 4-bit levels
constexpr std::int64_t words_for(std::int64_t levels) { return levels / kInAWord + (levels % kInAWord != 0); }

struct QuantizedWeight {
  std::int64_t n = 0;
  std::int64_t k = 0;
  DType type = DType::s8;                // s8, or s4: two a byte, each row from a byte on
  std::int64_t group = 0;                // of k that share a scale; 0: a whole row
  bool per_tensor = false;               // one scale for all
  std::vector<std::uint8_t> q;           // (N, K), as `type` packs it
  std::vector<float> scale;              // (N, K / group), (N) or (1)
  std::vector<std::int32_t> zero_point;  // as the scales; empty: 0
  std::optional<float> input_scale;      // of a static activation: x = (q - input_zero_point) * input_scale
  std::int32_t input_zero_point = 0;

  std::int64_t row_bytes() const { return type == DType::s4 ? (k + 1) / 2 : k; }
  std::int64_t groups() const { return group == 0 ? 1 : k / group; }  // of a row
  int level(std::int64_t row, std::int64_t column) const;
  // For LinearPlan and DequantizePlan.
  ConstTensor values() const;
};

// One row of W', f32: (q - z) * s, rounded once.
void dequantize_row(const QuantizedWeight& weight, std::int64_t row, std::span<float> values);

// ---- pack-quantized ----
std::vector<std::int32_t> pack_levels(const QuantizedWeight& weight);
std::vector<std::int32_t> pack_zero_points(const QuantizedWeight& weight);

// Words of 4-bit levels with their scales, as a file has them. `name` is for messages; sizes are checked, and so are
// the values: a scale that is not finite, a zero point outside -8..7.
struct PackedWords {
  std::string_view name = {};
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t group = 0;  // 0: a whole row
  std::span<const std::int32_t> words = {};
  std::span<const float> scale = {};
  std::span<const std::int32_t> zero_words = {};  // empty: symmetric, u = q + 8
};

QuantizedWeight from_pack_quantized(const PackedWords& packed);
QuantizedWeight from_awq(const PackedWords& packed);
// The group of each k; empty: k / group. Throws FileError where it is another one.
void check_group_order(const PackedWords& packed, std::span<const std::int32_t> group_of);
// zero_offset: 1, or 0 for version 2. Throws FileError for one that is 16.
void check_gptq_zero_points(const PackedWords& packed, int zero_offset);
QuantizedWeight from_gptq(const PackedWords& packed, std::span<const std::int32_t> group_of, int zero_offset);
// The quantized matrix product of the Triton puzzles (their number 12): the puzzle's group is 8. LinearPlan runs groups
// of 32, 64, 128 and whole rows.
QuantizedWeight from_puzzle(const PackedWords& packed);

}  // namespace octile::checkpoint
