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

#include "cases.h"
#include "check_trial.h"
#include "choose.h"
#include "cli.h"
#include "console.h"
#include "cuda_devices.h"
#include "message.h"

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

The last line is "N passed, N failed, N skipped", counting a row with a case as one. The
exit status is 1 if any failed.

Examples:
  octile check
  octile check --quick --kernel portable
  octile check --kernel w8a8_gemm_portable --threads 7 --seed 12345)";

constexpr std::size_t kFailuresShown = 20;

struct Options {
  std::string device = "cpu";
  std::string kernel;
  std::uint64_t seed = 1;
  int threads = 0;  // 0: in turn 1, 2 and 7
  bool quick = false;
  bool json = false;
  bool verbose = false;
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

std::optional<Operation> operation_named(std::string_view text) {
  for (int i = 0; i <= static_cast<int>(Operation::column_sum); ++i) {
    if (name(static_cast<Operation>(i)) == text) return static_cast<Operation>(i);
  }
  return {};
}

bool lists(std::string_view sku, std::string_view row) {
  for (std::size_t begin = 0; begin <= sku.size();) {
    const std::size_t end = std::min(sku.find(" + ", begin), sku.size());
    if (sku.substr(begin, end - begin) == row) return true;
    begin = end + 3;
  }
  return false;
}

class Check {
 public:
  explicit Check(const Options& options) : options_(options) {
    const std::vector<KernelInfo> all = kernels();
    rows_.reserve(all.size());  // operations_ points into it
    for (const KernelInfo& info : all) {
      if (!options.kernel.empty() && !matches(info.name, options.kernel)) continue;
      Row& row = rows_.emplace_back(Row{info});
      if (info.reason.empty() && name(info.device) != options.device) {
        row.info.reason = message("runs on ", name(info.device), ", this check is for ", options.device);
      }
      if (const std::optional<Operation> operation = operation_named(info.operation)) {
        operations_[*operation].push_back(&row);
        row.sums_in_float = *operation > Operation::w8a8_gemm;
      } else {
        fail_row(row, "no case", message("nothing exercises operation ", info.operation));
      }
    }
  }

  void run() {
    std::int64_t steps = 0;
    for (const auto& [operation, rows] : operations_) {
      steps += static_cast<std::int64_t>(cases_of(operation).size() * rows.size());
    }
    Progress progress("check", steps);
    for (const auto& [operation, rows] : operations_) {
      const std::vector<Case>& list = cases_of(operation);
      for (std::size_t i = 0; i < list.size(); ++i) run_case(rows, list[i], i, progress);
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
    const json document = {{"device", options_.device}, {"seed", options_.seed}, {"threads", options_.threads},
                           {"quick", options_.quick},   {"passed", passed()},    {"failed", failed()},
                           {"skipped", skipped()},      {"kernels", rows},       {"failures", failures}};
    std::cout << document.dump(2, ' ', false, json::error_handler_t::replace) << '\n';
  }

 private:
  const std::vector<Case>& cases_of(Operation operation) {
    auto [entry, added] = cases_.try_emplace(operation);
    if (added) entry->second = cases(operation, options_.quick);
    return entry->second;
  }

  // One case with all rows of its operation.
  void run_case(const std::vector<Row*>& rows, const Case& c, std::size_t index, Progress& progress) {
    constexpr int kThreads[] = {1, 2, 7};
    const int threads = options_.threads > 0 ? options_.threads : kThreads[index % 3];
    const std::string parameters = message(describe(c), " threads=", threads, " seed=", options_.seed, " case=", index);
    std::optional<Trial> trial;
    for (Row* const row : rows) {
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
    }
    row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

  // What is wrong; empty: nothing.
  std::string try_row(Row& row, const Trial& trial, int threads) {
    Tensors& tensors = *trial.tensors;
    tensors.spoil();
    const std::string sku = run_or_refuse(row, trial, threads);
    if (!lists(sku, row.info.name)) return message("the plan chose ", sku);
    const Tensors::Comparison comparison = tensors.compare();
    row.worst = std::max(row.worst, comparison.worst);
    if (!comparison.difference.empty()) return comparison.difference;
    if (tensors.inputs_changed()) return "an input was written to";
    if (!tensors.has_bounds()) return {};

    const auto first = tensors.snapshot();
    tensors.spoil();
    const int other = threads == 1 ? 3 : 1;
    trial.run(row.info.name, other);
    return tensors.snapshot() == first ? "" : message("other bits with ", other, " threads than with ", threads);
  }

  // The row's own "no" is a skip; a case that no row at all can do is a mistake of the case.
  std::string run_or_refuse(const Row& row, const Trial& trial, int threads) {
    try {
      return trial.run(row.info.name, threads);
    } catch (const Error& error) {
      if (error.status() != Status::unsupported) throw;
      trial.run("", threads);
      const std::string text = error.what();
      const std::string mark = message("not ", row.info.name, ": ");
      const std::size_t at = text.find(mark);
      if (at == std::string::npos) throw;
      const std::size_t begin = at + mark.size();
      throw Refused{text.substr(begin, text.find('\n', begin) - begin)};
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
  std::vector<Row> rows_;
  std::map<Operation, std::vector<Row*>> operations_;
  std::map<Operation, std::vector<Case>> cases_;
  std::vector<Failure> failures_;
};

// The tensors of the cases lie in host memory.
void require_device(const std::string& device) {
  if (device == "cpu") return;
  const CudaDevices cuda = cuda_devices();
  if (cuda.devices.empty()) throw std::runtime_error("check --device cuda: " + cuda.reason);
  for (const KernelInfo& info : kernels()) {
    if (info.device == DeviceType::cuda) {
      throw std::runtime_error("check --device cuda: cases with tensors in device memory are not written yet");
    }
  }
  throw std::runtime_error("check --device cuda: the kernel table has no row for cuda");
}

void require_row(const std::string& kernel) {
  if (kernel.empty()) return;
  for (const KernelInfo& info : kernels()) {
    if (matches(info.name, kernel)) return;
  }
  throw CLI::ValidationError("--kernel", kernel + " is no row of the kernel table, and no arch (see octile info)");
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
  check->add_flag("--json", options->json, "One JSON document instead of the table and the lines");
  check->add_flag("--verbose", options->verbose, "A line before each case, and all failures")->excludes("--json");
  check->callback([options] {
    require_device(options->device);
    require_row(options->kernel);
    Check check(*options);
    check.run();
    options->json ? check.print_json() : check.print();
    if (!check.good()) throw CLI::RuntimeError(1);
  });
}

}  // namespace octile::cli
