// Files of measured choices, the library's and the tile language's: where they are, and how they are read. Header only,
// because programs link both the library and the tile language.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "base/output.h"

namespace octile::base {

inline constexpr std::size_t kMaxTuningBytes = std::size_t{4} << 20;  // 30,000 products

// Of an untrusted text, for a message.
inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t kShown = 60;
  std::string shown(text.substr(0, kShown));
  std::replace_if(
      shown.begin(), shown.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return '"' + shown + (text.size() > kShown ? "...\"" : "\"");
}

// What is in the file; nothing where there is none. refuse(why) throws: "cannot be read: REASON".
template <class Refuse>
std::optional<std::string> tuning_text(const std::filesystem::path& path, const Refuse& refuse) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));  // a FIFO must not block
  if (file.number() < 0 && errno == ENOENT) return std::nullopt;
  const auto unreadable = [&] { refuse("cannot be read: " + std::generic_category().message(errno)); };
  struct stat status = {};
  if (file.number() < 0 || fstat(file.number(), &status) != 0) unreadable();
  if (!S_ISREG(status.st_mode)) refuse("is not a regular file");
  std::string text;
  const auto append = [&](std::string_view block) {  // whatever the file's size is said to be
    text += block;
    return text.size() <= kMaxTuningBytes;
  };
  if (!read_blocks(file, append)) unreadable();
  if (text.size() > kMaxTuningBytes) refuse("is larger than " + std::to_string(kMaxTuningBytes) + " bytes");
  return text;
}

// While the object lives, no other program writes choices into this folder.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder)
      : folder_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (folder_.number() < 0) fail_on("write into", folder, errno);
    // A file system without locks: the last one to write wins.
    while (flock(folder_.number(), LOCK_EX) != 0 && errno == EINTR) {
    }
  }

 private:
  Descriptor folder_;
};

// The file of a device in the folder of caches: its name is `begin`, the device's letters and digits, and `end`. Empty:
// neither XDG_CACHE_HOME nor HOME says where that is.
inline std::filesystem::path tuning_path(std::string begin, std::string_view device, std::string_view end) {
  const auto folder_of = [](const char* variable) -> std::filesystem::path {
    const char* const value = std::getenv(variable);
    return value && *value == '/' ? value : "";  // a relative one is to be ignored
  };
  std::filesystem::path folder = folder_of("XDG_CACHE_HOME");
  if (folder.empty() && !folder_of("HOME").empty()) folder = folder_of("HOME") / ".cache";
  if (folder.empty()) return {};
  constexpr std::size_t kMaxName = 150;
  for (const char c : device.substr(0, kMaxName)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80 && std::isalnum(byte)) {
      begin += static_cast<char>(std::tolower(byte));
    } else if (!begin.empty() && begin.back() != '-') {
      begin += '-';
    }
  }
  return folder / "octile" / begin.append(end);
}

}  // namespace octile::base
