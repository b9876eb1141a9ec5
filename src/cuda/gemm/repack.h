// Copies s8 operands that TMA or cp.async cannot read into a form that they can. That costs 2 bytes per element at
// memory speed; a product that gathers bytes itself is three times slower.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "cuda/tensor_map.h"
#include "octile/tensor.h"

namespace octile::cuda {

// Rows begin at lines of L2 if that costs little: otherwise the products take up to a third longer.
inline std::int64_t repacked_pitch(std::int64_t columns) {
  const std::int64_t unit = columns < 1024 ? kTmaAlignment : 128;
  return (columns + unit - 1) / unit * unit;
}

// Bytes that the copy takes.
inline std::size_t repacked_size(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * repacked_pitch(columns) + 127) / 128 * 128;
}

void prepare_repack();
// Enqueues copies of at most two operands, one after the other in `memory`, and makes views of them of the operands.
// One of the strides of each is 1. Null: none.
void repack(std::initializer_list<ConstTensor*> operands, std::byte* memory, Stream stream);

// Experts' terms, columns of the operand (whose columns are contiguous): in the copy each one's begin behind those of
// the experts before it, padded to multiples of `block`, itself one of 128. What lies behind the last term of an expert
// is 0 up to a multiple of 128, and then undefined.
struct ExpertTerms {
  ConstTensor offsets;
  std::int64_t block;

  std::int64_t padded(std::int64_t terms) const;
};
void prepare_repack_terms();
void repack_terms(ConstTensor& operand, const ExpertTerms& terms, std::byte* memory, Stream stream);

}  // namespace octile::cuda
