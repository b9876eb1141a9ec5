// An s8 operand that bulk copies cannot read as it is, copied into a form that they can: a matter of 2 bytes an element
// at the memory's speed, where a kernel that gathers bytes itself is three times slower at the product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/tensor_map.h"
#include "octile/tensor.h"

namespace octile::cuda {

inline std::int64_t repacked_pitch(std::int64_t columns) {
  return (columns + kTmaAlignment - 1) / kTmaAlignment * kTmaAlignment;
}

// Bytes that the copy takes.
inline std::size_t repacked_size(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * repacked_pitch(columns) + 127) / 128 * 128;
}

void prepare_repack();
// Enqueues the copy, and returns what it will be. Rows of columns are 1 apart, or columns of rows.
ConstTensor repack(const ConstTensor& from, std::byte* memory, Stream stream);

}  // namespace octile::cuda
