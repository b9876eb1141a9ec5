// Octile: element types, devices and the options that descriptions consist of.
#pragma once

#if __cplusplus < 202002L
#error "Octile's C++ headers need C++20, as with -std=c++20; octile/octile.h is for C, and for older C++"
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "octile/export.h"

namespace octile {

// Element types. s4 is packed two per byte: element 2i in the low nibble of byte i, element 2i + 1 in the high one;
// every row starts on a byte.
enum class DType : std::uint8_t { f16, bf16, f32, f64, s8, u8, s4, s32 };
inline constexpr DType kLastDType = DType::s32;

OCTILE_API std::string_view name(DType dtype);

// Bits of one element: 4 for s4, 8 for s8 and u8, 16, 32, 64.
constexpr int bits(DType dtype) {
  constexpr std::uint8_t kBits[] = {16, 16, 32, 64, 8, 8, 4, 32};
  const auto i = static_cast<std::size_t>(dtype);
  return i < sizeof kBits ? kBits[i] : 0;
}

// Whether a byte holds several elements (signed, the first in the lowest bits), and how many elements a byte holds.
constexpr bool is_packed(DType dtype) { return bits(dtype) > 0 && bits(dtype) < 8; }
constexpr int per_byte(DType dtype) { return is_packed(dtype) ? 8 / bits(dtype) : 1; }

// Elements from row to row of a compact matrix: rows start on a byte.
constexpr std::int64_t row_elements(DType dtype, std::int64_t cols) {
  const auto each = static_cast<std::uint64_t>(per_byte(dtype));
  return static_cast<std::int64_t>((static_cast<std::uint64_t>(cols) + each - 1) / each * each);
}

constexpr bool is_float(DType dtype) { return dtype <= DType::f64; }
constexpr bool is_quantized(DType dtype) { return dtype == DType::s8 || dtype == DType::u8 || is_packed(dtype); }

// The type of scales and multipliers, and of all arithmetic, for tensors of this float type: f64 for f64, else f32.
constexpr DType scale_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// IEEE 754 binary16, as storage. Conversion from float rounds to nearest, ties to even; overflow gives infinity.
struct Half {
  std::uint16_t bits = 0;

  Half() = default;
  explicit constexpr Half(float value) : bits(from_float(value)) {}
  constexpr operator float() const { return to_float(bits); }  // exact

  static constexpr std::uint16_t from_float(float value) {
    std::uint32_t x = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (x >> 16) & 0x8000u;
    x &= 0x7fffffffu;
    if (x >= 0x47800000u) {  // 65536 and above, infinity, NaN; 65520..65535 round up in the arithmetic below
      return static_cast<std::uint16_t>(sign | (x > 0x7f800000u ? 0x7e00u : 0x7c00u));
    }
    if (x < 0x38800000u) {  // below 2^-14: the addition aligns the subnormal's last bit with the float's and rounds it
      const float aligned = std::bit_cast<float>(x) + 0.5f;
      return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u));
    }
    const std::uint32_t odd = (x >> 13) & 1u;
    return static_cast<std::uint16_t>(sign | ((x + 0xc8000fffu + odd) >> 13));
  }

  static constexpr float to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // Re-biasing the exponent serves normal numbers; a subnormal becomes 2^-14 + its value, and the difference is
    // exact.
    const float normal = std::bit_cast<float>((magnitude << 13) + 0x38000000u);
    const float subnormal = std::bit_cast<float>((magnitude << 13) + 0x38800000u) - 0x1p-14f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude < 0x400u ? subnormal : normal));
  }
};

// The upper half of an IEEE 754 binary32, as storage. Conversion from float rounds to nearest, ties to even.
struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  explicit constexpr BFloat16(float value) : bits(from_float(value)) {}
  constexpr operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }  // exact

  static constexpr std::uint16_t from_float(float value) {
    const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
    if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((x >> 16) | 0x40u);  // NaN stays NaN
    return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
  }
};

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index) { return {DeviceType::cuda, index}; }
  friend constexpr bool operator==(Device, Device) = default;
};

// A CUDA stream (cudaStream_t) as a plain pointer; ignored by CPU plans.
struct Stream {
  void* handle = nullptr;
};

// Scratch memory for one run, on the plan's device, of any alignment. Concurrent runs need one each.
struct Workspace {
  void* data = nullptr;
  std::size_t size = 0;  // bytes. A run uses the first workspace_size() of them; no tensor may overlap those
};

