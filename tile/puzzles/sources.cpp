#include "puzzles/sources.h"

#include <fstream>
#include <sstream>

namespace octile::tile::puzzles {

namespace {

std::vector<std::string> lines_of(std::istream& stream) {
  std::vector<std::string> result;
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

}  // namespace

std::vector<std::string> source_lines(const std::string& path) {
  if (std::ifstream file(path); file) return lines_of(file);
  for (const KernelSource& source : kernel_sources()) {
    if (path.substr(path.rfind('/') + 1) != source.file) continue;
    std::istringstream text(source.text);
    return lines_of(text);
  }
  return {};
}

}  // namespace octile::tile::puzzles
