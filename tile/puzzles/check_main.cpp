// The main() of a learner's program.
#include <exception>
#include <iostream>

#include "puzzles/page.h"
#include "puzzles/starter.h"
#include "puzzles/trial.h"
#include "puzzles/watch.h"

namespace octile::tile::puzzles {

namespace {

// Records what is being tried, in case it crashes or hangs.
Try watched(const Facts& facts, Try a_try) {
  const auto tell = [&facts](const Case& a_case, const std::string& executor) {
    Progress& now = progress();
    now.program_runs = false;
    put(now.doing, "at " + text(facts, a_case) + (a_case.stated ? "" : " (a hidden size)") + ", " + executor);
  };
  Try result = a_try;
  result.checked = [=](const Case& a_case) {
    tell(a_case, "checked executor");
    return a_try.checked(a_case);
  };
  result.fast = [=](const Case& a_case, int threads) {
    tell(a_case, "fast executor with " + std::to_string(threads) + (threads == 1 ? " thread" : " threads"));
    return a_try.fast(a_case, threads);
  };
  return result;
}

int concluded(bool right) {
  progress() = {};
  report_verdict(right);
  return right ? 0 : 1;
}

int threw(const Facts& facts, const std::string& what) {
  const Progress& now = progress();
  std::cout << facts.number << " " << facts.name << ": wrong, it threw " << what << "\n  " << text(now) << "\n";
  if (now.program_runs && now.steps > 0) std::cout << excerpt(site_of(now));
  return concluded(false);
}

}  // namespace

int check_main(const Facts& facts, const Try& a_try, const std::vector<std::string>& command) {
  const std::string program = command.empty() ? facts.name : command[0];
  const std::vector<std::string> arguments(command.begin() + (command.empty() ? 0 : 1), command.end());
  Try wanted = a_try;
  std::string report, called = shell_word(program);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--stated") {
      wanted.hidden = false;
    } else if (arguments[i] == "--report" && i + 1 < arguments.size()) {
      report = arguments[++i];
    } else if (arguments[i] == "--called" && i + 1 < arguments.size()) {
      called = arguments[++i];
    } else if (arguments[i] == "--watched-by" && i + 1 < arguments.size()) {
      watched_by(arguments[++i]);  // octile puzzles check
    } else {
      const bool asked = arguments[i] == "--help" || arguments[i] == "-h";
      std::ostream& stream = asked ? std::cout : std::cerr;
      if (!asked) stream << program << ": " << arguments[i] << " is not an option here, or lacks its value\n";
      stream << "Checks this solution of puzzle " << facts.number << ", " << facts.name << ".\n"
             << "  --stated       only at the sizes of the task\n"
             << "  --report FILE  also write a report of it as an HTML page\n"
             << "  --called NAME  the command that the report names instead of this program, as a shell reads it\n";
      return asked ? 0 : 2;
    }
  }
  Verdict verdict;
  try {
    verdict = judge(facts.cases, watched(facts, wanted));
  } catch (const std::exception& error) {
    return threw(facts, type_name(typeid(error)) + ": " + error.what());
  } catch (...) {
    return threw(facts, "what is not a std::exception");
  }
  std::cout << text(facts, verdict);
  if (!report.empty()) {
    try {
      write_page(report, facts, verdict, called + " --report " + shell_word(report));
    } catch (const std::exception& error) {
      std::cerr << called << ": " << error.what() << std::endl;
      return concluded(false);
    }
    std::cout << "wrote " << report << ": what the kernel did, for a browser" << std::endl;
  }
  return concluded(verdict.right());
}

}  // namespace octile::tile::puzzles
