// octile puzzles: puzzles in the tile language, their solutions, and the checker for a learner's own.
#include "puzzles.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/output.h"
#include "cli/cli.h"
#include "cli/support/console.h"
#include "octile/octile.h"
#include "puzzles/device.h"
#include "puzzles/page.h"
#include "puzzles/puzzle.h"

namespace octile::cli {

namespace {

using namespace tile::puzzles;
using nlohmann::json;
namespace fs = std::filesystem;

constexpr double kMaxSeconds = 86'400;

constexpr const char* kFooter =
    R"(A puzzle is a small kernel to write in the tile language (docs/reference/tile.md). Numbers 13 to 18 are
the kernels of an int8 linear layer. docs/reference/puzzles.md has the tasks and what is checked.

Begin with `new`, which writes a file, and `check`, which judges the kernel that you write in it.

Examples:
  octile puzzles list                                     the tasks
  octile puzzles new 2                                    write masked_add.cpp, to fill in
  octile puzzles check masked_add.cpp                     is it right, and what does it move
  octile puzzles check masked_add.cpp --report page.html  see each access
  octile puzzles run 2 --wrong                            typical mistakes, and their verdicts)";

constexpr const char* kListFooter = R"(Examples:
  octile puzzles list
  octile puzzles list --json  with sizes, hints and tolerances)";

constexpr const char* kRunFooter =
    R"(On the CPU every access is checked, as in `octile puzzles check`. On a GPU the values are compared with the
expected ones, and the memory around each tensor must not change.

The exit status is 1 if a kernel is wrong, or with --wrong if one is not caught.

Examples:
  octile puzzles run all                             all solutions, at every size
  octile puzzles run 8                               one of them
  octile puzzles run 8 --wrong                       the verdicts on wrong kernels
  octile puzzles run 2 --wrong --report wrong.html   a page for each of them
  octile puzzles run 8 --prove                       a proof for all sizes
  octile puzzles run all --device cuda               on the first GPU)";

constexpr const char* kNewFooter =
    R"(The file compiles as it is; the checker then reports an unwritten output. A file that exists is never
replaced.

Examples:
  octile puzzles new 2                                    write masked_add.cpp, here
  octile puzzles new masked_add    the same
  octile puzzles new 2 second.cpp  under another name)";

constexpr const char* kCheckFooter =
    R"(The kernel runs at the sizes of the task and at hidden ones: odd, prime, rectangular, 1 and 0, with
negative, large and zero inputs. Every access is checked for bounds, undefined lanes, uninitialized
memory, races between programs, and the like.

`check` compiles the file, with the compiler that CXX names, and runs it as you, with all your
permissions: read a file from somebody else before you check it.

Examples:
  octile puzzles check masked_add.cpp
  octile puzzles check masked_add.cpp --stated               only the sizes of the task
  octile puzzles check masked_add.cpp --report page.html     a page that shows each access
  octile puzzles check masked_add.cpp --prove                is it safe at all sizes
  octile puzzles check masked_add.cpp --verbose              the compiler's full output)";

// ---- Names ----

std::vector<const Puzzle*> wanted(const std::string& which) {
  std::vector<const Puzzle*> result;
  if (which == "all") {
    for (const Puzzle& puzzle : puzzles()) result.push_back(&puzzle);
  } else if (const Puzzle* const puzzle = find_puzzle(which)) {
    result.push_back(puzzle);
  } else {
    throw CLI::ValidationError("puzzle", which + " is not a puzzle: give a number or a name of octile puzzles list");
  }
  return result;
}

// "out.html" for one page; "out-masked_add.html" where there may be several.
std::string page_path(const std::string& path, const std::string& name, bool several) {
  if (!several || fs::is_other(fs::status(path))) return path;  // into a pipe or a device go all of them
  fs::path result(path);
  const std::string extension = result.extension().string();
  result.replace_extension();
  return result.string() + "-" + name + extension;
}

// ---- list ----

// "100 x 90"
std::string sizes(const Puzzle& puzzle) {
  std::string result;
  for (const int n : puzzle.facts.cases[0].sizes) result += (result.empty() ? "" : " x ") + std::to_string(n);
  return result;
}

