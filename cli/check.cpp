// octile check: every row of the kernel table that can run here, with every case that exercises it, against the oracle.
#include <chrono>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/message.h"
#include "cases.h"
#include "check_device.h"
#include "check_trial.h"
#include "cli.h"
#include "console.h"
#include "cuda/devices.h"
#include "plan/choose.h"
#include "refusal.h"

namespace octile::cli {

namespace {

constexpr const char* kFooter =
    R"(Each row of the kernel table is run through the plans with fresh random inputs: ragged and
empty shapes, padded and repeated rows, every type and option, ties, subnormal, huge and
infinite values and NaN. Integers, and floats that follow from exact sums, must have the
oracle's bits; sums in float must keep a bound derived from their length and magnitudes.
What lies around the outputs must stay as it was.

A case that runs a sum in float is run a second time with another number of threads, and
must give the same bits.

With --device cuda the tensors lie in the memory of the first GPU, each case runs on a stream
of its own and then once more as a CUDA graph, which must give the same bits, and there are
larger cases too, whose results are compared with the CPU's. Under compute-sanitizer use
--no-graph --own-allocations --quick.

The last line is "N passed, N failed, N skipped", counting a row with a case as one. The
exit status is 1 if any failed.

Examples:
  octile check
  octile check --quick --kernel portable
  octile check --kernel w8a8_gemm_portable --threads 7 --seed 12345
  octile check --device cuda --kernel sm90)";

constexpr std::size_t kFailuresShown = 20;

struct Options {
  std::string device = "cpu";
  std::string kernel;
  std::uint64_t seed = 1;
  int threads = 0;  // 0: in turn 1, 2 and 7
  bool quick = false;
  bool json = false;
  bool verbose = false;
  bool no_graph = false;
  bool own_allocations = false;
};

struct Row {
  KernelInfo info;
  std::int64_t passed = 0;
  std::int64_t failed = 0;
  std::map<std::string, std::int64_t> skipped = {};  // by reason
  double worst = 0;                                  // largest error as a share of its bound
  bool sums_in_float = false;                        // otherwise its own outputs are compared bit for bit
  double seconds = 0;
};

struct Failure {
  std::string row;
  std::string parameters;
  std::string what;
};

// A row cannot do this case; not a failure.
struct Refused {
  std::string reason;
};

// What a row of the table computes, and whether it sums floats.
struct Work {
  Task task;
  bool sums_in_float;
};

Work work_of(std::string_view row) {
  for (const QuantizeKernel* kernel : quantize_kernels()) {
    if (kernel->name == row) return {kernel->task, kernel->task.operation == Operation::gradient_quantize};
  }
  for (const GemmKernel* kernel : gemm_kernels()) {
    if (kernel->name == row) return {kernel->task, kernel->bound != Bound::exact};
  }
  throw std::logic_error(message("no row is named ", row));
}

bool lists(std::string_view sku, std::string_view row) {
  for (std::size_t begin = 0; begin <= sku.size();) {
    const std::size_t end = std::min(sku.find(" + ", begin), sku.size());
    const std::string_view step = sku.substr(begin, end - begin);
    if (step.substr(0, step.find(" (")) == row) return true;
    begin = end + 3;
  }
  return false;
}

bool of_device(const KernelInfo& info, const Options& options) { return name(info.device) == options.device; }

class Check {
 public:
  explicit Check(const Options& options) : options_(options) {
    if (options.device == "cuda") gpu_.emplace(0, options.own_allocations);
    const std::vector<KernelInfo> all = kernels();
    rows_.reserve(all.size());  // tasks_ points into it
    for (const KernelInfo& info : all) {
      if (!of_device(info, options) || (!options.kernel.empty() && !matches(info.name, options.kernel))) continue;
      Row& row = rows_.emplace_back(Row{info});
      const Work work = work_of(info.name);
      tasks_[work.task].push_back(&row);
      row.sums_in_float = work.sums_in_float;
    }
  }

  void run() {
    std::int64_t steps = 0;
    for (const auto& [task, rows] : tasks_) {
      steps += static_cast<std::int64_t>(cases_of(task).size() * rows.size());
    }
    Progress progress("check", steps);
    for (const auto& [task, rows] : tasks_) {
      const std::vector<Case>& list = cases_of(task);
      for (std::size_t i = 0; i < list.size() && !gpu_lost_; ++i) run_case(rows, list[i], i, progress);
    }
  }

  bool good() const { return failed() == 0; }

