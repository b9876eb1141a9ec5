// Half and BFloat16: every bit pattern, and the roundings that a conversion can get wrong.
#include "octile/types.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace octile {
namespace {

// The value of a 16-bit binary float, from its fields.
double value_of(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  return bits >> 15 ? -magnitude : magnitude;
}

bool is_half_nan(std::uint32_t bits) { return (bits & 0x7fffu) > 0x7c00u; }
bool is_bfloat16_nan(std::uint32_t bits) { return (bits & 0x7fffu) > 0x7f80u; }

TEST(Half, EveryPatternHasItsValue) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = Half::to_float(static_cast<std::uint16_t>(bits));
    if ((bits & 0x7fffu) == 0x7c00u) {
      ASSERT_EQ(value, bits >> 15 ? -INFINITY : INFINITY) << bits;
    } else if (is_half_nan(bits)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), value_of(static_cast<std::uint16_t>(bits), 5, 10)) << bits;
      ASSERT_EQ(std::signbit(value), bits >> 15 != 0) << bits;
    }
  }
}

TEST(Half, EveryPatternComesBack) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const std::uint16_t back = Half::from_float(Half::to_float(static_cast<std::uint16_t>(bits)));
    if (is_half_nan(bits)) {
      ASSERT_TRUE(is_half_nan(back)) << bits;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

TEST(BFloat16, EveryPatternHasItsValueAndComesBack) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    BFloat16 x;
    x.bits = static_cast<std::uint16_t>(bits);
    const float value = x;
    const std::uint16_t back = BFloat16::from_float(value);
    if (is_bfloat16_nan(bits)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(is_bfloat16_nan(back)) << bits;
      continue;
    }
    if ((bits & 0x7fffu) == 0x7f80u) {
      ASSERT_EQ(value, bits >> 15 ? -INFINITY : INFINITY) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), value_of(static_cast<std::uint16_t>(bits), 8, 7)) << bits;
    }
    ASSERT_EQ(back, bits);
  }
}

// Between two neighbours a and b of a 16-bit format lies their midpoint, which both f32 (11 or 8 bits + 1) hold
// exactly. It goes to the even one; the next float on either side goes to the nearer one. `largest` is the last finite
// pattern, whose upper neighbour would be infinity's pattern: the rule is the same there.
template <class Float>
void check_midpoints(std::uint16_t largest, float above_largest) {
  for (std::uint32_t bits = 0; bits <= largest; ++bits) {
    Float a;
    a.bits = static_cast<std::uint16_t>(bits);
    Float b;
    b.bits = static_cast<std::uint16_t>(bits + 1);
    const float low = a;
    const float high = bits == largest ? above_largest : static_cast<float>(b);
    const auto middle = static_cast<float>((static_cast<double>(low) + static_cast<double>(high)) / 2);
    const std::uint32_t even = bits % 2 ? bits + 1 : bits;
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      ASSERT_EQ(Float::from_float(s * middle), sign | even) << bits;
      ASSERT_EQ(Float::from_float(s * std::nextafter(middle, 0.0f)), sign | bits) << bits;
      ASSERT_EQ(Float::from_float(s * std::nextafter(middle, INFINITY)), sign | (bits + 1)) << bits;
    }
  }
}

TEST(Half, RoundsToNearestTiesToEven) { check_midpoints<Half>(0x7bff, 65536.0f); }

