#include "puzzles/watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <random>
#include <system_error>

namespace octile::tile::puzzles {

namespace {

Told* told_to = nullptr;
std::uint64_t key_of_command = 0;

Told* mapped(const std::string& path, int flags) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600);
  const bool sized = file >= 0 && ((flags & O_CREAT) == 0 || ftruncate(file, sizeof(Told)) == 0);
  void* const memory = sized ? mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  const int error = errno;
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) throw std::system_error(error, std::generic_category(), "cannot map " + path);
  return static_cast<Told*>(memory);
}

}  // namespace

Watch::Watch(const std::string& path) : path_(path), told_(mapped(path, O_CREAT | O_EXCL)) {
  std::random_device random;
  key_ = (std::uint64_t{random()} << 32 | random()) | 1;
  new (told_) Told;
}
Watch::~Watch() { munmap(told_, sizeof(Told)); }

std::string Watch::word() const { return std::to_string(key_) + ":" + path_; }

void tell_to(const std::string& word) {
  const std::size_t colon = word.find(':');
  key_of_command = std::stoull(word.substr(0, colon));
  told_to = mapped(word.substr(colon + 1), 0);
  put_progress(told_to->progress);
}

void tell_verdict(bool right) {
  if (told_to == nullptr) return;
  ++(right ? told_to->right : told_to->wrong);
  told_to->key = key_of_command;
}

}  // namespace octile::tile::puzzles