void list(bool as_json) {
  if (!as_json) {
    std::vector<std::vector<std::string>> rows;
    for (const Puzzle& puzzle : puzzles()) {
      rows.push_back({std::to_string(puzzle.facts.number), puzzle.facts.name, sizes(puzzle), puzzle.facts.task});
    }
    std::cout << format_table({"", "puzzle", "sizes", "task"}, rows, 4)
              << "\nTo solve one, begin with: " << shell_word(this_command()) << " puzzles new 1\n";
    return;
  }
  json document = json::array();
  for (const Puzzle& puzzle : puzzles()) {
    json wrong = json::array();
    for (const Wrong& w : puzzle.wrong) wrong.push_back({{"kernel", w.kernel}, {"lesson", w.lesson}});
    document.push_back({{"number", puzzle.facts.number},
                        {"name", puzzle.facts.name},
                        {"task", puzzle.facts.task},
                        {"tensors", puzzle.facts.tensors},
                        {"launch", puzzle.facts.launch},
                        {"hint", puzzle.facts.hint},
                        {"tolerance", puzzle.facts.tolerance},
                        {"sizes", text(puzzle.facts, puzzle.facts.cases[0])},
                        {"cases", puzzle.facts.cases.size()},
                        {"wrong", wrong}});
  }
  std::cout << json{{"version", octile_version()}, {"puzzles", document}}.dump(2) << "\n";
}

// ---- run ----

struct Options {
  std::string which;
  std::string device = "cpu";
  std::string report;
  bool wrong = false;
  bool prove = false;
  bool json = false;
};

struct Row {
  std::string name, kernel;  // kernel: of a wrong one
  Facts facts;
  Verdict verdict;
  bool good = false;
  std::string page = {};
};

json place(const tile::Site& site) { return {{"file", site.file}, {"line", site.line}, {"column", site.column}}; }

json problems(const Outcome& outcome) {
  json result = json::array();
  for (const tile::Report& report : outcome.reports) {
    for (const tile::Finding& finding : report.findings) {
      const tile::Site& site = report.sites[static_cast<std::size_t>(finding.site)];
      const tile::TensorUse& tensor = report.tensors[static_cast<std::size_t>(site.tensor)];
      json entry = place(site);
      entry.update({{"problem", name(finding.problem)},
                    {"access", name(site.access)},
                    {"tensor", tensor.name},
                    {"size", tensor.size},
                    {"count", finding.count},
                    {"program", finding.first.program},
                    {"lane", finding.first.lane},
                    {"index", finding.first.index}});
      if (tile::Report::has_origin(finding) && finding.first.other_site >= 0) {
        entry["from"] = place(report.sites[static_cast<std::size_t>(finding.first.other_site)]);
      }
      result.push_back(entry);
    }
  }
  for (const Mismatch& m : outcome.mismatches) {
    const tile::Site* const site = blamed(outcome, m);
    json entry = site != nullptr ? place(*site) : json::object();
    entry.update({{"problem", m.input     ? "input written"
                              : m.written ? "wrong value"
                                          : "not written"},
                  {"tensor", m.tensor},
                  {"size", m.size},
                  {"count", m.count},
                  {"index", m.index}});
    if (m.written && !m.input) {
      entry.update({{"value", m.got}, {"expected", m.expected.value}, {"bound", m.expected.bound}});
    }
    result.push_back(entry);
  }
  return result;
}

class Run {
 public:
  explicit Run(const Options& options) : options_(options), puzzles_(wanted(options.which)) {
    if (options.device == "cuda") {
      const std::string reason = no_device();
      if (!reason.empty()) throw std::runtime_error("puzzles run --device cuda: " + reason);
    }
  }

  void run() {
    std::int64_t total = 0;
    for (const Puzzle* puzzle : puzzles_) {
      total += static_cast<std::int64_t>(options_.wrong ? puzzle->wrong.size() : puzzle->facts.cases.size());
    }
    std::optional<Progress> progress;
    if (options_.which == "all") progress.emplace("puzzles", total);
    const auto step = [&] {
      if (progress && !options_.wrong) progress->advance();
    };
    for (const Puzzle* puzzle : puzzles_) {
      if (!options_.wrong) {
        Try a_try{puzzle->checked, puzzle->fast, true, step};
        if (options_.device == "cuda") {  // no checker: values are compared, and the memory around the tensors
          a_try.checked = [puzzle](const Case& a_case) { return on_device(puzzle->facts, a_case); };
          a_try.fast = nullptr;
        }
        const Verdict verdict = judge(puzzle->facts.cases, a_try);
        rows_.push_back({puzzle->facts.name, "", puzzle->facts, verdict, verdict.right()});
        continue;
      }
      for (const Wrong& wrong : puzzle->wrong) {
        const Verdict verdict = judge(puzzle->facts.cases, {wrong.run});
        rows_.push_back({puzzle->facts.name, wrong.kernel, puzzle->facts, verdict, !verdict.right()});
        if (progress) progress->advance();
      }
    }
  }

  void write_pages() {
    if (options_.report.empty()) return;
    for (Row& row : rows_) {
      const std::string name = row.kernel.empty() ? row.name : row.kernel;
      row.page = page_path(options_.report, name, rows_.size() > 1);
      const std::string command = "octile puzzles run " + std::to_string(row.facts.number) +
                                  (row.kernel.empty() ? "" : " --wrong") + " --report " + shell_word(options_.report);
      write_page(row.page, row.facts, row.verdict, command);
    }
  }

