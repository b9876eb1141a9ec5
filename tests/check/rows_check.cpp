// `octile check` for sanitizers and emulators, without the command, whose libraries take long to compile.
// octile_rows_check [--quick] [--threads N] [ROW]...: a row that is named must pass at least one case.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>

#include "check/sweep.h"

namespace {

int run(const octile::check::SweepOptions& options) {
  octile::check::Sweep sweep(options);
  sweep.run({});
  for (const octile::check::Failure& f : sweep.failures()) {
    std::printf("FAILED %s: %s\n  %s\n", f.row.c_str(), f.parameters.c_str(), f.what.c_str());
  }
  bool good = sweep.failed() == 0 && sweep.passed() > 0;
  for (const octile::check::RowResult& row : sweep.rows()) {
    std::printf("%s: %lld passed\n", std::string(row.info.name).c_str(), static_cast<long long>(row.passed));
    for (const auto& [reason, cases] : row.skipped) {
      std::printf("  %lld skipped: %s\n", static_cast<long long>(cases), reason.c_str());
    }
    good = good && (row.passed > 0 || options.kernels.empty());
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  octile::check::SweepOptions options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      options.quick = true;
    } else if (std::strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
      ++i;
      std::from_chars(argv[i], argv[i] + std::strlen(argv[i]), options.threads);
    } else {
      options.kernels.emplace_back(argv[i]);
    }
  }
  return run(options);
}
