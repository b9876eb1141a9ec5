// What the kernels of the puzzles share.
#pragma once

#include <limits>

#include "octile/tile/context.h"

namespace octile::tile::puzzles {

inline constexpr int kNoEnd = std::numeric_limits<int>::max();  // i < kNoEnd masks nothing

}  // namespace octile::tile::puzzles
