// The report of a try as an HTML page.
#pragma once

#include <string>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// Shows the size that went wrong, or the stated one, and of several launches the one to look at: with the first
// finding, or that wrote the first wrong value, or the last. `command` is what makes the page again. Throws
// std::runtime_error if the file cannot be written.
void write_page(const std::string& path, const Facts& facts, const Verdict& verdict, const std::string& command);

}  // namespace octile::tile::puzzles
