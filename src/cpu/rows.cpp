#include "cpu/rows.h"

#include <bit>
#include <cstring>

#include "cpu/multiversion.h"

namespace octile::cpu {

namespace {

// The conversions of Half and BFloat16, with selects in place of branches: compilers do not vectorize a float operation
// that stands behind a branch.
OCTILE_INLINE float to_float(Half half) {
  const std::uint32_t sign = (half.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = half.bits & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>((magnitude << 13) + 0x38800000u) - 0x1p-14f);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
  const std::uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

OCTILE_INLINE float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

OCTILE_INLINE float to_float(float value) { return value; }
OCTILE_INLINE double to_float(double value) { return value; }

OCTILE_INLINE void from_float(float value, Half& half) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t x = bits & 0x7fffffffu;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(x) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (x + 0xc8000fffu + ((x >> 13) & 1u)) >> 13;
  const std::uint32_t special = x > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t finite = x < 0x38800000u ? subnormal : normal;
  half.bits = static_cast<std::uint16_t>(sign | (x >= 0x47800000u ? special : finite));
}

OCTILE_INLINE void from_float(float value, BFloat16& out) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nan = (x >> 16) | 0x40u;
  const std::uint32_t finite = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  out.bits = static_cast<std::uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? nan : finite);
}

struct Widen {
  template <Isa, class T, class Real>
  OCTILE_INLINE static void run(const T* __restrict in, std::int64_t n, Real* __restrict out) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<Real>(to_float(in[i]));
  }
};

struct Narrow {
  template <Isa, class T>
  OCTILE_INLINE static void run(const float* __restrict in, std::int64_t n, T* __restrict out) {
    for (std::int64_t i = 0; i < n; ++i) from_float(in[i], out[i]);
  }
};

struct WidenBytes {
  template <Isa, class T>
  OCTILE_INLINE static void run(const T* __restrict in, std::int64_t n, std::int16_t* __restrict out) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<std::int16_t>(in[i]);
  }
};

OCTILE_INLINE std::int8_t low_nibble(std::uint8_t byte) { return static_cast<std::int8_t>(((byte & 15) ^ 8) - 8); }
OCTILE_INLINE std::int8_t high_nibble(std::uint8_t byte) { return static_cast<std::int8_t>(((byte >> 4) ^ 8) - 8); }

struct WidenNibbles {
  template <Isa, class T>
  OCTILE_INLINE static void run(const std::uint8_t* __restrict in, std::int64_t pairs, T* __restrict out) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      out[2 * i] = low_nibble(in[i]);
      out[2 * i + 1] = high_nibble(in[i]);
    }
  }
};

template <class T>
void widen_nibbles(const std::uint8_t* data, std::int64_t i, std::int64_t n, T* out) {
  const std::uint8_t* bytes = data + i / 2;
  if (n > 0 && i % 2) {
    *out++ = high_nibble(*bytes++);
    --n;
  }
  multiversion<WidenNibbles>(bytes, n / 2, out);
  if (n % 2) out[n - 1] = low_nibble(bytes[n / 2]);
}

struct PackNibbles {
  template <Isa>
  OCTILE_INLINE static void run(const std::uint8_t* __restrict in, std::int64_t pairs, std::uint8_t* __restrict out) {
    for (std::int64_t i = 0; i < pairs; ++i) {
      out[i] = static_cast<std::uint8_t>((in[2 * i] & 15) | in[2 * i + 1] << 4);
    }
  }
};

using Row16 = std::uint8_t __attribute__((vector_size(16)));

OCTILE_INLINE Row16 interleave_low(Row16 a, Row16 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
  return __builtin_shuffle(a, b, Row16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
}

OCTILE_INLINE Row16 interleave_high(Row16 a, Row16 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  return __builtin_shuffle(a, b, Row16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

// Four rounds of interleaving row i with row i + 8 transpose 16 x 16 bytes: each round moves one bit of the row number
// to the column number.
OCTILE_INLINE void transpose_16x16(ConstBytes from, Bytes to) {
  Row16 a[16];
  Row16 b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], from.data + i * from.stride, 16);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = interleave_low(a[i], a[i + 8]);
      b[2 * i + 1] = interleave_high(a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) std::memcpy(to.data + i * to.stride, &a[i], 16);
}

OCTILE_INLINE void transpose_block(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols) {
  if (rows >= 16 && cols >= 16) return transpose_16x16(from, to);
  for (std::int64_t c = 0; c < std::min<std::int64_t>(16, cols); ++c) {
    for (std::int64_t r = 0; r < std::min<std::int64_t>(16, rows); ++r) {
      to.data[c * to.stride + r] = from.data[r * from.stride + c];
    }
  }
}

// The side whose rows lie further apart is gone through a whole line at a time: its lines may all fall into the same
// few places of the first-level cache, and would not stay there for a second visit.
struct Transpose {
  template <Isa>
  OCTILE_INLINE static void run(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols) {
    const bool along_rows = from.stride > to.stride;
    const std::int64_t outer = along_rows ? rows : cols;
    const std::int64_t inner = along_rows ? cols : rows;
    for (std::int64_t i = 0; i < outer; i += 16) {
      for (std::int64_t j = 0; j < inner; j += 16) {
        const std::int64_t r = along_rows ? i : j;
        const std::int64_t c = along_rows ? j : i;
        transpose_block({from.data + r * from.stride + c, from.stride}, {to.data + c * to.stride + r, to.stride},
                        rows - r, cols - c);
      }
    }
  }
};

}  // namespace

