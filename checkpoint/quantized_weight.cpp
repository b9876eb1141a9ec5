#include "octile/checkpoint/quantized_weight.h"

#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "base/access.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

// Unsigned integers of 4 or 8 bits in 32-bit words, along the columns or the rows of a matrix.
class WordMatrix {
 public:
  enum class Along : std::uint8_t { cols, rows };

  WordMatrix(std::int64_t rows, std::int64_t cols, DType type, Along along, bool is_awq = false)
      : bits_(bits(type)), along_(along), is_awq_(is_awq), cols_(along == Along::cols ? words_for(cols, type) : cols) {
    size_ = (along == Along::cols ? rows : words_for(rows, type)) * cols_;
  }

  std::int64_t size() const { return size_; }  // in words

  int get(std::span<const std::int32_t> words, std::int64_t row, std::int64_t col) const {
    const Place place = place_of(row, col);
    return static_cast<int>(static_cast<std::uint32_t>(words[place.word]) >> place.shift & ((1u << bits_) - 1));
  }

  // Of a word that is still 0 there.
  void set(std::span<std::int32_t> words, std::int64_t row, std::int64_t col, int value) const {
    const Place place = place_of(row, col);
    words[place.word] = static_cast<std::int32_t>(static_cast<std::uint32_t>(words[place.word]) |
                                                  static_cast<std::uint32_t>(value) << place.shift);
  }

 private:
  struct Place {
    std::size_t word;
    int shift;
  };

  Place place_of(std::int64_t row, std::int64_t col) const {
    // AWQ's output i of eight is nibble kAwqPlace[i] of the word.
    constexpr std::array<int, 8> kAwqPlace = {0, 4, 1, 5, 2, 6, 3, 7};
    const int log = std::countr_zero(32u / static_cast<unsigned>(bits_));
    std::int64_t& packed = along_ == Along::cols ? col : row;
    int i = static_cast<int>(packed & ((1 << log) - 1));
    packed >>= log;
    if (is_awq_) i = kAwqPlace[static_cast<std::size_t>(i)];
    return {static_cast<std::size_t>(row * cols_ + col), i * bits_};
  }

  int bits_;
  Along along_;
  bool is_awq_;
  std::int64_t cols_;  // in words, if they are along the columns
  std::int64_t size_;
};

using Along = WordMatrix::Along;

int offset_of(DType type) { return 1 << (bits(type) - 1); }

template <class T>
T at(std::span<const T> values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

void check_size(const PackedWords& packed, std::string_view what, std::size_t has, std::int64_t wants) {
  if (has == static_cast<std::size_t>(wants)) return;
  reject(printable(packed.name), ": ", what, " has ", has, " values; (", packed.n, ", ", packed.k, ") in groups of ",
         packed.group, " have ", wants);
}

// Comes before any arithmetic on the sizes: below these bounds no product of two of them overflows.
void check_shape(const PackedWords& packed) {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  if (packed.n < 0 || packed.k < 0 || packed.n >= kMax || packed.k >= kMax || packed.group < 0 ||
      (packed.group != 0 && packed.k % packed.group != 0)) {
    reject(printable(packed.name), ": (", packed.n, ", ", packed.k, ") cannot be in groups of ", packed.group);
  }
}

// Where a layout keeps the levels, the zero points and the scales.
struct Layout {
  bool is_transposed;  // (K, N) and (G, N) instead of (N, K) and (N, G)
  Along levels;
  Along zero_points;
  bool is_awq = false;
  int zero_offset = 0;  // what the stored zero points lack
};

constexpr Layout kPackQuantized = {false, Along::cols, Along::rows};
constexpr Layout kPuzzle = {false, Along::cols, Along::cols};
constexpr Layout kAwq = {true, Along::cols, Along::cols, true};

WordMatrix matrix_of(const Layout& layout, std::int64_t n, std::int64_t width, DType type, Along along) {
  return layout.is_transposed ? WordMatrix(width, n, type, along, layout.is_awq) : WordMatrix(n, width, type, along);
}

QuantizedWeight unpack(const PackedWords& packed, const Layout& layout) {
  QuantizedWeight weight;
  weight.n = packed.n;
  weight.k = packed.k;
  weight.format = {packed.type, Granularity::group, packed.group, !packed.zero_words.empty()};
  const std::int64_t groups = weight.groups();
  const WordMatrix levels = matrix_of(layout, packed.n, packed.k, packed.type, layout.levels);
  const WordMatrix zero_points = matrix_of(layout, packed.n, groups, packed.type, layout.zero_points);
  check_size(packed, "the weight, in words,", packed.words.size(), levels.size());
  check_size(packed, "the scale", packed.scale.size(), weight.n * groups);
  if (weight.format.zero_point) {
    check_size(packed, "the zero point, in words,", packed.zero_words.size(), zero_points.size());
  }
  for (const float scale : packed.scale) {
    if (!std::isfinite(scale)) reject(printable(packed.name), ": a scale is ", number_text(scale));
  }
  weight.q.resize(static_cast<std::size_t>(weight.n * weight.row_bytes()));
  const auto stored = [&](std::int64_t row, std::int64_t i) {
    return layout.is_transposed ? std::pair(i, row) : std::pair(row, i);
  };
  const int offset = offset_of(packed.type);
  for (std::int64_t row = 0; row < weight.n; ++row) {
    for (std::int64_t column = 0; column < weight.k; ++column) {
      const auto [i, j] = stored(row, column);
      weight.put(row, column, levels.get(packed.words, i, j) - offset);
    }
    for (std::int64_t group = 0; group < groups; ++group) {
      const auto [i, j] = stored(row, group);
      weight.scale.push_back(at(packed.scale, layout.is_transposed ? i * weight.n + j : i * groups + j));
      if (!weight.format.zero_point) continue;
      weight.zero_point.push_back(zero_points.get(packed.zero_words, i, j) + layout.zero_offset - offset);
    }
  }
  return weight;
}

void check_eights(const PackedWords& packed, std::int64_t count, const char* what) {
  if (count % 8 == 0) return;
  reject(printable(packed.name), ": ", what, " a word, and there are ", count);
}

}  // namespace

