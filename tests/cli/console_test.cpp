// The command's progress bar and tables. The test includes console.cpp itself: it is not part of the library.
#include "cli/support/console.cpp"

#include <gtest/gtest.h>

namespace octile::cli {
namespace {

namespace fs = std::filesystem;

// Redirects stderr until it goes out of scope.
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

// A pseudoterminal: what is written to `inside` can be read from `outside`.
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

  fs::path folder_;
};

// The message of the exception that `work` throws; "" if it throws none.
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

TEST_F(FileTest, ReadingNamesThePathAndTheReason) {
  const fs::path missing = folder_ / "no" / "f";
  EXPECT_EQ(error_of([&] { read_file(missing); }), "cannot read " + missing.string() + ": No such file or directory");
  EXPECT_EQ(error_of([&] { read_file(folder_); }), "cannot read " + folder_.string() + ": Is a directory");
}

TEST_F(FileTest, ThereIsNoProgressWhereThereIsNoTerminal) {
  const fs::path path = folder_ / "stderr";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT, 0666);
  {
    const Redirected redirected(file);
    Progress progress("work", 200);
    for (int i = 0; i < 200; ++i) progress.advance(1, i == 199 ? "the last" : "");
  }
  close(file);
  EXPECT_EQ(read_file(path), "");
}

TEST(ProgressOnATerminal, IsSilencedWhenAsked) {
  const Terminal terminal(60);
  if (terminal.inside < 0) GTEST_SKIP() << "no pseudo-terminals here";
  for (const bool silenced : {true, false}) {
    progress_is_silenced = silenced;
    const Redirected redirected(terminal.inside);
    Progress("work", 2).advance(1);
    EXPECT_EQ(terminal.text().empty(), silenced);
  }
}

TEST(ProgressOnADumbTerminal, IsALineForEachTenth) {
  const Terminal terminal(60);
  if (terminal.inside < 0) GTEST_SKIP() << "no pseudo-terminals here";
  setenv("TERM", "dumb", 1);
  {
    const Redirected redirected(terminal.inside);
    Progress progress("work", 200);
    for (int i = 0; i < 200; ++i) progress.advance(1, i == 199 ? "the last" : "");
  }
  const std::string text = terminal.text();
  EXPECT_EQ(count(text, "\r\n"), 10u) << text;
  EXPECT_EQ(count(text, "work 10%"), 1u) << text;
  EXPECT_EQ(count(text, "work 100%"), 1u) << text;
  EXPECT_EQ(count(text, "the last"), 1u) << text;
  EXPECT_EQ(text.find('\033'), std::string::npos) << text;
}

TEST(ProgressOnADumbTerminal, MayEndEarlyOrHaveNothingToDo) {
  const Terminal terminal(60);
  if (terminal.inside < 0) GTEST_SKIP() << "no pseudo-terminals here";
  setenv("TERM", "dumb", 1);
  {
    const Redirected redirected(terminal.inside);
    Progress half("half", 4);
    half.advance(2);
    Progress more("more", 1);
    more.advance(5);
    Progress nothing("nothing", 0);
    nothing.advance(0);
  }
  const std::string text = terminal.text();
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
