#include "octile/tile/recorder.h"

#include <cxxabi.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <typeinfo>

namespace octile::tile {

namespace {
std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
constexpr int kSector = 32;      // bytes: the minimum transfer of GPU memory
constexpr int kAlignment = 256;  // of memory on a GPU
}  // namespace

Recorder::Recorder(std::string kernel, Grid grid, WarpLayout layout, std::int64_t max_records, std::int64_t max_steps)
    : max_records_(max_records), max_steps_(max_steps) {
  report_.kernel = std::move(kernel);
  report_.grid = grid;
  report_.layout = layout;
}

Shadow* Recorder::add_tensor(TensorUse added, const void* data, std::uint8_t* written) {
  for (const std::int64_t side : added.shape) added.size *= side;
  const auto begin = reinterpret_cast<std::uintptr_t>(data), end = begin + at(added.size * added.element_bytes);
  for (Shadow& other : shadows_) {
    const auto start = reinterpret_cast<std::uintptr_t>(other.data),
               last = start + at(other.size * other.element_bytes);
    if (begin >= last || start >= end) continue;
    if (begin == start && end == last && other.element_bytes == added.element_bytes) return &other;
    throw std::invalid_argument("octile: " + report_.tensors[at(other.tensor)].name + " and " + added.name +
                                " share a part of their memory; a kernel's tensors are the same or apart.");
  }
  Shadow& shadow = shadows_.emplace_back();
  shadow.tensor = static_cast<int>(report_.tensors.size());
  shadow.data = data;
  shadow.shift = static_cast<std::int64_t>(begin % kAlignment) / added.element_bytes;
  shadow.element_bytes = added.element_bytes;
  shadow.size = added.size;
  const std::size_t n = at(shadow.size);
  if (written == nullptr) shadow.own_written.assign(n, 1);
  shadow.written = written != nullptr ? written : shadow.own_written.data();
  shadow.readers.resize(n);
  shadow.writers.resize(n);
  shadow.stored_at.resize(n);
  shadow.stored_lane.resize(n);
  shadow.read_at.resize(n);
  shadow.read_lane.resize(n);
  shadow.raced.resize(n);
  shadow.sector_used.resize((n + at(shadow.shift)) * at(added.element_bytes) / kSector + 1);
  TensorUse& use = report_.tensors.emplace_back(std::move(added));
  for (std::int64_t k = 0; k < shadow.size; ++k) {
    if (shadow.written[k] != 0) continue;
    if (use.unwritten.empty() || use.unwritten.back()[1] != k) use.unwritten.push_back({k, k});
    use.unwritten.back()[1] = k + 1;
  }
  return &shadow;
}

void Recorder::begin_program(std::int64_t number) {
  me_ = static_cast<std::uint32_t>(number + 1);
  barrier();
  operation_ = 0;
  Progress& now = progress();
  now.program = report_.program(number);
  now.steps = 0;
  now.program_runs = true;
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
  site.masked = access.masked;
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
  shape_tag_ = static_cast<std::uint32_t>(std::countr_zero(static_cast<unsigned>(access.rows)) * 32 +
                                          std::countr_zero(static_cast<unsigned>(access.columns)))
               << 22;
  ++next_access_;
  note_progress();
  if (max_steps_ == 0 || progress().steps <= max_steps_) return;
  bool is_new = false;
  Finding& endless = finding(Problem::endless, site_, is_new);
  endless.count = max_steps_;
  endless.first.program = progress().program;
  throw Endless{};
}

void Recorder::note_progress() {
  Progress& now = progress();
  if (now.steps++ == 0 || noted_site_ != site_) {
    const Site& site = report_.sites[at(site_)];
    noted_site_ = site_;
    now.access = site.access;
    now.line = site.line;
    now.column = site.column;
    put(now.file, site.file);
    put(now.tensor, report_.tensors[at(site.tensor)].name);
  }
}

// ---- Races, uninitialized memory, missing barriers ----

// The plain case, without branches, so that it vectorizes: nothing to report for elements k .. k + count - 1.
bool Recorder::load_is_plain(std::size_t k, int count) const {
  const Shadow& s = *access_.shadow;
  if (!s.atomics.first.empty()) return false;
  unsigned bad = 0;
  for (std::size_t i = k; i < k + at(count); ++i) {
    const std::uint32_t writer = s.writers.first[i];
    bad |= static_cast<unsigned>(s.written[i] == 0) | static_cast<unsigned>(s.stored_at[i] >= loads_since_) |
           static_cast<unsigned>((writer != 0) & (writer != me_));
  }
  return bad == 0;
}

bool Recorder::store_is_plain(std::size_t k, int count, std::uint32_t lane) const {
  const Shadow& s = *access_.shadow;
  if (!s.atomics.first.empty()) return false;
  unsigned bad = 0;
  for (std::size_t i = k; i < k + at(count); ++i, ++lane) {
    const std::uint32_t writer = s.writers.first[i], reader = s.readers.first[i];
    const bool stored = s.stored_at[i] >= epoch_, stored_elsewhere = s.stored_lane[i] != lane;
    const bool read = s.read_at[i] >= read_epoch_, read_elsewhere = s.read_lane[i] != lane;
    bad |= static_cast<unsigned>(stored & stored_elsewhere) | static_cast<unsigned>(read & read_elsewhere) |
           static_cast<unsigned>(s.stored_at[i] == store_) | static_cast<unsigned>((writer != 0) & (writer != me_)) |
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

// A lane keeps its thread from one tile to the next of the same shape; of different shapes nothing is known.
std::uint32_t Recorder::lane_of(int plane, int row, int column) const {
  const auto lane = static_cast<std::uint32_t>((plane * access_.rows + row) * access_.columns + column);
  return lane | shape_tag_;
}

void Recorder::read_by(std::size_t k, std::size_t count, std::uint32_t lane) {
  if (fetching_) return;
  // Locals, which no store through these pointers can change, so that it vectorizes.
  std::uint32_t* const at = access_.shadow->read_at.data() + k;
  std::uint32_t* const lanes = access_.shadow->read_lane.data() + k;
  const std::uint32_t epoch = read_epoch_, now = next_access_;
  for (std::uint32_t i = 0; i < count; ++i) {
    const bool another = (at[i] >= epoch) & (lanes[i] != lane + i);
    lanes[i] = another ? Shadow::kManyLanes : lane + i;
    at[i] = now;
  }
}

// The access of another lane of this program since its last barrier that this store may overtake, or -1.
int Recorder::unordered_with(std::size_t k, std::uint32_t lane) const {
  const Shadow& s = *access_.shadow;
  if (s.stored_at[k] >= epoch_ && s.stored_lane[k] != lane) return last_store_site(k);
  if (s.read_at[k] >= read_epoch_ && s.read_lane[k] != lane) return s.readers.site[k];
  return -1;
}

int Recorder::last_store_site(std::size_t k) const {
  const Shadow& s = *access_.shadow;
  return s.stored_lane[k] == Shadow::kAtomicLane ? s.atomics.site[k] : s.writers.site[k];
}

bool Recorder::run(const Run& run) {
  Shadow& s = *access_.shadow;
  active_ += run.count;
  runs_.push_back(run);
  touch_sectors(run);
  record(run);
  const std::int64_t last = run.index + run.step * (run.count - 1);
  const bool inside = in_bounds(run.index) && in_bounds(last);
  const std::uint32_t lane = lane_of(run.plane, run.row, run.column);
  if (inside && run.step == 1) {
    const std::size_t k = at(run.index), n = at(run.count);
    if (access_.access == Access::load && load_is_plain(k, run.count)) {
      use(s.readers, k, n, me_, site_);
      read_by(k, n, lane);
      return true;
    }
    if (access_.access == Access::store && store_is_plain(k, run.count, lane)) {
      use(s.writers, k, n, me_, site_);
      std::fill_n(s.stored_at.begin() + run.index, n, store_);
      std::iota(s.stored_lane.begin() + run.index, s.stored_lane.begin() + run.index + run.count, lane);
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
  if (s.stored_at[k] >= loads_since_) {
    found(Problem::unordered, run.plane, run.row, column, index, last_store_site(k));
  }
  race_after(s.writers, k);
  race_after(s.atomics, k);
  use(s.readers, k, 1, me_, site_);
  read_by(k, 1, lane_of(run.plane, run.row, column));
}

void Recorder::visit_store(const Run& run, int column, std::size_t k) {
  Shadow& s = *access_.shadow;
  const auto index = static_cast<std::int64_t>(k);
  const std::uint32_t lane = lane_of(run.plane, run.row, column);
  if (s.stored_at[k] == store_) {
    found(Problem::same_address, run.plane, run.row, column, index);
  } else if (const int other = unordered_with(k, lane); other >= 0) {
    found(Problem::unordered, run.plane, run.row, column, index, other);
  }
  if (!race_with(s.writers, k, run, column)) race_with(s.readers, k, run, column);
  race_with(s.atomics, k, run, column);
  use(s.writers, k, 1, me_, site_);
  s.stored_at[k] = store_;
  s.stored_lane[k] = lane;
  s.written[k] = 1;
}

// Atomics of several programs on one element are in order; with a plain access of another program they are not.
void Recorder::visit_atomic(const Run& run, int column, std::size_t k) {
  Shadow& s = *access_.shadow;
  if (s.written[k] == 0) {
    found(Problem::uninitialized, run.plane, run.row, column, static_cast<std::int64_t>(k));
    s.written[k] = 1;  // once
  }
  if (s.stored_lane[k] != Shadow::kAtomicLane || s.stored_at[k] < epoch_) {
    const int other = unordered_with(k, lane_of(run.plane, run.row, column));
    if (other >= 0) found(Problem::unordered, run.plane, run.row, column, static_cast<std::int64_t>(k), other);
  }
  race_after(s.writers, k);
  race_with(s.readers, k, run, column);
  use(s.atomics, k, 1, me_, site_);
  s.stored_at[k] = store_;
  s.stored_lane[k] = Shadow::kAtomicLane;
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

// This access, after the stores of another program.
void Recorder::race_after(const Shadow::Users& stores, std::size_t k) {
  if (const std::uint32_t other = stores.other_than(k, me_)) {
    race(k, {stores.site[k], other}, {site_, me_}, nullptr, 0);
  }
}

// This store, and what another program has done. Whether there is one.
bool Recorder::race_with(const Shadow::Users& users, std::size_t k, const Run& run, int column) {
  const std::uint32_t other = users.other_than(k, me_);
  if (other != 0) race(k, {site_, me_}, {users.site[k], other}, &run, column);
  return other != 0;
}

Finding& Recorder::finding(Problem problem, int site, bool& is_new) {
  for (Finding& f : report_.findings) {
    if (f.problem == problem && f.site == site) return f;
  }
  is_new = true;
  report_.findings.push_back({problem, site, 0, {}});
  return report_.findings.back();
}

void Recorder::found(Problem problem, int plane, int row, int column, std::int64_t index, int other_site) {
  bool is_new = false;
  Finding& f = finding(problem, site_, is_new);
  ++f.count;
  if (!is_new) return;
  f.first.program = report_.program(me_ - std::int64_t{1});
  f.first.lane = {plane, row, column};
  f.first.index = index;
  f.first.other_site = other_site;
  if (other_site >= 0) f.first.other_program = f.first.program;
}

void Recorder::undefined(Problem problem, Origin origin, int plane, int row, int column, std::int64_t index) {
  if (origin == kOverflow) return found(Problem::overflow, plane, row, column, index);
  const bool is_load = origin != kDivision && origin != kShift;
  found(problem, plane, row, column, index, is_load ? origin - 1 : -1);
  if (is_load) return;
  bool is_new = false;
  Finding& f = finding(problem, site_, is_new);
  if (f.count == 1) f.first.cause = origin == kDivision ? Cause::division : Cause::shift;
}

// ---- Records ----

// The runs of a row extend the records of the row above; there are seldom more than a few side by side.
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
  // Planes with equal records share one record.
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
  while (static_cast<std::int64_t>(report_.records.size() + boxes_.size()) > max_records_ && halvings_ < 31) {
    ++halvings_;
    const std::size_t before = report_.records.size();
    std::erase_if(report_.records, [&](const Record& r) { return !is_sampled(r.program); });
    report_.records_left_out += static_cast<std::int64_t>(before - report_.records.size());
  }
  for (const Box& box : boxes_) {
    if (is_sampled(box.record.program) && static_cast<std::int64_t>(report_.records.size()) < max_records_) {
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
  progress().program_runs = false;  // kept when an exception ends the launch, for its handler
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

namespace {
Progress own_progress;
Progress* progress_now = &own_progress;
}  // namespace

Progress& progress() { return *progress_now; }
void put_progress(Progress& where) { progress_now = &where; }

std::string text(const Progress& progress) {
  std::string result = progress.doing;
  if (!progress.program_runs) return result;
  const auto [x, y, z] = progress.program;
  result += ", program (" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
  if (progress.steps == 0) return result + ", before it used any memory";
  const std::string file = progress.file;
  return result + ", after " + std::to_string(progress.steps) + (progress.steps == 1 ? " access: " : " accesses: ") +
         name(progress.access) + " " + progress.tensor + " at " + file.substr(file.rfind('/') + 1) + ":" +
         std::to_string(progress.line) + ":" + std::to_string(progress.column);
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
                       ": " + name(finding.problem) + ", " + std::to_string(finding.count) + " " +
                       unit(finding.problem) + (finding.count == 1 ? "" : "s") + "; first: program " +
                       triple(first.program, "(", ")");
  if (finding.problem == Problem::endless) return result;
  if (first.lane[0] >= 0) result += ", lane " + triple(first.lane, "[", "]");
  result += ", " + tensor.name + "[" + std::to_string(first.index) + "] of " + std::to_string(tensor.size);
  if (first.cause != Cause::none) {
    result += first.cause == Cause::division ? "; from a division by 0" : "; from a shift by too many bits";
  } else if (first.other_site >= 0) {
    const Site& other = report.sites[at(first.other_site)];
    if (Report::has_origin(finding)) {
      return result + "; from " + name(other.access) + " " + report.tensors[at(other.tensor)].name + " at " +
             place(other);
    }
    result += "; also " + std::string(name(other.access)) + " at " + place(other) + ", program " +
              triple(first.other_program, "(", ")");
  }
  return result;
}

}  // namespace octile::tile
