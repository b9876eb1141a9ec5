// How many 32-byte sectors an access touches: in all, and as a GPU's warps would request them.
#include <algorithm>

#include "octile/tile/recorder.h"

namespace octile::tile {

namespace {

constexpr int kSector = 32, kWarp = 32, kVectorBytes = 16;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
std::int64_t sector_of(std::int64_t byte) { return byte >> 5; }  // rounds down below 0 too

}  // namespace

void Recorder::touch_sectors(const Run& run) {
  Shadow& s = *access_.shadow;
  const std::int64_t bytes = s.element_bytes;
  std::int64_t fresh = 0;
  const auto touch = [&](std::int64_t sector) {
    std::uint32_t& used = s.sector_used[at(sector)];
    fresh += used != next_access_ ? 1 : 0;
    used = next_access_;
  };
  if (run.step == 1) {  // of the lanes in bounds
    const std::int64_t first = std::max<std::int64_t>(run.index, 0), last = std::min(run.index + run.count, s.size) - 1;
    const std::int64_t end = sector_of((last + s.shift) * bytes);
    for (std::int64_t k = sector_of((first + s.shift) * bytes); first <= last && k <= end; ++k) touch(k);
  } else {
    for (int i = 0; i < run.count; ++i) {
      const std::int64_t index = run.index + run.step * i;
      if (in_bounds(index)) touch(sector_of((index + s.shift) * bytes));
    }
  }
  report_.sites[at(site_)].sectors += fresh;
}

void Recorder::count_requests(bool full) {
  const std::int64_t bytes = access_.shadow->element_bytes;
  const std::int64_t phase = (access_.base + access_.shadow->shift) * bytes & (kSector - 1);
  const std::array sides = {access_.planes, access_.rows, access_.columns};
  Requests requests;
  // The same strides from the same place in a sector give the same requests.
  const auto known = std::find_if(known_requests_.begin(), known_requests_.end(), [&](const KnownRequests& k) {
    return k.site == site_ && k.phase == phase && k.sides == sides && k.plane_stride == access_.plane_stride &&
           k.row_stride == access_.row_stride && k.column_stride == access_.column_stride;
  });
  if (full && access_.affine && known != known_requests_.end()) {
    requests = known->requests;
  } else {
    requests = requests_of_runs(full);
    if (full && access_.affine) {
      known_requests_.push_back(
          {site_, sides, access_.plane_stride, access_.row_stride, access_.column_stride, phase, requests});
    }
  }
  Site& site = report_.sites[at(site_)];
  site.requests += requests.requests;
  site.request_sectors += requests.sectors;
  site.request_bytes += requests.bytes;
  site.scalar_calls += requests.scalar ? 1 : 0;
  site.misaligned_calls += requests.misaligned ? 1 : 0;
}

Recorder::Requests Recorder::requests_of_runs(bool full) {
  const int planes = access_.planes, rows = access_.rows, columns = access_.columns;
  const std::int64_t bytes = access_.shadow->element_bytes;
  WarpLayout layout = report_.layout;
  if (layout.rows == 0) layout = rows == 1 ? WarpLayout{1, 128, 4} : WarpLayout{4, 32, 4};
  int vector = std::min({layout.vector, columns, kVectorBytes / static_cast<int>(bytes)});
  const int span = layout.columns * vector;  // columns that one row of threads takes at once

  lanes_.assign(at(std::int64_t{planes} * rows * columns), -1);
  Requests result;
  bool aligned = true;
  for (const Run& run : runs_) {
    aligned = aligned && (run.index + access_.shadow->shift) % vector == 0;
    std::int64_t* const to = lanes_.data() + (std::int64_t{run.plane} * rows + run.row) * columns + run.column;
    for (int i = 0; i < run.count; ++i) to[i] = run.index + run.step * i;
  }
  const bool contiguous = access_.unit && columns > 1;
  const bool whole = contiguous && full && aligned && vector > 1;
  result.scalar = contiguous && vector > 1 && !whole;
  result.misaligned = result.scalar && !aligned && full;

  // One request: the first of `width` neighbouring elements of each thread of a warp.
  const int width = whole ? vector : 1;
  std::int64_t elements[kWarp], sectors[kWarp];
  const auto request = [&](int plane, int first_row, int first_column, int warp, int chunk) {
    int active = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
      const int thread = warp * kWarp + lane;
      const int row = first_row + thread / layout.columns;
      const int column = first_column + thread % layout.columns * vector + chunk;
      if (row >= rows || column >= columns) continue;  // these threads repeat what others do
      const std::int64_t element = lanes_[at((std::int64_t{plane} * rows + row) * columns + column)];
      if (element >= 0) elements[active++] = element;
    }
    if (active == 0) return;
    std::sort(elements, elements + active);
    const std::int64_t different = std::unique(elements, elements + active) - elements;
    for (std::int64_t i = 0; i < different; ++i) sectors[i] = sector_of((elements[i] + access_.shadow->shift) * bytes);
    result.requests += 1;
    result.sectors += std::unique(sectors, sectors + different) - sectors;
    result.bytes += different * width * bytes;
  };
  const int warps = std::max(1, layout.rows * layout.columns / kWarp);
  for (int plane = 0; plane < planes; ++plane) {
    for (int row = 0; row < rows; row += layout.rows) {
      for (int column = 0; column < columns; column += span) {
        for (int chunk = 0; chunk < vector; chunk += width) {
          for (int warp = 0; warp < warps; ++warp) request(plane, row, column, warp, chunk);
        }
      }
    }
  }
  return result;
}

}  // namespace octile::tile
