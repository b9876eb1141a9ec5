// Element types, the 16-bit floats among them, and which type an operator computes in.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "octile/tile/platform.h"

namespace octile::tile {

using f32 = float;
using s8 = std::int8_t;
using u8 = std::uint8_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

enum class DType : std::uint8_t { f32, f16, bf16, s8, u8, s32, s64, boolean };

template <class To, class From>
TILE_FUNCTION constexpr To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

TILE_FUNCTION constexpr float f16_to_f32(std::uint16_t half) {  // exact
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
    return result;
  }
#endif
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  // Re-biasing the exponent serves normal numbers; a subnormal becomes 2^-14 + its value, and the difference is exact.
  const std::uint32_t special = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  const float subnormal = bits_as<float>((magnitude << 13) + 0x38800000u) - 0x1p-14f;
  const std::uint32_t finite = magnitude < 0x400u ? bits_as<std::uint32_t>(subnormal) : normal;
  return bits_as<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

TILE_FUNCTION constexpr std::uint16_t f32_to_f16(float value) {  // to nearest, ties to even; overflow gives infinity
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) {
    std::uint16_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
  }
#endif
  const std::uint32_t bits = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t x = bits & 0x7fffffffu;
  const std::uint32_t special = x > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Below 2^-14 the addition aligns the subnormal's last bit with the float's and rounds it.
  const std::uint32_t subnormal = bits_as<std::uint32_t>(bits_as<float>(x < 0x38800000u ? x : 0u) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (x + 0xc8000fffu + ((x >> 13) & 1u)) >> 13;
  return static_cast<std::uint16_t>(sign | (x >= 0x47800000u ? special : x < 0x38800000u ? subnormal : normal));
}

TILE_FUNCTION constexpr float bf16_to_f32(std::uint16_t upper) {  // exact
  return bits_as<float>(static_cast<std::uint32_t>(upper) << 16);
}

TILE_FUNCTION constexpr std::uint16_t f32_to_bf16(float value) {  // to nearest, ties to even
  const std::uint32_t x = bits_as<std::uint32_t>(value);
  const std::uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((x & 0x7fffffffu) > 0x7f800000u ? (x >> 16) | 0x40u : rounded);  // NaN stays NaN
}

// IEEE 754 binary16 and the upper half of a binary32, as storage. f16(x) rounds x to nearest, ties to even; all
// arithmetic and every comparison is of the f32 that they convert to, exactly. f16::from_bits(0x3c00) is 1.
struct f16 {
  std::uint16_t bits;

  f16() = default;  // trivial, for shared memory
  TILE_FUNCTION explicit constexpr f16(float value) : bits(f32_to_f16(value)) {}
  TILE_FUNCTION constexpr operator float() const { return f16_to_f32(bits); }
  TILE_FUNCTION static constexpr f16 from_bits(std::uint16_t bits) {
    f16 result{};
    result.bits = bits;
    return result;
  }
};
struct bf16 {
  std::uint16_t bits;

  bf16() = default;
  TILE_FUNCTION explicit constexpr bf16(float value) : bits(f32_to_bf16(value)) {}
  TILE_FUNCTION constexpr operator float() const { return bf16_to_f32(bits); }
  TILE_FUNCTION static constexpr bf16 from_bits(std::uint16_t bits) {
    bf16 result{};
    result.bits = bits;
    return result;
  }
};

template <class T>
inline constexpr bool is_float_type = std::is_same_v<T, f32> || std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
inline constexpr bool is_integer_type =
    std::is_same_v<T, s8> || std::is_same_v<T, u8> || std::is_same_v<T, s32> || std::is_same_v<T, s64>;
template <class T>
inline constexpr bool is_element_type = is_float_type<T> || is_integer_type<T> || std::is_same_v<T, bool>;

template <class T>
TILE_FUNCTION constexpr DType dtype_of() {
  static_assert(is_element_type<T>, "octile: a tensor holds f32, f16, bf16, s8, u8, s32, s64 or bool.");
  if constexpr (std::is_same_v<T, f32>) return DType::f32;
  if constexpr (std::is_same_v<T, f16>) return DType::f16;
  if constexpr (std::is_same_v<T, bf16>) return DType::bf16;
  if constexpr (std::is_same_v<T, s8>) return DType::s8;
  if constexpr (std::is_same_v<T, u8>) return DType::u8;
  if constexpr (std::is_same_v<T, s32>) return DType::s32;
  if constexpr (std::is_same_v<T, s64>) return DType::s64;
  return DType::boolean;
}

constexpr const char* name(DType dtype) {
  constexpr const char* kNames[] = {"f32", "f16", "bf16", "s8", "u8", "s32", "s64", "bool"};
  return kNames[static_cast<int>(dtype)];
}

// What an element becomes before any arithmetic: 16-bit floats f32, small integers s32; both exact.
TILE_FUNCTION f32 widen(f32 x) { return x; }
TILE_FUNCTION f32 widen(f16 x) { return x; }
TILE_FUNCTION f32 widen(bf16 x) { return x; }
TILE_FUNCTION s32 widen(s8 x) { return x; }
TILE_FUNCTION s32 widen(u8 x) { return x; }
TILE_FUNCTION s32 widen(s32 x) { return x; }
TILE_FUNCTION s64 widen(s64 x) { return x; }
TILE_FUNCTION bool widen(bool x) { return x; }

template <class T>
using Widened = decltype(widen(T{}));

// The type of `a + b`: f32 if one is a float, else s64 if one is, else s32.
template <class A, class B>
using Common = std::conditional_t<std::is_same_v<Widened<A>, f32> || std::is_same_v<Widened<B>, f32>, f32,
                                  std::conditional_t<std::is_same_v<A, s64> || std::is_same_v<B, s64>, s64, s32>>;

}  // namespace octile::tile
