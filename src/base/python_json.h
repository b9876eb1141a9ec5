// The JSON that Python writes: a model's config.json. Header only: the checkpoints and the command read it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace octile::base {

// Python writes NaN, Infinity and -Infinity, which are no JSON (Mamba 2's time_step_limit). None of these numbers is
// used here: each becomes a zero of as many bytes.
inline std::string without_python_numbers(std::string_view text) {
  std::string result(text);
  const auto has = [&](std::size_t at, std::string_view set) {
    return at < text.size() && set.find(text[at]) != std::string_view::npos;
  };
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') in_string = !in_string;
    if (in_string) {
      i += text[i] == '\\';
      continue;
    }
    for (const std::string_view number : {"NaN", "Infinity", "-Infinity"}) {
      if (!text.substr(i).starts_with(number)) continue;
      if (i == 0 || !has(i - 1, " \t\r\n:,[") || !has(i + number.size(), " \t\r\n,]}")) continue;
      result.replace(i, number.size(), "0." + std::string(number.size() - 2, '0'));
    }
  }
  return result;
}

}  // namespace octile::base
