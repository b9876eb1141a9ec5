#include "plan/bound.h"

#include "base/message.h"

namespace octile {

namespace {

double unit_roundoff(DType a) { return a == DType::f64 ? 0x1p-53 : 0x1p-24; }

}  // namespace

double max_error(Bound bound, const SumFacts& f) {
  if (bound == Bound::exact) return 0;
  // A term takes at most two roundings to be formed, terms - 1 to be added to the others and one to take the bias in; a
  // kernel that keeps the scale out of the sum has one more, and one that takes an offset off another. n roundings
  // change a term by at most n u / (1 - n u) of it (Higham, Accuracy and Stability of Numerical Algorithms, section
  // 3.1), n u to first order.
  const double u = unit_roundoff(f.a);
  const double sum = static_cast<double>(f.terms + 3) * u * f.magnitude;
  if (bound == Bound::offset_weight) {
    const double e = static_cast<double>(f.terms + 4) * u;
    return e / (1 - e) * f.offset_magnitude;
  }
  // A subnormal value of a is lost, below 2^-126 times an integer up to 128, and up to three such sums a term.
  if (bound == Bound::flushed_sum) return sum + 0x1p-118 * static_cast<double>(f.terms) * f.max_scale;
  const bool f16 = f.a == DType::f16;
  if (bound == Bound::sum || (!f16 && f.a != DType::bf16)) return sum;
  if (bound == Bound::rounded_weight && !f.several_scales) return sum;
  // The scale and the product are rounded once each: 2 u + u^2, u = 2^-11 or 2^-8.
  const double rounded = (f16 ? 0x1p-10 + 0x1p-22 : 0x1p-7 + 0x1p-16) * f.magnitude;
  if (bound == Bound::rounded_weight) {
    // In f16 the scales of a row are taken relative to one of them, which is put into [2^5, 2^6): what falls below the
    // normal numbers is off by at most 2^-25, 15 times for a scale and once for a product, 2^-26 of the largest scale
    // together. bf16 has f32's range, and a tensor core may take what is subnormal for zero.
    return sum + rounded + (f16 ? 0x1p-26 * f.max_scale : 0x1p-125) * f.a_magnitude;
  }
  // In f16 the largest scale is put at the top of what f16 holds, into [256, 512), and what then falls below the normal
  // numbers is off by at most 2^-15 of it. bf16: at most 2^-116 of the largest scale a term, and 2^-118 times a.
  const double reach = f.max_scale * f.a_magnitude;
  if (f16) return sum + rounded + 0x1p-15 * reach;
  return sum + rounded + 0x1p-116 * f.max_scale * static_cast<double>(f.terms) + 0x1p-118 * reach;
}

std::string in_words(Bound bound, const BoundText& t) {
  if (bound == Bound::exact) return "exact";
  const std::string end = message(", and one rounding to ", t.y);
  const char* const u = t.a == DType::f64 ? "2^-53" : "2^-24";
  if (bound == Bound::offset_weight) {
    return message("e / (1 - e) * the sum of |x s| (q + 24 + |24 + z|) with e = (", t.terms, " + 4) * ", u, end,
                   "; where X is infinite, NaN");
  }
  std::string text = message("(", t.terms, " + 3) * ", u, " * the sum of the terms' magnitudes", end);
  if (bound == Bound::flushed_sum) return message(text, "; and 2^-118 * ", t.terms, " * the row's largest scale");
  const bool f16 = t.a == DType::f16;
  if (bound == Bound::sum || (!f16 && t.a != DType::bf16)) return text;
  if (bound == Bound::rounded_weight && !t.several_scales) return text;
  text += f16 ? "; and (2^-10 + 2^-22) * that sum" : "; and (2^-7 + 2^-16) * that sum";
  if (bound == Bound::rounded_weight) {
    if (f16) text += " and 2^-26 * the row's largest scale * sum |x|";
    return text + message(", since (q - z) * s is rounded to ", t.a);
  }
  if (f16) text += message(" and 2^-15 * the largest scale * the sum of |dY|");
  return text + message(", since an integer times its scale is rounded to ", t.a);
}

}  // namespace octile
