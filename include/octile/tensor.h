// Octile: non-owning views of matrices and vectors.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "octile/types.h"

namespace octile {

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<Half> : std::integral_constant<DType, DType::f16> {};
template <>
struct DTypeOf<BFloat16> : std::integral_constant<DType, DType::bf16> {};
template <>
struct DTypeOf<float> : std::integral_constant<DType, DType::f32> {};
template <>
struct DTypeOf<double> : std::integral_constant<DType, DType::f64> {};
template <>
struct DTypeOf<std::int8_t> : std::integral_constant<DType, DType::s8> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<DType, DType::u8> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<DType, DType::s32> {};

// A view: pointer, element type, shape and strides. It owns nothing and copies nothing.
//   rank     0 (absent), 1 or 2
//   strides  in elements. A matrix is row-major: strides[1] is 1, strides[0] is the leading dimension (>= columns, so
//            rows may be padded or a slice of columns; 0 repeats one row, for inputs only). A vector may have any
//            stride >= 0; 0 repeats one value, for inputs only. For s4, strides[0] is even.
template <class Void>
struct BasicTensor {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Device device = {};
  int rank = 0;
  std::array<std::int64_t, 2> shape = {};
  std::array<std::int64_t, 2> strides = {};

  bool present() const { return rank != 0; }
  std::int64_t rows() const { return shape[0]; }
  std::int64_t cols() const { return shape[1]; }

  operator BasicTensor<const void>() const requires(!std::is_const_v<Void>) {
    return {data, dtype, device, rank, shape, strides};
  }
};

using Tensor = BasicTensor<void>;             // may be written
using ConstTensor = BasicTensor<const void>;  // only read

template <class T>
using TensorOf = std::conditional_t<std::is_const_v<T>, ConstTensor, Tensor>;

// A row-major matrix (rows, cols) with a leading dimension in elements; 0 means cols.
template <class T>
TensorOf<T> matrix(T* data, std::int64_t rows, std::int64_t cols, std::int64_t leading_dimension = 0) {
  return {data,         DTypeOf<std::remove_const_t<T>>::value,
          {},           2,
          {rows, cols}, {leading_dimension == 0 ? cols : leading_dimension, 1}};
}

// A vector (size) with a stride in elements.
template <class T>
TensorOf<T> vector(T* data, std::int64_t size, std::int64_t stride = 1) {
  return {data, DTypeOf<std::remove_const_t<T>>::value, {}, 1, {size, 0}, {stride, 0}};
}

// A matrix (rows, cols) of packed 4-bit values. The leading dimension is in elements, even; 0 means cols rounded up
// to an even number.
template <class Byte>
requires std::is_same_v<std::remove_const_t<Byte>, std::uint8_t> TensorOf<Byte> matrix_s4(
    Byte* data, std::int64_t rows, std::int64_t cols, std::int64_t leading_dimension = 0) {
  return {data, DType::s4,    {},
          2,    {rows, cols}, {leading_dimension == 0 ? row_elements(DType::s4, cols) : leading_dimension, 1}};
}

// A compact matrix (rows, cols) of a type that is known only at run time.
template <class Void>
requires std::is_void_v<Void> BasicTensor<Void> matrix_of(DType dtype, Void* data, std::int64_t rows,
                                                          std::int64_t cols) {
  return {data, dtype, {}, 2, {rows, cols}, {row_elements(dtype, cols), 1}};
}

// The same view on another device.
template <class Void>
BasicTensor<Void> on(Device device, BasicTensor<Void> tensor) {
  tensor.device = device;
  return tensor;
}

}  // namespace octile
