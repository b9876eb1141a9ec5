// The file that a learner begins with.
#pragma once

#include <string>
#include <vector>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// What a solution is compiled with.
struct Toolbox {
  std::vector<std::string> include_directories;
  std::vector<std::string> libraries;  // in the order of linking
  std::string compiler = "c++";        // may be several words
};

std::string shell_word(const std::string& word);  // quoted for a shell, where it has to be
std::string as_path(const std::string& file);  // "-x.cpp" and "@x.cpp" as "./-x.cpp", which no program reads as options

// Compiles `file`, "masked_add.cpp", to `program`; the other also runs it, under the name "masked_add".
std::string compile_only(const std::string& file, const std::string& program, const Toolbox& toolbox);
std::string compile_command(const std::string& file, const Toolbox& toolbox);
// A program that checks and proves Octile's own kernels for it.
std::string proof_of_the_solution(const Puzzle& puzzle);
// `check` and `command` are shown: how to check the file, and compile_command().
std::string starter(const Puzzle& puzzle, const std::string& check, const std::string& command);

}  // namespace octile::tile::puzzles