  void print() const {
    std::vector<std::vector<std::string>> table;
    for (const Row& row : rows_) {
      table.push_back({row.info.name, std::to_string(row.passed), std::to_string(row.failed),
                       std::to_string(skipped(row)), row.sums_in_float ? fixed(row.worst, 3) : "exact",
                       fixed(row.seconds, 2)});
    }
    std::cout << format_table({"kernel", "passed", "failed", "skipped", "worst error / bound", "seconds"}, table);
    for (const Row& row : rows_) {
      for (const auto& [reason, count] : row.skipped) {
        std::cout << "skipped " << row.info.name << ", " << count << " cases: " << reason << '\n';
      }
    }
    for (std::size_t i = 0; i < failures_.size(); ++i) {
      if (i == kFailuresShown && !options_.verbose) {
        std::cout << "... and " << failures_.size() - i << " more (--verbose shows all)\n";
        break;
      }
      const Failure& f = failures_[i];
      std::cout << "FAILED " << f.row << ": " << f.parameters << "\n  " << f.what << '\n';
    }
    if (gpu_lost_)
      std::cout << "the GPU takes no more work after the last failure: what would have followed was not run\n";
    std::cout << passed() << " passed, " << failed() << " failed, " << skipped() << " skipped\n";
  }

  void print_json() const {
    using nlohmann::json;
    json rows = json::array();
    for (const Row& row : rows_) {
      rows.push_back({{"name", row.info.name},
                      {"operation", row.info.operation},
                      {"device", name(row.info.device)},
                      {"passed", row.passed},
                      {"failed", row.failed},
                      {"skipped", skipped(row)},
                      {"skip_reasons", row.skipped},
                      {"worst_error_share", row.sums_in_float ? json(row.worst) : json(nullptr)},
                      {"seconds", row.seconds}});
    }
    json failures = json::array();
    for (const Failure& f : failures_)
      failures.push_back({{"kernel", f.row}, {"case", f.parameters}, {"what", f.what}});
    json document = {{"device", options_.device}, {"seed", options_.seed}, {"threads", options_.threads},
                     {"quick", options_.quick},   {"passed", passed()},    {"failed", failed()},
                     {"skipped", skipped()},      {"kernels", rows},       {"failures", failures}};
    if (gpu_) document["gpu_lost"] = gpu_lost_;
    std::cout << document.dump(2, ' ', false, json::error_handler_t::replace) << '\n';
  }

 private:
  const std::vector<Case>& cases_of(Task task) {
    auto [entry, added] = cases_.try_emplace(task);
    if (added) entry->second = cases(task, gpu_ ? DeviceType::cuda : DeviceType::cpu, options_.quick);
    return entry->second;
  }

  // One case with all rows of its task.
  void run_case(const std::vector<Row*>& rows, const Case& c, std::size_t index, Progress& progress) {
    constexpr int kThreads[] = {1, 2, 7};
    const int threads = options_.threads > 0 ? options_.threads : kThreads[index % 3];
    const std::string parameters = message(describe(c), " threads=", threads, " seed=", options_.seed, " case=", index);
    std::optional<Trial> trial;
    for (Row* const row : rows) {
      if (gpu_lost_) return;
      if (!row->info.reason.empty()) {
        ++row->skipped[row->info.reason];
      } else {
        if (options_.verbose) std::cout << row->info.name << ": " << parameters << std::endl;
        // The case's number in the seed gives each one inputs of its own.
        if (!trial) trial = make_trial(c, options_.seed * 0x9e3779b97f4a7c15u + index);
        run_trial(*row, *trial, threads, parameters);
      }
      progress.advance(1, row->info.name);
    }
  }

