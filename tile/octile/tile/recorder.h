// The observers of the checked executor: shadow memory, races, coalescing and records. They see addresses, not values.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "octile/tile/platform.h"
#include "octile/tile/progress.h"
#include "octile/tile/report.h"

namespace octile::tile {

// What is known of each element of one tensor during one launch. Programs are numbered from 1; 0 is none. They run one
// after the other, so an element that `me` uses now was used by another program exactly if its first user is another
// one.
struct Shadow {
  static constexpr std::uint32_t kManyLanes = 0xFFFFFFFFu, kAtomicLane = 0xFFFFFFFEu;

  struct Users {
    std::vector<std::uint32_t> first;
    std::vector<std::uint16_t> site;  // of the last use
    void resize(std::size_t n) {
      first.resize(n);
      site.resize(n);
    }
    std::uint32_t other_than(std::size_t k, std::uint32_t me) const {
      return first.empty() || first[k] == me ? 0 : first[k];
    }
  };

  int tensor = 0;
  const void* data = nullptr;
  std::int64_t shift = 0;  // elements between a multiple of 256 bytes and the first one
  std::int64_t size = 0;
  int element_bytes = 4;
  std::uint8_t* written = nullptr;
  std::vector<std::uint8_t> own_written;   // if the tensor has none
  Users readers, writers, atomics;         // atomics: empty until there is one
  std::vector<std::uint32_t> stored_at;    // number of the store that wrote it last
  std::vector<std::uint32_t> stored_lane;  // the lane that did, or kAtomicLane
  std::vector<std::uint32_t> read_at;      // number of the access that read it last
  std::vector<std::uint32_t> read_lane;    // the lane that did, or kManyLanes since the program's last barrier
  std::vector<std::uint32_t> sector_used;  // per sector, number of the access that touched it last
  std::vector<std::uint8_t> raced;
};

// Why a lane is undefined: 1 + the site of the load that masked it off, or one of these.
using Origin = std::uint16_t;
inline constexpr Origin kDefined = 0, kOverflow = 0xFFFF, kDivision = 0xFFFE, kShift = 0xFFFD;

// Lanes (plane, row, column ... column + count - 1) of an access, at elements index, index + step, ...
struct Run {
  int plane = 0, row = 0, column = 0, count = 0;
  std::int64_t index = 0, step = 1;
};

// A tile access, as far as it is known before its lanes are visited.
struct AccessTile {
  Access access = Access::load;
  Shadow* shadow = nullptr;
  int planes = 1, rows = 1, columns = 1;
  bool masked = false;
  bool affine = false;
  bool unit = false;  // affine, and neighbours in a row are neighbours in memory
  std::int64_t base = 0, plane_stride = 0, row_stride = 0, column_stride = 0;
  Where where;
};

class Recorder {
 public:
  Recorder(std::string kernel, Grid grid, WarpLayout layout, std::int64_t max_records, std::int64_t max_steps);
  struct Endless {};  // thrown by begin() when a program makes more than max_steps accesses; the finding is made

  // Two arguments that are the same memory are one tensor, under the first name. Throws std::invalid_argument if they
  // share a part of it only.
  Shadow* add_tensor(TensorUse use, const void* data, std::uint8_t* written);

  void begin_program(std::int64_t number);
  void barrier() {
    epoch_ = loads_since_ = next_store_;
    read_epoch_ = next_access_ + 1;
  }

  // The loads of a pipeline run ahead of its bodies: no barrier in a body comes between them and a body's stores. What
  // they read themselves has arrived before the next body.
  std::uint32_t epoch() const { return epoch_; }
  void begin_fetch(std::uint32_t pipeline_epoch) {
    loads_since_ = pipeline_epoch;
    fetching_ = true;
  }
  void end_fetch() {
    loads_since_ = epoch_;
    fetching_ = false;
  }
  // For a call whose result is discarded.
  void mute(bool muted) { muted_ = muted; }
  bool muted() const { return muted_; }

  // One tile access: begin, its runs (rows in order), end.
  void begin(const AccessTile& access);
  // True if all lanes are in bounds and may be copied; if not, the caller asks in_bounds() of each.
  bool run(const Run& run);
  bool in_bounds(std::int64_t index) const { return index >= 0 && index < access_.shadow->size; }
  void found(Problem problem, int plane, int row, int column, std::int64_t index, int other_site = -1);
  void undefined(Problem problem, Origin origin, int plane, int row, int column, std::int64_t index);
  Origin origin() const { return static_cast<Origin>(site_ + 1); }  // of what the access under way leaves out
  void end();

  void add_flops(std::int64_t flops) { report_.flops += flops; }
  Report finish();

 private:
  struct User {
    int site;
    std::uint32_t program;
  };
  struct Box {
    Record record;
    int plane, row, column;  // of its first lane
  };
  struct Requests {
    std::int64_t requests = 0, sectors = 0, bytes = 0;
    bool misaligned = false, scalar = false;
  };
  struct KnownRequests {
    int site;
    std::array<int, 3> sides;
    std::int64_t plane_stride, row_stride, column_stride, phase;
    Requests requests;
  };

  int site_of(const AccessTile& access);
  void note_progress();
  std::uint32_t lane_of(int plane, int row, int column) const;
  bool load_is_plain(std::size_t k, int count) const;
  bool store_is_plain(std::size_t k, int count, std::uint32_t lane) const;
  void read_by(std::size_t k, std::size_t count, std::uint32_t lane);
  int unordered_with(std::size_t k, std::uint32_t lane) const;
  int last_store_site(std::size_t k) const;
  void visit_load(const Run& run, int column, std::size_t k);
  void visit_store(const Run& run, int column, std::size_t k);
  void visit_atomic(const Run& run, int column, std::size_t k);
  void race(std::size_t k, User store, User other, const Run* run, int column);
  void race_after(const Shadow::Users& stores, std::size_t k);
  bool race_with(const Shadow::Users& users, std::size_t k, const Run& run, int column);
  Finding& finding(Problem problem, int site, bool& is_new);
  void record(const Run& run);
  void flush_records();
  bool is_sampled(std::int32_t program) const;
  void touch_sectors(const Run& run);
  void count_requests(bool full);
  Requests requests_of_runs(bool full);

  Report report_;
  std::int64_t max_records_, max_steps_;
  int halvings_ = 0;  // of the programs whose records are kept
  std::deque<Shadow> shadows_;
  std::uint32_t me_ = 0;                      // the program, from 1
  std::uint32_t next_store_ = 1, epoch_ = 1;  // stores from epoch_ on are of this program, since its last barrier
  std::uint32_t loads_since_ = 1;             // epoch_, or the one that a pipeline began in
  std::uint32_t next_access_ = 0, read_epoch_ = 1;
  bool fetching_ = false, muted_ = false;
  std::int32_t operation_ = 0;

  // Of the access under way.
  AccessTile access_;
  int site_ = 0, noted_site_ = -1;
  std::uint32_t store_ = 0, shape_tag_ = 0;
  std::int64_t active_ = 0;
  std::vector<Run> runs_;
  std::vector<Box> boxes_;
  std::vector<std::int64_t> lanes_;
  std::vector<KnownRequests> known_requests_;
};

}  // namespace octile::tile
