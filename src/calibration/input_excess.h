// How far unseen rows exceed the calibrated maxima: the cost of clamping to a static scale.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/powers.h"

namespace octile {

// For one row more than were calibrated, averaged over its channels j.
struct InputExcess {
  double probability = 0;  // that |x_j| > max_j
  double square = 0;       // E max(|x_j| / max_j - 1, 0)^2
};

// From the number of independent rows alone. One more row is the largest with a probability of 1 / (rows + 1); the
// maximum of an exponential tail of mean 1 is about ln(rows) + 0.58.
inline InputExcess modelled_excess(std::int64_t rows) {
  const double probability = 1 / (static_cast<double>(rows) + 1);
  const double max = log2_of(static_cast<double>(rows)) * 0.69314718055994531 + 0.57721566490153286;
  return {probability, 2 * probability / (max * max)};
}

// E max(|x| - limit, 0)^2 of a channel with this max, clamped at limit >= max: the tail beyond max is exponential.
inline double expected_clipping(const InputExcess& excess, double max, double limit) {
  if (!(excess.square > 0 && max > 0)) return 0;
  const double beyond = limit / max - 1;
  if (!(beyond > 0)) return max * max * excess.square;
  const double mean = std::sqrt(excess.square / (2 * excess.probability));  // of an exponential tail
  const double halvings = std::min(beyond / mean * 1.4426950408889634, 1000.0);
  return max * max * excess.square * exp2_of(-halvings);
}

}  // namespace octile
