// Two programs timed in turns, so that both see the same machine.
#pragma once

#include <functional>
#include <vector>

namespace octile::cli {

struct Schedule {
  int threads = 1;
  int runs = 0;               // 0: twenty, or as many as the seconds allow
  double seconds = 3;         // for the measured runs of both programs, when runs is 0
  bool cold = true;           // the caches hold none of the operands when a run begins
  std::vector<char> evictor;  // what is read to that end
};

struct Timing {
  double ours = 0;  // medians, in seconds
  double baseline = 0;
  int runs = 0;  // of each
};

// Blocks of runs, ours and the baseline's in turns; each block begins with a run that is not counted.
Timing time_in_turns(const std::function<void()>& ours, const std::function<void()>& baseline,
                     const Schedule& schedule);

}  // namespace octile::cli
