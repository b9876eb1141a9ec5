#include "console.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace octile::cli {

namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr std::size_t kBarCells = 24;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool stderr_is_terminal() {
  const char* kind = std::getenv("TERM");
  return isatty(STDERR_FILENO) && !(kind && std::string_view(kind) == "dumb");
}

// Of stderr's terminal; a pseudo-terminal that was never sized says 0.
std::size_t terminal_columns() {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; }

// Characters of a UTF-8 text, each taken to be one column wide.
std::size_t columns(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

std::string_view first_columns(std::string_view text, std::size_t count) {
  std::size_t end = 0;
  while (end < text.size() && (count > 0 || !begins_character(text[end]))) count -= begins_character(text[end++]);
  return text.substr(0, end);
}

std::string clock_time(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  char text[32];
  std::snprintf(text, sizeof text, "%lld:%02lld", static_cast<long long>(whole / 60),
                static_cast<long long>(whole % 60));
  return text;
}

[[noreturn]] void fail_on(const char* action, const std::filesystem::path& path, int error) {
  throw std::runtime_error(std::string("cannot ") + action + " " + path.string() + ": " +
                           std::generic_category().message(error));
}

class File {
 public:
  File(const std::filesystem::path& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~File() { close_now(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

  // 0, or the error: some file systems report a full disk only here.
  int close_now() {
    const int result = descriptor_ >= 0 ? close(descriptor_) : 0;
    descriptor_ = -1;
    return result == 0 ? 0 : errno;
  }

 private:
  int descriptor_;
};

// 0, or the error.
int write_all(File& file, std::string_view contents) {
  while (!contents.empty()) {
    const ssize_t written = write(file.descriptor(), contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    contents.remove_prefix(static_cast<std::size_t>(written));
  }
  return file.close_now();
}

}  // namespace

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(total), started_(seconds_now()), terminal_(stderr_is_terminal()) {
  if (terminal_) draw();
}

Progress::~Progress() {
  if (!terminal_) return;
  draw();
  std::fputc('\n', stderr);
}

void Progress::advance(std::int64_t steps, std::string_view note) {
  done_ = std::min(done_ + steps, total_);
  if (!note.empty()) note_ = note;
  if (terminal_) {
    if (seconds_now() - drawn_ >= kRedrawSeconds) draw();
    return;
  }
  const std::int64_t tenth = total_ > 0 ? done_ * 10 / total_ : 10;
  if (tenth == tenth_) return;
  tenth_ = tenth;
  draw();
}

void Progress::draw() {
  drawn_ = seconds_now();
  const double share = total_ > 0 ? static_cast<double>(done_) / static_cast<double>(total_) : 1;
  const double elapsed = drawn_ - started_;
  std::string line = label_;
  if (terminal_) {
    const auto cells = static_cast<std::size_t>(share * static_cast<double>(kBarCells));
    line.append(" [").append(cells, '#').append(kBarCells - cells, '.').append("]");
  }
  line.append(" ").append(fixed(100 * share, 0)).append("%");
  if (done_ == total_) {
    line.append("  ").append(clock_time(elapsed));
  } else if (done_ > 0) {
    line.append("  ").append(clock_time(elapsed * (1 / share - 1))).append(" left");
  }
  if (!note_.empty()) line.append("  ").append(note_);
  // A line that wraps could not be redrawn in place.
  if (terminal_) line.resize(first_columns(line, terminal_columns() - 1).size());
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
}

std::string format_table(const std::vector<std::string>& heading, const std::vector<std::vector<std::string>>& rows,
                         std::size_t left) {
  std::vector<std::size_t> widths;
  const auto measure = [&](const std::vector<std::string>& cells) {
    widths.resize(std::max(widths.size(), cells.size()));
    for (std::size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], columns(cells[i]));
  };
  measure(heading);
  for (const auto& row : rows) measure(row);

  std::string text;
  const auto add = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const std::string padding(widths[i] - columns(cells[i]), ' ');
      if (i > 0) line += "  ";
      line += i < left ? cells[i] + padding : padding + cells[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  };
  std::vector<std::string> rule;
  for (const std::size_t width : widths) rule.emplace_back(width, '-');
  add(heading);
  add(rule);
  for (const auto& row : rows) add(row);
  return text;
}

std::string fixed(double value, int digits) {
  const int size = std::snprintf(nullptr, 0, "%.*f", digits, value);
  std::string text(static_cast<std::size_t>(size), '\0');
  std::snprintf(text.data(), text.size() + 1, "%.*f", digits, value);
  return text;
}

void write_file(const std::filesystem::path& path, std::string_view contents) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) fail_on("write", path, EISDIR);
  // A pipe or a device is written into: renaming over /dev/null would replace it.
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    File file(path, O_WRONLY);
    if (file.descriptor() < 0) fail_on("write", path, errno);
    if (const int error = write_all(file, contents)) fail_on("write", path, error);
    return;
  }
  // Through a symbolic link, so that the link stays one.
  std::filesystem::path target = std::filesystem::weakly_canonical(path, ignored);
  if (ignored || target.empty()) target = path;
  if (std::filesystem::exists(status) && access(target.c_str(), W_OK) != 0) fail_on("write", path, errno);

  std::filesystem::path temporary = target;
  temporary.concat(".").concat(std::to_string(getpid())).concat(".tmp");
  int error = 0;
  {
    File file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    if (file.descriptor() < 0) fail_on("write", path, errno);
    error = write_all(file, contents);
  }
  if (error == 0 && rename(temporary.c_str(), target.c_str()) != 0) error = errno;
  if (error == 0) return;
  unlink(temporary.c_str());
  fail_on("write", path, error);
}

std::string read_file(const std::filesystem::path& path) {
  File file(path, O_RDONLY);
  if (file.descriptor() < 0) fail_on("read", path, errno);
  std::string contents;
  char block[1 << 16];
  for (;;) {
    const ssize_t size = read(file.descriptor(), block, sizeof block);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) fail_on("read", path, errno);
    if (size == 0) return contents;
    contents.append(block, static_cast<std::size_t>(size));
  }
}

}  // namespace octile::cli
