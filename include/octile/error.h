// Octile: errors, and how they are reported.
#pragma once

#include <stdexcept>
#include <string>

#include "octile/export.h"

namespace octile {

// The numbers are part of the C ABI.
enum class Status : int {
  ok = 0,
  invalid_argument = 1,     // a value that no plan accepts: a negative size, q_max < q_min, a scale of zero
  shape_mismatch = 2,       // rank, shape, stride, dtype or device of a tensor differ from the description's
  unsupported = 3,          // a valid request that no kernel on this machine supports
  misaligned = 4,           // a pointer that is not a multiple of its element's size
  workspace_too_small = 5,  // fewer bytes than workspace_size()
  cuda_error = 6,           // a CUDA call failed; the text names the kernel
  internal = 7,             // a bug in Octile
};

// The one exception that `select` and `run` throw for the caller's errors. what() names the function and every value
// that was wrong. Nothing has been written when it is thrown.
class OCTILE_API Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& what) : std::runtime_error(what), status_(status) {}
  ~Error() override;
  Status status() const { return status_; }

 private:
  Status status_;
};

// The answer of `can_implement`: true, or the error that `run` would throw.
struct Verdict {
  Status status = Status::ok;
  std::string reason;

  explicit operator bool() const { return status == Status::ok; }
};

}  // namespace octile
