// Rows of a float matrix as f32 and back, for what runs once and not in a plan.
#pragma once

#include <cstdint>

#include "octile/tensor.h"

namespace octile {

// Calls visit with the typed pointer to element (row, 0).
template <class Visit>
void visit_row(const ConstTensor& t, std::int64_t row, const Visit& visit) {
  const std::int64_t at = row * t.strides[0];
  switch (t.dtype) {
    case DType::f16:
      return visit(static_cast<const Half*>(t.data) + at);
    case DType::bf16:
      return visit(static_cast<const BFloat16*>(t.data) + at);
    case DType::f64:
      return visit(static_cast<const double*>(t.data) + at);
    default:
      return visit(static_cast<const float*>(t.data) + at);
  }
}

// A checked matrix; f64 is rounded.
inline void read_row(const ConstTensor& t, std::int64_t row, float* out) {
  visit_row(t, row, [&](const auto* x) {
    for (std::int64_t i = 0; i < t.cols(); ++i) out[i] = static_cast<float>(x[i]);
  });
}

// A checked f32 vector; its stride may be anything.
inline float read_f32(const ConstTensor& t, std::int64_t i) {
  return static_cast<const float*>(t.data)[i * t.strides[0]];
}
inline void write_f32(const Tensor& t, std::int64_t i, float value) {
  static_cast<float*>(t.data)[i * t.strides[0]] = value;
}

// As the type would keep it.
inline float rounded_to(DType dtype, float value) {
  if (dtype == DType::f16) return Half(value);
  if (dtype == DType::bf16) return BFloat16(value);
  return value;
}

}  // namespace octile
