// Files and folders that appear completely or not at all: what they replace, which links they follow, and what a
// process killed by a signal leaves behind.
#include "base/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace octile::base {
namespace {

namespace fs = std::filesystem;

std::string read_all(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

mode_t permissions(const fs::path& path) { return mode_of(path, 0); }

class OutputTest : public testing::Test {
 protected:
  OutputTest() {
    std::string name = (fs::temp_directory_path() / "octile-output-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~OutputTest() override { fs::remove_all(folder_); }

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

// The message of the exception that `work` throws; "" if it throws none.
template <class Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const OutputError& error) {
    return error.what();
  }
  return {};
}

// Runs `work` in a child process and returns its waitpid status. The child exits with what `work` returns.
int status_of(const std::function<int()>& work) {
  const pid_t child = fork();
  if (child == 0) _exit(work());
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

constexpr int kEnding[] = {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGALRM, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGBUS};

// The test's own process may ignore some of them.
void restore_signals() {
  for (const int number : kEnding) std::signal(number, SIG_DFL);
  std::signal(SIGXFSZ, SIG_DFL);
}

TEST_F(OutputTest, WritesEveryByte) {
  const std::string contents("a\0b\r\n\xff", 6);
  write_file(folder_ / "f", contents);
  EXPECT_EQ(read_all(folder_ / "f"), contents);
  write_file(folder_ / "f", "");
  EXPECT_EQ(read_all(folder_ / "f"), "");
  const std::string large(1'000'000, 'x');
  write_file(folder_ / "f", large);
  EXPECT_EQ(read_all(folder_ / "f"), large);
  write_file(folder_ / std::string(255, 'n'), "the longest of names");
  EXPECT_EQ(files(), 2u) << "a temporary file was left";
}

TEST_F(OutputTest, KeepsTheOldFileWhenTheNewOneCannotBeWritten) {
  const fs::path path = folder_ / "f";
  write_file(path, "old");
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small = {1000, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { write_file(path, std::string(100'000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(error, "cannot write " + path.string() + ": File too large");
  EXPECT_EQ(read_all(path), "old");
  EXPECT_EQ(files(), 1u) << "a temporary file was left";
}

TEST_F(OutputTest, NamesThePathAndTheReason) {
  const fs::path missing = folder_ / "no" / "f";
  EXPECT_EQ(error_of([&] { write_file(missing, "x"); }),
            "cannot write " + missing.string() + ": No such file or directory");
  EXPECT_EQ(error_of([&] { write_file(folder_, "x"); }), "cannot write " + folder_.string() + ": Is a directory");
  EXPECT_EQ(error_of([&] { write_file("", "x"); }), "cannot write : No such file or directory");
}

TEST_F(OutputTest, RespectsAFileThatIsReadOnly) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everything";
  const fs::path path = folder_ / "f";
  write_file(path, "old");
  fs::permissions(path, fs::perms::owner_read);
  EXPECT_EQ(error_of([&] { write_file(path, "new"); }), "cannot write " + path.string() + ": Permission denied");
  EXPECT_EQ(read_all(path), "old");
}

TEST_F(OutputTest, AFileThatIsReplacedKeepsItsPermissions) {
  const fs::path path = folder_ / "f";
  for (const mode_t mode : {0600u, 0666u}) {
    write_file(path, "old");
    chmod(path.c_str(), mode);
    write_file(path, "new");
    EXPECT_EQ(permissions(path), mode);
  }
}

TEST_F(OutputTest, WritesIntoDevicesAndDoesNotReplaceThem) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "no /dev/full";
  EXPECT_EQ(error_of([] { write_file("/dev/full", "x"); }), "cannot write /dev/full: No space left on device");
  EXPECT_EQ(error_of([] { write_file("/dev/null", "x"); }), "");
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(OutputTest, WritesIntoAPipe) {
  const fs::path path = folder_ / "pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const int reader = open(path.c_str(), O_RDONLY | O_NONBLOCK);
  write_file(path, "text");
  char text[8] = {};
  EXPECT_EQ(read(reader, text, sizeof text), 4);
  EXPECT_STREQ(text, "text");
  EXPECT_TRUE(fs::is_fifo(path));
  EXPECT_NE(error_of([&] { write_file(path, "x", Existing::refuse); }), "");
  close(reader);
}

// Text printed before and after the page stays, as it would in a pipe.
TEST_F(OutputTest, WritesIntoTheFileThatIsTheStandardOutput) {
  const fs::path path = folder_ / "f";
  fs::create_symlink("/proc/self/fd/1", folder_ / "stdout");  // as /dev/stdout, which the test must not risk
  status_of([&] {
    dup2(open(path.c_str(), O_WRONLY | O_CREAT, 0666), STDOUT_FILENO);
    const auto print = [](std::string_view text) { (void)!write(STDOUT_FILENO, text.data(), text.size()); };
    print("before ");
    write_file(folder_ / "stdout", "page");
    print(" after");
    return 0;
  });
  EXPECT_EQ(read_all(path), "before page after");
}

TEST_F(OutputTest, FollowsASymbolicLink) {
  write_file(folder_ / "target", "old");
  fs::create_symlink("target", folder_ / "link");
  write_file(folder_ / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read_all(folder_ / "target"), "new");
}

TEST_F(OutputTest, RefusesALinkToNothing) {
  fs::create_symlink("nothing", folder_ / "link");
  EXPECT_EQ(error_of([&] { write_file(folder_ / "link", "x"); }),
            "cannot write " + (folder_ / "link").string() + ": it is a link to nothing");
  EXPECT_NE(error_of([&] { write_file(folder_ / "link", "x", Existing::refuse); }), "");
  EXPECT_EQ(files(), 1u);
}

TEST_F(OutputTest, RefusesToReplaceWhenAsked) {
  write_file(folder_ / "f", "old");
  EXPECT_NE(error_of([&] { write_file(folder_ / "f", "x", Existing::refuse); }), "");
  {
    Temporary late(folder_ / "g", Temporary::Kind::file, 0666);
    write_file(folder_ / "g", "old", Existing::refuse);
    EXPECT_NE(error_of([&] { late.move_into_place(); }), "");
  }
  EXPECT_EQ(read_all(folder_ / "f") + read_all(folder_ / "g"), "oldold");
  EXPECT_EQ(files(), 2u);
}

// A page's name may be a slip for that of the file it is about.
TEST_F(OutputTest, APageReplacesOnlyAPage) {
  for (const std::string old : {"", "<!DOCTYPE html>\nold", "<!doctype html>"}) {
    write_file(folder_ / "page", old);
    write_file(folder_ / "page", "<!doctype html>new", Existing::page);
    EXPECT_EQ(read_all(folder_ / "page"), "<!doctype html>new") << old;
  }
  for (const std::string old : {"int main() {}", "<!doctype", "<", "<!doctype xml>"}) {
    write_file(folder_ / "work", old);
    fs::create_symlink("work", folder_ / "link");
    for (const char* const name : {"work", "link"}) {
      const fs::path path = folder_ / name;
      EXPECT_EQ(error_of([&] { write_file(path, "x", Existing::page); }),
                "cannot write " + path.string() + ": it already exists, and is not a page of HTML");
    }
    EXPECT_EQ(read_all(folder_ / "work"), old);
    fs::remove(folder_ / "link");
  }
  write_file(folder_ / "new", "x", Existing::page);
  EXPECT_EQ(files(), 3u);
}

// Links planted under names that a temporary file could be expected to have.
TEST_F(OutputTest, FollowsNoLinkThatWasPlanted) {
  const std::string process = std::to_string(getpid());
  write_file(folder_ / "victim", "kept");
  for (const std::string& suffix : {"." + process + ".tmp", "." + process + "-1.tmp", std::string(".part")}) {
    fs::create_symlink("victim", folder_ / ("f" + suffix));
  }
  write_file(folder_ / "f", "new");
  EXPECT_EQ(read_all(folder_ / "victim"), "kept");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder_ / "f")));
  EXPECT_EQ(files(), 5u);
  const Temporary one(folder_ / "g", Temporary::Kind::file, 0666), other(folder_ / "g", Temporary::Kind::file, 0666);
  EXPECT_NE(one.path(), other.path());
}

TEST_F(OutputTest, ReplacesOnlyFilesByFilesAndFoldersByFolders) {
  const auto replace = [&](const char* name, Temporary::Kind kind) {
    return error_of([&] { Temporary(folder_ / name, kind, 0777).replace(); });
  };
  fs::create_directory(folder_ / "folder");
  write_file(folder_ / "file", "x");
  fs::create_symlink("file", folder_ / "link");
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  for (const char* const name : {"folder", "link", "pipe"}) EXPECT_NE(replace(name, Temporary::Kind::file), "") << name;
  for (const char* const name : {"file", "link", "pipe"}) EXPECT_NE(replace(name, Temporary::Kind::folder), "") << name;
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(replace("folder", Temporary::Kind::folder), "");
  EXPECT_EQ(files(), 4u);
}

// A file that appears in the old folder, through a descriptor, after the folder was listed must not be removed.
TEST_F(OutputTest, RemovesOnlyWhatWasChecked) {
  fs::create_directories(folder_ / "out" / "sub");
  write_file(folder_ / "out" / "sub" / "x", "old");
  const int inside = open((folder_ / "out").c_str(), O_RDONLY | O_DIRECTORY);
  const auto check = [&](const fs::path& name, const fs::directory_entry&) {
    if (name == "sub/x") close(openat(inside, "late", O_WRONLY | O_CREAT, 0666));
  };
  const std::string error = error_of([&] { Temporary(folder_ / "out", Temporary::Kind::folder, 0777).replace(check); });
  EXPECT_NE(error.find("out is written; what it replaces is "), std::string::npos) << error;
  EXPECT_EQ(faccessat(inside, "late", F_OK, 0), 0);
  EXPECT_NE(faccessat(inside, "sub", F_OK, 0), 0);
  EXPECT_TRUE(fs::is_empty(folder_ / "out"));
  close(inside);
}

// ---- Signals ----

// Writes a folder with every kind of entry.
struct Unfinished {
  explicit Unfinished(const fs::path& target) : folder(target, Temporary::Kind::folder, 0777) {
    folder.add_folder("sub", 0777);
    write_all(folder.add_file("sub/x", 0666), "x", "x");
    Temporary(folder.path() / "finished", Temporary::Kind::file, 0666).move_into_place();
    Temporary(folder.path() / "finished", Temporary::Kind::file, 0666).replace();
    shard.emplace(folder.path() / "shard", Temporary::Kind::file, 0666);
  }
  Temporary folder;
  std::optional<Temporary> shard;
};

TEST_F(OutputTest, ASignalThatEndsTheProcessLeavesNothing) {
  for (const int number : kEnding) {
    for (const bool in_a_thread : {false, true}) {
      const int status = status_of([&] {
        restore_signals();
        clean_up_on_signals();
        const Unfinished unfinished(folder_ / "out");
        if (in_a_thread) std::thread([&] { std::raise(number); }).join();
        std::raise(number);
        return 0;
      });
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == number) << number << ": " << status;
      EXPECT_EQ(files(), 0u) << number;
    }
  }
}

// Like a program between fork and exec.
TEST_F(OutputTest, ASignalToAForkRemovesNothing) {
  const int status = status_of([&] {
    restore_signals();
    clean_up_on_signals();
    const Unfinished unfinished(folder_ / "out");
    const int fork_status = status_of([] { return std::raise(SIGTERM); });
    return WIFSIGNALED(fork_status) && fs::exists(unfinished.folder.path() / "sub" / "x") ? 7 : 8;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}

TEST_F(OutputTest, ASignalThatIsIgnoredStaysIgnored) {
  for (const int number : {SIGHUP, SIGINT, SIGPIPE}) {
    const int status = status_of([&] {
      restore_signals();
      std::signal(number, SIG_IGN);
      clean_up_on_signals();
      std::raise(number);
      return 7;
    });
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << number << ": " << status;
  }
}

TEST_F(OutputTest, TheLimitOfAFilesSizeIsAnError) {
  const int status = status_of([&] {
    restore_signals();
    clean_up_on_signals();
    const rlimit small = {1000, 1000};
    setrlimit(RLIMIT_FSIZE, &small);
    const std::string error = error_of([&] { write_file(folder_ / "f", std::string(100'000, 'x')); });
    return error == "cannot write " + (folder_ / "f").string() + ": File too large" ? 7 : 8;
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  EXPECT_EQ(files(), 0u);
}

// At that moment the new folder's entries still have temporary names.
TEST_F(OutputTest, ASignalWhileAFolderIsReplacedTakesOneOfTheTwo) {
  for (const bool passes : {true, false}) {
    fs::remove_all(folder_ / "out");
    fs::create_directories(folder_ / "out" / "sub");
    write_file(folder_ / "out" / "sub" / "x", "old");
    const int status = status_of([&] {
      restore_signals();
      clean_up_on_signals();
      Unfinished unfinished(folder_ / "out");
      unfinished.shard.reset();
      unfinished.folder.replace([&](const fs::path&, const fs::directory_entry&) {
        std::raise(SIGTERM);
        if (!passes) throw OutputError("no");
      });
      return 0;
    });
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
    EXPECT_EQ(read_all(folder_ / "out" / "sub" / "x"), passes ? "x" : "old");
    EXPECT_EQ(fs::exists(folder_ / "out" / "finished"), passes);
    EXPECT_EQ(files(), 1u);
  }
}

}  // namespace
}  // namespace octile::base
