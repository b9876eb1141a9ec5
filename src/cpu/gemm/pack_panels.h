// Rows of an s8 matrix into panels of 16 channels, 4 terms to a lane: packed_weight.h. Of an s4 matrix, as bytes, 8
// terms.
#pragma once

#include <cstdint>

#include "cpu/gemm/gemm_view.h"

namespace octile::cpu {

// Panels of (terms / 4, 16, 4), `stride` bytes apart.
struct Panels {
  std::uint8_t* data;
  std::int64_t stride;
  std::uint8_t flip = 0;  // what each byte is xor'ed with
};
// Two nibbles: two's complement becomes q + 8.
inline constexpr std::uint8_t kFlipNibbles = 0x88;

// Each panel is padded with 0, flipped: to 16 channels, and to the next multiple of 64 terms. b is contiguous along
// either dimension.
void pack_panels(const ConstTensor& b, const Range& channels, const Range& terms, const Panels& out);

}  // namespace octile::cpu
