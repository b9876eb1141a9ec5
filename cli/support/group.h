// Runs a command in a process group of its own, which ends at the latest when this program does.
#pragma once

#include <string>
#include <vector>

namespace octile::cli {

// While one lives, signals that would end this program (SIGINT, SIGTERM, ...; not those that it was started to ignore)
// end the group that runs instead. The destructor raises what came, so that what is declared after it is gone by then.
class GroupSignals {
 public:
  GroupSignals();
  ~GroupSignals();
  GroupSignals(const GroupSignals&) = delete;
  GroupSignals& operator=(const GroupSignals&) = delete;
  bool came() const;
};

struct GroupEnd {
  int wait_status = 0;  // of the command itself, as of waitpid()
  bool timed_out = false;
};

// Needs a GroupSignals. Standard input is empty; both outputs go to the file `output`, or to ours where it is empty.
// What the command has left running in its group is ended with it. Throws std::runtime_error if it cannot be started.
GroupEnd run_group(const std::vector<std::string>& command, double seconds, const std::string& output = {});

}  // namespace octile::cli
