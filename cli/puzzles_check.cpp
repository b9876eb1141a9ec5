// octile puzzles check: compiles a learner's file, shows what the compiler objects to in that file, and runs it.
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/output.h"
#include "cli/support/console.h"
#include "cli/support/group.h"
#include "puzzles.h"
#include "puzzles/watch.h"

namespace octile::cli {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxComplaints = 3;
constexpr int kLastSignal = 64;
constexpr int kNotExecutable = 126, kNotFound = 127;  // a shell's status of a command that it cannot run

// A folder that is gone when the check is over.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const char* const chosen = std::getenv("TMPDIR");
    const fs::path parent = chosen != nullptr && *chosen != '\0' ? chosen : "/tmp";
    std::string name = (fs::absolute(parent) / "octile-puzzle-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) base::fail_on("write into", parent, errno);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

struct Compiled {
  int status = 0;
  std::vector<std::string> lines;  // of both outputs
};

// A line of the learner's file and what is wrong there.
struct Complaint {
  std::string what;
  int line = 0, column = 0;
};

// "3:14:" and what follows, at the beginning of a text.
bool take_number(std::string_view& text, int& number) {
  const char* const end = text.data() + text.size();
  const auto [past, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || number < 0 || past == end || *past != ':') return false;
  text.remove_prefix(static_cast<std::size_t>(past - text.data()) + 1);
  return true;
}

// "FILE:3:14: what it says": a line of a compiler that names a place. No regular expressions: those of the library call
// themselves for each character, and lines may be long.
struct Said {
  bool in_file = false;  // the learner's
  int line = 0, column = 0;
  std::string_view what;
};

std::optional<Said> said_at_a_place(std::string_view text, std::string_view file) {
  const auto place_from = [&](std::size_t colon) -> std::optional<Said> {
    Said said{text.substr(0, colon) == file, 0, 0, text.substr(colon + 1)};
    if (!take_number(said.what, said.line) || !take_number(said.what, said.column)) return std::nullopt;
    return said;
  };
  if (text.starts_with(file) && text.size() > file.size() && text[file.size()] == ':') {
    if (const auto said = place_from(file.size())) return said;
  }
  for (std::size_t colon = 0; (colon = text.find(':', colon + 1)) != std::string_view::npos;) {
    if (const auto said = place_from(colon)) return said;
  }
  return std::nullopt;
}

// Without "static assertion failed: ", or what else a compiler says before the words of the assertion.
std::string_view without_assertion(std::string_view what) {
  for (const std::string_view begin : {"static assertion failed", "static_assert failed"}) {
    if (!what.starts_with(begin)) continue;
    std::string_view rest = what.substr(begin.size());
    constexpr std::string_view kDueTo = " due to requirement '";
    if (rest.starts_with(kDueTo)) {
      const std::size_t end = std::min(rest.find("': ", kDueTo.size()), rest.find("' \"", kDueTo.size()));
      if (end == std::string_view::npos) return what;
      rest.remove_prefix(end + 1);
    }
    if (rest.starts_with(":")) rest.remove_prefix(1);
    if (!rest.starts_with(" ")) return what;
    rest.remove_prefix(1);
    if (rest.starts_with("\"")) rest.remove_prefix(1);
    if (rest.ends_with("\"")) rest.remove_suffix(1);
    return rest;
  }
  return what;
}

// Most of what a compiler says of a mistake in a template is about the templates. g++ lists the places that lead to an
// error before it, the innermost first, and clang after it: of these the first in the learner's own file is meant.
std::vector<Complaint> complaints(const std::vector<std::string>& lines, const std::string& file) {
  std::vector<Complaint> result;
  int line = 0, column = 0;  // in the file, since the last error
  for (const std::string& text : lines) {
    const std::optional<Said> said = said_at_a_place(text, file);
    if (!said) continue;
    std::string_view what = said->what;
    bool error = false, warning = false;
    for (const std::string_view kind : {" error: ", " fatal error: ", " warning: "}) {
      if (!what.starts_with(kind)) continue;
      what.remove_prefix(kind.size());
      warning = kind == " warning: ";
      error = !warning;
      break;
    }
    if (!error && !warning) {
      if (!said->in_file) continue;
      const bool after = line == 0 && !result.empty() && result.back().line == 0 && what.starts_with(" note: ");
      int& into_line = after ? result.back().line : line;
      int& into_column = after ? result.back().column : column;
      if (into_line == 0) {
        into_line = said->line;
        into_column = said->column;
      }
      continue;
    }
    Complaint complaint{(warning ? "warning: " : "") + std::string(without_assertion(what)), line, column};
    if (said->in_file) {
      complaint.line = said->line;
      complaint.column = said->column;
    }
    result.push_back(complaint);
    line = column = 0;
  }
  // What follows from an error elsewhere, or from a mistake that the language itself explains, would only be noise.
  const auto warns = [](const Complaint& c) { return c.what.starts_with("warning: "); };
  const auto ours = [](const Complaint& c) { return c.what.starts_with("octile: "); };
  const bool any_ours = std::any_of(result.begin(), result.end(), ours);
  const bool all_warn = std::all_of(result.begin(), result.end(), warns);
  std::erase_if(result,
                [&](const Complaint& c) { return c.line == 0 || (any_ours && !ours(c)) || (!all_warn && warns(c)); });
  return result;
}

void show(const Complaint& complaint, const std::string& file, const std::vector<std::string>& source) {
  std::cout << "  " << file << ":" << complaint.line << ":" << complaint.column << ": " << complaint.what << "\n";
  if (complaint.line > static_cast<int>(source.size())) return;
  const std::string number = std::to_string(complaint.line);
  std::cout << "    " << number << " | " << source[static_cast<std::size_t>(complaint.line - 1)] << "\n"
            << "    " << std::string(number.size(), ' ') << " | "
            << std::string(static_cast<std::size_t>(std::max(complaint.column, 1) - 1), ' ') << "^\n";
}

void show_complaints(const Compiled& compiler, const Check& check) {
  const std::vector<Complaint> all = complaints(compiler.lines, check.file);
  if (check.verbose || (all.empty() && compiler.status != 0)) {
    for (const std::string& line : compiler.lines) std::cout << line << "\n";
    return;
  }
  if (all.empty()) return;
  std::vector<std::string> source;
  std::istringstream stream(read_file(check.file));
  for (std::string line; std::getline(stream, line);) source.push_back(line);
  for (std::size_t i = 0; i < all.size() && i < kMaxComplaints; ++i) show(all[i], check.file, source);
  if (all.size() > kMaxComplaints) std::cout << "  and " << all.size() - kMaxComplaints << " more\n";
  if (compiler.status != 0) std::cout << "  (--verbose shows all that the compiler says)\n";
}

// A shell says 128 and the signal's number.
int ended_by(int wait_status) {
  if (WIFSIGNALED(wait_status)) return WTERMSIG(wait_status);
  const int status = WEXITSTATUS(wait_status);
  return status > 128 && status - 128 <= kLastSignal ? status - 128 : 0;
}

// "was ended by a signal: Aborted"; empty if it has ended by itself.
std::string violent_end(const GroupEnd& end, double timeout, const std::string& option) {
  std::ostringstream text;
  if (end.timed_out) {
    text << "was stopped after " << timeout << (timeout == 1 ? " second" : " seconds") << " (" << option << ")";
  } else if (const int signal = ended_by(end.wait_status)) {
    text << "was ended by a signal: " << strsignal(signal);
  }
  return text.str();
}

// The last reported place of the program.
std::string whereabouts(const tile::puzzles::Watch& watch) {
  if (watch.any_verdict()) return ", after its verdict";
  const std::string place = text(watch.progress());
  return ", " + (place.empty() ? "before it checked anything" : place);
}

// The file; or, for a proof, one that includes it with an int that may be a symbol. What it includes comes before.
std::string source_of(const Check& check, const fs::path& folder) {
  if (!check.prove) return check.file;
  const std::string path = (folder / "proof.cpp").string();
  if (check.solution != nullptr) {
    std::ofstream(path) << tile::puzzles::proof_of_the_solution(*check.solution);
    return path;
  }
  std::string text, line;
  std::istringstream stream(read_file(check.file));
  while (std::getline(stream, line)) {
    const std::size_t first = line.find_first_not_of(" \t");
    if (first != std::string::npos && line.compare(first, 8, "#include") == 0) text += line + "\n";
  }
  text +=
      "#include \"puzzles/mistake.h\"\n#include \"puzzles/prove_trial.h\"\n"
      "#define int octile::tile::SymbolicInt\n#define bool octile::tile::SymbolicBool\n"
      "#define main main_of_the_file\n#include \"" +
      check.file +
      "\"\n#undef main\n#undef bool\n#undef int\n"
      "int main(int argc, char** argv) { return static_cast<int>(main_of_the_file(argc, argv)); }\n";
  std::ofstream(path) << text;
  return path;
}

Compiled compile(const Check& check, const fs::path& folder, const std::string& program) {
  const std::string output = (folder / "said").string();
  const tile::puzzles::Toolbox toolbox = find_toolbox(check.prove);
  const GroupEnd end = run_group({"/bin/sh", "-c",
                                  tile::puzzles::compile_only(source_of(check, folder), program, toolbox) +
                                      " -ftemplate-backtrace-limit=0 -fno-diagnostics-color"},
                                 check.compile_timeout, output);
  if (const std::string how = violent_end(end, check.compile_timeout, "--compile-timeout"); !how.empty()) {
    throw std::runtime_error("the compiler, with " + check.file + ", " + how);
  }
  Compiled result{WEXITSTATUS(end.wait_status), {}};
  std::istringstream said(read_file(output));
  for (std::string line; std::getline(said, line);) result.lines.push_back(line);
  if (result.status == kNotExecutable || result.status == kNotFound) {
    throw std::runtime_error("cannot run the compiler, \"" + toolbox.compiler + "\"; set CXX to another" +
                             (result.lines.empty() ? "" : ": " + result.lines.back()));
  }
  return result;
}

int run_solution(const Check& check, const fs::path& folder, const std::string& program) {
  const tile::puzzles::Watch watch((folder / "status").string());
  std::vector<std::string> command = {program, "--called", check.called, "--watched-by", watch.token()};
  if (check.stated) command.push_back("--stated");
  if (!check.report.empty()) command.insert(command.end(), {"--report", check.report});
  const GroupEnd end = run_group(command, check.timeout);
  if (const std::string how = violent_end(end, check.timeout, "--timeout"); !how.empty()) {
    throw std::runtime_error(check.file + " " + how + whereabouts(watch));
  }
  const int status = WEXITSTATUS(end.wait_status);
  if (!watch.any_verdict()) {
    std::string message = check.file + " ended with status " + std::to_string(status) + " and without a verdict";
    if (!text(watch.progress()).empty()) throw std::runtime_error(message + whereabouts(watch));
    throw std::runtime_error(message +
                             ": its main() has to return puzzles::check<...>(argc, argv, ...), as octile puzzles new "
                             "writes it");
  }
  return watch.right() ? status : 1;
}

}  // namespace

int check_solution(const Check& wanted) {
  Check check = wanted;
  if (check.solution == nullptr && !fs::is_regular_file(check.file)) {
    throw std::runtime_error("there is no file " + check.file + "; octile puzzles new N writes one to begin with");
  }
  if (check.prove && check.solution == nullptr)
    check.file = fs::absolute(check.file).string();  // it is included from elsewhere
  const GroupSignals signals;
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "program");
  const std::string program = (folder.path() / "program" / fs::path(check.file).stem()).string();
  const Compiled compiler = compile(check, folder.path(), program);
  if (compiler.status != 0) std::cout << check.file << " does not compile:\n";
  show_complaints(compiler, check);
  if (compiler.status != 0) return 1;
  std::cout.flush();
  return run_solution(check, folder.path(), program);
}

}  // namespace octile::cli
