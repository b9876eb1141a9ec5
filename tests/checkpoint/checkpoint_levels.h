// Weights in the layouts of checkpoint files, each word put together by hand.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "octile/checkpoint/quantized_weight.h"

namespace octile::checkpoint {

// Levels and zero points, 0..15, and scales, by position.
struct Levels {
  std::int64_t n, k, group;
  std::int64_t groups() const { return k / group; }
  static std::uint32_t level(std::int64_t row, std::int64_t column) {
    return static_cast<std::uint32_t>(row * 7 + column * 11 + row * column) % 16;
  }
  static std::uint32_t zero(std::int64_t row, std::int64_t group) {
    return static_cast<std::uint32_t>(row * 5 + group * 3 + 1) % 15;  // GPTQ stores one less: 0 there would be -1
  }
  static float scale(std::int64_t row, std::int64_t group) {
    return static_cast<float>(row + 1) / static_cast<float>(group + 3);
  }
  float value(std::int64_t row, std::int64_t column) const {
    const auto level_of = static_cast<float>(level(row, column));
    return (level_of - static_cast<float>(zero(row, column / group))) * scale(row, column / group);
  }
};

// (rows, cols) of words, whose nibble i is the element that `nibble` returns.
inline std::vector<std::int32_t> words(std::int64_t rows, std::int64_t cols,
                                       const std::function<std::uint32_t(std::int64_t, std::int64_t, int)>& nibble) {
  std::vector<std::int32_t> result;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t col = 0; col < cols; ++col) {
      std::uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word += nibble(row, col, i) << (4 * i);
      result.push_back(static_cast<std::int32_t>(word));
    }
  }
  return result;
}

inline std::vector<float> scales(const Levels& levels, bool transposed) {
  std::vector<float> result;
  const std::int64_t rows = transposed ? levels.groups() : levels.n;
  const std::int64_t cols = transposed ? levels.n : levels.groups();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) result.push_back(transposed ? Levels::scale(j, i) : Levels::scale(i, j));
  }
  return result;
}

inline void expect_levels(const QuantizedWeight& weight, const Levels& levels) {
  ASSERT_EQ(weight.n, levels.n);
  ASSERT_EQ(weight.k, levels.k);
  std::vector<float> row(static_cast<std::size_t>(levels.k));
  for (std::int64_t i = 0; i < levels.n; ++i) {
    dequantize_row(weight, i, row);
    for (std::int64_t j = 0; j < levels.k; ++j) {
      ASSERT_EQ(weight.level(i, j), static_cast<int>(Levels::level(i, j)) - 8) << i << ", " << j;
      ASSERT_EQ(row[static_cast<std::size_t>(j)], levels.value(i, j)) << i << ", " << j;
    }
  }
}

inline constexpr int kAwqOrder[] = {0, 2, 4, 6,
                                    1, 3, 5, 7};  // the order of the eight outputs in a word, from the lowest nibble

struct Awq {
  explicit Awq(const Levels& l)
      : levels(l),
        weight(
            words(l.k, l.n / 8,
                  [](std::int64_t k, std::int64_t word, int i) { return Levels::level(word * 8 + kAwqOrder[i], k); })),
        zeros(words(l.groups(), l.n / 8,
                    [](std::int64_t g, std::int64_t word, int i) { return Levels::zero(word * 8 + kAwqOrder[i], g); })),
        scale(scales(l, true)) {}
  PackedWords packed() const {
    return {.name = "w",
            .n = levels.n,
            .k = levels.k,
            .group = levels.group,
            .words = weight,
            .scale = scale,
            .zero_words = zeros};
  }
  Levels levels;
  std::vector<std::int32_t> weight, zeros;
  std::vector<float> scale;
};

struct Gptq {
  explicit Gptq(const Levels& l, std::uint32_t less = 1)
      : levels(l),
        weight(words(l.k / 8, l.n,
                     [](std::int64_t word, std::int64_t n, int i) { return Levels::level(n, word * 8 + i); })),
        zeros(words(
            l.groups(), l.n / 8,
            [&](std::int64_t g, std::int64_t word, int i) { return (Levels::zero(word * 8 + i, g) - less) & 15; })),
        scale(scales(l, true)) {}
  PackedWords packed() const {
    return {.name = "w",
            .n = levels.n,
            .k = levels.k,
            .group = levels.group,
            .words = weight,
            .scale = scale,
            .zero_words = zeros};
  }
  Levels levels;
  std::vector<std::int32_t> weight, zeros;
  std::vector<float> scale;
};

// Zero points of at least 1 in both layouts, so that GPTQ's are legal.
inline const Levels kLevels = {16, 64, 32};

inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
    return {};
  } catch (const FileError& error) {
    return error.what();
  }
}

#define EXPECT_ERROR(action, says)                                     \
  do {                                                                 \
    const std::string text = error_of([&] { (void)(action); });        \
    EXPECT_NE(text.find(says), std::string::npos) << "says: " << text; \
  } while (0)

}  // namespace octile::checkpoint
