#include "base/output.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>
#include <vector>

namespace octile::base {

namespace {

namespace fs = std::filesystem;

constexpr unsigned kNoReplace = 1, kExchange = 2;  // renameat2's
constexpr mode_t kPermissions = 0777;

// ---- What a signal has to remove ----

struct Entry {
  std::string path;
  bool is_folder;
};

// Folders come before what is in them. Never destroyed: a signal may come at any time.
std::vector<Entry>& entries() {
  static auto& all = *new std::vector<Entry>;
  return all;
}

pid_t owner = 0;  // a fork of it must not remove what is being written

std::atomic_flag busy = ATOMIC_FLAG_INIT;

// While it lives, no signal handler reads the entries: signals are blocked in this thread, and handlers in other
// threads wait for the flag. So a file is in the entries from the moment it exists.
class Guard {
 public:
  Guard() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
    while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  ~Guard() {
    busy.clear(std::memory_order_release);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  sigset_t before_;
};

bool is_within(const std::string& path, const std::string& folder) {
  return path.size() > folder.size() && path[folder.size()] == '/' && path.starts_with(folder);
}

// Under a Guard. Returns the entries that were at `path` and below.
std::vector<Entry> take_entries(const std::string& path) {
  std::vector<Entry> taken;
  std::erase_if(entries(), [&](Entry& entry) {
    const bool below = entry.path == path || is_within(entry.path, path);
    if (below) taken.push_back(std::move(entry));
    return below;
  });
  return taken;
}

void add_entries(std::vector<Entry> more) { std::move(more.begin(), more.end(), std::back_inserter(entries())); }

// Under a Guard: what was `from` is now in its final place, which may be in a folder that is not.
void settle(const fs::path& from, const fs::path& to) {
  const bool is_folder = take_entries(from.string()).front().is_folder;
  const std::string path = to.string();
  const auto holds = [&](const Entry& entry) { return entry.is_folder && is_within(path, entry.path); };
  if (!is_folder && std::any_of(entries().begin(), entries().end(), holds)) entries().push_back({path, false});
}

// ---- System calls ----

std::string reason(int error) { return std::generic_category().message(error); }

int open_new(const fs::path& path, mode_t mode) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode & kPermissions);
}

// 0, or the error.
int make_folder(const fs::path& path, mode_t mode) {
  return mkdir(path.c_str(), (mode & kPermissions) | S_IRWXU) == 0 ? 0 : errno;
}

std::string random_name() {
  std::uint64_t number = 0;
  if (getentropy(&number, sizeof number) != 0) throw OutputError("no random numbers: " + reason(errno));
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

// A new name in the folder of `target`, created by `make`, which returns 0 or the error.
template <class Make>
fs::path make_beside(const fs::path& target, Make make) {
  constexpr std::size_t kMaxName = 200;  // of the 255 bytes that a name may have
  for (;;) {
    const std::string name = target.filename().string().substr(0, kMaxName) + "." + random_name() + ".tmp";
    fs::path path = target.parent_path() / name;
    const int error = make(path);
    if (error == 0) return path;
    if (error != EEXIST) fail_on("write", target, error);
  }
}

// A rename is durable once the folder that contains the name is.
void sync_folder(const fs::path& path) {
  const Descriptor folder(open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.number() >= 0) fsync(folder.number());
}

// 0, or the error. Not every file system or kernel supports every flag.
int rename_with(unsigned flags, const fs::path& from, const fs::path& to) {
#ifdef __linux__
  return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
#else
  (void)flags, (void)from, (void)to;
  return ENOSYS;
#endif
}
bool is_unknown(int error) { return error == EINVAL || error == ENOSYS; }

void rename_or_fail(const char* action, const fs::path& from, const fs::path& to) {
  if (rename(from.c_str(), to.c_str()) != 0) fail_on(action, to, errno);
}

void rename_new(const fs::path& from, const fs::path& to) {
  const int error = rename_with(kNoReplace, from, to);
  if (error == 0) return;
  if (!is_unknown(error)) fail_on("write", to, error);
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(to, ignored))) fail_on("write", to, EEXIST);
  rename_or_fail("write", from, to);
}

