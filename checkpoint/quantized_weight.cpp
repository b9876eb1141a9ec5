#include "octile/checkpoint/quantized_weight.h"

#include <array>
#include <cmath>
#include <cstdlib>

namespace octile::checkpoint {

namespace {

int nibble(std::int32_t word, int i) { return static_cast<int>(static_cast<std::uint32_t>(word) >> (4 * i) & 15u); }

std::int32_t with_nibble(std::int32_t word, int i, int value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(word) | static_cast<std::uint32_t>(value) << (4 * i));
}

template <class T>
T at(std::span<const T> values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

void check_size(const PackedWords& packed, std::string_view what, std::size_t has, std::int64_t wants) {
  if (has == static_cast<std::size_t>(wants)) return;
  throw FileError(printable(packed.name) + ": " + std::string(what) + " has " + std::to_string(has) + " values; (" +
                  std::to_string(packed.n) + ", " + std::to_string(packed.k) + ") in groups of " +
                  std::to_string(packed.group) + " have " + std::to_string(wants));
}

// Before anything is computed of the sizes: below these bounds no product of two of them overflows.
void check_shape(const PackedWords& packed) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  if (packed.n < 0 || packed.k < 0 || packed.n >= kMost || packed.k >= kMost || packed.group < 0 ||
      (packed.group != 0 && packed.k % packed.group != 0)) {
    throw FileError(printable(packed.name) + ": (" + std::to_string(packed.n) + ", " + std::to_string(packed.k) +
                    ") cannot be in groups of " + std::to_string(packed.group));
  }
}

// The shell of the result, after the checks that all layouts share.
QuantizedWeight begin(const PackedWords& packed, std::int64_t words, std::int64_t zero_words) {
  QuantizedWeight weight;
  weight.n = packed.n;
  weight.k = packed.k;
  weight.type = DType::s4;
  weight.group = packed.group;
  check_size(packed, "the weight, in words,", packed.words.size(), words);
  check_size(packed, "the scale", packed.scale.size(), weight.n * weight.groups());
  if (!packed.zero_words.empty()) check_size(packed, "the zero point, in words,", packed.zero_words.size(), zero_words);
  for (const float scale : packed.scale) {
    if (!std::isfinite(scale)) throw FileError(printable(packed.name) + ": a scale is " + number_text(scale));
  }
  weight.q.resize(static_cast<std::size_t>(weight.n * weight.row_bytes()));
  weight.scale.resize(packed.scale.size());
  if (!packed.zero_words.empty()) weight.zero_point.resize(packed.scale.size());
  return weight;
}

// `unsigned_level(row, column)` and the rest of what a layout says, each element once.
template <class Level>
void fill_levels(QuantizedWeight& weight, Level unsigned_level) {
  for (std::int64_t row = 0; row < weight.n; ++row) {
    std::uint8_t* const q = weight.q.data() + row * weight.row_bytes();
    for (std::int64_t column = 0; column < weight.k; ++column) {
      const int signed_level = unsigned_level(row, column) - 8;
      q[column / 2] = static_cast<std::uint8_t>(q[column / 2] | (signed_level & 15) << (column % 2 * 4));
    }
  }
}

template <class Scale, class Zero>
void fill_groups(QuantizedWeight& weight, Scale scale, Zero unsigned_zero) {
  for (std::int64_t row = 0; row < weight.n; ++row) {
    for (std::int64_t group = 0; group < weight.groups(); ++group) {
      const auto i = static_cast<std::size_t>(row * weight.groups() + group);
      weight.scale[i] = scale(row, group);
      if (!weight.zero_point.empty()) weight.zero_point[i] = unsigned_zero(row, group) - 8;
    }
  }
}

}  // namespace

int QuantizedWeight::level(std::int64_t row, std::int64_t column) const {
  const std::uint8_t* const values = q.data() + row * row_bytes();
  if (type == DType::s8) return static_cast<std::int8_t>(values[column]);
  return ((values[column / 2] >> (column % 2 * 4) & 15) ^ 8) - 8;
}

