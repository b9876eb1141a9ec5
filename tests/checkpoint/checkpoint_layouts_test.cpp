// The layouts of quantized weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "checkpoint_files.h"
#include "checkpoint_levels.h"
#include "octile/linear.h"

namespace octile::checkpoint {
namespace {

TEST(Layouts, Awq) {
  const Awq awq(kLevels);
  expect_levels(from_awq(awq.packed()), kLevels);
  PackedWords bad = awq.packed();
  bad.n = 12;
  EXPECT_ERROR(from_awq(bad), "8 outputs a word, and there are 12");
  bad = awq.packed();
  bad.words = bad.words.first(bad.words.size() - 1);
  EXPECT_ERROR(from_awq(bad), "the weight, in words, has 127 values");
  bad = awq.packed();
  bad.zero_words = bad.zero_words.first(1);
  EXPECT_ERROR(from_awq(bad), "the zero point, in words, has 1 values");
  bad.scale = bad.scale.first(1);
  EXPECT_ERROR(from_awq(bad), "the scale has 1 values");
}

TEST(Layouts, Gptq) {
  const Levels levels = {8, 64, 32};  // none of their zero points is 0
  Gptq gptq(levels);
  std::vector<std::int32_t> order;
  for (std::int32_t i = 0; i < 64; ++i) order.push_back(i / 32);
  expect_levels(from_gptq(gptq.packed(), order, 1), levels);
  expect_levels(from_gptq(gptq.packed(), {}, 1), levels);
  expect_levels(from_gptq(Gptq(levels, 0).packed(), order, 0), levels);  // version 2

  std::swap(order[0], order[63]);
  EXPECT_ERROR(from_gptq(Gptq(levels, 0).packed(), order, 0), "g_idx puts input 0 in group 1, not 0");
  order.pop_back();
  EXPECT_ERROR(from_gptq(Gptq(levels, 0).packed(), order, 0), "g_idx has 63 values");
  gptq.zeros[0] |= 15;
  EXPECT_ERROR(from_gptq(gptq.packed(), {}, 1), "output 0, group 0 is 15, which stands for 16");
  PackedWords bad = gptq.packed();
  bad.k = 60, bad.group = 0;
  EXPECT_ERROR(from_gptq(bad, {}, 1), "8 inputs a word, and there are 60");
}

// scale and weight (32, 8), one word of shifts a row, groups of 8: the puzzle's own sizes.
TEST(Layouts, Puzzle) {
  const Levels levels = {32, 64, 8};
  const auto weight =
      words(32, 8, [](std::int64_t n, std::int64_t word, int i) { return Levels::level(n, word * 8 + i); });
  const auto shifts = words(32, 1, [](std::int64_t n, std::int64_t, int i) { return Levels::zero(n, i); });
  const auto scale = scales(levels, false);
  PackedWords packed = {
      .name = "w", .n = 32, .k = 64, .group = 8, .words = weight, .scale = scale, .zero_words = shifts};
  expect_levels(from_puzzle(packed), levels);
  packed.k = 60, packed.group = 0;
  EXPECT_ERROR(from_puzzle(packed), "8 inputs a word, and there are 60");
}

// In groups that LinearPlan takes, the product is the puzzle's: z = (scale * (w - shift)) @ x.
TEST(Layouts, LinearPlanRunsAPuzzlesWeight) {
  const Levels levels = {8, 64, 32};
  const auto weight =
      words(8, 8, [](std::int64_t n, std::int64_t word, int i) { return Levels::level(n, word * 8 + i); });
  const auto shifts = words(8, 1, [](std::int64_t n, std::int64_t, int i) { return i < 2 ? Levels::zero(n, i) : 0; });
  const auto scale = scales(levels, false);
  const QuantizedWeight quantized =
      from_puzzle({.name = "w", .n = 8, .k = 64, .group = 32, .words = weight, .scale = scale, .zero_words = shifts});
  const Values x = normal("x", {3, 64}, 1);
  std::vector<float> y(3 * 8);
  const LinearDescription description = {
      .m = 3, .n = 8, .k = 64, .activation = Activation::none, .weight = {DType::s4, Granularity::group, 32, true}};
  const LinearPlan plan = LinearPlan::select(description);
  std::vector<std::byte> scratch(plan.workspace_size());
  plan.run({.x = matrix(x.values.data(), 3, 64),
            .weight = quantized.values(),
            .weight_scale = matrix(quantized.scale.data(), 8, 2),
            .weight_zero_point = matrix(quantized.zero_point.data(), 8, 2),
            .y = matrix(y.data(), 3, 8)},
           {scratch.data(), scratch.size()});
  for (std::int64_t m = 0; m < 3; ++m) {
    for (std::int64_t n = 0; n < 8; ++n) {
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < 64; ++k) {
        const double term = static_cast<double>(levels.value(n, k)) * x.values[static_cast<std::size_t>(m * 64 + k)];
        sum += term;
        magnitude += std::fabs(term);
      }
      // An f32 sum of 64 products: each product, its dequantization and 64 additions round, each by at most 2^-24.
      EXPECT_NEAR(y[static_cast<std::size_t>(m * 8 + n)], sum, 68 * 0x1p-24 * magnitude);
    }
  }
}

// int8 in groups, packed by a file or not: LinearPlan takes the levels and scales as they are, W8A16 and W8A8.
TEST(Layouts, LinearPlanRunsInt8InGroups) {
  constexpr std::int64_t kM = 3, kN = 8, kK = 128, kGroup = 32, kGroups = kK / kGroup;
  QuantizedWeight weight;
  weight.n = kN;
  weight.k = kK;
  weight.format = {DType::s8, Granularity::group, kGroup};
  for (int i = 0; i < kN * kK; ++i) weight.q.push_back(static_cast<std::uint8_t>(i * 37 % 255 - 127));
  for (int i = 0; i < kN * kGroups; ++i) weight.scale.push_back(static_cast<float>(i % 7 + 1) / 64);
  const QuantizedWeight packed = from_pack_quantized({.name = "w",
                                                      .n = kN,
                                                      .k = kK,
                                                      .group = kGroup,
                                                      .type = DType::s8,
                                                      .words = pack_levels(weight),
                                                      .scale = weight.scale});
  const Values x = normal("x", {kM, kK}, 1);
  for (const Activation activation : {Activation::none, Activation::dynamic_per_token}) {
    const LinearPlan plan =
        LinearPlan::select({.m = kM, .n = kN, .k = kK, .activation = activation, .weight = packed.format});
    std::vector<float> y(kM * kN);
    std::vector<std::byte> scratch(plan.workspace_size());
    plan.run({.x = matrix(x.values.data(), kM, kK),
              .weight = packed.values(),
              .weight_scale = matrix(packed.scale.data(), kN, kGroups),
              .y = matrix(y.data(), kM, kN)},
             {scratch.data(), scratch.size()});
    for (std::int64_t m = 0; m < kM; ++m) {
      const float* const row = x.values.data() + m * kK;
      double max = 0;
      for (std::int64_t k = 0; k < kK; ++k) max = std::max(max, std::fabs(static_cast<double>(row[k])));
      for (std::int64_t n = 0; n < kN; ++n) {
        std::vector<float> values(kK);
        dequantize_row(packed, n, values);
        double sum = 0, magnitude = 0, levels = 0;
        for (std::size_t k = 0; k < kK; ++k) {
          sum += static_cast<double>(values[k]) * row[k];
          magnitude += std::fabs(static_cast<double>(values[k]) * row[k]);
          levels += std::fabs(static_cast<double>(values[k]));
        }
        // Float sums round as in the test above; quantized inputs are off by half a step of max / 127 each.
        const double bound = 132 * 0x1p-24 * magnitude + (activation == Activation::none ? 0 : max / 254 * levels);
        EXPECT_NEAR(y[static_cast<std::size_t>(m * kN + n)], sum, bound) << name(activation) << " " << m << ", " << n;
      }
    }
  }
}

TEST(Layouts, PackQuantizedBothWays) {
  for (const Levels& levels : {Levels{16, 64, 32}, Levels{9, 60, 60}, Levels{1, 3, 3}, Levels{3, 20, 4}}) {
    QuantizedWeight weight;
    weight.n = levels.n;
    weight.k = levels.k;
    weight.format = {DType::s4, Granularity::group, levels.group == levels.k ? 0 : levels.group, true};
    weight.q.resize(static_cast<std::size_t>(weight.n * weight.row_bytes()));
    for (std::int64_t i = 0; i < levels.n; ++i) {
      for (std::int64_t j = 0; j < levels.k; ++j) {
        auto& byte = weight.q[static_cast<std::size_t>(i * weight.row_bytes() + j / 2)];
        byte = static_cast<std::uint8_t>(byte | (Levels::level(i, j) ^ 8) << (j % 2 * 4));
      }
      for (std::int64_t group = 0; group < levels.groups(); ++group) {
        weight.scale.push_back(Levels::scale(i, group));
        weight.zero_point.push_back(static_cast<int>(Levels::zero(i, group)) - 8);
      }
    }
    expect_levels(weight, levels);
    const auto packed = pack_levels(weight);
    const auto zeros = pack_zero_points(weight);
    const std::int64_t row_words = (levels.k + 7) / 8;
    EXPECT_EQ(packed, words(levels.n, row_words, [&](std::int64_t n, std::int64_t word, int i) {
                return word * 8 + i < levels.k ? Levels::level(n, word * 8 + i) : 0u;
              }));
    EXPECT_EQ(zeros, words((levels.n + 7) / 8, levels.groups(), [&](std::int64_t word, std::int64_t group, int i) {
                return word * 8 + i < levels.n ? Levels::zero(word * 8 + i, group) : 0u;
              }));
    const QuantizedWeight back = from_pack_quantized({.name = "w",
                                                      .n = levels.n,
                                                      .k = levels.k,
                                                      .group = weight.format.group,
                                                      .words = packed,
                                                      .scale = weight.scale,
                                                      .zero_words = zeros});
    EXPECT_EQ(back.q, weight.q);
    EXPECT_EQ(back.zero_point, weight.zero_point);
    // Without zero points a level of 8 is 0.
    const QuantizedWeight symmetric = from_pack_quantized({.name = "w",
                                                           .n = levels.n,
                                                           .k = levels.k,
                                                           .group = weight.format.group,
                                                           .words = packed,
                                                           .scale = weight.scale});
    EXPECT_EQ(symmetric.q, weight.q);
    EXPECT_TRUE(symmetric.zero_point.empty());
  }
}

// Four levels of 8 bits a word, the last word of a row or column filled with zeros.
TEST(Layouts, PackQuantizedOfInt8BothWays) {
  QuantizedWeight weight;
  weight.n = 5;
  weight.k = 6;
  weight.format = {DType::s8, Granularity::group, 3, true};
  for (int i = 0; i < 30; ++i) weight.q.push_back(static_cast<std::uint8_t>(i * 9 - 128));
  for (int i = 0; i < 10; ++i) {
    weight.scale.push_back(static_cast<float>(i + 1));
    weight.zero_point.push_back(i * 28 - 128);
  }
  const auto packed = pack_levels(weight);
  const auto zeros = pack_zero_points(weight);
  ASSERT_EQ(packed.size(), 10u);
  EXPECT_EQ(static_cast<std::uint32_t>(packed[0]), 0x1b120900u);  // levels -128, -119, -110, -101, plus 128
  EXPECT_EQ(packed[1], 36 | 45 << 8);
  ASSERT_EQ(zeros.size(), 4u);
  EXPECT_EQ(static_cast<std::uint32_t>(zeros[0]), 0u | 56u << 8 | 112u << 16 | 168u << 24);  // of rows 0 to 3
  EXPECT_EQ(zeros[3], 252);
  const QuantizedWeight back = from_pack_quantized({.name = "w",
                                                    .n = 5,
                                                    .k = 6,
                                                    .group = 3,
                                                    .type = DType::s8,
                                                    .words = packed,
                                                    .scale = weight.scale,
                                                    .zero_words = zeros});
  EXPECT_EQ(back.q, weight.q);
  EXPECT_EQ(back.zero_point, weight.zero_point);
  EXPECT_EQ(back.format, weight.format);
  EXPECT_EQ(back.level(4, 5), static_cast<std::int8_t>(29 * 9 - 128));
  std::vector<float> row(6);
  dequantize_row(back, 4, row);
  EXPECT_EQ(row[5], static_cast<float>(back.level(4, 5) - 124) * 10);
}

TEST(Layouts, RefuseWhatHasNoMeaning) {
  const Awq awq(kLevels);
  PackedWords bad = awq.packed();
  bad.group = 24;
  EXPECT_ERROR(from_awq(bad), "(16, 64) cannot be in groups of 24");
  bad.n = std::int64_t{1} << 40;
  EXPECT_ERROR(from_pack_quantized(bad), "cannot be in groups");
  bad.n = bad.k = std::int64_t{1} << 62;  // the number of words overflows
  EXPECT_ERROR(from_pack_quantized(bad), "cannot be in groups");
  EXPECT_ERROR(from_awq(bad), "cannot be in groups");
  EXPECT_ERROR(from_gptq(bad, {}, 1), "cannot be in groups");
  EXPECT_ERROR(from_puzzle(bad), "cannot be in groups");
  bad = awq.packed();
  std::vector<float> scale = awq.scale;
  scale[3] = std::numeric_limits<float>::infinity();
  bad.scale = scale;
  EXPECT_ERROR(from_awq(bad), "a scale is inf");
}

}  // namespace
}  // namespace octile::checkpoint