// Returns the place of what was `to`: `from`, or another one if the two cannot be exchanged in one step; then
// `to` is free.
fs::path move_aside(const fs::path& from, const fs::path& to) {
  const int error = rename_with(kExchange, from, to);
  if (error == 0) return from;
  if (!is_unknown(error)) fail_on("replace", to, error);
  fs::path aside = make_beside(to, [](const fs::path& path) { return make_folder(path, S_IRWXU); });
  if (rename(to.c_str(), aside.c_str()) == 0) return aside;  // an empty folder may be renamed over
  const int why = errno;
  rmdir(aside.c_str());
  fail_on("replace", to, why);
}

// Undoes that.
void move_back(const fs::path& from, const fs::path& to, const fs::path& aside) {
  if (aside != from) return rename_or_fail("put back", aside, to);
  if (const int error = rename_with(kExchange, from, to)) fail_on("put back", to, error);
}

// The folder with all that is in it, once each entry has passed.
std::vector<Entry> checked(const fs::path& folder, const CheckReplaced& check) {
  std::vector<Entry> result = {{folder.string(), true}};
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (check) check(entry.path().lexically_relative(folder), entry);
    result.push_back({entry.path().string(), entry.is_directory() && !entry.is_symlink()});
  }
  return result;
}

// Removes only these. Returns 0, or the first error.
int remove_entries(const std::vector<Entry>& all) {
  int error = 0;
  for (auto entry = all.rbegin(); entry != all.rend(); ++entry) {
    const int result = entry->is_folder ? rmdir(entry->path.c_str()) : unlink(entry->path.c_str());
    if (result != 0 && errno != ENOENT && error == 0) error = errno;
  }
  return error;
}

bool is_open_as(int number, const struct stat& status) {
  struct stat open = {};
  return fstat(number, &open) == 0 && open.st_dev == status.st_dev && open.st_ino == status.st_ino;
}

// Opens what exists and is no file to replace. An empty descriptor: it is a file.
Descriptor open_to_write_into(const fs::path& path, const struct stat& status) {
  if (S_ISDIR(status.st_mode)) fail_on("write", path, EISDIR);
  if (S_ISBLK(status.st_mode)) throw OutputError("cannot write " + path.string() + ": it is a block device");
  int number = -1;
  // A file's own offset: what the process writes before and after stays.
  if (is_open_as(STDOUT_FILENO, status)) {
    number = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
  } else if (is_open_as(STDERR_FILENO, status)) {
    number = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
  } else if (!S_ISREG(status.st_mode)) {
    number = open(path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
  } else {
    return Descriptor(-1);
  }
  if (number < 0) fail_on("write", path, errno);
  return Descriptor(number);
}

// Whether a regular file is a page of HTML, or empty.
bool is_page(const fs::path& path) {
  constexpr std::string_view kBegin = "<!doctype html";
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.number() < 0) fail_on("read", path, errno);
  char begin[kBegin.size()];
  const ssize_t size = pread(file.number(), begin, sizeof begin, 0);
  if (size < 0) fail_on("read", path, errno);
  const auto same = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
  return size == 0 || std::equal(begin, begin + size, kBegin.begin(), kBegin.end(), same);
}

}  // namespace

void fail_on(const char* action, const fs::path& path, int error) {
  throw OutputError(std::string("cannot ") + action + " " + path.string() + ": " + reason(error));
}

void write_all(const Descriptor& file, std::string_view contents, const fs::path& path) {
  while (!contents.empty()) {
    const ssize_t written = write(file.number(), contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_on("write", path, errno);
    contents.remove_prefix(static_cast<std::size_t>(written));
  }
}

mode_t mode_of(const fs::path& path, mode_t otherwise) {
  struct stat status = {};
  return stat(path.c_str(), &status) == 0 ? status.st_mode & kPermissions : otherwise;
}

Temporary::Temporary(fs::path target, Kind kind, mode_t mode) : target_(std::move(target)), file_(-1) {
  const Guard guard;
  path_ = make_beside(target_, [&](const fs::path& path) {
    if (kind == Kind::folder) return make_folder(path, mode);
    file_ = Descriptor(open_new(path, mode));
    return file_.number() >= 0 ? 0 : errno;
  });
  entries().push_back({path_.string(), kind == Kind::folder});
}

Temporary::~Temporary() {
  if (path_.empty()) return;
  const Guard guard;
  remove_entries(take_entries(path_.string()));
}

Descriptor Temporary::add_file(const fs::path& name, mode_t mode) {
  const fs::path path = path_ / name;
  const Guard guard;
  Descriptor file(open_new(path, mode));
  if (file.number() < 0) fail_on("write", path, errno);
  entries().push_back({path.string(), false});
  return file;
}

void Temporary::add_folder(const fs::path& name, mode_t mode) {
  const fs::path path = path_ / name;
  const Guard guard;
  if (const int error = make_folder(path, mode)) fail_on("write", path, error);
  entries().push_back({path.string(), true});
}

void Temporary::sync() const {
  if (file_.number() >= 0) {
    if (fsync(file_.number()) != 0) fail_on("write", target_, errno);
    return;
  }
  std::error_code ignored;
  sync_folder(path_);
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path_, ignored)) {
    if (entry.is_directory(ignored)) sync_folder(entry.path());
  }
}