// The part of a matrix that shares one scale. A group is `group` consecutive elements of a row.
enum class Granularity : std::uint8_t { tensor, row, column, group };
// dynamic: computed from the data by the plan. given: passed by the caller.
enum class ScaleSource : std::uint8_t { dynamic, given };
// symmetric: no zero point. affine: q = x / s + z.
enum class Mapping : std::uint8_t { symmetric, affine };
// nearest: ties to even. stochastic: floor(x / s + u), u from Philox-4x32-10 keyed by (seed, element index).
enum class Rounding : std::uint8_t { nearest, stochastic };
enum class Orientation : std::uint8_t { row_major, transposed, both };
// An optional factor on the quantizer's input, one per column or one per row of x.
enum class Multiplier : std::uint8_t { none, per_column, per_row };
// What a quantizer computes from its input first. gelu_tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
// silu: x / (1 + exp(-x)). rms_norm: x / sqrt(mean(x^2) + epsilon) * weight of each row; layer_norm:
// (x - mean(x)) / sqrt(variance + epsilon) * weight + bias. docs/reference/contract.md has every rounding.
enum class Prologue : std::uint8_t { none, gelu_tanh, silu, rms_norm, layer_norm };
// Which values count as in range for the straight-through gradient: q_min <= v <= q_max, or q_min < v < q_max.
enum class Mask : std::uint8_t { inclusive, exclusive };

// Where the scale of an activation comes from, and how much of it shares one. none: X is used as it is, in float.
enum class Activation : std::uint8_t { none, dynamic_per_token, dynamic_per_tensor, static_per_tensor };
// out_in: (OUT, IN) = (N, K), as torch.nn.Linear keeps it. in_out: (IN, OUT) = (K, N).
enum class WeightLayout : std::uint8_t { out_in, in_out };
// How one product of the backward pass is computed. none: not at all. dequantized: the int8 operand is dequantized on
// the fly and multiplied in float (the "16-bit" backward). int8: dY is quantized too, and the sum is exact.
enum class Product : std::uint8_t { none, dequantized, int8 };

// How a weight W (N, K) is stored: its integer type, and which of its elements share a scale.
struct WeightFormat {
  DType type = DType::s8;                      // s8 or s4
  Granularity granularity = Granularity::row;  // tensor: one scale; row: one per output channel; group: one per group
  std::int64_t group = 0;                      // with Granularity::group: 32, 64 or 128, a divisor of K; 0: a whole row
  bool zero_point = false;                     // s4: each scale has a zero point

  static const WeightFormat s8_per_channel, s8_per_tensor, s8_group, s4_group;  // groups of 128
  friend constexpr bool operator==(const WeightFormat& a, const WeightFormat& b) {
    const bool same_group = a.granularity != Granularity::group || a.group == b.group;
    return a.type == b.type && a.granularity == b.granularity && same_group && a.zero_point == b.zero_point;
  }

  static constexpr WeightFormat in_groups(DType type, std::int64_t group = 128) {
    return {type, Granularity::group, group};
  }
};
inline constexpr WeightFormat WeightFormat::s8_per_channel = {};
inline constexpr WeightFormat WeightFormat::s8_per_tensor = {DType::s8, Granularity::tensor};
inline constexpr WeightFormat WeightFormat::s8_group = in_groups(DType::s8);
inline constexpr WeightFormat WeightFormat::s4_group = in_groups(DType::s4);

OCTILE_API std::string_view name(DeviceType value);
OCTILE_API std::string_view name(Granularity value);
OCTILE_API std::string_view name(ScaleSource value);
OCTILE_API std::string_view name(Mapping value);
OCTILE_API std::string_view name(Rounding value);
OCTILE_API std::string_view name(Orientation value);
OCTILE_API std::string_view name(Multiplier value);
OCTILE_API std::string_view name(Prologue value);
OCTILE_API std::string_view name(Mask value);
OCTILE_API std::string_view name(Activation value);
OCTILE_API std::string_view name(const WeightFormat& value);  // "s8_per_channel", "s4_group"
OCTILE_API std::string_view name(WeightLayout value);
OCTILE_API std::string_view name(Product value);

// The longest sum of products of two s8 values that always fits into an s32: 131071 * (-128) * (-128) is 2^31 - 2^14;
// one more term would make it 2^31.
inline constexpr std::int64_t kMaxContraction = 131071;

}  // namespace octile
