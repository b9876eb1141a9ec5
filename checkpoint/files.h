// Reads files, and writes those of a checkpoint's folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/output.h"
#include "octile/checkpoint/elements.h"

namespace octile::checkpoint::files {

[[noreturn]] void fail_on(const char* action, const std::filesystem::path& path, int error);

// Turns the exceptions of std::filesystem and base/output.h in `action` into a FileError.
template <class Action>
auto with_file_errors(Action action) {
  try {
    return action();
  } catch (const std::filesystem::filesystem_error& error) {
    fail_on("use", error.path1(), error.code().value());
  } catch (const base::OutputError& error) {
    throw FileError(error.what());
  }
}

using base::Descriptor;
using base::Temporary;

// Throws FileError, among others for anything but a regular file. Does not block on a pipe.
Descriptor open_to_read(const std::filesystem::path& path);

// Throws FileError, among others for more than `max` bytes.
std::string read_text(const std::filesystem::path& path, std::size_t max);

// Writes a new file in the folder durably; or copies one verbatim, with no more permissions than the original.
void write_text(Temporary& folder, const std::filesystem::path& name, std::string_view text, mode_t mode);
void copy(const std::filesystem::path& from, Temporary& folder, const std::filesystem::path& name);

}  // namespace octile::checkpoint::files
