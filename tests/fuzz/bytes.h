// Choices that fuzz targets of plans draw from bytes.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#define REQUIRE(condition, text)                                                                                   \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      std::fprintf(stderr, "%s:%d: %s is false: %s\n", __FILE__, __LINE__, #condition, std::string(text).c_str()); \
      std::abort();                                                                                                \
    }                                                                                                              \
  } while (0)

namespace octile::fuzz {

// Zeros, and reads past the end, give the plain, legal choices.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {
    for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ data[i]) * 0x100000001b3u;
  }

  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  std::uint64_t word() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }
  int below(int count) { return byte() % count; }
  // True for one byte value in `count`, never for 0.
  bool rarely(int count) { return byte() % count == count - 1; }

  template <class T, std::size_t kCount>
  T pick(const T (&values)[kCount]) {
    return values[byte() % kCount];
  }
  template <class Enum>
  Enum choice(int count) {
    const std::uint8_t b = byte();
    return static_cast<Enum>(b >= 252 ? b : b % count);
  }
  std::int64_t size() {
    const std::uint8_t b = byte();
    if (b < 160) return b % 20;
    if (b < 220) return b % 70;
    if (b < 250) return byte() + 1;
    constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
    return pick<std::int64_t>({-1, 131071, 131072, 1 << 20, std::int64_t{1} << 31, std::int64_t{1} << 33,
                               std::int64_t{1} << 55, std::int64_t{1} << 57, std::int64_t{1} << 62, kMax, kMax - 1,
                               -kMax - 1, static_cast<std::int64_t>(word())});
  }
  double real() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const std::uint8_t b = byte();
    if (b < 200) return (b + 1) / 64.0;
    return pick<double>({0.0, -1.0, 1e-300, 1e300, 1e-40, 3.5e38, -0.0, kInfinity, -kInfinity, std::nan("")});
  }
  // For contents, which would use up the fuzzer's bytes.
  std::uint64_t random() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace octile::fuzz
