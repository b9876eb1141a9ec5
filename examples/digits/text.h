// Numbers, tables and files as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace octile::digits {

// The value with `decimals` after the point.
std::string fixed(double value, int decimals);

// "1,437".
std::string grouped(std::int64_t value);

// For HTML.
std::string escaped(std::string_view text);

// Columns padded to their widest cell, the first left-aligned, the others right-aligned, a rule under the heading.
std::string format_table(const std::vector<std::string>& heading, const std::vector<std::vector<std::string>>& rows);

// All throw std::runtime_error that names the path and the reason.
std::string read_file(const std::string& path);
void require_writable(const std::string& path);                         // found out before the training, not after it
void write_file(const std::string& path, const std::string& contents);  // whole or not at all

// One line on stderr, redrawn in place; none where stderr is no terminal.
class Progress {
 public:
  Progress(std::int64_t total, bool quiet);
  ~Progress();
  void advance(const std::string& note);

 private:
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool shown_;
};

}  // namespace octile::digits