ConstTensor QuantizedWeight::values() const {
  if (type == DType::s4) return matrix_s4(q.data(), n, k);
  return matrix(reinterpret_cast<const std::int8_t*>(q.data()), n, k);
}

void dequantize_row(const QuantizedWeight& weight, std::int64_t row, std::span<float> values) {
  const std::int64_t groups = weight.groups();
  const std::int64_t length = weight.group == 0 ? weight.k : weight.group;
  for (std::int64_t column = 0; column < weight.k; ++column) {
    const auto i = static_cast<std::size_t>(weight.per_tensor ? 0 : row * groups + column / length);
    const int zero_point = weight.zero_point.empty() ? 0 : weight.zero_point[i];
    values[static_cast<std::size_t>(column)] =
        static_cast<float>(weight.level(row, column) - zero_point) * weight.scale[i];
  }
}

std::vector<std::int32_t> pack_levels(const QuantizedWeight& weight) {
  const std::int64_t row_words = words_for(weight.k);
  std::vector<std::int32_t> words(static_cast<std::size_t>(weight.n * row_words));
  for (std::int64_t row = 0; row < weight.n; ++row) {
    for (std::int64_t column = 0; column < weight.k; ++column) {
      std::int32_t& word = words[static_cast<std::size_t>(row * row_words + column / kInAWord)];
      word = with_nibble(word, static_cast<int>(column % kInAWord), weight.level(row, column) + 8);
    }
  }
  return words;
}

std::vector<std::int32_t> pack_zero_points(const QuantizedWeight& weight) {
  const std::int64_t groups = weight.groups();
  std::vector<std::int32_t> words(static_cast<std::size_t>(words_for(weight.n) * groups));
  for (std::int64_t row = 0; row < weight.n; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      std::int32_t& word = words[static_cast<std::size_t>(row / kInAWord * groups + group)];
      word = with_nibble(word, static_cast<int>(row % kInAWord),
                         weight.zero_point[static_cast<std::size_t>(row * groups + group)] + 8);
    }
  }
  return words;
}

QuantizedWeight from_pack_quantized(const PackedWords& packed) {
  check_shape(packed);
  const std::int64_t row_words = words_for(packed.k);
  const std::int64_t groups = packed.group == 0 ? 1 : packed.k / packed.group;
  QuantizedWeight weight = begin(packed, packed.n * row_words, words_for(packed.n) * groups);
  fill_levels(weight, [&](std::int64_t row, std::int64_t column) {
    return nibble(at(packed.words, row * row_words + column / kInAWord), static_cast<int>(column % kInAWord));
  });
  fill_groups(
      weight, [&](std::int64_t row, std::int64_t group) { return at(packed.scale, row * groups + group); },
      [&](std::int64_t row, std::int64_t group) {
        return nibble(at(packed.zero_words, row / kInAWord * groups + group), static_cast<int>(row % kInAWord));
      });
  return weight;
}

QuantizedWeight from_awq(const PackedWords& packed) {
  check_shape(packed);
  // Output i of eight is nibble kPlace[i] of the word.
  constexpr std::array<int, kInAWord> kPlace = {0, 4, 1, 5, 2, 6, 3, 7};
  if (packed.n % kInAWord != 0) {
    throw FileError(printable(packed.name) + ": AWQ packs 8 outputs a word, and there are " + std::to_string(packed.n));
  }
  const std::int64_t row_words = packed.n / kInAWord;
  const std::int64_t groups = packed.group == 0 ? 1 : packed.k / packed.group;
  QuantizedWeight weight = begin(packed, packed.k * row_words, groups * row_words);
  const auto place = [&](std::int64_t row) { return kPlace[static_cast<std::size_t>(row % kInAWord)]; };
  fill_levels(weight, [&](std::int64_t row, std::int64_t column) {
    return nibble(at(packed.words, column * row_words + row / kInAWord), place(row));
  });
  fill_groups(
      weight, [&](std::int64_t row, std::int64_t group) { return at(packed.scale, group * packed.n + row); },
      [&](std::int64_t row, std::int64_t group) {
        return nibble(at(packed.zero_words, group * row_words + row / kInAWord), place(row));
      });
  return weight;
}

