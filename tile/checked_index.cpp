#include "octile/tile/checked_index.h"

#include <algorithm>
#include <set>

namespace octile::tile {

namespace {

thread_local std::set<LaneSet> sets;

template <class Has>
const LaneSet* kept(int planes, int rows, int columns, Has has) {
  LaneSet set{planes, rows, columns, {}};
  for (int p = 0; p < planes; ++p) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) set.lanes.push_back(has(p, r, c));
    }
  }
  return &*sets.insert(std::move(set)).first;
}

}  // namespace

void CheckedOverflow::forget() { sets.clear(); }

const LaneSet* CheckedOverflow::either(const LaneSet& a, const LaneSet& b) {
  return kept(std::max(a.planes, b.planes), std::max(a.rows, b.rows), std::max(a.columns, b.columns),
              [&](int p, int r, int c) { return a.has(p, r, c) || b.has(p, r, c); });
}

const LaneSet* CheckedOverflow::as_column(const LaneSet& a) {
  return kept(a.rows, a.columns, 1, [&](int p, int r, int) { return a.has(0, p, r); });
}

const LaneSet* CheckedOverflow::outside(std::array<int, 3> sides, std::array<s64, 4> index) {
  return kept(sides[0], sides[1], sides[2], [&](int p, int r, int c) {
    const auto [base, plane, row, column] = index;
    const s64 value = base + plane * p + row * r + column * c;
    return value < INT32_MIN || value > INT32_MAX;
  });
}

}  // namespace octile::tile
