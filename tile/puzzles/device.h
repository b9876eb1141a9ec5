// The puzzles on a GPU. cuda.cu runs them; no_cuda.cpp replaces it in builds without CUDA.
#pragma once

#include <string>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// Why no GPU can be used; empty: one can.
std::string no_device();
// The puzzle's own kernels. CUDA errors throw std::runtime_error.
Outcome on_device(const Facts& facts, const Case& a_case);

}  // namespace octile::tile::puzzles
