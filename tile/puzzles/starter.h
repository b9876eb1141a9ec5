// The file that a learner begins with.
#pragma once

#include <string>
#include <vector>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// Where the headers and the libraries of the tile language are.
struct Toolbox {
  std::vector<std::string> include_directories;
  std::vector<std::string> libraries;  // in the order of linking
};

// Compiles `file`, "masked_add.cpp", and runs it.
std::string compile_command(const std::string& file, const Toolbox& toolbox);
std::string starter(const Puzzle& puzzle, const std::string& command);

}  // namespace octile::tile::puzzles
