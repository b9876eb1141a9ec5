#include "octile/checkpoint/elements.h"

#include <array>
#include <bit>
#include <cstring>

#include "octile/types.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and read in place");

namespace octile::checkpoint {

namespace {

struct Kind {
  std::string_view name;
  int bits;
};

// In the order of ElementType.
constexpr std::array<Kind, 20> kKinds = {
    {{"BOOL", 8},    {"U8", 8},      {"I8", 8},      {"U16", 16},    {"I16", 16},    {"U32", 32}, {"I32", 32},
     {"U64", 64},    {"I64", 64},    {"F16", 16},    {"BF16", 16},   {"F32", 32},    {"F64", 64}, {"F4", 4},
     {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"C64", 64}}};

template <class T>
void widen(Bytes bytes, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    values[i] = static_cast<float>(value);
  }
}

template <class T>
std::vector<std::byte> narrow(std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T value(values[i]);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

}  // namespace

std::string_view name(ElementType type) { return kKinds.at(static_cast<std::size_t>(type)).name; }

int bits(ElementType type) { return kKinds.at(static_cast<std::size_t>(type)).bits; }

void read_values(ElementType type, Bytes bytes, std::span<float> values, std::string_view what) {
  if (bytes.size() * 8 != values.size() * static_cast<std::size_t>(bits(type))) {
    throw FileError(printable(what) + ": " + std::to_string(bytes.size()) + " bytes are not " +
                    std::to_string(values.size()) + " values of " + std::string(name(type)));
  }
  switch (type) {
    case ElementType::boolean:
    case ElementType::u8:
      return widen<std::uint8_t>(bytes, values);
    case ElementType::s8:
      return widen<std::int8_t>(bytes, values);
    case ElementType::u16:
      return widen<std::uint16_t>(bytes, values);
    case ElementType::s16:
      return widen<std::int16_t>(bytes, values);
    case ElementType::u32:
      return widen<std::uint32_t>(bytes, values);
    case ElementType::s32:
      return widen<std::int32_t>(bytes, values);
    case ElementType::f16:
      return widen<Half>(bytes, values);
    case ElementType::bf16:
      return widen<BFloat16>(bytes, values);
    case ElementType::f32:
      return widen<float>(bytes, values);
    case ElementType::f64:
      return widen<double>(bytes, values);
    default:
      throw FileError(printable(what) + ": values of " + std::string(name(type)) + " are not read");
  }
}

std::vector<std::byte> write_values(ElementType type, std::span<const float> values) {
  switch (type) {
    case ElementType::f16:
      return narrow<Half>(values);
    case ElementType::bf16:
      return narrow<BFloat16>(values);
    case ElementType::f32:
      return narrow<float>(values);
    case ElementType::f64:
      return narrow<double>(values);
    default:
      throw FileError("values of " + std::string(name(type)) + " are not written");
  }
}

void round_values(ElementType type, std::span<float> values) {
  if (type == ElementType::f16) {
    for (float& value : values) value = Half(value);
  } else if (type == ElementType::bf16) {
    for (float& value : values) value = BFloat16(value);
  }
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 200;
  std::string result(text.substr(0, kMost));
  for (char& c : result) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = '?';
  }
  // A character that the cut has halved goes as a whole.
  if (text.size() > kMost) {
    while (!result.empty() && (static_cast<unsigned char>(text[result.size()]) & 0xc0) == 0x80) result.pop_back();
    result += "...";
  }
  return result;
}

}  // namespace octile::checkpoint
