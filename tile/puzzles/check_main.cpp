// The main() of a learner's program.
#include <exception>
#include <iostream>

#include "puzzles/page.h"
#include "puzzles/starter.h"
#include "puzzles/trial.h"

namespace octile::tile::puzzles {

int check_main(const Facts& facts, const std::vector<Case>& cases, const Try& a_try,
               const std::vector<std::string>& command) {
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
    } else {
      const bool asked = arguments[i] == "--help" || arguments[i] == "-h";
      std::ostream& stream = asked ? std::cout : std::cerr;
      if (!asked) stream << program << ": " << arguments[i] << " is no option here, or lacks its value\n";
      stream << "Checks this solution of puzzle " << facts.number << ", " << facts.name << ".\n"
             << "  --stated       only at the sizes of the task\n"
             << "  --report FILE  also write a report of it as an HTML page\n"
             << "  --called NAME  the command that the report names instead of this program, as a shell reads it\n";
      return asked ? 0 : 2;
    }
  }
  const Verdict verdict = judge(cases, wanted);
  std::cout << text(facts, verdict);
  if (!report.empty()) {
    try {
      write_page(report, facts, verdict, called + " --report " + shell_word(report));
    } catch (const std::exception& error) {
      std::cerr << program << ": " << error.what() << std::endl;
      return 1;
    }
    std::cout << "wrote " << report << ": what the kernel did, for a browser" << std::endl;
  }
  return verdict.right() ? 0 : 1;
}

}  // namespace octile::tile::puzzles
