// What a solution that is checked tells the command that runs it. A solution is somebody's program: it may crash, or
// leave, and then only what it has told so far is known.
#pragma once

#include <cstdint>
#include <string>

#include "octile/tile/progress.h"

namespace octile::tile::puzzles {

// The content of a file that both map.
struct Told {
  std::uint64_t key = 0;              // that of the command, once there is a verdict: nothing else in the file says it
  std::int32_t right = 0, wrong = 0;  // kernels
  Progress progress;
};

// The side of the command.
class Watch {
 public:
  explicit Watch(const std::string& path);  // makes the file; throws std::system_error
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  std::string word() const;  // for the solution's command line, after --told-to
  bool any_verdict() const { return told_->key == key_ && told_->right + told_->wrong > 0; }
  bool right() const { return any_verdict() && told_->wrong == 0; }
  const Progress& progress() const { return told_->progress; }

 private:
  std::string path_;
  std::uint64_t key_;
  Told* told_;
};

// The side of the solution.
void tell_to(const std::string& word);  // throws std::system_error
void tell_verdict(bool right);

}  // namespace octile::tile::puzzles
