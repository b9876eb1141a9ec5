// From values known at run time to template arguments.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/forms.h"

namespace octile::cuda {

// Calls body.operator()<flag...>(), and returns what it does.
template <bool... known, class Body>
auto with_flags(const Body& body) {
  return body.template operator()<known...>();
}
template <bool... known, class Body, class... Flags>
auto with_flags(const Body& body, bool flag, Flags... rest) {
  return flag ? with_flags<known..., true>(body, rest...) : with_flags<known..., false>(body, rest...);
}

// for_each(visit) calls visit with every candidate, a form, each of its own type. Calls body(candidate, seconds) for
// the first of those whose seconds(candidate) are the fewest.
template <class ForEach, class Seconds, class Body>
void with_cheapest(const ForEach& for_each, const Seconds& seconds, const Body& body) {
  double least = std::numeric_limits<double>::infinity();
  int number = 0;
  for_each([&](const auto& candidate) { least = std::min(least, ranked(seconds(candidate), number++)); });
  bool done = false;
  number = 0;
  for_each([&](const auto& candidate) {
    const double its = seconds(candidate);
    if (ranked(its, number++) > least || done) return;
    done = true;
    body(candidate, its);
  });
}

}  // namespace octile::cuda
