// Files that are written whole or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "octile/checkpoint/elements.h"

namespace octile::checkpoint::files {

[[noreturn]] void fail_on(const char* action, const std::filesystem::path& path, int error);

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// At most 100 MB. Throws FileError.
std::string read_text(const std::filesystem::path& path);

// Writes a new file and makes it durable.
void write_text(const std::filesystem::path& path, std::string_view text);

// Byte for byte, to a new file.
void copy(const std::filesystem::path& from, const std::filesystem::path& to);

// A name beside `path` that only this process uses.
std::filesystem::path temporary_name(const std::filesystem::path& path);

// Renames, over what `to` is if `overwrite`: a file, or a folder whose contents go. Durable afterwards.
void move_into_place(const std::filesystem::path& from, const std::filesystem::path& to, bool overwrite);

}  // namespace octile::checkpoint::files
