// A file's descriptor, and reading from it.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string_view>
#include <utility>

namespace octile::base {

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int number() const { return number_; }

 private:
  int number_;
};

// Calls take(block) until the file ends, or take returns false. Returns false, with errno set, if reading fails.
template <class Take>
bool read_blocks(const Descriptor& file, const Take& take) {
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(file.number(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return size == 0;
    if (!take(std::string_view(block, static_cast<std::size_t>(size)))) return true;
  }
}

}  // namespace octile::base
