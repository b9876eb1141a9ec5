// The shape of a linear layer's product, as a person writes it: 16x4096x14336.
#pragma once

#include <cstdint>
#include <string>

namespace octile::cli {

struct Shape {
  std::int64_t m = 0;
  std::int64_t k = 0;
  std::int64_t n = 0;
  friend bool operator==(const Shape&, const Shape&) = default;
};

// "MxKxN". Throws CLI::ValidationError, with the option's name.
Shape parse_shape(const std::string& option, const std::string& text);

}  // namespace octile::cli