void Temporary::move_into_place() {
  sync();
  {
    const Guard guard;
    rename_new(path_, target_);
    settle(path_, target_);
  }
  path_.clear();
  sync_folder(target_.parent_path());
}

void Temporary::replace(const CheckReplaced& check) {
  struct stat status = {};
  if (lstat(target_.c_str(), &status) != 0) return move_into_place();
  const bool is_folder = file_.number() < 0;
  if (is_folder ? !S_ISDIR(status.st_mode) : !S_ISREG(status.st_mode)) {
    throw OutputError("cannot replace " + target_.string() + ": it is no " + (is_folder ? "folder" : "regular file"));
  }
  sync();
  if (is_folder) return replace_folder(check);
  {
    const Guard guard;
    rename_or_fail("replace", path_, target_);
    settle(path_, target_);
  }
  path_.clear();
  sync_folder(target_.parent_path());
}

void Temporary::replace_folder(const CheckReplaced& check) {
  std::vector<Entry> old;
  fs::path aside;
  {
    // From the exchange to the check's answer our entries would name the files of others.
    const Guard guard;
    aside = move_aside(path_, target_);
    std::vector<Entry> ours = take_entries(path_.string());
    try {
      old = checked(aside, check);
      if (aside != path_) rename_or_fail("write", path_, target_);
    } catch (...) {
      move_back(path_, target_, aside);
      add_entries(std::move(ours));
      throw;
    }
    add_entries(old);
  }
  path_.clear();
  sync_folder(target_.parent_path());
  const int error = remove_entries(old);
  const Guard guard;
  take_entries(aside.string());
  if (error != 0) {
    throw OutputError(target_.string() + " is written; what it replaces is " + aside.string() +
                      ", which cannot be removed: " + reason(error));
  }
}

void write_file(const fs::path& path, std::string_view contents, Existing existing) {
  if (path.empty()) fail_on("write", path, ENOENT);
  struct stat status = {};
  fs::path target = path;
  mode_t mode = 0666;
  const bool is_there = stat(path.c_str(), &status) == 0;
  if (is_there && existing != Existing::refuse) {
    if (const Descriptor file = open_to_write_into(path, status); file.number() >= 0) {
      return write_all(file, contents, path);
    }
    if (existing == Existing::page && !is_page(path)) {
      throw OutputError("cannot write " + path.string() + ": it already exists, and is not a page of HTML");
    }
    if (access(path.c_str(), W_OK) != 0) fail_on("write", path, errno);
    std::error_code error;
    target = fs::canonical(path, error);  // through a symbolic link, so that the link stays one
    if (error) fail_on("write", path, error.value());
    mode = status.st_mode & kPermissions;
  } else if (lstat(path.c_str(), &status) == 0) {
    if (existing == Existing::refuse) fail_on("write", path, EEXIST);
    throw OutputError("cannot write " + path.string() + ": it is a link to nothing");
  }
  Temporary temporary(target, Temporary::Kind::file, mode);
  if (is_there) fchmod(temporary.file().number(), mode);  // whatever the umask
  write_all(temporary.file(), contents, path);
  existing == Existing::refuse ? temporary.move_into_place() : temporary.replace();
}

void clean_up_on_signals() {
  entries();
  owner = getpid();
  const auto handle = [](int number, void (*handler)(int)) {
    struct sigaction action = {};
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  };
  // SIGBUS: a file that is mapped was made shorter.
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGALRM, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGBUS}) {
    handle(number, octile_end_by_signal);
  }
  handle(SIGXFSZ, [](int) {});  // then write says EFBIG
}

}  // namespace octile::base

extern "C" void octile_end_by_signal(int number) {
  using namespace octile::base;
  // Never released: from here on no thread creates another file.
  while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
  if (getpid() == owner) remove_entries(entries());
  std::signal(number, SIG_DFL);
  std::raise(number);
}
