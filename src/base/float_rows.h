// Rows of a float matrix as f32 and back, for code that runs once, outside of plans.
#pragma once

#include <cstdint>

#include "base/access.h"
#include "octile/tensor.h"

namespace octile {

// A checked matrix; f64 is rounded.
inline void read_row(const ConstTensor& t, std::int64_t row, float* out) {
  visit_floats(t, row * t.strides[0], [&](const auto* x) {
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
