#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "reject.h"

namespace octile::checkpoint::files {

namespace fs = std::filesystem;

void fail_on(const char* action, const fs::path& path, int error) {
  reject("cannot ", action, " ", path.string(), ": ", std::generic_category().message(error));
}

Descriptor open_to_read(const fs::path& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status = {};
  if (file.number() < 0 || fstat(file.number(), &status) != 0) fail_on("read", path, errno);
  if (!S_ISREG(status.st_mode)) reject("cannot read ", path.string(), ": it is no file");
  return file;
}

std::string read_text(const fs::path& path, std::size_t max) {
  const Descriptor file = open_to_read(path);
  std::string text;
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(file.number(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail_on("read", path, errno);
    if (size == 0) return text;
    text.append(block, static_cast<std::size_t>(size));
    if (text.size() > max) reject(path.string(), ": more than ", max, " bytes of JSON");
  }
}

void write_text(Temporary& folder, const fs::path& name, std::string_view text, mode_t mode) {
  const Descriptor file = folder.add_file(name, mode);
  base::write_all(file, text, folder.path() / name);
  if (fsync(file.number()) != 0) fail_on("write", folder.path() / name, errno);
}

void copy(const fs::path& from, Temporary& folder, const fs::path& name) {
  const Descriptor source = open_to_read(from);
  struct stat status = {};
  if (fstat(source.number(), &status) != 0) fail_on("read", from, errno);
  const fs::path to = folder.path() / name;
  const Descriptor target = folder.add_file(name, status.st_mode);
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(source.number(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail_on("read", from, errno);
    if (size == 0) break;
    base::write_all(target, {block, static_cast<std::size_t>(size)}, to);
  }
  if (fsync(target.number()) != 0) fail_on("write", to, errno);
}

}  // namespace octile::checkpoint::files
