#include <cerrno>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "base/output.h"
#include "cli/cli.h"
#include "cpu/support/isa.h"
#include "octile/octile.h"

namespace {

constexpr int kGood = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;

constexpr const char* kDescription =
    R"(octile - quantized linear layers, forward and backward, on this machine

The command shows what the Octile library can do here: which kernels run on this
machine, whether each computes what the contract says, how fast it is, and which are the
fastest, for plans to use. It quantizes, inspects and compares checkpoints of models, and
its puzzles teach how to write kernels.
)";

constexpr const char* kFooter = R"(Each command has its own page: octile COMMAND --help.

Results go to the standard output, errors to the standard error. Progress is shown on the
standard error if that is a terminal, unless --quiet is given. With --json the standard output
is one JSON document and nothing else; docs/reference/json.md has its fields. No output is
coloured.

Files are written completely or not at all, and an interrupted command leaves nothing behind. A
file that is replaced keeps its permissions; if it is a symbolic link, its target is replaced. A
page replaces another page, but no other file; it may go to a pipe or a character device
(/dev/stdout), which is written into.

Exit status:
  0  success
  1  something failed: a check, a file, a kernel that cannot run here
  2  the command line was wrong (an unknown option or command, or a bad value), or OCTILE_ISA

Environment:
  OCTILE_ISA  the widest instruction set that the kernels may use, which the machine must
            have: baseline, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx, or on Arm
            neon, i8mm.
            octile info says which is used
  OCTILE_TUNING  the file of measured kernels that plans use, or "off"; octile tune --help
  TERM      "dumb": progress is shown in plain lines

Examples:
  octile info                         what this machine has, and the kernel table
  octile check                        compare every kernel with the oracle
  octile bench --filter w8a8_forward  time the int8 forward
  octile tune --model-config config.json
                                      measure which kernels are the fastest for a model
  octile quantize IN OUT --format w4a16
                                      write a model's checkpoint with 4-bit weights
  octile puzzles list                 learn to write block kernels)";

// "octile", or "octile puzzles run" once the commands' names have been read.
std::string page(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  return commands.empty() ? app.get_name() : app.get_name() + " " + page(*commands.front());
}

int report(const std::string& what, int status) {
  // One line, whatever the message was made of.
  std::string line = what;
  while (!line.empty() && line.back() == '\n') line.pop_back();
  for (std::size_t at = 0; (at = line.find('\n', at)) != std::string::npos;) line.replace(at, 1, "; ");
  std::cerr << "octile: " << line << std::endl;
  return status;
}

// An empty value is mostly a variable of a script that nobody has set. CLI11 would take the default for it.
void refuse_empty_values(CLI::App& app) {
  const auto reason = [](const std::string& value) { return std::string(value.empty() ? "the value is empty" : ""); };
  for (CLI::Option* const option : app.get_options()) {
    if (option->get_items_expected_max() > 0) option->check(reason);
  }
  for (CLI::App* const command : app.get_subcommands({})) refuse_empty_values(*command);
}

int run(int argc, char** argv) {
  CLI::App app(kDescription, "octile");
  app.formatter(octile::cli::examples_first());
  app.footer(kFooter);
  app.set_help_flag("-h,--help", "Show this page and exit");
  app.set_version_flag("-V,--version", std::string("octile ") + octile_version(), "Show the version and exit");
  app.require_subcommand(1);
  octile::cli::add_info(app);
  octile::cli::add_check(app);
#if OCTILE_BLAS
  octile::cli::add_bench(app);
#endif
  octile::cli::add_tune(app);
#if OCTILE_CHECKPOINT
  octile::cli::add_inspect(app);
  octile::cli::add_quantize(app);
  octile::cli::add_compare(app);
#endif
#if OCTILE_PUZZLES
  octile::cli::add_puzzles(app);
#endif
  octile::cli::add_manual(app);
  refuse_empty_values(app);
  app.parse_complete_callback([] {  // before any command runs, so that it is said once
    const std::string reason = octile::cpu::reason_against_requested_isa();
    if (!reason.empty()) throw CLI::ValidationError(reason);
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {  // a command's way to leave with a status; it has said why
    return error.get_exit_code();
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::RequiredError& error) {
    const std::vector<std::string> rest = app.remaining(true);
    const std::string unknown = rest.empty() ? "" : rest.front();
    if (unknown.empty()) return report(std::string(error.what()) + " (see " + page(app) + " --help)", kUsage);
    return report(unknown + " is not a command or option of " + page(app) + " (see " + page(app) + " --help)", kUsage);
  } catch (const CLI::ExtrasError&) {  // which names them in reverse
    const std::vector<std::string> rest = app.remaining(true);
    return report("not expected: " + CLI::detail::join(rest, " ") + " (see " + page(app) + " --help)", kUsage);
  } catch (const CLI::ParseError& error) {
    return report(std::string(error.what()) + " (see " + page(app) + " --help)", kUsage);
  }
  return kGood;
}

}  // namespace

int main(int argc, char** argv) {
  octile::base::clean_up_on_signals();
  int status = kFailed;
  try {
    status = run(argc, argv);
  } catch (const std::bad_alloc&) {
    return report("out of memory", kFailed);
  } catch (const std::exception& error) {
    return report(error.what(), kFailed);
  }
  errno = 0;
  if (!std::cout.flush()) {
    if (errno == 0) {  // an earlier write failed: the next one tells why
      std::cout.clear();
      std::cout.put('\n').flush();
    }
    return report("cannot write to the standard output: " + std::generic_category().message(errno != 0 ? errno : EIO),
                  kFailed);
  }
  return status;
}
