// Reading and writing one element of a view. For the reference loops and for edges, not for inner loops.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "octile/tensor.h"

namespace octile {

// Calls visit with the typed pointer to element i of a float view. Of another type, nothing is visited.
template <class Void, class Visit>
auto visit_floats(const BasicTensor<Void>& t, std::int64_t i, const Visit& visit) {
  const auto at = [&]<class T>(T) {
    return visit(static_cast<std::conditional_t<std::is_const_v<Void>, const T, T>*>(t.data) + i);
  };
  switch (t.dtype) {
    case DType::f16:
      return at(Half{});
    case DType::bf16:
      return at(BFloat16{});
    case DType::f32:
      return at(float{});
    case DType::f64:
      return at(double{});
    default:
      return decltype(at(float{}))();
  }
}

inline std::int64_t place_of(const ConstTensor& t, std::int64_t r, std::int64_t c) {
  return r * t.strides[0] + (t.rank == 2 ? c * t.strides[1] : 0);
}

// Element (r, c) as Real (float or double). Exact: only f64 is wider than f32, and f64 views are read as double.
template <class Real>
Real load(const ConstTensor& t, std::int64_t r, std::int64_t c = 0) {
  return visit_floats(t, place_of(t, r, c), [](const auto* x) { return static_cast<Real>(*x); });
}

// Element (r, c) of an integer view. Strides count elements, of packed types too.
inline std::int32_t load_integer(const ConstTensor& t, std::int64_t r, std::int64_t c = 0) {
  const std::int64_t i = place_of(t, r, c);
  switch (t.dtype) {
    case DType::s8:
      return static_cast<const std::int8_t*>(t.data)[i];
    case DType::u8:
      return static_cast<const std::uint8_t*>(t.data)[i];
    case DType::s32:
      return static_cast<const std::int32_t*>(t.data)[i];
    default:
      break;
  }
  if (!is_packed(t.dtype)) return 0;
  const int width = bits(t.dtype), sign = 1 << (width - 1), last = per_byte(t.dtype) - 1;
  const int byte = static_cast<const std::uint8_t*>(t.data)[i >> std::popcount(static_cast<unsigned>(last))];
  return ((byte >> (i & last) * width & (2 * sign - 1)) ^ sign) - sign;
}

// Rounds once to the view's float type. A double goes to f64 only.
template <class Real>
void store(const Tensor& t, std::int64_t r, std::int64_t c, Real value) {
  visit_floats(t, place_of(t, r, c), [&]<class T>(T* x) {
    if constexpr (std::is_same_v<T, double>) {
      *x = static_cast<double>(value);
    } else {
      *x = T(static_cast<float>(value));
    }
  });
}

// The first element of a byte leaves the others 0.
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
    default: {
      if (!is_packed(t.dtype)) break;
      const int width = bits(t.dtype), last = per_byte(t.dtype) - 1, shift = static_cast<int>(i & last) * width;
      std::uint8_t& byte = static_cast<std::uint8_t*>(t.data)[i >> std::popcount(static_cast<unsigned>(last))];
      const int before = byte & ((1 << shift) - 1);
      byte = static_cast<std::uint8_t>(before | (value & ((1 << width) - 1)) << shift);
    }
  }
}

}  // namespace octile