void check_group_order(const PackedWords& packed, std::span<const std::int32_t> group_of) {
  if (group_of.empty()) return;
  check_size(packed, "g_idx", group_of.size(), packed.k);
  const std::int64_t length = packed.group == 0 ? packed.k : packed.group;
  for (std::int64_t column = 0; column < packed.k; ++column) {
    if (at(group_of, column) == column / length) continue;
    throw FileError(printable(packed.name) + ": g_idx puts input " + std::to_string(column) + " in group " +
                    std::to_string(at(group_of, column)) + ", not " + std::to_string(column / length) +
                    ": columns in the order of their activations (desc_act) are not read");
  }
}

void check_gptq_zero_points(const PackedWords& packed, int zero_offset) {
  const std::int64_t zero_row = words_for(packed.n);
  for (std::size_t i = 0; zero_offset > 0 && i < packed.zero_words.size(); ++i) {
    for (int place = 0; place < kInAWord; ++place) {
      if (nibble(packed.zero_words[i], place) + zero_offset <= 15) continue;
      const auto word = static_cast<std::int64_t>(i);
      throw FileError(printable(packed.name) + ": the stored zero point of output " +
                      std::to_string(word % zero_row * kInAWord + place) + ", group " +
                      std::to_string(word / zero_row) +
                      " is 15, which stands for 16, or for a 0 that has overflowed: it is not read");
    }
  }
}

QuantizedWeight from_gptq(const PackedWords& packed, std::span<const std::int32_t> group_of, int zero_offset) {
  check_shape(packed);
  if (packed.n % kInAWord != 0 || packed.k % kInAWord != 0) {
    throw FileError(printable(packed.name) + ": GPTQ packs 8 inputs and 8 zero points a word, and the weight is (" +
                    std::to_string(packed.n) + ", " + std::to_string(packed.k) + ")");
  }
  const std::int64_t groups = packed.group == 0 ? 1 : packed.k / packed.group;
  const std::int64_t zero_row = packed.n / kInAWord;
  QuantizedWeight weight = begin(packed, packed.k / kInAWord * packed.n, groups * zero_row);
  check_group_order(packed, group_of);
  check_gptq_zero_points(packed, zero_offset);
  fill_levels(weight, [&](std::int64_t row, std::int64_t column) {
    return nibble(at(packed.words, column / kInAWord * packed.n + row), static_cast<int>(column % kInAWord));
  });
  fill_groups(
      weight, [&](std::int64_t row, std::int64_t group) { return at(packed.scale, group * packed.n + row); },
      [&](std::int64_t row, std::int64_t group) {
        return zero_offset +
               nibble(at(packed.zero_words, group * zero_row + row / kInAWord), static_cast<int>(row % kInAWord));
      });
  return weight;
}

QuantizedWeight from_puzzle(const PackedWords& packed) {
  check_shape(packed);
  if (packed.k % kInAWord != 0) {
    throw FileError(printable(packed.name) + ": the puzzle packs 8 inputs a word, and there are " +
                    std::to_string(packed.k));
  }
  const std::int64_t row_words = packed.k / kInAWord;
  const std::int64_t groups = packed.group == 0 ? 1 : packed.k / packed.group;
  const std::int64_t shift_words = words_for(groups);
  QuantizedWeight weight = begin(packed, packed.n * row_words, packed.n * shift_words);
  fill_levels(weight, [&](std::int64_t row, std::int64_t column) {
    return nibble(at(packed.words, row * row_words + column / kInAWord), static_cast<int>(column % kInAWord));
  });
  fill_groups(
      weight, [&](std::int64_t row, std::int64_t group) { return at(packed.scale, row * groups + group); },
      [&](std::int64_t row, std::int64_t group) {
        return nibble(at(packed.zero_words, row * shift_words + group / kInAWord), static_cast<int>(group % kInAWord));
      });
  return weight;
}

}  // namespace octile::checkpoint
