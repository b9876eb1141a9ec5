// log2 and exp2 in plain arithmetic: the mathematical libraries of two machines differ in the last bit.
#pragma once

#include <cmath>

namespace octile {

// log2(x) of a positive x: of the mantissa in 1/sqrt(2)..sqrt(2) by 2 artanh(r), r = (m - 1) / (m + 1), |r| < 0.172.
// Written out, as is exp2 below, because the mathematical libraries of two machines differ in the last bit.
inline double log2_of(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double r = (m - 1) / (m + 1);
  double sum = 0;
  for (int i = 21; i >= 1; i -= 2) sum = sum * (r * r) + 1.0 / i;
  return exponent + sum * r * 2.8853900817779268;  // 2 / ln 2
}

// 2^x: of the fraction in -1/2..1/2 by its Taylor series, 15 terms.
inline double exp2_of(double x) {
  const double whole = std::floor(x + 0.5);
  const double t = (x - whole) * 0.69314718055994531;
  double sum = 1;
  for (int i = 15; i >= 1; --i) sum = 1 + sum * t / i;
  return std::ldexp(sum, static_cast<int>(whole));
}

}  // namespace octile
