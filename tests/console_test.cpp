// The command's progress bar, tables and files. The test sees console.cpp itself: it is no part of the library.
#include "cli/console.cpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>

namespace octile::cli {
namespace {

namespace fs = std::filesystem;

// Sends stderr elsewhere, until it goes out of scope.
class Redirected {
 public:
  explicit Redirected(int to) : before_(dup(STDERR_FILENO)) { dup2(to, STDERR_FILENO); }
  ~Redirected() {
    dup2(before_, STDERR_FILENO);
    close(before_);
  }

 private:
  int before_;
};

// A terminal of our own: what is written to `inside` can be read from `outside`.
class Terminal {
 public:
  explicit Terminal(unsigned short columns) : outside(posix_openpt(O_RDWR | O_NOCTTY)) {
    if (outside < 0 || grantpt(outside) != 0 || unlockpt(outside) != 0) return;
    inside = open(ptsname(outside), O_RDWR | O_NOCTTY);
    winsize size = {};
    size.ws_row = 24;
    size.ws_col = columns;
    ioctl(inside, TIOCSWINSZ, &size);
    fcntl(outside, F_SETFL, O_NONBLOCK);
  }
  ~Terminal() {
    close(inside);
    close(outside);
  }
  std::string text() const {
    std::string all;
    char block[4096];
    for (ssize_t size; (size = read(outside, block, sizeof block)) > 0;) all.append(block, static_cast<size_t>(size));
    return all;
  }
  int outside = -1;
  int inside = -1;
};

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

class FileTest : public testing::Test {
 protected:
  FileTest() : folder_(fs::temp_directory_path() / ("octile_console_test." + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~FileTest() override { fs::remove_all(folder_); }

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

// The text of what `work` throws, "" if nothing.
template <class Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

TEST(Table, PadsTheFirstColumnRightAndTheOthersLeft) {
  EXPECT_EQ(format_table({"name", "ms"}, {{"a", "1.5"}, {"longer", "10.25"}}),
            "name       ms\n"
            "------  -----\n"
            "a         1.5\n"
            "longer  10.25\n");
}

TEST(Table, LeftColumnsHaveNoTrailingSpaces) {
  EXPECT_EQ(format_table({"a", "reason"}, {{"x", "yes"}, {"y", "no: it is old"}}, 2),
            "a  reason\n"
            "-  -------------\n"
            "x  yes\n"
            "y  no: it is old\n");
}

TEST(Table, CountsCharactersNotBytes) {
  EXPECT_EQ(format_table({"a", "b"}, {{"\u00b5s", "1"}, {"ms", "22"}}),
            "a    b\n"
            "--  --\n"
            "\u00b5s   1\n"
            "ms  22\n");
}

TEST(Table, TakesRowsOfAnyLength) {
  EXPECT_EQ(format_table({"a", "b"}, {{"x"}, {"y", "1", "more"}}),
            "a  b\n"
            "-  -  ----\n"
            "x\n"
            "y  1  more\n");
  EXPECT_EQ(format_table({"only"}, {}), "only\n----\n");
}

TEST(Fixed, RoundsToTheDigits) {
  EXPECT_EQ(fixed(1.005, 0), "1");
  EXPECT_EQ(fixed(-2.25, 1), "-2.2");  // exactly half: to even
  EXPECT_EQ(fixed(1e300, 0).size(), 301u);
}

TEST_F(FileTest, WritesAndReadsBackEveryByte) {
  const std::string contents("a\0b\r\n\xff", 6);
  write_file(folder_ / "f", contents);
  EXPECT_EQ(read_file(folder_ / "f"), contents);
  write_file(folder_ / "f", "");
  EXPECT_EQ(read_file(folder_ / "f"), "");
  const std::string large(1'000'000, 'x');
  write_file(folder_ / "f", large);
  EXPECT_EQ(read_file(folder_ / "f"), large);
  EXPECT_EQ(files(), 1u) << "a temporary file was left";
}

TEST_F(FileTest, KeepsTheOldFileWhenTheNewOneCannotBeWritten) {
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
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(files(), 1u) << "a temporary file was left";
}

TEST_F(FileTest, NamesThePathAndTheReason) {
  const fs::path missing = folder_ / "no" / "f";
  EXPECT_EQ(error_of([&] { write_file(missing, "x"); }),
            "cannot write " + missing.string() + ": No such file or directory");
  EXPECT_EQ(error_of([&] { read_file(missing); }), "cannot read " + missing.string() + ": No such file or directory");
  EXPECT_EQ(error_of([&] { write_file(folder_, "x"); }), "cannot write " + folder_.string() + ": Is a directory");
  EXPECT_EQ(error_of([&] { read_file(folder_); }), "cannot read " + folder_.string() + ": Is a directory");
  EXPECT_EQ(error_of([&] { write_file("", "x"); }), "cannot write : No such file or directory");
}

TEST_F(FileTest, RespectsAFileThatIsReadOnly) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everything";
  const fs::path path = folder_ / "f";
  write_file(path, "old");
  fs::permissions(path, fs::perms::owner_read);
  EXPECT_EQ(error_of([&] { write_file(path, "new"); }), "cannot write " + path.string() + ": Permission denied");
  EXPECT_EQ(read_file(path), "old");
}

TEST_F(FileTest, WritesIntoDevicesAndDoesNotReplaceThem) {
  if (!fs::is_character_file("/dev/full")) GTEST_SKIP() << "no /dev/full";
  EXPECT_EQ(error_of([] { write_file("/dev/full", "x"); }), "cannot write /dev/full: No space left on device");
  EXPECT_EQ(error_of([] { write_file("/dev/null", "x"); }), "");
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(FileTest, FollowsASymbolicLink) {
  write_file(folder_ / "target", "old");
  fs::create_symlink("target", folder_ / "link");
  write_file(folder_ / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read_file(folder_ / "target"), "new");
}

TEST_F(FileTest, ProgressIsALineForEachTenthWhereThereIsNoTerminal) {
  const fs::path path = folder_ / "stderr";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT, 0666);
  {
    const Redirected redirected(file);
    Progress progress("work", 200);
    for (int i = 0; i < 200; ++i) progress.advance(1, i == 199 ? "the last" : "");
  }
  close(file);
  const std::string text = read_file(path);
  EXPECT_EQ(count(text, "\n"), 10u) << text;
  EXPECT_EQ(count(text, "work 10%"), 1u) << text;
  EXPECT_EQ(count(text, "work 100%"), 1u) << text;
  EXPECT_EQ(count(text, "the last"), 1u) << text;
  EXPECT_EQ(text.find_first_of("\r\033"), std::string::npos) << text;
}

TEST_F(FileTest, ProgressMayEndEarlyOrHaveNothingToDo) {
  const fs::path path = folder_ / "stderr";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT, 0666);
  {
    const Redirected redirected(file);
    Progress half("half", 4);
    half.advance(2);
    Progress more("more", 1);
    more.advance(5);
    Progress nothing("nothing", 0);
    nothing.advance(0);
  }
  close(file);
  const std::string text = read_file(path);
  EXPECT_EQ(count(text, "half 50%"), 1u) << text;
  EXPECT_EQ(count(text, "half 100%"), 0u) << text;
  EXPECT_EQ(count(text, "more 100%"), 1u) << text;
  EXPECT_EQ(count(text, "nothing 100%"), 1u) << text;
}

TEST(ProgressOnATerminal, RedrawsOneLineInPlaceAndNotTooOften) {
  const Terminal terminal(60);
  if (terminal.inside < 0) GTEST_SKIP() << "no pseudo-terminals here";
  setenv("TERM", "xterm", 1);
  const double start = seconds_now();
  {
    const Redirected redirected(terminal.inside);
    Progress progress("training", 100'000);
    for (int i = 0; i < 100'000; ++i) progress.advance(1, "a note that is much too long for a line of sixty columns");
  }
  const double draws_allowed = (seconds_now() - start) / kRedrawSeconds + 2;
  const std::string text = terminal.text();
  EXPECT_LE(static_cast<double>(count(text, "\r\033[K")), draws_allowed);
  EXPECT_EQ(count(text, "\n"), 1u) << text;
  const std::string last = text.substr(text.rfind("\033[K") + 3);
  EXPECT_TRUE(last.starts_with("training [########################] 100%")) << last;
  EXPECT_TRUE(last.ends_with("\r\n")) << last;
  EXPECT_EQ(last.size() - 2, 59u) << last;
}

}  // namespace
}  // namespace octile::cli
