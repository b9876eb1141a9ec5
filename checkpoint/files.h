// Files and folders that appear whole or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "octile/checkpoint/elements.h"

namespace octile::checkpoint::files {

[[noreturn]] void fail_on(const char* action, const std::filesystem::path& path, int error);

// What std::filesystem throws in `action` becomes a FileError.
template <class Action>
auto with_file_errors(Action action) {
  try {
    return action();
  } catch (const std::filesystem::filesystem_error& error) {
    fail_on("use", error.path1(), error.code().value());
  }
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int number() const { return number_; }

 private:
  int number_;
};

// Throws FileError, among others for what is no regular file; does not wait, as opening a pipe does.
Descriptor open_to_read(const std::filesystem::path& path);

// Throws FileError, among others for more than this many bytes.
std::string read_text(const std::filesystem::path& path, std::size_t most);

// Writes a new file and makes it durable.
void write_text(const std::filesystem::path& path, std::string_view text);

// Byte for byte, to a new file.
void copy(const std::filesystem::path& from, const std::filesystem::path& to);

// A new empty file or folder beside `target`, of a name of its own. It is removed with the object, unless it has come
// into `target`'s place.
class Temporary {
 public:
  enum class Kind { file, folder };
  Temporary(std::filesystem::path target, Kind kind);
  ~Temporary();
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const Descriptor& file() const { return file_; }  // to write; of a folder: none

  // Renames, over what `target` is if `overwrite`: a file, or a folder whose contents go. Durable afterwards. At every
  // moment one of the two stands there, save on file systems that cannot exchange two folders in one step.
  void move_into_place(bool overwrite);

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  Descriptor file_;
};

}  // namespace octile::checkpoint::files