template <>
void widen(DType dtype, const void* data, std::int64_t i, std::int64_t n, float* out) {
  switch (dtype) {
    case DType::f16:
      return multiversion<Widen>(static_cast<const Half*>(data) + i, n, out);
    case DType::bf16:
      return multiversion<Widen>(static_cast<const BFloat16*>(data) + i, n, out);
    case DType::f32:
      return multiversion<Widen>(static_cast<const float*>(data) + i, n, out);
    default:
      return multiversion<Widen>(static_cast<const double*>(data) + i, n, out);
  }
}

template <>
void widen(DType dtype, const void* data, std::int64_t i, std::int64_t n, double* out) {
  if (dtype == DType::f64) {
    std::memcpy(out, static_cast<const double*>(data) + i, static_cast<std::size_t>(n) * sizeof(double));
    return;
  }
  float block[256];
  for (std::int64_t done = 0; done < n; done += 256) {
    const std::int64_t count = std::min<std::int64_t>(256, n - done);
    widen(dtype, data, i + done, count, block);
    multiversion<Widen>(static_cast<const float*>(block), count, out + done);
  }
}

template <>
void narrow(DType dtype, void* data, std::int64_t i, std::int64_t n, const float* values) {
  switch (dtype) {
    case DType::f16:
      return multiversion<Narrow>(values, n, static_cast<Half*>(data) + i);
    case DType::bf16:
      return multiversion<Narrow>(values, n, static_cast<BFloat16*>(data) + i);
    case DType::f32:
      if (static_cast<float*>(data) + i != values) std::copy_n(values, n, static_cast<float*>(data) + i);
      return;
    default:
      std::copy_n(values, n, static_cast<double*>(data) + i);
  }
}

template <>
void narrow(DType dtype, void* data, std::int64_t i, std::int64_t n, const double* values) {
  if (dtype == DType::f64) {
    if (static_cast<double*>(data) + i != values) std::copy_n(values, n, static_cast<double*>(data) + i);
    return;
  }
  // Rounds twice, as the reference's store does; a problem in f64 has f64 outputs, or f32 at the caller's wish.
  float block[256];
  for (std::int64_t done = 0; done < n; done += 256) {
    const std::int64_t count = std::min<std::int64_t>(256, n - done);
    for (std::int64_t j = 0; j < count; ++j) block[j] = static_cast<float>(values[done + j]);
    narrow(dtype, data, i + done, count, static_cast<const float*>(block));
  }
}

void widen_integers(DType dtype, const void* data, std::int64_t i, std::int64_t n, std::int16_t* out) {
  switch (dtype) {
    case DType::s8:
      return multiversion<WidenBytes>(static_cast<const std::int8_t*>(data) + i, n, out);
    case DType::u8:
      return multiversion<WidenBytes>(static_cast<const std::uint8_t*>(data) + i, n, out);
    default:
      return widen_nibbles(static_cast<const std::uint8_t*>(data), i, n, out);
  }
}

void unpack_s4(const std::uint8_t* data, std::int64_t i, std::int64_t n, std::int8_t* out) {
  widen_nibbles(data, i, n, out);
}

void pack_s4(const std::uint8_t* bytes, std::int64_t n, std::uint8_t* data, std::int64_t i) {
  std::uint8_t* out = data + i / 2;
  if (n > 0 && i % 2) {
    *out = static_cast<std::uint8_t>((*out & 15) | *bytes++ << 4);
    ++out;
    --n;
  }
  multiversion<PackNibbles>(bytes, n / 2, out);
  if (n % 2) out[n / 2] = static_cast<std::uint8_t>(bytes[n - 1] & 15);
}

void transpose(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols) {
  multiversion<Transpose>(from, to, rows, cols);
}

}  // namespace octile::cpu
