#include "octile/tile/recorder.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <typeinfo>

namespace octile::tile {

namespace {
std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
constexpr int kSector = 32;  // bytes: what a GPU's memory moves at least
}  // namespace

Recorder::Recorder(std::string kernel, Grid grid, WarpLayout layout, std::int64_t most_records)
    : most_records_(most_records) {
  report_.kernel = std::move(kernel);
  report_.grid = grid;
  report_.layout = layout;
}

Shadow* Recorder::add_tensor(std::string name, DType dtype, int element_bytes, std::vector<std::int64_t> shape,
                             std::uint8_t* written) {
  Shadow& shadow = shadows_.emplace_back();
  shadow.tensor = static_cast<int>(report_.tensors.size());
  shadow.element_bytes = element_bytes;
  shadow.size = 1;
  for (const std::int64_t side : shape) shadow.size *= side;
  const std::size_t n = at(shadow.size);
  if (written == nullptr) shadow.own_written.assign(n, 1);
  shadow.written = written != nullptr ? written : shadow.own_written.data();
  shadow.readers.resize(n);
  shadow.writers.resize(n);
  shadow.stored_at.resize(n);
  shadow.raced.resize(n);
  shadow.sector_used.resize(n * at(element_bytes) / kSector + 1);
  TensorUse& use = report_.tensors.emplace_back();
  use.name = std::move(name);
  use.dtype = dtype;
  use.element_bytes = element_bytes;
  use.shape = std::move(shape);
  use.size = shadow.size;
  for (std::int64_t k = 0; k < shadow.size; ++k) {
    if (shadow.written[k] != 0) continue;
    if (use.unwritten.empty() || use.unwritten.back()[1] != k) use.unwritten.push_back({k, k});
    use.unwritten.back()[1] = k + 1;
  }
  return &shadow;
}

void Recorder::begin_program(std::int64_t number) {
  me_ = static_cast<std::uint32_t>(number + 1);
  epoch_ = next_store_;
  operation_ = 0;
}

int Recorder::site_of(const AccessTile& access) {
  for (std::size_t i = 0; i < report_.sites.size(); ++i) {
    const Site& site = report_.sites[i];
    if (site.line == access.where.line && site.column == access.where.column && site.access == access.access &&
        site.tensor == access.shadow->tensor && site.file == access.where.file) {
      return static_cast<int>(i);
    }
  }
  Site site;
  site.access = access.access;
  site.file = access.where.file;
  site.line = access.where.line;
  site.column = access.where.column;
  site.tensor = access.shadow->tensor;
  report_.sites.push_back(std::move(site));
  return static_cast<int>(report_.sites.size()) - 1;
}

void Recorder::begin(const AccessTile& access) {
  access_ = access;
  site_ = site_of(access);
  active_ = 0;
  runs_.clear();
  boxes_.clear();
  if (access.access == Access::atomic && access.shadow->atomics.first.empty()) {
    access.shadow->atomics.resize(at(access.shadow->size));
  }
  store_ = access.access == Access::load ? 0 : next_store_++;
  ++next_access_;
}

// ---- Races, uninitialized memory, missing barriers ----

// The plain case, without branches, so that it vectorizes: nothing to report for elements k .. k + count - 1.
bool Recorder::load_is_plain(std::size_t k, int count) const {
  const Shadow& s = *access_.shadow;
  if (!s.atomics.first.empty()) return false;
  unsigned bad = 0;
  for (std::size_t i = k; i < k + at(count); ++i) {
    const std::uint32_t writer = s.writers.first[i];
    bad |= static_cast<unsigned>(s.written[i] == 0) | static_cast<unsigned>(s.stored_at[i] >= epoch_) |
           static_cast<unsigned>((writer != 0) & (writer != me_));
  }
  return bad == 0;
}

bool Recorder::store_is_plain(std::size_t k, int count) const {
  const Shadow& s = *access_.shadow;
  if (!s.atomics.first.empty()) return false;
  unsigned bad = 0;
  for (std::size_t i = k; i < k + at(count); ++i) {
    const std::uint32_t writer = s.writers.first[i], reader = s.readers.first[i];
    bad |= static_cast<unsigned>(s.stored_at[i] == store_) | static_cast<unsigned>((writer != 0) & (writer != me_)) |
           static_cast<unsigned>((reader != 0) & (reader != me_));
  }
  return bad == 0;
}

namespace {
void use(Shadow::Users& users, std::size_t k, std::size_t count, std::uint32_t me, int site) {
  for (std::size_t i = k; i < k + count; ++i) users.first[i] = users.first[i] == 0 ? me : users.first[i];
  std::fill_n(users.site.begin() + static_cast<std::ptrdiff_t>(k), count, static_cast<std::uint16_t>(site));
}
}  // namespace

bool Recorder::run(const Run& run) {
  Shadow& s = *access_.shadow;
  active_ += run.count;
  runs_.push_back(run);
  touch_sectors(run);
  record(run);
  const std::int64_t last = run.index + run.step * (run.count - 1);
  const bool inside = in_bounds(run.index) && in_bounds(last);
  if (inside && run.step == 1) {
    const std::size_t k = at(run.index), n = at(run.count);
    if (access_.access == Access::load && load_is_plain(k, run.count)) {
      use(s.readers, k, n, me_, site_);
      return true;
    }
    if (access_.access == Access::store && store_is_plain(k, run.count)) {
      use(s.writers, k, n, me_, site_);
      std::fill_n(s.stored_at.begin() + run.index, n, store_);
      std::fill_n(s.written + k, n, std::uint8_t{1});
      return true;
    }
  }
  for (int i = 0; i < run.count; ++i) {
    const std::int64_t index = run.index + run.step * i;
    const int column = run.column + i;
    if (!in_bounds(index)) {
      found(Problem::out_of_bounds, run.plane, run.row, column, index);
    } else if (access_.access == Access::load) {
      visit_load(run, column, at(index));
    } else if (access_.access == Access::store) {
      visit_store(run, column, at(index));
    } else {
      visit_atomic(run, column, at(index));
    }
  }
  return inside;
}

void Recorder::visit_load(const Run& run, int column, std::size_t k) {
  Shadow& s = *access_.shadow;
  const auto index = static_cast<std::int64_t>(k);
  if (s.written[k] == 0) found(Problem::uninitialized, run.plane, run.row, column, index);
  if (s.stored_at[k] >= epoch_) found(Problem::unordered, run.plane, run.row, column, index);
  if (const std::uint32_t writer = s.writers.other_than(k, me_)) {
    race(k, {s.writers.site[k], writer}, {site_, me_}, nullptr, 0);
  }
  if (!s.atomics.first.empty()) {
    if (const std::uint32_t other = s.atomics.other_than(k, me_)) {
      race(k, {s.atomics.site[k], other}, {site_, me_}, nullptr, 0);
    }
  }
  use(s.readers, k, 1, me_, site_);
}

void Recorder::visit_store(const Run& run, int column, std::size_t k) {
  Shadow& s = *access_.shadow;
  if (s.stored_at[k] == store_) {
    found(Problem::same_address, run.plane, run.row, column, static_cast<std::int64_t>(k));
  }
  if (const std::uint32_t writer = s.writers.other_than(k, me_)) {
    race(k, {site_, me_}, {s.writers.site[k], writer}, &run, column);
  } else if (const std::uint32_t reader = s.readers.other_than(k, me_)) {
    race(k, {site_, me_}, {s.readers.site[k], reader}, &run, column);
  }
  if (!s.atomics.first.empty()) {
    if (const std::uint32_t other = s.atomics.other_than(k, me_)) {
      race(k, {site_, me_}, {s.atomics.site[k], other}, &run, column);
    }
  }
  use(s.writers, k, 1, me_, site_);
  s.stored_at[k] = store_;
  s.written[k] = 1;
}

// Atomics of several programs on one element are in order; with a plain access of another program they are not.
void Recorder::visit_atomic(const Run& run, int column, std::size_t k) {
  Shadow& s = *access_.shadow;
  if (s.written[k] == 0) {
    found(Problem::uninitialized, run.plane, run.row, column, static_cast<std::int64_t>(k));
    s.written[k] = 1;  // once
  }
  if (const std::uint32_t writer = s.writers.other_than(k, me_)) {
    race(k, {s.writers.site[k], writer}, {site_, me_}, nullptr, 0);
  }
  if (const std::uint32_t reader = s.readers.other_than(k, me_)) {
    race(k, {site_, me_}, {s.readers.site[k], reader}, &run, column);
  }
  use(s.atomics, k, 1, me_, site_);
  s.stored_at[k] = store_;
}

// Blamed on the store, whichever came later in this run, and counted once for an element.
void Recorder::race(std::size_t k, User store, User other, const Run* run, int column) {
  if (access_.shadow->raced[k] != 0) return;
  access_.shadow->raced[k] = 1;
  bool is_new = false;
  Finding& f = finding(Problem::race, store.site, is_new);
  ++f.count;
  if (!is_new) return;
  f.first.program = report_.program(store.program - std::int64_t{1});
  f.first.index = static_cast<std::int64_t>(k);
  if (run != nullptr) f.first.lane = {run->plane, run->row, column};
  f.first.other_site = other.site;
  f.first.other_program = report_.program(other.program - std::int64_t{1});
}

Finding& Recorder::finding(Problem problem, int site, bool& is_new) {
  for (Finding& f : report_.findings) {
    if (f.problem == problem && f.site == site) return f;
  }
  is_new = true;
  report_.findings.push_back({problem, site, 0, {}});
  return report_.findings.back();
}

void Recorder::found(Problem problem, int plane, int row, int column, std::int64_t index) {
  bool is_new = false;
  Finding& f = finding(problem, site_, is_new);
  ++f.count;
  if (!is_new) return;
  f.first.program = report_.program(me_ - std::int64_t{1});
  f.first.lane = {plane, row, column};
  f.first.index = index;
}

// ---- Records ----

// A row of runs continues the boxes of the row above; there are seldom more than a few side by side.
constexpr std::size_t kOpenBoxes = 4;

void Recorder::record(const Run& run) {
  const std::size_t open =
      access_.affine ? std::min(boxes_.size(), kOpenBoxes) : std::min<std::size_t>(boxes_.size(), 1);
  for (std::size_t i = boxes_.size(); i-- > boxes_.size() - open;) {
    Box& box = boxes_[i];
    Record& r = box.record;
    if (access_.affine) {
      if (run.plane == box.plane && run.row == box.row + r.rows && run.column == box.column && run.count == r.columns) {
        ++r.rows;
        return;
      }
    } else if (run.plane == box.plane && run.row == box.row && run.column == box.column + r.columns &&
               (r.columns == 1 || run.index == r.base + r.columns * r.column_stride)) {
      r.column_stride = run.index - (r.base + (r.columns - 1) * r.column_stride);
      ++r.columns;
      return;
    }
  }
  Record r;
  r.site = site_;
  r.program = static_cast<std::int32_t>(me_ - 1);
  r.operation = operation_;
  r.columns = run.count;
  r.base = run.index;
  r.plane_stride = access_.plane_stride;
  r.row_stride = access_.row_stride;
  r.column_stride = run.step;
  boxes_.push_back({r, run.plane, run.row, run.column});
}

void Recorder::flush_records() {
  // Planes whose boxes are alike become one box.
  std::size_t kept = 0;
  for (const Box& next : boxes_) {
    bool joined = false;
    for (std::size_t i = kept; access_.affine && !joined && i > 0 && i + kOpenBoxes > kept; --i) {
      Box& box = boxes_[i - 1];
      joined = next.plane == box.plane + box.record.planes && next.row == box.row && next.column == box.column &&
               next.record.rows == box.record.rows && next.record.columns == box.record.columns;
      if (joined) ++box.record.planes;
    }
    if (!joined) boxes_[kept++] = next;
  }
  boxes_.resize(kept);
  while (static_cast<std::int64_t>(report_.records.size() + boxes_.size()) > most_records_ && halvings_ < 31) {
    ++halvings_;
    const std::size_t before = report_.records.size();
    std::erase_if(report_.records, [&](const Record& r) { return !is_sampled(r.program); });
    report_.records_left_out += static_cast<std::int64_t>(before - report_.records.size());
  }
  for (const Box& box : boxes_) {
    if (is_sampled(box.record.program) && static_cast<std::int64_t>(report_.records.size()) < most_records_) {
      report_.records.push_back(box.record);
    } else {
      ++report_.records_left_out;
    }
  }
}

// Half of the programs, a quarter ..., all over the grid, whatever its sides are; program 0 always.
bool Recorder::is_sampled(std::int32_t program) const {
  return static_cast<std::uint32_t>(program) * 2654435769u <= 0xFFFFFFFFu >> halvings_;
}

// ---- The end of an access, and of the launch ----

void Recorder::end() {
  Site& site = report_.sites[at(site_)];
  const std::int64_t lanes = std::int64_t{access_.planes} * access_.rows * access_.columns;
  ++site.calls;
  site.lanes += lanes;
  site.active += active_;
  site.bytes += active_ * access_.shadow->element_bytes;
  flush_records();
  count_requests(active_ == lanes);
  ++operation_;
}

Report Recorder::finish() {
  for (const Shadow& s : shadows_) {
    TensorUse& use = report_.tensors[at(s.tensor)];
    for (std::size_t k = 0; k < at(s.size); ++k) {
      use.never_written += s.written[k] == 0 ? 1 : 0;
      const bool atomic = !s.atomics.first.empty() && s.atomics.first[k] != 0;
      use.elements_read += s.readers.first[k] != 0 || atomic ? 1 : 0;
      use.elements_written += s.writers.first[k] != 0 || atomic ? 1 : 0;
    }
  }
  return std::move(report_);
}

std::string type_name(const std::type_info& type) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string result = status == 0 ? demangled : type.name();
  std::free(demangled);
  const std::size_t colon = result.rfind("::");
  return colon == std::string::npos ? result : result.substr(colon + 2);
}

