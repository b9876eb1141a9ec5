// From values known at run time to template arguments.
#pragma once

namespace octile::cuda {

// Calls body.operator()<flag...>().
template <bool... known, class Body>
void with_flags(const Body& body) {
  body.template operator()<known...>();
}
template <bool... known, class Body, class... Flags>
void with_flags(const Body& body, bool flag, Flags... rest) {
  flag ? with_flags<known..., true>(body, rest...) : with_flags<known..., false>(body, rest...);
}

}  // namespace octile::cuda
