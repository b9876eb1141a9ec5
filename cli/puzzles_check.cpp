// octile puzzles check: compiles a learner's file, shows what the compiler objects to in that file, and runs it.
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "console.h"
#include "puzzles.h"

namespace octile::cli {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostComplaints = 3;
constexpr int kLastSignal = 64;

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

// Throws if a signal has ended it: a shell then says 128 and the signal's number.
int exit_status(int wait_status, const std::string& who) {
  if (wait_status == -1) throw std::runtime_error("cannot run " + who);
  const int status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
  if (status > 128 && status - 128 <= kLastSignal) {
    throw std::runtime_error(who + " was ended by a signal: " + strsignal(status - 128));
  }
  return status;
}

}  // namespace

int check_solution(const Check& check) {
  if (!fs::is_regular_file(check.file)) {
    throw std::runtime_error("there is no file " + check.file + "; octile puzzles new N writes one to begin with");
  }
  const TemporaryFolder folder;
  const std::string program = (folder.path() / fs::path(check.file).stem()).string();
  Ran compiler = run(tile::puzzles::compile_only(check.file, program, find_toolbox()) +
                     " -ftemplate-backtrace-limit=0 -fno-diagnostics-color");
  compiler.status = exit_status(compiler.status, "the compiler, with " + check.file + ",");
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
