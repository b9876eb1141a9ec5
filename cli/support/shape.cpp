#include "cli/support/shape.h"

#include <CLI/CLI.hpp>
#include <charconv>

namespace octile::cli {

Shape parse_shape(const std::string& option, const std::string& text) {
  constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
  Shape shape;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (std::int64_t* size : {&shape.m, &shape.k, &shape.n}) {
    const auto [next, error] = std::from_chars(at, end, *size);
    const bool last = size == &shape.n;
    if (error != std::errc{} || *size < 1 || *size > kMaxSize || (last ? next != end : next == end || *next != 'x')) {
      throw CLI::ValidationError(option, text + " is not MxKxN, three sizes of 1 to " + std::to_string(kMaxSize));
    }
    at = last ? next : next + 1;
  }
  return shape;
}

}  // namespace octile::cli
