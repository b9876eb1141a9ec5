// The demo's data: small images of handwritten digits, their split for training and testing, and a random number
// generator whose values are the same on every platform.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace octile::digits {

inline constexpr std::int64_t kPixels = 64;
inline constexpr std::int64_t kClasses = 10;

struct Digits {
  std::vector<float> pixels;  // (size, kPixels), 0 for paper to 1 for ink
  std::vector<int> labels;    // 0 to 9

  std::int64_t size() const { return static_cast<std::int64_t>(labels.size()); }
};

// Reads lines of 64 integers from 0 to 16 and a digit, with commas between. Throws std::runtime_error that names
// `source`, the line, the value and what was expected.
Digits parse_digits(std::string_view csv, const std::string& source);

// The digits that are built into the command.
Digits built_in_digits();

// The standard fixes what the engine yields but not what its distributions make of it, so the maps are our own.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  float uniform();                             // a multiple of 2^-24 in [0, 1)
  std::int64_t below(std::int64_t limit);      // 0 to limit - 1
  void shuffle(std::vector<std::int64_t>& v);  // every order is equally likely

 private:
  std::mt19937_64 engine_;
};

// The numbers of the images in `parts` parts of nearly the same size, every digit dealt out evenly among them.
std::vector<std::vector<std::int64_t>> split(const Digits& digits, std::size_t parts, Random& random);

}  // namespace octile::digits