int QuantizedWeight::level(std::int64_t row, std::int64_t column) const { return load_integer(values(), row, column); }

void QuantizedWeight::put(std::int64_t row, std::int64_t column, int level) {
  store_integer(values(), row, column, level);
}

void dequantize_row(const QuantizedWeight& weight, std::int64_t row, std::span<float> values) {
  const bool per_tensor = weight.format.granularity == Granularity::tensor;
  const std::int64_t first = per_tensor ? 0 : row * weight.groups();
  for (std::int64_t column = 0; column < weight.k; ++column) {
    const auto i = static_cast<std::size_t>(first + column / weight.run());
    const int zero_point = weight.zero_point.empty() ? 0 : weight.zero_point[i];
    values[static_cast<std::size_t>(column)] =
        static_cast<float>(weight.level(row, column) - zero_point) * weight.scale[i];
  }
}

std::vector<std::int32_t> pack_levels(const QuantizedWeight& weight) {
  const DType type = weight.format.type;
  const WordMatrix levels = matrix_of(kPackQuantized, weight.n, weight.k, type, kPackQuantized.levels);
  std::vector<std::int32_t> words(static_cast<std::size_t>(levels.size()));
  for (std::int64_t row = 0; row < weight.n; ++row) {
    for (std::int64_t column = 0; column < weight.k; ++column) {
      levels.set(words, row, column, weight.level(row, column) + offset_of(type));
    }
  }
  return words;
}

std::vector<std::int32_t> pack_zero_points(const QuantizedWeight& weight) {
  const DType type = weight.format.type;
  const std::int64_t groups = weight.groups();
  const WordMatrix points = matrix_of(kPackQuantized, weight.n, groups, type, kPackQuantized.zero_points);
  std::vector<std::int32_t> words(static_cast<std::size_t>(points.size()));
  for (std::int64_t row = 0; row < weight.n; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int32_t zero_point = weight.zero_point[static_cast<std::size_t>(row * groups + group)];
      points.set(words, row, group, zero_point + offset_of(type));
    }
  }
  return words;
}

QuantizedWeight from_pack_quantized(const PackedWords& packed) {
  check_shape(packed);
  return unpack(packed, kPackQuantized);
}

QuantizedWeight from_awq(const PackedWords& packed) {
  check_shape(packed);
  check_eights(packed, packed.n, "AWQ packs 8 outputs");
  return unpack(packed, kAwq);
}

void check_group_order(const PackedWords& packed, std::span<const std::int32_t> group_of) {
  if (group_of.empty()) return;
  check_size(packed, "g_idx", group_of.size(), packed.k);
  const std::int64_t length = packed.group == 0 ? packed.k : packed.group;
  for (std::int64_t column = 0; column < packed.k; ++column) {
    if (at(group_of, column) == column / length) continue;
    reject(printable(packed.name), ": g_idx puts input ", column, " in group ", at(group_of, column), ", not ",
           column / length, ": columns in the order of their activations (desc_act) are not read");
  }
}

void check_gptq_zero_points(const PackedWords& packed, int zero_offset) {
  if (zero_offset == 0 || packed.zero_words.empty()) return;
  const std::int64_t groups = packed.group == 0 ? 1 : packed.k / packed.group;
  const WordMatrix points(groups, packed.n, DType::s4, Along::cols);
  check_size(packed, "the zero point, in words,", packed.zero_words.size(), points.size());
  for (std::int64_t group = 0; group < groups; ++group) {
    for (std::int64_t row = 0; row < packed.n; ++row) {
      if (points.get(packed.zero_words, group, row) + zero_offset <= 15) continue;
      reject(printable(packed.name), ": the stored zero point of output ", row, ", group ", group,
             " is 15, which stands for 16, or for a 0 that has overflowed: it is not read");
    }
  }
}

QuantizedWeight from_gptq(const PackedWords& packed, std::span<const std::int32_t> group_of, int zero_offset) {
  check_shape(packed);
  check_eights(packed, packed.k, "GPTQ packs 8 inputs");
  check_eights(packed, packed.n, "GPTQ packs 8 zero points");
  check_group_order(packed, group_of);
  check_gptq_zero_points(packed, zero_offset);
  return unpack(packed, {true, Along::rows, Along::cols, false, zero_offset});
}

QuantizedWeight from_puzzle(const PackedWords& packed) {
  check_shape(packed);
  check_eights(packed, packed.k, "the puzzle packs 8 inputs");
  return unpack(packed, kPuzzle);
}

}  // namespace octile::checkpoint
