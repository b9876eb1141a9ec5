// The puzzles, by the file that they are in.
#pragma once

#include <vector>

#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

std::vector<Puzzle> elementwise_puzzles();      // 1 to 6
std::vector<Puzzle> row_puzzles();              // 7 to 9
std::vector<Puzzle> product_puzzles();          // 10 to 12
std::vector<Puzzle> linear_quantize_puzzles();  // 13, 14
std::vector<Puzzle> linear_puzzles();           // 15 to 18

}  // namespace octile::tile::puzzles
