// The report of a try as an HTML page.
#pragma once

#include <string>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// Of a try of several launches, the one to look at: with the first finding, or that wrote the first wrong value, or the
// last. `command` is what makes the page again. Throws std::runtime_error if the file cannot be written.
void write_page(const std::string& path, const Facts& facts, const Outcome& outcome, const std::string& command);

// The outcome that a verdict is about.
const Outcome& shown(const Verdict& verdict);

}  // namespace octile::tile::puzzles
