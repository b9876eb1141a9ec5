// Reading files, and writing those of a checkpoint's folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/output.h"
#include "octile/checkpoint/elements.h"

namespace octile::checkpoint::files {

[[noreturn]] void fail_on(const char* action, const std::filesystem::path& path, int error);

// What std::filesystem and base/output.h throw in `action` becomes a FileError.
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

// Throws FileError, among others for what is no regular file; does not wait, as opening a pipe does.
Descriptor open_to_read(const std::filesystem::path& path);

// Throws FileError, among others for more than this many bytes.
std::string read_text(const std::filesystem::path& path, std::size_t most);

// A new file in the folder, as durable as its contents are whole; or a copy, byte for byte, no more permitted than the
// original.
void write_text(Temporary& folder, const std::filesystem::path& name, std::string_view text, mode_t mode);
void copy(const std::filesystem::path& from, Temporary& folder, const std::filesystem::path& name);

}  // namespace octile::checkpoint::files
