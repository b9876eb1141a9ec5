#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace octile::checkpoint::files {

namespace {

constexpr std::size_t kMostTextBytes = 100'000'000;

std::string reason(int error) { return std::generic_category().message(error); }

// What a rename does to a folder is durable once the folder that holds it is.
void sync_folder_of(const std::filesystem::path& path) {
  const std::filesystem::path parent = path.parent_path();
  const Descriptor folder(parent.empty() ? "." : parent, O_RDONLY | O_DIRECTORY);
  if (folder.number() >= 0) fsync(folder.number());
}

void write_all(const Descriptor& file, std::string_view bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(file.number(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_on("write", path, errno);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

void fail_on(const char* action, const std::filesystem::path& path, int error) {
  throw FileError(std::string("cannot ") + action + " " + path.string() + ": " + reason(error));
}

Descriptor::Descriptor(const std::filesystem::path& path, int flags)
    : number_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

std::string read_text(const std::filesystem::path& path) {
  const Descriptor file(path, O_RDONLY);
  if (file.number() < 0) fail_on("read", path, errno);
  std::string text;
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(file.number(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail_on("read", path, errno);
    if (size == 0) return text;
    text.append(block, static_cast<std::size_t>(size));
    if (text.size() > kMostTextBytes) throw FileError(path.string() + ": more than 100 MB of JSON");
  }
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
  if (file.number() < 0) fail_on("write", path, errno);
  write_all(file, text, path);
  if (fsync(file.number()) != 0) fail_on("write", path, errno);
}

void copy(const std::filesystem::path& from, const std::filesystem::path& to) {
  const Descriptor source(from, O_RDONLY);
  if (source.number() < 0) fail_on("read", from, errno);
  const Descriptor target(to, O_WRONLY | O_CREAT | O_EXCL);
  if (target.number() < 0) fail_on("write", to, errno);
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(source.number(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail_on("read", from, errno);
    if (size == 0) break;
    write_all(target, {block, static_cast<std::size_t>(size)}, to);
  }
  if (fsync(target.number()) != 0) fail_on("write", to, errno);
}

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  std::filesystem::path temporary = path;
  temporary.concat(".").concat(std::to_string(getpid())).concat(".tmp");
  return temporary;
}

void move_into_place(const std::filesystem::path& from, const std::filesystem::path& to, bool overwrite) {
  constexpr unsigned kNoReplace = 1, kExchange = 2;
  const bool replaces = overwrite && std::filesystem::exists(to);
  if (replaces && std::filesystem::is_directory(to)) {
    // At every moment one of the two stands there.
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), kExchange) != 0) fail_on("replace", to, errno);
    std::filesystem::remove_all(from);
  } else if (replaces) {
    if (rename(from.c_str(), to.c_str()) != 0) fail_on("replace", to, errno);
  } else if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), kNoReplace) != 0) {
    // Some file systems cannot refuse in the same step.
    if (errno != EINVAL) fail_on("write", to, errno);
    if (std::filesystem::exists(to)) fail_on("write", to, EEXIST);
    if (rename(from.c_str(), to.c_str()) != 0) fail_on("write", to, errno);
  }
  sync_folder_of(to);
}

}  // namespace octile::checkpoint::files
