// octile check: every row of the kernel table that can run here, with every case that exercises it, against the oracle.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/message.h"
#include "check/sweep.h"
#include "cli/cli.h"
#include "cli/support/console.h"
#include "cli/support/machine.h"
#include "plan/choose.h"

namespace octile::cli {

namespace {

constexpr const char* kFooter =
    R"(Each row of the kernel table is run through the plans with random inputs: ragged and
empty shapes, padded and repeated rows, every type and option, ties, subnormal, huge and
infinite values and NaN. Integers, and floats computed from exact sums, must have the
oracle's bits; sums of floats must stay within a bound derived from their length and
magnitudes. Memory around the outputs must not change.

A case that sums floats is run a second time with another number of threads, and must give
the same bits.

With --device cuda the tensors are in the memory of the first GPU. Each case runs on a stream
of its own and then again as a CUDA graph, which must give the same bits. There are larger
cases too, whose results are compared with the CPU's. Under compute-sanitizer use
--no-graph --own-allocations --quick.

With --digest each row has a line "digest NAME HEX": 64 bits over all of its outputs, by which
two builds or two machines can be compared bit for bit. The same options give the same cases.

The last line is "N passed, N failed, N skipped"; each case counts once per row. The exit
status is 1 if any failed.

Examples:
  octile check
  octile check --quick --kernel portable
  octile check --kernel w8a8_gemm_portable --threads 7 --seed 12345
  octile check --device cuda --kernel sm90)";

constexpr std::size_t kFailuresShown = 20;

struct Options {
  std::string device = "cpu";
  check::SweepOptions sweep;
  bool json = false;
  bool verbose = false;
};

void require_row(const std::string& kernel, const Options& options) {
  bool known = false;
  for (const KernelInfo& info : kernels()) {
    if (!matches(info.name, kernel)) continue;
    known = true;
    if (name(info.device) == options.device) return;
  }
  if (!known) {
    throw CLI::ValidationError("--kernel",
                               kernel + " is neither a row of the kernel table nor an arch (see octile info)");
  }
  throw CLI::ValidationError("--device", message("no row ", kernel, " runs on ", options.device, " (see octile info)"));
}

std::string hexadecimal(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

void print(const check::Sweep& sweep, const Options& options) {
  std::vector<std::vector<std::string>> table;
  for (const check::RowResult& row : sweep.rows()) {
    table.push_back({row.info.name, std::to_string(row.passed), std::to_string(row.failed),
                     std::to_string(row.skipped_cases()), row.sums_in_float ? fixed(row.worst, 3) : "exact",
                     fixed(row.seconds, 2)});
  }
  std::cout << format_table({"kernel", "passed", "failed", "skipped", "worst error / bound", "seconds"}, table);
  for (const check::RowResult& row : sweep.rows()) {
    for (const auto& [reason, count] : row.skipped) {
      std::cout << "skipped " << row.info.name << ", " << count << " cases: " << reason << '\n';
    }
  }
  if (options.sweep.digest) {
    for (const check::RowResult& row : sweep.rows()) {
      std::cout << "digest " << row.info.name << ' ' << hexadecimal(row.digest) << '\n';
    }
  }
  for (std::size_t i = 0; i < sweep.failures().size(); ++i) {
    if (i == kFailuresShown && !options.verbose) {
      std::cout << "... and " << sweep.failures().size() - i << " more (--verbose shows all)\n";
      break;
    }
    const check::Failure& f = sweep.failures()[i];
    std::cout << "FAILED " << f.row << ": " << f.parameters << "\n  " << f.what << '\n';
  }
  if (sweep.gpu_lost())
    std::cout << "the GPU takes no more work after the last failure: what would have followed was not run\n";
  std::cout << sweep.passed() << " passed, " << sweep.failed() << " failed, " << sweep.skipped() << " skipped\n";
}

void print_json(const check::Sweep& sweep, const Options& options) {
  using nlohmann::json;
  json rows = json::array();
  for (const check::RowResult& row : sweep.rows()) {
    rows.push_back({{"name", row.info.name},
                    {"operation", row.info.operation},
                    {"device", name(row.info.device)},
                    {"passed", row.passed},
                    {"failed", row.failed},
                    {"skipped", row.skipped_cases()},
                    {"skip_reasons", row.skipped},
                    {"worst_error_share", row.sums_in_float ? json(row.worst) : json(nullptr)},
                    {"seconds", row.seconds}});
    if (options.sweep.digest) rows.back()["digest"] = hexadecimal(row.digest);
  }
  json failures = json::array();
  for (const check::Failure& f : sweep.failures())
    failures.push_back({{"kernel", f.row}, {"case", f.parameters}, {"what", f.what}});
  json document = {{"device", options.device},
                   {"seed", options.sweep.seed},
                   {"threads", options.sweep.threads},
                   {"quick", options.sweep.every > 1},
                   {"passed", sweep.passed()},
                   {"failed", sweep.failed()},
                   {"skipped", sweep.skipped()},
                   {"kernels", rows},
                   {"failures", failures}};
  if (options.sweep.device == DeviceType::cuda) document["gpu_lost"] = sweep.gpu_lost();
  std::cout << document.dump(2, ' ', false, json::error_handler_t::replace) << '\n';
}

void run(Options& options) {
  options.sweep.device = options.device == "cuda" ? DeviceType::cuda : DeviceType::cpu;
  for (const std::string& kernel : options.sweep.kernels) require_row(kernel, options);
  if (options.device == "cuda") require_gpu("check");
  check::Sweep sweep(options.sweep);
  Progress progress("check", sweep.steps());
  check::Sweep::Observer observer;
  observer.on_step = [&](const std::string& row) { progress.advance(1, row); };
  if (options.verbose) {
    observer.on_case = [](const std::string& row, const std::string& parameters) {
      std::cout << row << ": " << parameters << std::endl;
    };
  }
  sweep.run(observer);
  options.json ? print_json(sweep, options) : print(sweep, options);
  if (sweep.failed() > 0) throw CLI::RuntimeError(1);
}

}  // namespace

void add_check(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* const check = app.add_subcommand("check", "Compare every kernel with the oracle");
  check->footer(kFooter);
  check->add_option("--device", options->device, "Rows of this device: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  check
      ->add_option("--kernel", options->sweep.kernels,
                   "Only this row, or those of an arch such as portable; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  check->add_option("--seed", options->sweep.seed, "Seed of the random inputs")
      ->check(CLI::Validator(
          [](const std::string& text) {
            const char* const end = text.data() + text.size();
            std::uint64_t seed = 0;
            const bool decimal = text.find_first_not_of("0123456789") == text.npos;
            const bool fits = !decimal || std::from_chars(text.data(), end, seed).ec == std::errc();
            return fits && text.front() != '-' ? "" : text + " is not a whole number below 2^64";
          },
          ""))
      ->capture_default_str();
  check->add_option("--threads", options->sweep.threads, "CPU threads of each plan; without it 1, 2 and 7 in turn")
      ->check(CLI::Range(1, 1024));
  check->add_flag_callback(
      "--quick", [options] { options->sweep.every = check::kQuick; }, "About an eleventh of the cases");
  check->add_flag_callback(
      "--no-graph", [options] { options->sweep.graphs = false; }, "cuda: do not repeat the cases as graphs");
  check->add_flag("--own-allocations", options->sweep.own_allocations,
                  "cuda: allocate each tensor separately, at its exact size");
  check->add_option("--form", options->sweep.form, "cuda: use this variant of each kernel that has variants")
      ->check(CLI::Range(0, 99));
  check->add_flag("--digest", options->sweep.digest,
                  "Print a digest of each row's outputs, to compare builds and machines");
  check->add_flag("--json", options->json, "Write one JSON document instead of text");
  check->add_flag("--verbose", options->verbose, "Print a line before each case, and all failures")->excludes("--json");
  add_quiet(*check);
  check->callback([options] { run(*options); });
}

}  // namespace octile::cli
