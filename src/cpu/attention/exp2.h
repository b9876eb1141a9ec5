// 2^x of vectors of floats, for x <= 0.
#pragma once

#include <cstdint>

#include "cpu/support/multiversion.h"

namespace octile::cpu {

// x becomes 2^x, within 1.22 units in the last place (0.96 with FMA); 0 below -126, so for -inf; NaN stays NaN. 2^0
// is 1.
template <class Floats>
OCTILE_INLINE void exp2_below_0(Floats& x) {
  typedef std::int32_t Integers __attribute__((vector_size(sizeof(Floats))));
  typedef std::uint32_t Words __attribute__((vector_size(sizeof(Floats))));
  constexpr float kRound = 0x1.8p23f;  // added, it leaves the nearest integer in the lowest bits
  const Integers underflow = x < -126.0f;
  const Floats clamped = underflow ? Floats{} : x;
  const Floats rounded = clamped + kRound;
  const Floats f = clamped - (rounded - kRound);  // -1/2 to 1/2
  // 2^f = 1 + f r(f): the relative error of r is minimal, 2e-9.
  Floats r = Floats{} + 1.5353362e-4f;
  r = r * f + 1.3398875e-3f;
  r = r * f + 9.618437e-3f;
  r = r * f + 5.5503324e-2f;
  r = r * f + 2.4022648e-1f;
  r = r * f + 6.931472e-1f;
  r = r * f + 1.0f;
  const Floats power = reinterpret_cast<Floats>((reinterpret_cast<Words>(rounded) << 23) + 0x3f800000);
  x = underflow ? Floats{} : r * power;
}

}  // namespace octile::cpu
