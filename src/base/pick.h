// The name of a choice, from those of all values of its enumeration in order.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>

namespace octile {

template <class Enum>
constexpr std::string_view pick(std::initializer_list<std::string_view> names, Enum value,
                                std::string_view unknown = "?") {
  const auto i = static_cast<std::size_t>(value);
  return i < names.size() ? names.begin()[i] : unknown;
}

}  // namespace octile
