// Operands of the benchmarks: random normal values, and what the quantizers make of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octile::cli {

// rows x cols values of the standard normal distribution, the same for the same seed.
std::vector<float> normal(std::int64_t rows, std::int64_t cols, std::uint64_t seed);

// A matrix (rows, cols) quantized to the full range.
struct QuantizedMatrix {
  std::vector<std::int8_t> values;
  std::vector<float> scale;  // (rows)
};
QuantizedMatrix quantized_rows(const std::vector<float>& x, std::int64_t rows, std::int64_t cols);

// 4 bits, two per byte, a scale per group of a row; cols is a multiple of group.
struct PackedMatrix {
  std::vector<std::uint8_t> values;
  std::vector<float> scale;  // (rows, cols / group)
};
PackedMatrix quantized_groups(const std::vector<float>& x, std::int64_t rows, std::int64_t cols, std::int64_t group);

// Uninitialized would do, but then the first run would pay for the pages.
template <class T>
std::vector<T> zeros(std::int64_t rows, std::int64_t cols) {
  return std::vector<T>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
}

}  // namespace octile::cli
