// Rows of an s8 matrix into a panel of 16 channels, 4 terms to a lane: packed_weight.h.
#pragma once

#include <cstdint>

#include "octile/tensor.h"

namespace octile::cpu {

struct ChannelRange {
  std::int64_t first;  // the panel's
  std::int64_t end;    // of the matrix; missing ones are 0
};
struct TermRange {
  std::int64_t first, count;
};

// out: (count / 4, 16, 4), up to the next multiple of 64 terms, padded with 0. b is contiguous along either dimension.
void pack_panel(const ConstTensor& b, const ChannelRange& channels, const TermRange& terms, std::uint8_t* out);

}  // namespace octile::cpu