  void run_trial(Row& row, const Trial& trial, int threads, const std::string& parameters) {
    const auto began = std::chrono::steady_clock::now();
    try {
      const std::string what = try_row(row, trial, threads);
      what.empty() ? static_cast<void>(++row.passed) : fail_row(row, parameters, what);
    } catch (const Refused& refused) {
      ++row.skipped[refused.reason];
    } catch (const std::exception& error) {
      fail_row(row, parameters, error.what());
      gpu_lost_ = gpu_ && !gpu_->usable();
    }
    row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

  // What is wrong; empty: nothing.
  std::string try_row(Row& row, const Trial& trial, int threads) {
    Tensors& tensors = *trial.tensors;
    tensors.spoil();
    Attempt attempt{row.info.name, threads, gpu_ ? &*gpu_ : nullptr};
    const Choice choice = run_or_refuse(row, trial, attempt);
    if (!lists(choice.sku, row.info.name)) {
      const std::string refusal = refusal_of(row.info.name, choice.explanation);
      if (gpu_ && !refusal.empty()) throw Refused{refusal};
      return message("the plan chose ", choice.sku);
    }
    const Tensors::Comparison comparison = tensors.compare();
    row.worst = std::max(row.worst, comparison.worst);
    if (!comparison.difference.empty()) return comparison.difference;
    if (tensors.inputs_changed()) return "an input was written to";

    attempt.threads = threads == 1 ? 3 : 1;
    attempt.as_graph = gpu_ && !options_.no_graph;
    if (!attempt.as_graph && !tensors.has_bounds()) return {};
    const auto first = tensors.snapshot();
    tensors.spoil();
    trial.run(attempt);
    if (tensors.snapshot() == first) return {};
    if (attempt.as_graph) return "other bits as a graph than without";
    return message("other bits with ", attempt.threads, " threads than with ", threads);
  }

  // The row's own "no" is a skip; a case that no row at all can do is a mistake of the case, unless rows are missing:
  // on a GPU there is no reference.
  Choice run_or_refuse(const Row& row, const Trial& trial, const Attempt& attempt) {
    try {
      return trial.run(attempt);
    } catch (const Error& error) {
      if (error.status() != Status::unsupported) throw;
      const std::string refusal = refusal_of(row.info.name, error.what());
      if (gpu_) throw Refused{refusal.empty() ? one_line(error.what(), options_.device) : refusal};
      trial.run({"", attempt.threads});
      if (refusal.empty()) throw;
      throw Refused{refusal};
    }
  }

  void fail_row(Row& row, const std::string& parameters, const std::string& what) {
    ++row.failed;
    failures_.push_back({row.info.name, parameters, what});
  }

  static std::int64_t skipped(const Row& row) {
    std::int64_t count = 0;
    for (const auto& [reason, cases] : row.skipped) count += cases;
    return count;
  }
  template <class Count>
  std::int64_t total(const Count& count) const {
    std::int64_t sum = 0;
    for (const Row& row : rows_) sum += count(row);
    return sum;
  }
  std::int64_t passed() const {
    return total([](const Row& row) { return row.passed; });
  }
  std::int64_t failed() const {
    return total([](const Row& row) { return row.failed; });
  }
  std::int64_t skipped() const {
    return total([](const Row& row) { return skipped(row); });
  }

  Options options_;
  std::optional<DeviceTensors> gpu_;
  bool gpu_lost_ = false;  // a kernel has failed in a way that ends all work of this process
  std::vector<Row> rows_;
  std::map<Task, std::vector<Row*>> tasks_;
  std::map<Task, std::vector<Case>> cases_;
  std::vector<Failure> failures_;
};

void require_device(const std::string& device) {
  if (device == "cpu") return;
  const CudaDevices cuda = cuda_devices();
  if (cuda.devices.empty()) throw std::runtime_error("check --device cuda: " + cuda.reason);
}

void require_row(const Options& options) {
  bool known = options.kernel.empty();
  for (const KernelInfo& info : kernels()) {
    if (!options.kernel.empty() && !matches(info.name, options.kernel)) continue;
    known = true;
    if (of_device(info, options)) return;
  }
  if (!known) {
    throw CLI::ValidationError("--kernel",
                               options.kernel + " is no row of the kernel table, and no arch (see octile info)");
  }
  throw CLI::ValidationError("--device", message("no row", options.kernel.empty() ? "" : " " + options.kernel,
                                                 " runs on ", options.device, " (see octile info)"));
}

}  // namespace

void add_check(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* const check = app.add_subcommand("check", "Compare every kernel with the oracle");
  check->footer(kFooter);
  check->add_option("--device", options->device, "Rows of this device: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  check->add_option("--kernel", options->kernel, "Only this row, or the rows of this arch (portable, reference)")
      ->type_name("NAME");
  check->add_option("--seed", options->seed, "Of the random inputs")->capture_default_str();
  check->add_option("--threads", options->threads, "CPU threads of each plan; without it 1, 2 and 7 in turn")
      ->check(CLI::Range(1, 1024));
  check->add_flag("--quick", options->quick, "About an eleventh of the cases");
  check->add_flag("--no-graph", options->no_graph, "cuda: do not run the cases as graphs too");
  check->add_flag("--own-allocations", options->own_allocations, "cuda: an allocation for each tensor, of its size");
  check->add_flag("--json", options->json, "One JSON document instead of the table and the lines");
  check->add_flag("--verbose", options->verbose, "A line before each case, and all failures")->excludes("--json");
  add_quiet(*check);
  check->callback([options] {
    require_row(*options);
    require_device(options->device);
    Check check(*options);
    check.run();
    options->json ? check.print_json() : check.print();
    if (!check.good()) throw CLI::RuntimeError(1);
  });
}

}  // namespace octile::cli
