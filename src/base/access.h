// Reading and writing one element of a view. For the reference loops and for edges, not for inner loops.
#pragma once

#include <cstdint>

#include "octile/tensor.h"

namespace octile {

// Element (r, c) as Real (float or double). Exact: only f64 is wider than f32, and f64 views are read as double.
template <class Real>
Real load(const ConstTensor& t, std::int64_t r, std::int64_t c = 0) {
  const std::int64_t i = r * t.strides[0] + (t.rank == 2 ? c * t.strides[1] : 0);
  switch (t.dtype) {
    case DType::f16:
      return static_cast<Real>(static_cast<float>(static_cast<const Half*>(t.data)[i]));
    case DType::bf16:
      return static_cast<Real>(static_cast<float>(static_cast<const BFloat16*>(t.data)[i]));
    case DType::f32:
      return static_cast<Real>(static_cast<const float*>(t.data)[i]);
    case DType::f64:
      return static_cast<Real>(static_cast<const double*>(t.data)[i]);
    default:
      break;
  }
  return Real{};
}

// Element (r, c) of an integer view. s4: low nibble first, sign-extended; its strides count elements.
inline std::int32_t load_integer(const ConstTensor& t, std::int64_t r, std::int64_t c = 0) {
  const std::int64_t i = r * t.strides[0] + (t.rank == 2 ? c * t.strides[1] : 0);
  switch (t.dtype) {
    case DType::s8:
      return static_cast<const std::int8_t*>(t.data)[i];
    case DType::u8:
      return static_cast<const std::uint8_t*>(t.data)[i];
    case DType::s32:
      return static_cast<const std::int32_t*>(t.data)[i];
    case DType::s4: {
      const int byte = static_cast<const std::uint8_t*>(t.data)[i / 2];
      return (((i % 2 ? byte >> 4 : byte) & 15) ^ 8) - 8;
    }
    default:
      break;
  }
  return 0;
}

// Rounds once to the view's float type. A double goes to f64 only.
template <class Real>
void store(const Tensor& t, std::int64_t r, std::int64_t c, Real value) {
  const std::int64_t i = r * t.strides[0] + (t.rank == 2 ? c * t.strides[1] : 0);
  switch (t.dtype) {
    case DType::f16:
      static_cast<Half*>(t.data)[i] = Half(static_cast<float>(value));
      break;
    case DType::bf16:
      static_cast<BFloat16*>(t.data)[i] = BFloat16(static_cast<float>(value));
      break;
    case DType::f32:
      static_cast<float*>(t.data)[i] = static_cast<float>(value);
      break;
    case DType::f64:
      static_cast<double*>(t.data)[i] = static_cast<double>(value);
      break;
    default:
      break;
  }
}

// The odd last column of an s4 row leaves its high nibble 0.
inline void store_integer(const Tensor& t, std::int64_t r, std::int64_t c, std::int32_t value) {
  const std::int64_t i = r * t.strides[0] + c * t.strides[1];
  switch (t.dtype) {
    case DType::s8:
      static_cast<std::int8_t*>(t.data)[i] = static_cast<std::int8_t>(value);
      break;
    case DType::u8:
      static_cast<std::uint8_t*>(t.data)[i] = static_cast<std::uint8_t>(value);
      break;
    case DType::s32:
      static_cast<std::int32_t*>(t.data)[i] = value;
      break;
    case DType::s4: {
      std::uint8_t& byte = static_cast<std::uint8_t*>(t.data)[i / 2];
      const int nibble = value & 15;
      byte = static_cast<std::uint8_t>(i % 2 ? (byte & 15) | nibble << 4 : nibble);
      break;
    }
    default:
      break;
  }
}

}  // namespace octile
