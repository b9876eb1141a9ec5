#include "octile/checkpoint/elements.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>

#include "octile/types.h"
#include "reject.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and read in place");

namespace octile::checkpoint {

namespace {

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

struct Kind {
  std::string_view name;
  int bits;
  void (*read)(Bytes bytes, std::span<float> values) = nullptr;
  std::vector<std::byte> (*write)(std::span<const float> values) = nullptr;
};

// In the order of ElementType.
constexpr std::array<Kind, 20> kKinds = {{{"BOOL", 8, widen<std::uint8_t>},
                                          {"U8", 8, widen<std::uint8_t>},
                                          {"I8", 8, widen<std::int8_t>},
                                          {"U16", 16, widen<std::uint16_t>},
                                          {"I16", 16, widen<std::int16_t>},
                                          {"U32", 32, widen<std::uint32_t>},
                                          {"I32", 32, widen<std::int32_t>},
                                          {"U64", 64},
                                          {"I64", 64},
                                          {"F16", 16, widen<Half>, narrow<Half>},
                                          {"BF16", 16, widen<BFloat16>, narrow<BFloat16>},
                                          {"F32", 32, widen<float>, narrow<float>},
                                          {"F64", 64, widen<double>, narrow<double>},
                                          {"F4", 4},
                                          {"F6_E2M3", 6},
                                          {"F6_E3M2", 6},
                                          {"F8_E4M3", 8},
                                          {"F8_E5M2", 8},
                                          {"F8_E8M0", 8},
                                          {"C64", 64}}};

const Kind& kind_of(ElementType type) { return kKinds.at(static_cast<std::size_t>(type)); }

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;  // 0: not valid UTF-8
};

Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  std::uint32_t code = lead & (0xffu >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fu);
  }
  // Overlong, half of a surrogate pair, or beyond the last code point.
  constexpr std::uint32_t kMin[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kMin[bytes] || (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) return {};
  return {code, bytes};
}

// Invisible characters that may change how their neighbours are shown: Unicode 15.1's categories Cc (control), Cf
// (format: direction marks, joiners, tags), Zl and Zp (line and paragraph separators). Sorted.
constexpr std::array<std::pair<std::uint32_t, std::uint32_t>, 22> kControls = {
    {{0x00, 0x1f},       {0x7f, 0x9f},       {0xad, 0xad},       {0x600, 0x605},     {0x61c, 0x61c},
     {0x6dd, 0x6dd},     {0x70f, 0x70f},     {0x890, 0x891},     {0x8e2, 0x8e2},     {0x180e, 0x180e},
     {0x200b, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},   {0xfeff, 0xfeff},   {0xfff9, 0xfffb},
     {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a},
     {0xe0001, 0xe0001}, {0xe0020, 0xe007f}}};

bool is_control(std::uint32_t code) {
  const auto is_before = [](const auto& range, std::uint32_t value) { return range.second < value; };
  const auto* const range = std::lower_bound(kControls.begin(), kControls.end(), code, is_before);
  return range != kControls.end() && code >= range->first;
}

std::string without_controls(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const Character character = first_character(text);
    const std::size_t bytes = character.bytes == 0 ? 1 : character.bytes;
    if (character.bytes == 0 || is_control(character.code)) {
      result += '?';
    } else {
      result += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return result;
}

}  // namespace

std::string_view name(ElementType type) { return kind_of(type).name; }

int bits(ElementType type) { return kind_of(type).bits; }

void read_values(ElementType type, Bytes bytes, std::span<float> values, std::string_view what) {
  if (bytes.size() * 8 != values.size() * static_cast<std::size_t>(bits(type))) {
    reject(printable(what), ": ", bytes.size(), " bytes are not ", values.size(), " values of ", name(type));
  }
  if (!kind_of(type).read) reject(printable(what), ": values of ", name(type), " are not read");
  kind_of(type).read(bytes, values);
}

std::vector<std::byte> write_values(ElementType type, std::span<const float> values) {
  if (!kind_of(type).write) reject("values of ", name(type), " are not written");
  return kind_of(type).write(values);
}

void round_values(ElementType type, std::span<float> values) {
  if (type == ElementType::f16) {
    for (float& value : values) value = Half(value);
  } else if (type == ElementType::bf16) {
    for (float& value : values) value = BFloat16(value);
  }
}

FileError::FileError(std::string_view text) : std::runtime_error(without_controls(text)) {}

std::string printable(std::string_view text) {
  constexpr std::size_t kMax = 200;
  if (text.size() <= kMax) return without_controls(text);
  // Does not split a character.
  std::size_t end = kMax;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return without_controls(text.substr(0, end)) + "...";
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

}  // namespace octile::checkpoint
