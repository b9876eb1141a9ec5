// The text of the kernels that come with Octile, for excerpts and reports where there is no checkout.
#pragma once

#include <string>
#include <vector>

namespace octile::tile::puzzles {

struct KernelSource {
  std::string file;  // "rows_kernels.h"
  std::string text;
};
const std::vector<KernelSource>& kernel_sources();

// The lines of a file: from the disk, else of one of these. Empty if there is neither.
std::vector<std::string> source_lines(const std::string& path);

}  // namespace octile::tile::puzzles
