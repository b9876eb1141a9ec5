// Element types of checkpoint files, and their values as f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace octile::checkpoint {

// An error in a file, or in a request about one. what() names the file, the tensor and the values, on one line. Names
// come from files, so the whole text passes through printable()'s replacement.
class FileError : public std::runtime_error {
 public:
  explicit FileError(std::string_view text);
};

enum class ElementType : std::uint8_t {
  boolean,
  u8,
  s8,
  u16,
  s16,
  u32,
  s32,
  u64,
  s64,
  f16,
  bf16,
  f32,
  f64,
  f4,
  f6_e2m3,
  f6_e3m2,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  c64,  // known by name and size only
};

std::string_view name(ElementType type);  // as safetensors writes it: "BF16"
int bits(ElementType type);
constexpr bool is_float(ElementType type) { return type >= ElementType::f16 && type <= ElementType::f64; }

using Bytes = std::span<const std::byte>;

// The elements as f32; f64 and integers beyond 2^24 are rounded. Any alignment. Throws FileError, naming `what`, for
// fp8 and narrower types, complex numbers and 64-bit integers.
void read_values(ElementType type, Bytes bytes, std::span<float> values, std::string_view what);

// The values rounded to f16, bf16, f32 or f64, to nearest, ties to even.
std::vector<std::byte> write_values(ElementType type, std::span<const float> values);

// The same rounding, in place.
void round_values(ElementType type, std::span<float> values);

// For messages and tables. Replaces by '?' what a terminal may obey and a hostile name may hold: Unicode's control and
// format characters, line and paragraph separators, bytes that are not UTF-8. Cuts a long text.
std::string printable(std::string_view text);
// "1e+30", "0.1": for messages.
std::string number_text(double value);

}  // namespace octile::checkpoint
