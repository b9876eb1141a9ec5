// octile puzzles check: compiles a learner's file, shows what the compiler objects to in that file, and runs it.
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "console.h"
#include "puzzles.h"

namespace octile::cli {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostComplaints = 3;

// A folder that is gone when the check is over.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "octile-puzzle-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a folder like " + name);
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

struct Ran {
  int status = 0;
  std::vector<std::string> lines;  // of both outputs
};

Ran run(const std::string& command) {
  Ran result;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen((command + " 2>&1").c_str(), "r"), [](FILE*) { return 0; });
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  std::string all;
  std::array<char, 4096> part;
  for (std::size_t n = 0; (n = fread(part.data(), 1, part.size(), pipe.get())) > 0;) all.append(part.data(), n);
  result.status = pclose(pipe.get());
  std::istringstream stream(all);
  for (std::string line; std::getline(stream, line);) result.lines.push_back(line);
  return result;
}

// A line of the learner's file and what is wrong there.
struct Complaint {
  std::string what;
  int line = 0, column = 0;
};

// Most of what a compiler says of a mistake in a template is about the templates. g++ lists the places that lead to an
// error before it, the innermost first, and clang after it: of these the first in the learner's own file is meant.
std::vector<Complaint> complaints(const std::vector<std::string>& lines, const std::string& file) {
  static const std::regex place("^(.+?):([0-9]+):([0-9]+):(.*)$");
  static const std::regex error("^ (?:fatal )?(error|warning): (.*)$");
  static const std::regex assertion(
      "^static(?: assertion|_assert) failed(?: due to requirement '.*?')?:? \"?(.*?)\"?$");
  std::vector<Complaint> result;
  int line = 0, column = 0;  // in the file, since the last error
  for (const std::string& text : lines) {
    std::smatch at, says;
    if (!std::regex_match(text, at, place)) continue;
    const bool in_file = at[1] == file;
    const std::string rest = at[4];
    if (!std::regex_match(rest, says, error)) {
      if (!in_file) continue;
      const bool after = line == 0 && !result.empty() && result.back().line == 0 && rest.starts_with(" note: ");
      int& into_line = after ? result.back().line : line;
      int& into_column = after ? result.back().column : column;
      if (into_line == 0) {
        into_line = std::stoi(at[2]);
        into_column = std::stoi(at[3]);
      }
      continue;
    }
    Complaint complaint{std::regex_replace(says[2].str(), assertion, "$1"), line, column};
    if (says[1] == "warning") complaint.what = "warning: " + complaint.what;
    if (in_file) {
      complaint.line = std::stoi(at[2]);
      complaint.column = std::stoi(at[3]);
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

void show_complaints(const Ran& compiler, const Check& check) {
  const std::vector<Complaint> all = complaints(compiler.lines, check.file);
  if (check.verbose || (all.empty() && compiler.status != 0)) {
    for (const std::string& line : compiler.lines) std::cout << line << "\n";
    return;
  }
  std::vector<std::string> source;
  std::istringstream stream(read_file(check.file));
  for (std::string line; std::getline(stream, line);) source.push_back(line);
  for (std::size_t i = 0; i < all.size() && i < kMostComplaints; ++i) show(all[i], check.file, source);
  if (all.size() > kMostComplaints) std::cout << "  and " << all.size() - kMostComplaints << " more\n";
  if (compiler.status != 0) std::cout << "  (--verbose shows all that the compiler says)\n";
}

int exit_status(int wait_status, const std::string& file) {
  // A shell says 128 and the signal.
  const int status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
  if (status > 128) throw std::runtime_error(file + " was ended by a signal: " + strsignal(status - 128));
  return status;
}

}  // namespace

int check_solution(const Check& check) {
  if (!fs::is_regular_file(check.file)) {
    throw std::runtime_error("there is no file " + check.file + "; octile puzzles new N writes one to begin with");
  }
  const TemporaryFolder folder;
  const std::string program = (folder.path() / fs::path(check.file).stem()).string();
  const Ran compiler = run(tile::puzzles::compile_only(check.file, program, find_toolbox()) +
                           " -ftemplate-backtrace-limit=0 -fno-diagnostics-color");
  if (compiler.status != 0) std::cout << check.file << " does not compile:\n";
  show_complaints(compiler, check);
  if (compiler.status != 0) return 1;
  std::cout.flush();
  std::string command = tile::puzzles::shell_word(program) + " --called " + tile::puzzles::shell_word(check.called);
  if (check.stated) command += " --stated";
  if (!check.report.empty()) command += " --report " + tile::puzzles::shell_word(check.report);
  return exit_status(std::system(command.c_str()), check.file);
}

}  // namespace octile::cli
