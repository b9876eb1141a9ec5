#include "puzzles/registry.h"

#include <iterator>

namespace octile::tile::puzzles {

const std::vector<Puzzle>& puzzles() {
  static const std::vector<Puzzle> all = [] {
    std::vector<Puzzle> result;
    for (auto* part : {elementwise_puzzles, row_puzzles, product_puzzles, linear_quantize_puzzles, linear_puzzles}) {
      std::vector<Puzzle> more = part();
      std::move(more.begin(), more.end(), std::back_inserter(result));
    }
    return result;
  }();
  return all;
}

const Puzzle* find_puzzle(const std::string& number_or_name) {
  for (const Puzzle& puzzle : puzzles()) {
    if (puzzle.facts.name == number_or_name || std::to_string(puzzle.facts.number) == number_or_name) return &puzzle;
  }
  return nullptr;
}

}  // namespace octile::tile::puzzles
