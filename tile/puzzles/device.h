// The puzzles on a GPU. cuda.cu runs them; no_cuda.cpp stands in for it where Octile is built without CUDA.
#pragma once

#include <string>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// Why no GPU can be used; empty: one can.
std::string no_device();
// The puzzle's own kernels. What CUDA refuses throws std::runtime_error.
Outcome on_device(const Facts& facts, const Case& a_case);

}  // namespace octile::tile::puzzles
