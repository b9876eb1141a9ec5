#include "check/refusal.h"

#include <sstream>

namespace octile::check {

std::string refusal_of(const std::string& row, const std::string& text) {
  const std::string mark = "not " + row + ": ";
  const std::size_t at = text.find(mark);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + mark.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

std::string one_line(const std::string& error, const std::string& device) {
  std::istringstream lines(error);
  std::string line, all;
  while (std::getline(lines, line)) {
    const bool runs_on_another =
        line.find(": runs on ") != std::string::npos && line.find(": runs on " + device) == std::string::npos;
    if (!runs_on_another) all += (all.empty() ? "" : ";") + line;
  }
  return all;
}

}  // namespace octile::check
