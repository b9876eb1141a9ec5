// The shape of a linear layer's product, as a person writes it: 16x4096x14336.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace octile::cli {

struct Shape {
  std::int64_t m = 0;
  std::int64_t k = 0;
  std::int64_t n = 0;
  friend bool operator==(const Shape&, const Shape&) = default;
};

// Of "MxKxN", or nothing if the text is none.
std::optional<Shape> shape_of(const std::string& text);
std::string no_shape(const std::string& text);  // says so

// Throws CLI::ValidationError, with the option's name.
Shape parse_shape(const std::string& option, const std::string& text);

}  // namespace octile::cli
