// 4 x 4 lanes of 32 bits, on any machine.
#pragma once

#include <cstdint>

#include "cpu/support/multiversion.h"

namespace octile::cpu {

// The first two lanes of a and b interleaved, or the last two.
template <int first, class Four>
OCTILE_INLINE Four interleaved(const Four& a, const Four& b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, first, first + 4, first + 1, first + 5);
#else
  typedef std::uint32_t Lanes __attribute__((vector_size(16)));
  return __builtin_shuffle(a, b, Lanes{first, first + 4, first + 1, first + 5});
#endif
}

// 4 x 4 lanes: lane j of v[i] becomes lane i of v[j].
template <class Four>
OCTILE_INLINE void transpose_lanes(Four (&v)[4]) {
  const Four low02 = interleaved<0>(v[0], v[2]);
  const Four high02 = interleaved<2>(v[0], v[2]);
  const Four low13 = interleaved<0>(v[1], v[3]);
  const Four high13 = interleaved<2>(v[1], v[3]);
  v[0] = interleaved<0>(low02, low13);
  v[1] = interleaved<2>(low02, low13);
  v[2] = interleaved<0>(high02, high13);
  v[3] = interleaved<2>(high02, high13);
}

}  // namespace octile::cpu
