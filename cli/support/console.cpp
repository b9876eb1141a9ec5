#include "cli/support/console.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "base/output.h"

namespace octile::cli {

namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr std::size_t kBarCells = 24;
constexpr std::size_t kMaxFileBytes = 16'000'000;  // of a text; /dev/zero has no end

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool progress_is_silenced = false;

bool terminal_is_dumb() {
  const char* kind = std::getenv("TERM");
  return kind && std::string_view(kind) == "dumb";
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

}  // namespace

Progress::Progress(std::string label, std::int64_t total)
    : label_(std::move(label)),
      total_(total),
      started_(seconds_now()),
      shown_(!progress_is_silenced && isatty(STDERR_FILENO)),
      in_place_(shown_ && !terminal_is_dumb()) {
  if (in_place_) draw();
}

Progress::~Progress() {
  if (!in_place_) return;
  draw();
  std::fputc('\n', stderr);
}

void Progress::advance(std::int64_t steps, std::string_view note) {
  if (!shown_) return;
  done_ = std::min(done_ + steps, total_);
  if (!note.empty()) note_ = note;
  if (in_place_) {
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
  if (in_place_) {
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
  if (in_place_) line.resize(first_columns(line, terminal_columns() - 1).size());
  std::fprintf(stderr, in_place_ ? "\r\033[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
}

void silence_progress() { progress_is_silenced = true; }

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

std::string read_file(const std::filesystem::path& path) {
  const base::Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.number() < 0) base::fail_on("read", path, errno);
  std::string contents;
  const auto take = [&](std::string_view block) {
    contents += block;
    if (contents.size() <= kMaxFileBytes) return true;
    throw std::runtime_error("cannot read " + path.string() + ": more than " + std::to_string(kMaxFileBytes) +
                             " bytes");
  };
  if (!base::read_blocks(file, take)) base::fail_on("read", path, errno);
  return contents;
}

}  // namespace octile::cli
