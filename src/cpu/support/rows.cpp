#include "cpu/support/rows.h"

#include <bit>
#include <cstring>
#include <limits>

#include "cpu/support/multiversion.h"

#if defined(__x86_64__)
#include "cpu/support/narrow_x86.h"
#endif

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

struct Add {
  template <Isa, class Real>
  OCTILE_INLINE static void run(const Real* __restrict in, std::int64_t n, Real* __restrict out) {
    for (std::int64_t i = 0; i < n; ++i) out[i] += in[i];
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

#if defined(__x86_64__)

OCTILE_TARGET_F16C std::int64_t widen_halves(const Half* in, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  return i;
}

__attribute__((target("avx512f"))) std::int64_t widen_halves_512(const Half* in, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_maskz_cvtph_ps(0xffff, halves));  // without a mask g++ 12 warns
  }
  return i;
}

OCTILE_TARGET_F16C std::int64_t narrow_to_halves(const float* in, std::int64_t n, Half* out) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), to_halves(_mm256_loadu_ps(in + i)));
  }
  return i;
}

__attribute__((target("avx512f"))) std::int64_t narrow_to_halves_512(const float* in, std::int64_t n, Half* out) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), to_halves(_mm512_loadu_ps(in + i)));
  }
  return i;
}

// bfloat16 is the upper half of a float.
OCTILE_TARGET_F16C std::int64_t widen_bfloats(const BFloat16* in, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_slli_epi32(halves, 16));
  }
  return i;
}

__attribute__((target("avx512f"))) std::int64_t widen_bfloats_512(const BFloat16* in, std::int64_t n, float* out) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_si512(out + i, _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16));
  }
  return i;
}

OCTILE_TARGET_F16C std::int64_t narrow_to_bfloats(const float* in, std::int64_t n, BFloat16* out) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i a = to_wide_bfloats(_mm256_loadu_ps(in + i));
    const __m256i b = to_wide_bfloats(_mm256_loadu_ps(in + i + 8));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), both);
  }
  return i;
}

__attribute__((target("avx512f"))) std::int64_t narrow_to_bfloats_512(const float* in, std::int64_t n, BFloat16* out) {
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), to_bfloats(_mm512_loadu_ps(in + i)));
  }
  return i;
}

std::int64_t widen_fast(const BFloat16* in, std::int64_t n, float* out) {
  if (isa() >= Isa::avx512) return widen_bfloats_512(in, n, out);
  return isa() >= Isa::avx2 ? widen_bfloats(in, n, out) : 0;
}

std::int64_t narrow_fast(const float* in, std::int64_t n, BFloat16* out) {
  if (isa() >= Isa::avx512) return narrow_to_bfloats_512(in, n, out);
  return isa() >= Isa::avx2 ? narrow_to_bfloats(in, n, out) : 0;
}

std::int64_t widen_fast(const Half* in, std::int64_t n, float* out) {
  if (isa() >= Isa::avx512) return widen_halves_512(in, n, out);
  return isa() >= Isa::avx2 ? widen_halves(in, n, out) : 0;
}

std::int64_t narrow_fast(const float* in, std::int64_t n, Half* out) {
  if (isa() >= Isa::avx512) return narrow_to_halves_512(in, n, out);
  return isa() >= Isa::avx2 ? narrow_to_halves(in, n, out) : 0;
}

#else

template <class T>
std::int64_t widen_fast(const T*, std::int64_t, float*) {
  return 0;
}
template <class T>
std::int64_t narrow_fast(const float*, std::int64_t, T*) {
  return 0;
}

#endif

template <class T>
void widen_16(const T* in, std::int64_t n, float* out) {
  const std::int64_t done = widen_fast(in, n, out);
  if (done < n) multiversion<Widen>(in + done, n - done, out + done);
}

template <class T>
void narrow_to_16(const float* in, std::int64_t n, T* out) {
  const std::int64_t done = narrow_fast(in, n, out);
  if (done < n) multiversion<Narrow>(in + done, n - done, out + done);
}

}  // namespace

template <>
void widen(DType dtype, const void* data, std::int64_t i, std::int64_t n, float* out) {
  switch (dtype) {
    case DType::f16:
      return widen_16(static_cast<const Half*>(data) + i, n, out);
    case DType::bf16:
      return widen_16(static_cast<const BFloat16*>(data) + i, n, out);
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
      return narrow_to_16(values, n, static_cast<Half*>(data) + i);
    case DType::bf16:
      return narrow_to_16(values, n, static_cast<BFloat16*>(data) + i);
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
  // Rounds twice, as the reference's store does; a problem in f64 has f64 outputs, or f32 on request.
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

#if defined(__x86_64__)

namespace {

void copy_rows(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t lines) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < 64 * lines; i += 16) {  // the processor gathers the parts of a line
      _mm_stream_si128(reinterpret_cast<__m128i*>(to.data + r * to.stride + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.data + r * from.stride + i)));
    }
  }
}

__attribute__((target("avx512f"))) void copy_rows_512(ConstBytes from, Bytes to, std::int64_t rows,
                                                      std::int64_t lines) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < 64 * lines; i += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to.data + r * to.stride + i),
                          _mm512_loadu_si512(from.data + r * from.stride + i));
    }
  }
}

}  // namespace

void copy_rows_around_caches(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t lines) {
  isa() >= Isa::avx512 ? copy_rows_512(from, to, rows, lines) : copy_rows(from, to, rows, lines);
}

void copy_around_caches(void* to, const void* from, std::int64_t bytes) {
  auto* out = static_cast<std::uint8_t*>(to);
  const auto* in = static_cast<const std::uint8_t*>(from);
  const std::int64_t head = std::min(bytes, static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(to) % 64));
  const std::int64_t lines = (bytes - head) / 64;
  const std::int64_t end = head + lines * 64;
  std::memcpy(out, in, static_cast<std::size_t>(head));
  copy_rows_around_caches({in + head, 0}, {out + head, 0}, 1, lines);
  std::memcpy(out + end, in + end, static_cast<std::size_t>(bytes - end));
}

void end_copies() { _mm_sfence(); }

#else

void copy_around_caches(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void copy_rows_around_caches(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t lines) {
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(to.data + r * to.stride, from.data + r * from.stride, static_cast<std::size_t>(64 * lines));
  }
}

void end_copies() {}

#endif

template <class Real>
void add(void* data, std::int64_t i, std::int64_t n, const Real* values) {
  multiversion<Add>(values, n, static_cast<Real*>(data) + i);
}

template void add(void*, std::int64_t, std::int64_t, const float*);
template void add(void*, std::int64_t, std::int64_t, const double*);

}  // namespace octile::cpu
