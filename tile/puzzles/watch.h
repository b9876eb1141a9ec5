// How a solution reports its progress to the command that checks it. A solution is a learner's program: it may crash or
// exit early, and its last report then says how far it got.
#pragma once

#include <cstdint>
#include <string>

#include "octile/tile/progress.h"

namespace octile::tile::puzzles {

// The content of a file that both map.
struct Status {
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

  std::string token() const;  // for the solution's command line, after --watched-by
  bool any_verdict() const { return status_->key == key_ && status_->right + status_->wrong > 0; }
  bool right() const { return any_verdict() && status_->wrong == 0; }
  const Progress& progress() const { return status_->progress; }

 private:
  std::string path_;
  std::uint64_t key_;
  Status* status_;
};

// The side of the solution.
void watched_by(const std::string& token);  // throws std::system_error
void report_verdict(bool right);

}  // namespace octile::tile::puzzles
