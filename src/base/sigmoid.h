// Constants of the contract's logistic function, sigma(t) = 1 / (1 + 2^z) with z = -t log2(e):
//
//   z' = min(max(z, -126), 128)   n = rint(z')   f = z' - n   p = c1 .. c5 by Horner's rule in fma, 1 last
//   2^z' = p 2^n, infinite at 128
//
// 2^f is within 2^-22.5 of the exact value.
#pragma once

namespace octile {

inline constexpr float kMinExponent = -126.0f;
inline constexpr float kMaxExponent = 128.0f;
// Of f^1 to f^5.
inline constexpr float kExp2[5] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};

inline constexpr float kSilu = -0x1.715476p+0f;  // z = kSilu x
// z = x fma(x x, kGeluCubic, kGelu): 0.5 (1 + tanh(u)) is sigma(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline constexpr float kGelu = -0x1.26aec2p+1f;
inline constexpr float kGeluCubic = -0x1.a5a7d0p-4f;

}  // namespace octile
