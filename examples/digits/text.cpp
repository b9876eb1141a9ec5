#include "text.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>

namespace octile::digits {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what, const std::string& path, const std::string& reason) {
  throw std::runtime_error("cannot " + what + " " + path + ": " + reason);
}

std::string folder_of(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

// Whether it is a page of HTML, or empty.
bool is_page(const std::string& contents) {
  constexpr std::string_view kBegin = "<!DOCTYPE html";
  return contents.empty() || contents.starts_with(kBegin);
}

}  // namespace

std::string fixed(double value, int decimals) {
  const int size = std::snprintf(nullptr, 0, "%.*f", decimals, value);
  std::string text(static_cast<std::size_t>(size), '\0');
  std::snprintf(text.data(), text.size() + 1, "%.*f", decimals, value);
  return text;
}

std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::int64_t at = std::ssize(text) - 3; at > 0; at -= 3) text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string format_table(const std::vector<std::string>& heading, const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::vector<std::string>> lines = {heading, {}};
  lines.insert(lines.end(), rows.begin(), rows.end());
  for (std::size_t column = 0; column < heading.size(); ++column) {
    std::size_t width = heading[column].size();
    for (const auto& row : rows) width = std::max(width, row[column].size());
    lines[1].emplace_back(width, '-');
  }
  std::string text;
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      const std::string padding(lines[1][i].size() - line[i].size(), ' ');
      text += (i > 0 ? "  " : "") + (i == 0 ? line[i] + padding : padding + line[i]);
    }
    text += '\n';
  }
  return text;
}

std::string read_file(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string contents{std::istreambuf_iterator<char>(file), {}};
  if (!file || errno != 0) fail("read", path, std::strerror(errno));
  return contents;
}

void require_writable(const std::string& path) {
  if (fs::is_other(path)) return;  // is written into
  const std::string folder = folder_of(path);
  if (fs::is_directory(path)) fail("write", path, "it is a directory");
  if (fs::is_regular_file(path) && !is_page(read_file(path))) {
    fail("write", path, "it already exists, and is not a page of HTML");
  }
  if (!fs::is_directory(folder)) fail("write", path, "there is no directory " + folder);
  if (access(folder.c_str(), W_OK) != 0) fail("write", path, folder + ": " + std::strerror(errno));
}

void write_file(const std::string& path, const std::string& contents) {
  if (fs::is_other(path)) {  // a pipe or a device
    if (!(std::ofstream(path, std::ios::binary) << contents << std::flush)) fail("write", path, std::strerror(errno));
    return;
  }
  const std::string target = fs::is_symlink(path) ? fs::canonical(path).string() : path;
  std::string temporary = target + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) fail("write", path, std::strerror(errno));
  const mode_t mask = umask(0);
  umask(mask);
  fchmod(file, 0666 & ~mask);
  close(file);
  if (!(std::ofstream(temporary, std::ios::binary) << contents << std::flush) ||
      std::rename(temporary.c_str(), target.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    unlink(temporary.c_str());
    fail("write", path, reason);
  }
}

Progress::Progress(std::int64_t total, bool quiet) : total_(total), shown_(!quiet && isatty(STDERR_FILENO)) {}

Progress::~Progress() {
  if (shown_) std::cerr << "\r\033[K" << std::flush;
}

void Progress::advance(const std::string& note) {
  ++done_;
  if (shown_) std::cerr << "\r\033[K" << 100 * done_ / total_ << "%  " << note << std::flush;
}

}  // namespace octile::digits
