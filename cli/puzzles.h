// octile puzzles, what its parts share.
#pragma once

#include <string>

#include "puzzles/starter.h"

namespace octile::cli {

// The command as it can be typed: by its name where that is found, else by its path.
std::string this_command();

// What a learner's program is compiled with: in the build directory, or where the command is installed; `prove`: one
// that proves its kernel. Throws std::runtime_error that names what is missing.
tile::puzzles::Toolbox find_toolbox(bool prove = false);

// octile puzzles check
struct Check {
  std::string file;
  std::string report;  // empty: none
  bool stated = false;
  bool verbose = false;
  bool prove = false;
  const tile::puzzles::Puzzle* solution = nullptr;  // instead of a file: Octile's own kernels, which are proved
  double timeout = 60, compile_timeout = 60;        // seconds
  std::string called = {};                          // what the report names as its command
};
// Compiles the file, runs it, and returns its exit status. Throws std::runtime_error if there is no such file.
int check_solution(const Check& check);

}  // namespace octile::cli
