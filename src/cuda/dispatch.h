// From values known at run time to template arguments.
#pragma once

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

}  // namespace octile::cuda
