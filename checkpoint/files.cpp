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
  if (!S_ISREG(status.st_mode)) reject("cannot read ", path.string(), ": it is not a file");
  return file;
}

std::string read_text(const fs::path& path, std::size_t max) {
  const Descriptor file = open_to_read(path);
  std::string text;
  const bool complete = base::read_blocks(file, [&](std::string_view block) {
    text += block;
    if (text.size() > max) reject(path.string(), ": more than ", max, " bytes of JSON");
    return true;
  });
  if (!complete) fail_on("read", path, errno);
  return text;
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
  const bool complete = base::read_blocks(source, [&](std::string_view block) {
    base::write_all(target, block, to);
    return true;
  });
  if (!complete) fail_on("read", from, errno);
  if (fsync(target.number()) != 0) fail_on("write", to, errno);
}

}  // namespace octile::checkpoint::files
