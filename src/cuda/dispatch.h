// From values known at run time to template arguments.
#pragma once

#include <algorithm>
#include <limits>

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

// for_each(visit) calls visit with every candidate, each of its own type. Calls body(candidate, seconds) for the first
// of those whose seconds(candidate) are the fewest.
template <class ForEach, class Seconds, class Body>
void with_cheapest(const ForEach& for_each, const Seconds& seconds, const Body& body) {
  double least = std::numeric_limits<double>::infinity();
  for_each([&](const auto& candidate) { least = std::min(least, seconds(candidate)); });
  bool done = false;
  for_each([&](const auto& candidate) {
    if (done || seconds(candidate) > least) return;
    done = true;
    body(candidate, least);
  });
}

}  // namespace octile::cuda