// Above the largest bfloat16 comes 2^128, which f32 cannot hold; it can hold the midpoint below that, 2^128 - 2^119.
TEST(BFloat16, RoundsToNearestTiesToEven) {
  for (std::uint32_t bits = 0; bits < 0x7f7fu; ++bits) {
    const float middle = std::bit_cast<float>((bits << 16) | 0x8000u);
    const std::uint32_t even = bits % 2 ? bits + 1 : bits;
    ASSERT_EQ(BFloat16::from_float(middle), even) << bits;
    ASSERT_EQ(BFloat16::from_float(-middle), 0x8000u | even) << bits;
    ASSERT_EQ(BFloat16::from_float(std::bit_cast<float>((bits << 16) | 0x7fffu)), bits);
    ASSERT_EQ(BFloat16::from_float(std::bit_cast<float>((bits << 16) | 0x8001u)), bits + 1);
  }
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0x7f7f7fffu)), 0x7f7f);
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0x7f7f8000u)), 0x7f80) << "the midpoint is a tie: infinity";
  EXPECT_EQ(BFloat16::from_float(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Half, HandValues) {
  EXPECT_EQ(Half(1.0f).bits, 0x3c00);
  EXPECT_EQ(Half(-2.0f).bits, 0xc000);
  EXPECT_EQ(Half(0.1f).bits, 0x2e66);
  EXPECT_EQ(Half(2049.0f).bits, Half(2048.0f).bits) << "a tie between 2048 and 2050";
  EXPECT_EQ(Half(2051.0f).bits, Half(2052.0f).bits) << "a tie between 2050 and 2052";
  EXPECT_EQ(Half(65504.0f).bits, 0x7bff);
  EXPECT_EQ(Half(65519.996f).bits, 0x7bff);
  EXPECT_EQ(Half(65520.0f).bits, 0x7c00) << "the midpoint to 2^16 is a tie: infinity";
  EXPECT_EQ(Half(-65520.0f).bits, 0xfc00);
  EXPECT_EQ(Half(1e30f).bits, 0x7c00);
  EXPECT_EQ(Half(0x1p-14f).bits, 0x0400) << "the smallest normal";
  EXPECT_EQ(Half(0x1p-24f).bits, 0x0001) << "the smallest subnormal";
  EXPECT_EQ(Half(0x1p-25f).bits, 0x0000) << "half of it is a tie: zero";
  EXPECT_EQ(Half(0x1.000002p-25f).bits, 0x0001);
  EXPECT_EQ(Half(0x1.8p-24f).bits, 0x0002) << "a tie between 1 and 2";
  EXPECT_EQ(Half(-0.0f).bits, 0x8000);
  EXPECT_EQ(Half(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(Half(0x1.ffcp-15f).bits, 0x0400) << "the largest subnormal's upper tie is the smallest normal";
  EXPECT_TRUE(is_half_nan(Half(NAN).bits));
  EXPECT_TRUE(is_half_nan(Half(std::bit_cast<float>(0x7f800001u)).bits)) << "a NaN whose payload lies in the low bits";
  EXPECT_TRUE(is_bfloat16_nan(BFloat16(std::bit_cast<float>(0x7f800001u)).bits));
}

TEST(BFloat16, HandValues) {
  EXPECT_EQ(BFloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(BFloat16(257.0f).bits, BFloat16(256.0f).bits);
  EXPECT_EQ(BFloat16(259.0f).bits, BFloat16(260.0f).bits);
  EXPECT_EQ(BFloat16(3.14159265f).bits, 0x4049);
  EXPECT_EQ(BFloat16(-0.0f).bits, 0x8000);
  EXPECT_EQ(BFloat16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
}

// The compiler's own binary16, for all exponents and the mantissa bits around the rounding position.
// Clang 14 has the macro but not the type.
#if defined(__FLT16_MAX__) && (!defined(__clang__) || __clang_major__ >= 15)
TEST(Half, AgreesWithTheCompilersConversion) {
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu, 0x2000u, 0x3000u, 0x7fffu, 0x8000u, 0xffffu}) {
      const float value = std::bit_cast<float>((high << 16) | low);
      const auto ours = Half::from_float(value);
      const auto theirs = std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
      if (std::isnan(value)) {
        ASSERT_TRUE(is_half_nan(ours)) << std::hex << high << ' ' << low;
      } else {
        ASSERT_EQ(ours, theirs) << std::hex << high << ' ' << low;
      }
    }
  }
}
#endif

TEST(Types, KMaxContractionIsTheLastThatFits) {
  EXPECT_LE(kMaxContraction * 128 * 128, std::numeric_limits<std::int32_t>::max());
  EXPECT_GT((kMaxContraction + 1) * 128 * 128, std::numeric_limits<std::int32_t>::max());
}

}  // namespace
}  // namespace octile
