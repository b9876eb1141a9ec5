// Where octile puzzles new finds what a learner's program is compiled with.
#pragma once

#include "puzzles/starter.h"

namespace octile::cli {

// In the build directory, or where the command is installed. Throws std::runtime_error that names what is missing.
tile::puzzles::Toolbox find_toolbox();

}  // namespace octile::cli
