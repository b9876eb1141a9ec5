// Copies an s8 operand that TMA cannot read into a form that it can. That costs 2 bytes an element at memory speed; a
// kernel that gathers bytes itself makes the product three times slower.
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
// Enqueues the copy and returns its view. One of the strides of `from` is 1.
ConstTensor repack(const ConstTensor& from, std::byte* memory, Stream stream);

}  // namespace octile::cuda