  void print() const {
    if (options_.which == "all" && !options_.wrong) print_table();
    for (const Row& row : rows_) {
      if (!row.kernel.empty()) std::cout << row.kernel << ": ";
      const bool in_table = options_.which == "all" && !options_.wrong && row.good;
      if (!in_table) std::cout << text(row.facts, row.verdict);
      if (!row.page.empty()) std::cout << "wrote " << row.page << "\n";
    }
    if (options_.which == "all" || options_.wrong) {
      const std::size_t bad = rows_.size() - good();
      std::cout << good() << (options_.wrong ? " caught, " : " right, ") << bad
                << (options_.wrong ? " not caught\n" : " wrong\n");
    }
  }

  void print_json() const {
    json rows = json::array();
    for (const Row& row : rows_) {
      json entry = {{"number", row.facts.number},
                    {"name", row.name},
                    {"right", row.verdict.right()},
                    {"sizes", row.verdict.cases},
                    {"worst", row.verdict.worst}};
      if (!row.kernel.empty()) entry["kernel"] = row.kernel;
      if (row.kernel.empty() && row.verdict.stated) {
        const Score s = score(*row.verdict.stated);
        json reuse = json::object();
        for (const Score::Reuse& r : s.reuse) reuse[r.tensor] = r.times();
        entry["score"] = {{"reads", reuse},
                          {"bytes", s.moved_bytes},
                          {"least_bytes", s.min_bytes},
                          {"sector_bytes", s.sector_bytes},
                          {"used_bytes", s.used_bytes},
                          {"lanes", s.lanes},
                          {"active_lanes", s.active}};
      }
      if (row.verdict.wrong) {
        entry["at"] = text(row.facts, row.verdict.wrong->the_case);
        entry["hidden"] = !row.verdict.wrong->the_case.stated;
        entry["problems"] = problems(*row.verdict.wrong);
      }
      if (!row.verdict.disagreement.empty()) entry["disagreement"] = row.verdict.disagreement;
      if (!row.page.empty()) entry["report"] = row.page;
      rows.push_back(entry);
    }
    std::cout << json{{"version", octile_version()}, {"device", options_.device}, {"puzzles", rows}}.dump(
                     2, ' ', false, json::error_handler_t::replace)
              << "\n";
  }

  std::size_t good() const {
    return static_cast<std::size_t>(std::count_if(rows_.begin(), rows_.end(), [](const Row& row) { return row.good; }));
  }
  bool all_good() const { return good() == rows_.size(); }

 private:
  void print_table() const {
    std::vector<std::vector<std::string>> rows;
    for (const Row& row : rows_) {
      std::vector<std::string> cells = {std::to_string(row.facts.number), row.name, row.good ? "right" : "wrong",
                                        std::to_string(row.verdict.cases)};
      if (options_.device == "cpu") {
        const Score s = score(*row.verdict.stated);
        cells.insert(cells.end(), {std::to_string(s.moved_bytes), fixed(s.times_minimum(), 2),
                                   fixed(100 * s.sector_use(), 0), fixed(100 * s.masked_off(), 0)});
      }
      rows.push_back(cells);
    }
    std::vector<std::string> heading = {"", "puzzle", "verdict", "sizes"};
    if (options_.device == "cpu") {
      heading.insert(heading.end(), {"bytes", "of the minimum", "bytes used %", "masked off %"});
    }
    std::cout << format_table(heading, rows, 3);
  }

  Options options_;
  std::vector<const Puzzle*> puzzles_;
  std::vector<Row> rows_;
};

// Each is compiled and run as a learner's file is.
void prove(const std::string& which) {
  int status = 0;
  for (const Puzzle* puzzle : wanted(which)) {
    Check check;
    check.file = puzzle->facts.name;
    check.prove = true;
    check.solution = puzzle;
    check.called = shell_word(this_command()) + " puzzles run " + puzzle->facts.name + " --prove";
    status = std::max(status, check_solution(check));
  }
  if (status != 0) throw CLI::RuntimeError(status);
}

// ---- new ----

