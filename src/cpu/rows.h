// Runs of neighbouring elements, between memory and the arithmetic type; and which thread does how much.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/thread_pool.h"
#include "octile/tensor.h"

namespace octile::cpu {

// Elements i .. i + n - 1 of a float array as Real (float; double for f64).
template <class Real>
void widen(DType dtype, const void* data, std::int64_t i, std::int64_t n, Real* out);

// The same without a copy where the array already holds Real; otherwise `buffer` is filled and returned.
template <class Real>
const Real* widened(DType dtype, const void* data, std::int64_t i, std::int64_t n, Real* buffer) {
  if (dtype == DTypeOf<Real>::value) return static_cast<const Real*>(data) + i;
  widen(dtype, data, i, n, buffer);
  return buffer;
}

// Rounds n values to elements i .. i + n - 1 of a float array.
template <class Real>
void narrow(DType dtype, void* data, std::int64_t i, std::int64_t n, const Real* values);

// Where to write n values of Real that `narrow` will take: the array itself where it holds Real, else `buffer`.
template <class Real>
Real* narrowing_target(DType dtype, void* data, std::int64_t i, Real* buffer) {
  return dtype == DTypeOf<Real>::value ? static_cast<Real*>(data) + i : buffer;
}

// Elements i .. i + n - 1 of an s8, u8 or s4 array.
void widen_integers(DType dtype, const void* data, std::int64_t i, std::int64_t n, std::int16_t* out);

// Elements i .. i + n - 1 of an s4 array, as bytes.
void unpack_s4(const std::uint8_t* data, std::int64_t i, std::int64_t n, std::int8_t* out);

// Packs n bytes as elements i .. i + n - 1 of an s4 array. Element i - 1 keeps its nibble; the one after the last
// becomes 0 if it shares a byte with it.
void pack_s4(const std::uint8_t* bytes, std::int64_t n, std::uint8_t* data, std::int64_t i);

// A matrix of bytes, row-major.
struct Bytes {
  std::uint8_t* data;
  std::int64_t stride;
};
struct ConstBytes {
  const std::uint8_t* data;
  std::int64_t stride;
};
// `to` (cols, rows) becomes the transpose of `from` (rows, cols).
void transpose(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// How many of the threads to use so that each has enough to do: waking one costs about as much as `kWorthAThread`
// units (an element quantized, or 32 products of a matrix multiplication).
inline constexpr double kWorthAThread = 16384;
inline int useful_threads(int threads, double units) {
  const int most = threads > 0 ? threads : hardware_threads();
  return static_cast<int>(std::clamp(units / kWorthAThread, 1.0, static_cast<double>(most)));
}

}  // namespace octile::cpu
