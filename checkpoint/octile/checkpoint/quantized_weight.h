// A layer's quantized weight in memory, the layouts that files keep it in, and the conversion from each to the other.
//
// In memory it is what LinearPlan takes: W'[n, k] = (q[n, k] - z[n, g]) * s[n, g], (N, K) = (OUT, IN), g = k / group.
// Files may pack levels and zero points of b bits (4 or 8) into 32-bit words, unsigned, u = q + 2^(b - 1), the first in
// the lowest bits unless said otherwise. G groups in a row, P = 32 / b integers in a word:
//   pack-quantized  words (N, ceil(K / P)) along K; zero points (ceil(N / P), G) along N; scales (N, G)
//   AWQ             words (K, N / 8) along N, the eight in the order 0, 2, 4, 6, 1, 3, 5, 7; zero points (G, N / 8) in
//                   the same order; scales (G, N)
//   GPTQ            words (K / 8, N) along K; zero points (G, N / 8), stored less 1 unless the file is of version 2;
//                   scales (G, N); the group of each k
//   puzzle 12       words (N, K / 8) along K; shifts (N, ceil(G / 8)) along the groups; scales (N, G)
// AWQ, GPTQ and the puzzle are read with 4 bits.
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

// The integer types of files, and the one with this many bits.
inline constexpr DType kLevelTypes[] = {DType::s4, DType::s8};
constexpr std::optional<DType> level_type(std::int64_t width) {
  for (const DType type : kLevelTypes) {
    if (bits(type) == width) return type;
  }
  return std::nullopt;
}
// The number of 32-bit words that hold this many levels.
constexpr std::int64_t words_for(std::int64_t levels, DType type) {
  const int per_word = 32 / bits(type);
  return levels / per_word + (levels % per_word != 0);
}
// Of a row of k.
constexpr std::int64_t groups_of(const WeightFormat& format, std::int64_t k) {
  return format.group == 0 ? 1 : k / format.group;
}

struct QuantizedWeight {
  std::int64_t n = 0;
  std::int64_t k = 0;
  WeightFormat format = WeightFormat::s8_per_channel;
  std::vector<std::uint8_t> q;           // (N, K), each row starts on a byte
  std::vector<float> scale;              // (N, K / group), (N) or (1)
  std::vector<std::int32_t> zero_point;  // as the scales; empty: 0
  std::optional<float> input_scale;      // of a static activation: x = (q - input_zero_point) * input_scale
  std::int32_t input_zero_point = 0;

  std::int64_t row_bytes() const { return row_elements(format.type, k) / per_byte(format.type); }
  std::int64_t groups() const { return groups_of(format, k); }               // of a row
  std::int64_t run() const { return format.group == 0 ? k : format.group; }  // neighbours that share a scale
  int level(std::int64_t row, std::int64_t column) const;
  void put(std::int64_t row, std::int64_t column, int level);  // where q is 0
  // For LinearPlan and DequantizePlan; to be filled.
  ConstTensor values() const { return matrix_of<const void>(format.type, q.data(), n, k); }
  Tensor values() { return matrix_of<void>(format.type, q.data(), n, k); }
};

// One row of W', f32: (q - z) * s, rounded once.
void dequantize_row(const QuantizedWeight& weight, std::int64_t row, std::span<float> values);

// ---- pack-quantized ----
std::vector<std::int32_t> pack_levels(const QuantizedWeight& weight);
std::vector<std::int32_t> pack_zero_points(const QuantizedWeight& weight);

// Words of levels with their scales, as a file has them. `name` is for messages. Sizes and values are checked: a scale
// that is not finite or a zero point outside of the levels throws.
struct PackedWords {
  std::string_view name = {};
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t group = 0;  // 0: a whole row
  DType type = DType::s4;  // s8: only pack-quantized
  std::span<const std::int32_t> words = {};
  std::span<const float> scale = {};
  std::span<const std::int32_t> zero_words = {};  // empty: symmetric
};

QuantizedWeight from_pack_quantized(const PackedWords& packed);
QuantizedWeight from_awq(const PackedWords& packed);
// `group_of`: the group of each k; empty: k / group. Throws FileError where it is another one.
void check_group_order(const PackedWords& packed, std::span<const std::int32_t> group_of);
// zero_offset: 1, or 0 for version 2. Throws FileError for a zero point of 16.
void check_gptq_zero_points(const PackedWords& packed, int zero_offset);
QuantizedWeight from_gptq(const PackedWords& packed, std::span<const std::int32_t> group_of, int zero_offset);
// Of the Triton puzzles' quantized product (number 12), whose group is 8. LinearPlan runs groups of 32, 64, 128 and
// whole rows.
QuantizedWeight from_puzzle(const PackedWords& packed);

}  // namespace octile::checkpoint