void write_starter(const std::string& which, const std::string& wanted_path) {
  const Puzzle& puzzle = *wanted(which).front();
  if (which == "all") throw CLI::ValidationError("puzzle", "one at a time: give a number or a name");
  std::string path = wanted_path.empty() ? puzzle.facts.name + ".cpp" : as_path(wanted_path);
  if (fs::is_directory(path)) path = (fs::path(path) / (puzzle.facts.name + ".cpp")).string();
  if (fs::path(path).extension() != ".cpp") throw CLI::ValidationError("file", path + " does not end in .cpp");
  if (fs::exists(fs::symlink_status(path))) throw std::runtime_error(path + " already exists, and may hold your work");
  const std::string check = shell_word(this_command()) + " puzzles check " + shell_word(path);
  base::write_file(path, starter(puzzle, check, compile_command(path, find_toolbox())), base::Existing::refuse);
  std::cout << "wrote " << path << ": puzzle " << puzzle.facts.number << ", " << puzzle.facts.task << "\n"
            << "write your kernel in it, then check it:\n  " << check << "\n";
}

void add_list(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("list", "Show the puzzles");
  command->footer(kListFooter);
  const auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Write one JSON document instead of a table, with sizes, hints and tolerances");
  command->callback([as_json] { list(*as_json); });
}

void add_run(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* const command = app.add_subcommand("run", "Check the kernels that come with the puzzles");
  command->footer(kRunFooter);
  command->add_option("puzzle", options->which, "A number, a name, or all")->required();
  command->add_option("--device", options->device, "cpu: checked and fast; cuda: on the first GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  auto* const report = command
                           ->add_option("--report", options->report,
                                        "Write a page that shows what the kernel did; with several kernels, one page "
                                        "each, with the kernel's name in the file name")
                           ->type_name("FILE");
  auto* const wrong =
      command->add_flag("--wrong", options->wrong, "Run the wrong kernels instead, which must be caught");
  auto* const json = command->add_flag("--json", options->json, "Write one JSON document instead of text");
  command->add_flag("--prove", options->prove, "Also compile and prove the kernels; needs Z3")
      ->excludes(wrong)
      ->excludes(report)
      ->excludes(json);
  add_quiet(*command);
  command->callback([options, report, wrong] {
    if (options->prove) return prove(options->which);
    options->report = as_path(options->report);
    if (options->device == "cuda" && (report->count() > 0 || wrong->count() > 0)) {
      throw CLI::ValidationError("--device", "a report and the wrong kernels need the checker, which is on the cpu");
    }
    if (fs::is_directory(options->report)) base::fail_on("write", options->report, EISDIR);
    Run run(*options);
    run.run();
    run.write_pages();
    options->json ? run.print_json() : run.print();
    if (!run.all_good()) throw CLI::RuntimeError(1);
  });
}

void add_new(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("new", "Write a file in which to solve a puzzle");
  command->footer(kNewFooter);
  const auto which = std::make_shared<std::string>(), path = std::make_shared<std::string>();
  command->add_option("puzzle", *which, "A number or a name")->required();
  command->add_option("file", *path, "The file to write (default: the puzzle's name with .cpp, here)")
      ->type_name("FILE");
  command->callback([which, path] { write_starter(*which, *path); });
}

void add_check_solution(CLI::App& app) {
  const auto check = std::make_shared<Check>();
  CLI::App* const command = app.add_subcommand("check", "Compile a file that new wrote, run it, and judge it");
  command->footer(kCheckFooter);
  const auto a_time = [](const std::string& text) -> std::string {
    double seconds = 0;
    const bool given = CLI::detail::lexical_cast(text, seconds) && seconds >= 0.01 && seconds <= kMaxSeconds;
    return given ? "" : text + " is not a time of 0.01 to 86400 seconds";
  };
  command->add_option("file", check->file, "The file")->required()->type_name("FILE");
  command->add_option("--report", check->report, "Write a page that shows each access of the kernel")
      ->type_name("FILE");
  command
      ->add_option("--timeout", check->timeout, "Kill the program, and everything that it has started, after this time")
      ->type_name("SECONDS")
      ->check(a_time)
      ->capture_default_str();
  command->add_option("--compile-timeout", check->compile_timeout, "The same for the compiler")
      ->type_name("SECONDS")
      ->check(a_time)
      ->capture_default_str();
  command->add_flag("--stated", check->stated, "Only the sizes of the task, not the hidden ones");
  command->add_flag("--prove", check->prove,
                    "Also prove that the kernel is safe at all sizes, or find a size at which it is not; needs Z3");
  command->add_flag("--verbose", check->verbose, "Show the compiler's full output");
  command->callback([check] {
    check->file = as_path(check->file);
    check->report = as_path(check->report);
    check->called = shell_word(this_command()) + " puzzles check " + shell_word(check->file);
    const int status = check_solution(*check);
    if (status != 0) throw CLI::RuntimeError(status);
  });
}

}  // namespace

void add_puzzles(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("puzzles", "Learn the tile language by puzzles, which are checked");
  command->footer(kFooter);
  command->require_subcommand(1);
  add_list(*command);
  add_run(*command);
  add_new(*command);
  add_check_solution(*command);
}

}  // namespace octile::cli
