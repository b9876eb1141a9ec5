#include "cli/support/shape.h"

#include <CLI/CLI.hpp>
#include <charconv>

namespace octile::cli {

namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;

}  // namespace

std::optional<Shape> shape_of(const std::string& text) {
  Shape shape;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (std::int64_t* size : {&shape.m, &shape.k, &shape.n}) {
    const auto [next, error] = std::from_chars(at, end, *size);
    const bool last = size == &shape.n;
    if (error != std::errc{} || *size < 1 || *size > kMaxSize) return std::nullopt;
    if (last ? next != end : next == end || *next != 'x') return std::nullopt;
    at = last ? next : next + 1;
  }
  return shape;
}

std::string no_shape(const std::string& text) {
  return text + " is not MxKxN, three sizes of 1 to " + std::to_string(kMaxSize);
}

Shape parse_shape(const std::string& option, const std::string& text) {
  const std::optional<Shape> shape = shape_of(text);
  if (!shape) throw CLI::ValidationError(option, no_shape(text));
  return *shape;
}

}  // namespace octile::cli
