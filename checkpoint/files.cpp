#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace octile::checkpoint::files {

namespace {

namespace fs = std::filesystem;

constexpr unsigned kNoReplace = 1, kExchange = 2;  // renameat2's

std::string reason(int error) { return std::generic_category().message(error); }

int open_new(const fs::path& path) { return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); }

// Names beside `target`, until `make` has made one of them new: returns 0, or the error.
template <class Make>
fs::path make_beside(const fs::path& target, Make make) {
  constexpr int kMostTries = 1000;
  for (int i = 0;; ++i) {
    fs::path path = target;
    path.concat("." + std::to_string(getpid()) + (i > 0 ? "-" + std::to_string(i) : "") + ".tmp");
    const int error = make(path);
    if (error == 0) return path;
    if (error != EEXIST || i == kMostTries) fail_on("write", target, error);
  }
}

fs::path make_folder_beside(const fs::path& target) {
  return make_beside(target, [](const fs::path& path) { return mkdir(path.c_str(), 0777) == 0 ? 0 : errno; });
}

// What a rename does to a folder is durable once the folder that holds it is.
void sync_folder_of(const fs::path& path) {
  const fs::path parent = path.parent_path();
  const Descriptor folder(open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.number() >= 0) fsync(folder.number());
}

void write_all(const Descriptor& file, std::string_view bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(file.number(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_on("write", path, errno);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

// 0, or the error. Not every file system knows every flag, nor does every kernel.
int rename_with(unsigned flags, const fs::path& from, const fs::path& to) {
  return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}
bool is_unknown(int error) { return error == EINVAL || error == ENOSYS; }

void rename_or_fail(const char* action, const fs::path& from, const fs::path& to) {
  if (rename(from.c_str(), to.c_str()) != 0) fail_on(action, to, errno);
}

// Returns where that lies which was `to`.
fs::path exchange_folders(const fs::path& from, const fs::path& to) {
  const int error = rename_with(kExchange, from, to);
  if (error == 0) return from;
  if (!is_unknown(error)) fail_on("replace", to, error);
  fs::path aside = make_folder_beside(to);  // an empty folder may be renamed over
  if (rename(to.c_str(), aside.c_str()) != 0) {
    const int why = errno;
    rmdir(aside.c_str());
    fail_on("replace", to, why);
  }
  if (rename(from.c_str(), to.c_str()) != 0) {
    const int why = errno;
    rename_or_fail("put back", aside, to);
    fail_on("replace", to, why);
  }
  return aside;
}

void move_new(const fs::path& from, const fs::path& to) {
  const int error = rename_with(kNoReplace, from, to);
  if (error == 0) return;
  if (!is_unknown(error)) fail_on("write", to, error);
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(to, ignored))) fail_on("write", to, EEXIST);
  rename_or_fail("write", from, to);
}

}  // namespace

void fail_on(const char* action, const fs::path& path, int error) {
  throw FileError(std::string("cannot ") + action + " " + path.string() + ": " + reason(error));
}

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

Descriptor open_to_read(const fs::path& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status = {};
  if (file.number() < 0 || fstat(file.number(), &status) != 0) fail_on("read", path, errno);
  if (!S_ISREG(status.st_mode)) throw FileError("cannot read " + path.string() + ": it is no file");
  return file;
}

std::string read_text(const fs::path& path, std::size_t most) {
  const Descriptor file = open_to_read(path);
  std::string text;
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(file.number(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail_on("read", path, errno);
    if (size == 0) return text;
    text.append(block, static_cast<std::size_t>(size));
    if (text.size() > most) throw FileError(path.string() + ": more than " + std::to_string(most) + " bytes of JSON");
  }
}

void write_text(const fs::path& path, std::string_view text) {
  const Descriptor file(open_new(path));
  if (file.number() < 0) fail_on("write", path, errno);
  write_all(file, text, path);
  if (fsync(file.number()) != 0) fail_on("write", path, errno);
}

void copy(const fs::path& from, const fs::path& to) {
  const Descriptor source = open_to_read(from);
  const Descriptor target(open_new(to));
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

Temporary::Temporary(fs::path target, Kind kind) : target_(std::move(target)), file_(-1) {
  if (kind == Kind::folder) {
    path_ = make_folder_beside(target_);
    return;
  }
  int number = -1;
  path_ = make_beside(target_, [&](const fs::path& path) { return (number = open_new(path)) >= 0 ? 0 : errno; });
  file_ = Descriptor(number);
}

Temporary::~Temporary() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void Temporary::move_into_place(bool overwrite) {
  if (file_.number() >= 0 && fsync(file_.number()) != 0) fail_on("write", target_, errno);
  std::error_code error;
  if (!overwrite || !fs::exists(target_, error)) {
    move_new(path_, target_);
  } else if (fs::is_directory(target_, error)) {
    path_ = exchange_folders(path_, target_);
    fs::remove_all(path_, error);
    if (error) {
      throw FileError(target_.string() + " is written; what it replaces is " + path_.string() +
                      ", which cannot be removed: " + error.message());
    }
  } else {
    rename_or_fail("replace", path_, target_);
  }
  path_.clear();
  sync_folder_of(target_);
}

}  // namespace octile::checkpoint::files
