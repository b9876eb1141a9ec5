// What `octile check --threads 7 --quick` does, without the command: for builds under sanitizers.
#include <cstdio>

#include "check/sweep.h"

int main() {
  octile::check::Sweep sweep({.threads = 7, .quick = true});
  sweep.run({});
  for (const octile::check::Failure& f : sweep.failures()) {
    std::printf("FAILED %s: %s\n  %s\n", f.row.c_str(), f.parameters.c_str(), f.what.c_str());
  }
  std::printf("%lld passed, %lld failed, %lld skipped\n", static_cast<long long>(sweep.passed()),
              static_cast<long long>(sweep.failed()), static_cast<long long>(sweep.skipped()));
  return sweep.failed() == 0 && sweep.passed() > 0 ? 0 : 1;
}