std::string text(const Report& report, const Finding& finding) {
  const auto place = [&](const Site& site) {
    return site.file.substr(site.file.rfind('/') + 1) + ":" + std::to_string(site.line);
  };
  const auto triple = [](const std::array<int, 3>& v, const char* open, const char* close) {
    return open + std::to_string(v[0]) + "," + std::to_string(v[1]) + "," + std::to_string(v[2]) + close;
  };
  const Site& site = report.sites[at(finding.site)];
  const TensorUse& tensor = report.tensors[at(site.tensor)];
  const Instance& first = finding.first;
  std::string result = place(site) + ":" + std::to_string(site.column) + ": " + name(site.access) + " " + tensor.name +
                       ": " + name(finding.problem) + ", " + std::to_string(finding.count) +
                       (finding.problem == Problem::race ? " element" : " lane") + (finding.count == 1 ? "" : "s") +
                       "; first: program " + triple(first.program, "(", ")");
  if (first.lane[0] >= 0) result += ", lane " + triple(first.lane, "[", "]");
  result += ", " + tensor.name + "[" + std::to_string(first.index) + "] of " + std::to_string(tensor.size);
  if (first.other_site >= 0) {
    const Site& other = report.sites[at(first.other_site)];
    result += "; also " + std::string(name(other.access)) + " at " + place(other) + ", program " +
              triple(first.other_program, "(", ")");
  }
  return result;
}

}  // namespace octile::tile
