// Constants of the contract's norms. A row's sum: value c is added to lane c % kNormLanes, in ascending order, and then
// neighbours are added, lanes 2 i and 2 i + 1, until one is left.
#pragma once

#include <cstddef>

namespace octile {

inline constexpr std::size_t kNormLanes = 1024;

}  // namespace octile
