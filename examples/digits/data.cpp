#include "data.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace octile::digits {

extern const std::string_view kDigitsCsv;

namespace {

constexpr int kInk = 16;
constexpr std::int64_t kMinOfEach = 2;  // of each digit: one to learn from, one to be tested on

[[noreturn]] void refuse(const std::string& source, std::int64_t line, const std::string& what) {
  throw std::runtime_error(source + ":" + std::to_string(line) + ": " + what);
}

std::string quoted(std::string_view value) {
  constexpr std::size_t kShown = 24;
  std::string text = "'";
  for (char c : value.substr(0, kShown)) text += c >= ' ' && c <= '~' ? c : '?';
  return text + (value.size() > kShown ? "...'" : "'");
}

int parse_integer(std::string_view text, int limit) {  // -1 unless it is one from 0 to limit
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value <= limit ? value : -1;
}

void parse_line(std::string_view line, const std::string& source, std::int64_t number, Digits& digits) {
  const std::int64_t values = 1 + std::count(line.begin(), line.end(), ',');
  if (values != kPixels + 1) {
    refuse(source, number,
           std::to_string(line.empty() ? 0 : values) + " values, expected " + std::to_string(kPixels + 1) + ": " +
               std::to_string(kPixels) + " pixels and the digit");
  }
  for (std::int64_t i = 0; i <= kPixels; ++i) {
    const std::string_view text = line.substr(0, line.find(','));
    const int limit = i < kPixels ? kInk : static_cast<int>(kClasses) - 1;
    const int value = parse_integer(text, limit);
    if (value < 0) {
      refuse(source, number,
             (i < kPixels ? "pixel " + std::to_string(i + 1) : "the digit") + " is " + quoted(text) +
                 ", expected an integer from 0 to " + std::to_string(limit));
    }
    if (i < kPixels) {
      digits.pixels.push_back(static_cast<float>(value) / kInk);
    } else {
      digits.labels.push_back(value);
    }
    line.remove_prefix(std::min(line.size(), text.size() + 1));
  }
}

}  // namespace

Digits parse_digits(std::string_view csv, const std::string& source) {
  if (csv.starts_with("\x1f\x8b")) throw std::runtime_error(source + ": is compressed; unpack it with gunzip first");
  Digits digits;
  for (std::int64_t number = 1; !csv.empty(); ++number) {
    const std::size_t end = csv.find('\n');
    std::string_view line = csv.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    parse_line(line, source, number, digits);
    csv.remove_prefix(end == std::string_view::npos ? csv.size() : end + 1);
  }
  for (int label = 0; label < kClasses; ++label) {
    const std::int64_t found = std::count(digits.labels.begin(), digits.labels.end(), label);
    if (found < kMinOfEach) {
      throw std::runtime_error(source + ": digit " + std::to_string(label) + " occurs " + std::to_string(found) +
                               " times in " + std::to_string(digits.size()) + " lines, expected at least " +
                               std::to_string(kMinOfEach) + " times");
    }
  }
  return digits;
}

Digits built_in_digits() { return parse_digits(kDigitsCsv, "built-in digits"); }

float Random::uniform() { return static_cast<float>(engine_() >> 40) * 0x1p-24f; }

std::int64_t Random::below(std::int64_t limit) {
  // The remainder alone would prefer small values: numbers past the last whole multiple of the limit are drawn again.
  const auto range = static_cast<std::uint64_t>(limit);
  const std::uint64_t surplus = (0 - range) % range;  // 2^64 mod range
  std::uint64_t drawn = engine_();
  while (drawn < surplus) drawn = engine_();
  return static_cast<std::int64_t>(drawn % range);
}

void Random::shuffle(std::vector<std::int64_t>& v) {
  for (std::int64_t i = static_cast<std::int64_t>(v.size()); i > 1; --i) std::swap(v[i - 1], v[below(i)]);
}

std::vector<std::vector<std::int64_t>> split(const Digits& digits, std::size_t parts, Random& random) {
  std::vector<std::vector<std::int64_t>> dealt(parts);
  std::size_t next = 0;
  for (int label = 0; label < kClasses; ++label) {
    std::vector<std::int64_t> images;
    for (std::int64_t i = 0; i < digits.size(); ++i) {
      if (digits.labels[i] == label) images.push_back(i);
    }
    random.shuffle(images);
    for (std::int64_t image : images) dealt[next++ % parts].push_back(image);
  }
  return dealt;
}

}  // namespace octile::digits
