// For tests of the operators, each on both CPU executors, against scalar loops.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "octile/tile/tile.h"

namespace octile::tile {

template <class E>
class OnCpu : public testing::Test {};
using Executors = testing::Types<FastCpu, CheckedCpu>;
TYPED_TEST_SUITE(OnCpu, Executors);

// The checker must also find nothing wrong with a correct kernel.
template <class E, class Kernel, class... Args>
void run(Grid grid, const Kernel& kernel, Args&&... args) {
  if constexpr (std::is_same_v<E, CheckedCpu>) {
    const Report report = launch(E{}, grid, kernel, args...);
    for (const Finding& finding : report.findings) ADD_FAILURE() << text(report, finding);
  } else {
    launch(E{}, grid, kernel, args...);
  }
}

template <class T>
Array<T> values(const char* name, std::vector<std::int64_t> shape, unsigned seed, int low = -128, int high = 127) {
  Array<T> result(name, std::move(shape));
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> integer(low, high);
  for (std::int64_t i = 0; i < result.size(); ++i) {
    const int n = integer(random);
    if constexpr (std::is_same_v<T, f32>) result.set(i, static_cast<float>(n) * 0.37f);
    if constexpr (std::is_same_v<T, f16>) result.set(i, f16(static_cast<float>(n) * 0.37f));
    if constexpr (std::is_same_v<T, bf16>) result.set(i, bf16(static_cast<float>(n) * 0.37f));
    if constexpr (is_integer_type<T>) result.set(i, static_cast<T>(n));
    if constexpr (std::is_same_v<T, bool>) result.set(i, n > 0);
  }
  return result;
}

template <class T>
std::uint32_t bits(T value) {
  std::uint32_t result = 0;
  std::memcpy(&result, &value, sizeof(T));
  return result;
}

inline void expect_same(float got, float expected, std::int64_t i) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << "element " << i;
  } else {
    EXPECT_EQ(bits(got), bits(expected)) << "element " << i << ": " << got << " instead of " << expected;
  }
}
template <class T>
requires std::is_integral_v<T>
void expect_same(T got, T expected, std::int64_t i) { EXPECT_EQ(got, expected) << "element " << i; }

}  // namespace octile::tile
