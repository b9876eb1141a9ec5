// Runs every row of the kernel table with every case that exercises it, and compares the results with the oracle's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases.h"
#include "check/trial.h"

namespace octile::check {

inline constexpr int kQuick = 11;

struct SweepOptions {
  DeviceType device = DeviceType::cpu;
  std::vector<std::string> kernels;  // rows, or archs: their rows. Empty: all
  std::uint64_t seed = 1;
  int threads = 0;     // 0: 1, 2 and 7 in turn
  int every = 1;       // run one case in `every` (check/cases.h); a quick run has kQuick
  bool graphs = true;  // on a GPU: once more as a CUDA graph
  bool own_allocations = false;
  int form = -1;        // on a GPU: of each row, the form with this number (cuda/forms.h), if it has one
  bool digest = false;  // of each row's outputs
  // Each case at every instruction set of this machine, with 1, 2 and 7 threads or `threads`, with outputs written
  // through the caches and around them, and float products once more a row at a time. For rows that run at every
  // instruction set.
  bool thorough = false;
};

struct RowResult {
  KernelInfo info;
  std::int64_t passed = 0;
  std::int64_t failed = 0;
  std::map<std::string, std::int64_t> skipped = {};  // by reason
  double worst = 0;                                  // largest error as a share of its bound
  bool sums_in_float = false;                        // otherwise its own outputs are compared bit for bit
  double seconds = 0;
  std::uint64_t digest = kEmptyDigest;  // of its outputs, case after case

  std::int64_t skipped_cases() const;
};

struct Failure {
  std::string row;
  std::string parameters;
  std::string what;
};

class Sweep {
 public:
  // Throws std::runtime_error where the device is missing.
  explicit Sweep(const SweepOptions& options);

  std::int64_t steps();  // calls of on_step that run() makes
  struct Observer {
    std::function<void(const std::string& row, const std::string& parameters)> on_case = {};
    std::function<void(const std::string& row)> on_step = {};
  };
  void run(const Observer& observer);

  const std::vector<RowResult>& rows() const { return rows_; }
  const std::vector<Failure>& failures() const { return failures_; }
  std::int64_t passed() const;
  std::int64_t failed() const;
  std::int64_t skipped() const;
  // A kernel has failed in a way that ends all work of this process on the GPU: what would have followed was not run.
  bool gpu_lost() const { return gpu_lost_; }

 private:
  const std::vector<Case>& cases_of(Task task);
  void run_case(const std::vector<RowResult*>& rows, const Case& c, std::size_t index, const Observer& observer);
  void run_trial(RowResult& row, const Trial& trial, int threads, const std::string& parameters);
  std::string try_row(RowResult& row, const Trial& trial, int threads);
  std::string try_everywhere(RowResult& row, const Trial& trial);
  std::string run_and_compare(RowResult& row, const Trial& trial, const Attempt& attempt);
  Choice run_or_refuse(const RowResult& row, const Trial& trial, const Attempt& attempt);
  void fail(RowResult& row, const std::string& parameters, const std::string& what);

  SweepOptions options_;
  std::optional<DeviceTensors> gpu_;
  bool gpu_lost_ = false;
  std::vector<RowResult> rows_;
  std::map<Task, std::vector<RowResult*>> tasks_;
  std::map<Task, std::vector<Case>> cases_;
  std::vector<Failure> failures_;
};

}  // namespace octile::check
