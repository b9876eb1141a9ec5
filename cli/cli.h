// The octile command: one function per verb, each in the file of its name.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/support/console.h"

namespace octile::cli {

void add_info(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_tune(CLI::App& app);
void add_puzzles(CLI::App& app);
void add_inspect(CLI::App& app);
void add_quantize(CLI::App& app);
void add_compare(CLI::App& app);
void add_manual(CLI::App& app);  // must come last: it describes the others

// Formats --help with the examples before the options.
std::shared_ptr<CLI::FormatterBase> examples_first();

// For a verb that shows its progress.
inline void add_quiet(CLI::App& verb) {
  verb.add_flag_callback("-q,--quiet", silence_progress, "Show no progress (the default unless stderr is a terminal)");
}

}  // namespace octile::cli
