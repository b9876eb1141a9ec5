// `octile check` for sanitizers and emulators, without the command, whose libraries take long to compile.
// octile_rows_check [--every N] [--threads N] [--no-reference] [ROW]...: each ROW that is named must pass at least one
// case.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>

#include "check/sweep.h"

namespace {

int run(const octile::check::SweepOptions& options, bool named) {
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
    good = good && (row.passed > 0 || !named);
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  octile::check::SweepOptions options;
  bool reference = true;
  for (int i = 1; i < argc; ++i) {
    int* const number = std::strcmp(argv[i], "--every") == 0     ? &options.every
                        : std::strcmp(argv[i], "--threads") == 0 ? &options.threads
                                                                 : nullptr;
    if (number && i + 1 < argc) {
      ++i;
      std::from_chars(argv[i], argv[i] + std::strlen(argv[i]), *number);
    } else if (std::strcmp(argv[i], "--no-reference") == 0) {
      reference = false;
    } else {
      options.kernels.emplace_back(argv[i]);
    }
  }
  const bool named = !options.kernels.empty();
  if (!named && !reference) {
    for (const octile::KernelInfo& row : octile::kernels()) {
      if (!row.name.ends_with("_reference")) options.kernels.emplace_back(row.name);
    }
  }
  return run(options, named);
}
