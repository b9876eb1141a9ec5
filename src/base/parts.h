// Parts of a view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "octile/tensor.h"

namespace octile {

// Rows first .. first + count - 1 of a matrix, or elements of a vector.
template <class Void>
BasicTensor<Void> rows_at(BasicTensor<Void> t, std::int64_t first, std::int64_t count) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  // One without elements may have no memory.
  if (t.data != nullptr) t.data = static_cast<Byte*>(t.data) + first * t.strides[0] * bits(t.dtype) / 8;
  t.shape[0] = count;
  return t;
}

// Those of expert e, where each has `rows`.
template <class Void>
BasicTensor<Void> expert_rows(const BasicTensor<Void>& t, std::int64_t e, std::int64_t rows) {
  return rows_at(t, e * rows, rows);
}

// A matrix of one row as a vector.
template <class Void>
BasicTensor<Void> as_vector(const BasicTensor<Void>& row) {
  return {row.data, row.dtype, row.device, 1, {row.cols(), 0}, {1, 0}};
}

}  // namespace octile
