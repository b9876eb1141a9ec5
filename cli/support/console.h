// What the octile command shows a person: a progress bar and tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace octile::cli {

// A progress bar with an estimate of the time left, on stderr where that is a terminal: redrawn in place at most ten
// times a second, or, on a terminal that is dumb, a plain line each time another tenth is done.
class Progress {
 public:
  Progress(std::string label, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void advance(std::int64_t steps = 1, std::string_view note = {});  // note: shown at the end of the line

 private:
  void draw();
  std::string label_;
  std::string note_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  std::int64_t tenth_ = 0;
  double started_ = 0;
  double drawn_ = 0;
  bool shown_;
  bool in_place_;
};

// From here on no progress is shown.
void silence_progress();

// Columns padded to their widest cell, the first `left` of them left-aligned, the others right-aligned, a rule under
// the heading.
std::string format_table(const std::vector<std::string>& heading, const std::vector<std::vector<std::string>>& rows,
                         std::size_t left = 1);

// The value with `digits` after the point.
std::string fixed(double value, int digits);

// The whole file, of at most 16 MB. Throws std::runtime_error that names the path and the reason.
std::string read_file(const std::filesystem::path& path);

}  // namespace octile::cli
