// Philox-4x32-10 against the published vectors, and the rounding made from its words.
#include "base/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>

namespace octile {
namespace {

// The generator with all 128 bits of its counter, one word at a time; the library's leaves the upper half 0.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const unsigned long long even = 0xD2511F53ull * counter[0];
    const unsigned long long odd = 0xCD9E8D57ull * counter[2];
    std::array<std::uint32_t, 4> next{};
    next[3] = static_cast<std::uint32_t>(even % 0x100000000ull);
    next[2] = static_cast<std::uint32_t>(even / 0x100000000ull) ^ counter[3] ^ key[1];
    next[1] = static_cast<std::uint32_t>(odd % 0x100000000ull);
    next[0] = static_cast<std::uint32_t>(odd / 0x100000000ull) ^ counter[1] ^ key[0];
    counter = next;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

using Words = std::array<std::uint32_t, 4>;

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox_4x32_10(0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  // All ones fills the upper half of the counter too. It checks the generator above, which in turn checks the
  // library's.
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Philox, CounterAndKeyFillTheirWordsLowFirst) {
  const std::array<std::uint64_t, 5> values = {1, 0xffffffffull, 0x100000000ull, 0x243f6a8885a308d3ull, ~0ull};
  for (const std::uint64_t counter : values) {
    for (const std::uint64_t key : values) {
      const Words expected =
          philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0},
                 {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)});
      EXPECT_EQ(philox_4x32_10(counter, key), expected) << counter << ' ' << key;
    }
  }
}

TEST(Uniform, TakesTheHalvesOfABlockInOrder) {
  // Block 0 of key 0 is 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
  const std::array<std::uint32_t, 8> halves = {0xe8d5, 0x6627, 0xc58d, 0xe169, 0xac4c, 0xbc57, 0xdbd8, 0x9b00};
  for (std::uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(uniform(i, 0), static_cast<float>(halves[i]) / 65536.0f) << i;
  }
  EXPECT_EQ(uniform(8, 0), static_cast<float>(philox({1, 0, 0, 0}, {0, 0})[0] & 0xffff) / 65536.0f);
}

// The mean of n uniforms on {0, 2^-16, ..., 1 - 2^-16} is 1/2 - 2^-17 with a standard deviation of sqrt(1 / 12 n);
// neighbours are independent, so their product has mean 1/4 and variance 1/9 - 1/16 = 7/144. Five deviations.
TEST(Uniform, IsUniformAndUncorrelated) {
  constexpr int kCount = 1 << 18;
  for (const std::uint64_t seed : {0ull, 1ull, 0x9e3779b97f4a7c15ull}) {
    double sum = 0;
    double product = 0;
    std::array<int, 16> bins{};
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const double u = uniform(i, seed);
      ASSERT_GE(u, 0.0);
      ASSERT_LT(u, 1.0);
      sum += u;
      product += u * uniform(i + 1, seed);
      ++bins[static_cast<std::size_t>(u * 16)];
    }
    EXPECT_NEAR(sum / kCount, 0.5 - 0x1p-17, 5 * std::sqrt(1.0 / 12 / kCount));
    // Each u enters two of the products, hence the covariance of neighbours: 2 (1/2 * 1/2 * 1/3 - 1/16) = 1/24.
    EXPECT_NEAR(product / kCount, 0.25 - 0x1p-17, 5 * std::sqrt((7.0 / 144 + 1.0 / 24) / kCount));
    for (const int bin : bins) EXPECT_NEAR(bin, kCount / 16.0, 5 * std::sqrt(kCount / 16.0 * 15 / 16));
  }
}

}  // namespace
}  // namespace octile
