// What a pipeline fetches, as boxes of tensors that TMA loads. The host runs the kernel for a few of its programs,
// without values, and makes a tensor map of each fetch: the columns and rows that its mask bounds, and a third side for
// whatever else the addresses of its boxes differ by. On the GPU one thread runs the kernel in the same way and asks
// for the boxes.
#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "octile/tile/cuda_hollow.h"
#include "octile/tile/cuda_hopper.h"
#include "octile/tile/cuda_pipeline.h"
#include "octile/tile/cuda_wgmma.h"

#if defined(__CUDACC__)
#include <cuda.h>  // types only
#include <cudaTypedefs.h>
#endif

namespace octile::tile::gpu {

// ---- Masks: `index < n` of columns, of rows, or of the whole tile, joined by & ----

enum class Side : std::uint8_t { columns, rows, whole, other };

template <class M>
TILE_FUNCTION constexpr Side side_of() {
  using S = typename M::Shape;
  if (S::kPlanes > 1 || (S::kRows > 1 && S::kColumns > 1)) return Side::other;
  return S::kColumns > 1 ? Side::columns : S::kRows > 1 ? Side::rows : Side::whole;
}

template <class M>
struct Bounds {
  TILE_FUNCTION static constexpr int count(Side side) { return side == Side::other ? 1 : 0; }
};
template <>
struct Bounds<Everything> {
  TILE_FUNCTION static constexpr int count(Side) { return 0; }
  template <Side kSide, class Visit>
  TILE_FUNCTION static void visit(const Everything&, Visit) {}
};
template <class A>
struct Bounds<Bound<A, Compare::less>> {
  TILE_FUNCTION static constexpr int count(Side side) { return side == side_of<A>(); }
  template <Side kSide, class Visit>
  TILE_FUNCTION static void visit(const Bound<A, Compare::less>& bound, Visit visit) {
    if constexpr (kSide == side_of<A>()) visit(bound.a, bound.n);
  }
};
template <class A, class B>
struct Bounds<BothMasks<A, B>> {
  TILE_FUNCTION static constexpr int count(Side side) { return Bounds<A>::count(side) + Bounds<B>::count(side); }
  template <Side kSide, class Visit>
  TILE_FUNCTION static void visit(const BothMasks<A, B>& mask, Visit visit) {
    Bounds<A>::template visit<kSide>(mask.a, visit);
    Bounds<B>::template visit<kSide>(mask.b, visit);
  }
};

// Whether TMA may load a fetch, as far as its type tells. Others are loaded by those who multiply.
template <class F>
TILE_FUNCTION constexpr bool is_box() {
  using S = FetchedShape<F>;
  using M = std::remove_cvref_t<decltype(F::mask)>;
  using Index = std::remove_cvref_t<decltype(F::pointers.index)>;
  if constexpr (!unit_stride<Index>()) {
    return false;
  } else {
    return S::kPlanes == 1 && (S::kRows == 1 || S::kRows >= 8) &&
           FetchedLayout<F>::kRowBytes >= (S::kRows == 1 ? 128 : 32) && Bounds<M>::count(Side::other) == 0 &&
           Bounds<M>::count(Side::columns) <= 1 && Bounds<M>::count(Side::rows) <= 1;
  }
}

// A box without its map: its first column and row, and its position in the tensor.
struct Corner {
  s64 column = 0, row = 0, rest = 0;  // rest: what they leave of the index
  bool inside = true;
};
template <class F>
TILE_FUNCTION Corner corner_of(const F& fetch) {
  using M = std::remove_cvref_t<decltype(fetch.mask)>;
  const auto& index = fetch.pointers.index;
  Corner at;
  Bounds<M>::template visit<Side::columns>(fetch.mask, [&](const auto& a, auto) { at.column = a.base; });
  Bounds<M>::template visit<Side::rows>(fetch.mask, [&](const auto& a, auto) { at.row = a.base; });
  Bounds<M>::template visit<Side::whole>(fetch.mask,
                                         [&](const auto& a, auto n) { at.inside = at.inside && a.base < n; });
  at.rest = index.base - at.column - at.row * (FetchedShape<F>::kRows > 1 ? s64{index.row} : s64{0});
  return at;
}

// ---- Maps ----

// The tensor that a fetch's boxes are of, as its pointers and its mask tell: what both sides find its map by.
struct Boxed {
  const void* data;
  s64 columns, rows, pitch;  // in elements
  int element, box_columns, box_rows;
  TILE_FUNCTION bool operator==(const Boxed& b) const {
    return data == b.data && columns == b.columns && rows == b.rows && pitch == b.pitch && element == b.element &&
           box_columns == b.box_columns && box_rows == b.box_rows;
  }
};
template <class F>
TILE_FUNCTION Boxed boxed(const F& fetch) {
  using S = FetchedShape<F>;
  using M = std::remove_cvref_t<decltype(fetch.mask)>;
  constexpr int kElement = static_cast<int>(sizeof(FetchedType<F>));
  Boxed found{fetch.pointers.tensor.data,         S::kColumns,           S::kRows, fetch.pointers.index.row, kElement,
              FetchedLayout<F>::kLine / kElement, smaller(S::kRows, 256)};
  Bounds<M>::template visit<Side::columns>(fetch.mask, [&](const auto&, auto n) { found.columns = n; });
  Bounds<M>::template visit<Side::rows>(fetch.mask, [&](const auto&, auto n) { found.rows = n; });
  if constexpr (S::kRows == 1) found.pitch = (found.columns * kElement + 15) / 16 * 16 / kElement;  // of no use
  return found;
}

struct TileMap {
#if defined(__CUDACC__)
  CUtensorMap map;
#endif
  Boxed of;
  s64 step, depth;  // of the third side
  double per_step;  // 1 / step
  s64 origin;       // the element (0, 0, 0)
  unsigned line;    // of a fetch of it, for messages
  bool shared;      // by neighbouring programs along x, which then load half of each box for both
};

inline constexpr int kMaxMaps = 6;
struct Maps {
  TileMap maps[kMaxMaps];
  int count = 0;

  TILE_FUNCTION const TileMap* find(const Boxed& boxed) const {
    for (int i = 0; i < count; ++i) {
      if (maps[i].of == boxed) return maps + i;
    }
    return nullptr;
  }
};

// The fields that locate a box, in registers: a map is in the kernel's parameters, and four loads of it for each box,
// one after the other, took longer than the products of a step.
struct Place3d {
  const TileMap* map = nullptr;
  s64 step = 0, depth = 0, origin = 0;
  double per_step = 0;
  int rows = 0;
  bool shared = false;

  Place3d() = default;
  TILE_FUNCTION explicit Place3d(const TileMap& of)
      : map(&of),
        step(of.step),
        depth(of.depth),
        origin(of.origin),
        per_step(of.per_step),
        rows(static_cast<int>(of.of.rows)),
        shared(of.shared) {}
};

struct Box {
  int column, row, depth;
};
TILE_FUNCTION void stop() {
#if defined(__CUDA_ARCH__)
  __trap();
#elif !defined(__CUDACC__)
  emulation::fail("a pipeline fetches what no program did that the launch looked at");
#endif
}
// The coordinates of a box. A program that fetches from elsewhere than those the host has run is stopped.
template <class F>
TILE_FUNCTION Box box_of(const F& fetch, const Place3d& map) {
  const Corner at = corner_of(fetch);
  if (!at.inside) return {0, map.rows, 0};
  const s64 rest = at.rest - map.origin;
  const int depth = rest == 0 ? 0 : static_cast<int>(static_cast<double>(rest) * map.per_step + 0.5);
  if (depth * map.step != rest || depth < 0 || depth >= map.depth) stop();
  return {static_cast<int>(at.column), static_cast<int>(at.row), depth};
}

template <class Fetches>
inline constexpr int boxed_bytes = 0;
template <class F, class... More>
inline constexpr int boxed_bytes<Fetches<F, More...>> =
    (is_box<F>() ? (FetchedLayout<F>::kBytes + 1023) / 1024 * 1024 : 0) + boxed_bytes<Fetches<More...>>;
template <class Fetches>
inline constexpr int expected_bytes = 0;
template <class F, class... More>
inline constexpr int expected_bytes<Fetches<F, More...>> =
    (is_box<F>() ? FetchedLayout<F>::kBytes : 0) + expected_bytes<Fetches<More...>>;
template <class Fetches>
inline constexpr int fetch_count = 0;
template <class... F>
inline constexpr int fetch_count<Fetches<F...>> = sizeof...(F);

// ---- On the host: what the programs of a launch fetch ----

struct Plan {
  // What a program fetches, in its order: a map and where, or the steps of a pipeline.
  struct Seen {
    int map;  // -1: steps
    Corner at;
    int steps;
  };

  Maps maps;
  int depth = 0;  // of pipelines in pipelines
  std::string problem;
  std::vector<Seen> seen;  // by the last program
  bool pairs = false;      // neighbouring programs along x have the same steps

  // Two neighbours; called for several pairs.
  void compare(const std::vector<Seen>& a, const std::vector<Seen>& b) {
    pairs = pairs && a.size() == b.size();
    for (std::size_t i = 0; pairs && i < a.size(); ++i) {
      pairs = a[i].map == b[i].map && a[i].steps == b[i].steps;
      const Corner &x = a[i].at, &y = b[i].at;
      const bool same = x.column == y.column && x.row == y.row && x.rest == y.rest && x.inside == y.inside;
      if (a[i].map >= 0 && !same) maps.maps[a[i].map].shared = false;
    }
  }

  void refuse(const Where& where, const std::string& why) {
    if (problem.empty()) problem = "the fetch in line " + std::to_string(where.line) + ": " + why;
  }

  template <class F>
  void look_at(const F& fetch) {
    using M = std::remove_cvref_t<decltype(fetch.mask)>;
    const Boxed of = boxed(fetch);
    bool plain = true;
    Bounds<M>::template visit<Side::columns>(fetch.mask, [&](const auto& a, auto) { plain = plain && a.column == 1; });
    Bounds<M>::template visit<Side::rows>(fetch.mask, [&](const auto& a, auto) { plain = plain && a.row == 1; });
    if (!plain) return refuse(fetch.where, "its mask is not of whole rows and columns");
    if (of.columns < 1 || of.rows < 1) return refuse(fetch.where, "the tensor is empty");
    if constexpr (!std::is_same_v<std::remove_cvref_t<decltype(fetch.other)>, Nothing>) {
      if (fetch.other != 0) return refuse(fetch.where, "it is masked with a number that is not 0");
    }
    const Corner corner = corner_of(fetch);
    const s64 origin = corner.rest;
    for (int i = 0; i < maps.count; ++i) {
      TileMap& map = maps.maps[i];
      if (!(map.of == of)) continue;
      const s64 low = std::min(map.origin, origin), high = std::max(map.origin + map.step * (map.depth - 1), origin);
      map.step = std::gcd(map.step, origin - map.origin);
      map.origin = low;
      map.depth = map.step == 0 ? 1 : (high - low) / map.step + 1;
      seen.push_back({i, corner, 0});
      return;
    }
    if (maps.count == kMaxMaps) return refuse(fetch.where, "there are more than " + std::to_string(kMaxMaps));
    seen.push_back({maps.count, corner, 0});
    TileMap& map = maps.maps[maps.count++];
    map.shared = of.box_rows >= 16;  // half of it is eight rows, a unit of the swizzle
    map.of = of;
    map.step = 0;
    map.depth = 1;
    map.origin = origin;
    map.line = fetch.where.line;
  }

  // After the last program.
  void finish() {
    for (int i = 0; i < maps.count; ++i) {
      TileMap& map = maps.maps[i];
      map.per_step = map.step == 0 ? 0.0 : 1.0 / static_cast<double>(map.step);
      const Where where{"", map.line, 0};
      const s64 pitch = map.of.pitch * map.of.element, step = map.step * map.of.element;
      const auto address =
          reinterpret_cast<std::uintptr_t>(map.of.data) + static_cast<std::uintptr_t>(map.origin * map.of.element);
      if (address % 16 != 0) return refuse(where, "its tensor does not start at a multiple of 16 bytes");
      if (pitch % 16 != 0 || pitch <= 0) {
        return refuse(where, "its rows are " + std::to_string(pitch) + " bytes apart, no multiple of 16");
      }
      if (step % 16 != 0) {
        return refuse(where, "its tiles are " + std::to_string(step) + " bytes apart, no multiple of 16");
      }
    }
  }
};

struct Probe : Hollow<Probe> {
  template <class T>
  static Pointer<Probe, T> pointer(const Tensor<T>& tensor) {
    return {tensor.data, {}};
  }

  struct Look {
    Plan* plan;
    Boxed* first;  // of each fetch, in step 0
    bool is_first;
    template <class F, class Position>
    int operator()(const F& fetch, Position position) const {
      if constexpr (is_box<F>()) {
        if (is_first) first[position] = boxed(fetch);
        if (!(first[position] == boxed(fetch))) plan->refuse(fetch.where, "its tensor is another one in another step");
        plan->look_at(fetch);
      }
      return 0;
    }
  };

  struct Program : Hollow<Probe>::Program {
    Plan* plan = nullptr;
    int ids[3] = {}, counts[3] = {1, 1, 1};
    TILE_FUNCTION int id(int axis) const { return ids[axis]; }
    TILE_FUNCTION int count(int axis) const { return counts[axis]; }

    template <class Context, int Stages, class Stage, class Body>
    TILE_FUNCTION void pipeline(Context&, Constant<Stages>, int steps, Stage& stage, Body& body) {
#if !defined(__CUDA_ARCH__)
      if (++plan->depth > 1 && plan->problem.empty()) plan->problem = "a pipeline stands in another one's body";
      NoBody nothing;
      Boxed first[fetch_count<decltype(stage(0))> + 1] = {};
      plan->seen.push_back({-1, {}, steps});
      for (int k = 0; k < steps; k = k < 1 || k == steps - 1 ? k + 1 : steps - 1) {
        stage(k).each(Look{plan, first, k == 0}, nothing, k);
      }
      if (steps > 0) stage(0).each(HollowFetches<Probe>{}, body, 0);
      --plan->depth;
#endif
    }
  };
};

// ---- The ring of stages ----

// The stages are followed by two copies of the bytes that are transposed, and these by the barriers: a full and an
// empty one for each stage and each copy.
struct Ring {
  int memory, slot_bytes, slots;
  int copies_at, copies_bytes;                       // of operands that are copied, kCopies times
  int transposed_bytes, transposed[kMaxTransposed];  // of each fetch, where in them; -1 if it is not transposed
  int blocks;                                        // of a cluster, 1 or 2
  Word barriers;
  int rank = 0;       // of this block in its cluster
  Word messages = 0;  // to the other block's producer
  int slot = 0;
  Word parity = 0;
  int copy = 0;
  int time = 0;
  Word time_parity = 0;

  TILE_FUNCTION int transposed_at() const { return memory + slots * slot_bytes + time * transposed_bytes; }
  TILE_FUNCTION Word transposed_full() const { return barriers + static_cast<Word>(16 * (slots + time)); }
  TILE_FUNCTION Word transposed_empty() const { return transposed_full() + 8; }
  TILE_FUNCTION void next_time() {
    time ^= 1;
    time_parity ^= static_cast<Word>(time == 0);
  }

  TILE_FUNCTION Word message_barrier(Word i) const { return barriers + static_cast<Word>(16 * (slots + 2)) + 8 * i; }
  TILE_FUNCTION Word message_word(Word i) const { return message_barrier(2) + 4 * i; }

  TILE_FUNCTION Word full() const { return barriers + static_cast<Word>(16 * slot); }
  TILE_FUNCTION Word empty() const { return full() + 8; }
  TILE_FUNCTION int offset() const { return memory + slot * slot_bytes; }
  TILE_FUNCTION int copies() const { return copies_at + copy * copies_bytes; }
  TILE_FUNCTION void next_copy() { copy = copy + 1 == kCopies ? 0 : copy + 1; }
  TILE_FUNCTION void next() {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};
inline constexpr int kMaxSlots = 8, kTransposingWarps = 3;
inline constexpr int kMessageBytes = 2 * 8 + 2 * 4;

// Whether a fetch may be transposed; whether it is, the ring says.
template <class F, int kPlace>
TILE_FUNCTION constexpr bool may_be_transposed() {
  return is_box<F>() && std::is_same_v<FetchedType<F>, s8> && FetchedShape<F>::kRows >= 32 && kPlace < kMaxTransposed;
}
template <class Fetches, int kPlace = 0>
inline constexpr bool any_may_be_transposed = false;
template <class F, class... More, int kPlace>
inline constexpr bool any_may_be_transposed<Fetches<F, More...>, kPlace> =
    may_be_transposed<F, kPlace>() || any_may_be_transposed<Fetches<More...>, kPlace + 1>;
template <class Fetches>
TILE_FUNCTION bool is_transposed(const Ring& ring) {
  if constexpr (any_may_be_transposed<Fetches>) return ring.transposed_bytes > 0;
  return false;
}

// Transposes the bytes of a stage that has come.
template <int kWarps>
struct TransposeFetches {
  const Ring* ring;
  int warp;
  int* offset;
  template <class F, class Position>
  TILE_FUNCTION int operator()(const F&, Position) const {
    if constexpr (may_be_transposed<F, Position::value>()) {
      using S = FetchedShape<F>;
      using E = typename decltype(F::pointers)::Executor;
      const int to = ring->transposed[Position::value];
      if (to >= 0) {
        transpose_bytes<kWarps>(Staged<E, s8, S>{*offset},
                                Staged<E, s8, Shape<1, S::kColumns, S::kRows>>{ring->transposed_at() + to}, warp);
      }
    }
    if constexpr (is_box<F>()) *offset += (FetchedLayout<F>::kBytes + 1023) / 1024 * 1024;
    return 0;
  }
};

// Programs in bands along x: those that run at the same time share rows and columns of operands. Clusters of `blocks`
// neighbours along x are numbered; `rank` is the place in one.
TILE_FUNCTION void place_program(int number, const int (&counts)[3], int band, int blocks, int rank, int (&ids)[3]) {
  const int across = counts[0] / blocks, wide = larger(1, band / blocks);
  const int plane = across * counts[1], z = number / plane, within = number - z * plane;
  const int first = within / (wide * counts[1]) * wide, width = smaller(wide, across - first);
  const int rest = within - first * counts[1];
  ids[0] = (first + rest % width) * blocks + rank;
  ids[1] = rest / width;
  ids[2] = z;
}

// ---- The thread that requests the boxes ----

#if defined(__CUDACC__)
// Returns what the other block of a cluster has to agree with.
template <class F>
TILE_FUNCTION Word tma_load(const Box& at, const Place3d& map, const Ring& ring, Word to) {
  using Layout = FetchedLayout<F>;
  const Word full = ring.full();
  constexpr int kColumns = Layout::kLine / Layout::kElement, kRows = smaller(Layout::kRows, 256);
  if constexpr (kRows >= 16) {
    if (ring.blocks == 2 && map.shared) {
      constexpr int kHalf = Layout::kRows / 2;
      const int first = ring.rank * kHalf;
      TILE_UNROLL
      for (int panel = 0; panel < Layout::kPanels; ++panel) {
        TILE_UNROLL
        for (int row = 0; row < kHalf; row += kRows / 2) {
          tma_load_to_both(to + Word(panel * Layout::kPanel + (first + row) * Layout::kLine), map.map,
                           at.column + panel * kColumns, at.row + first + row, at.depth, full);
        }
      }
      return static_cast<Word>(at.column) * 31 + static_cast<Word>(at.row) * 1021 + static_cast<Word>(at.depth);
    }
  }
  TILE_UNROLL
  for (int panel = 0; panel < Layout::kPanels; ++panel) {
    TILE_UNROLL
    for (int row = 0; row < Layout::kRows; row += kRows) {
      tma_load(to + Word(panel * Layout::kPanel + row * Layout::kLine), map.map, at.column + panel * kColumns,
               at.row + row, at.depth, full);
    }
  }
  return 0;
}

TILE_FUNCTION int from_lane([[maybe_unused]] int value, [[maybe_unused]] int lane) {
  TILE_HOPPER(, return __shfl_sync(0xffffffffu, value, lane));
  return 0;
}

// Exchanges a word between the producers of two blocks; stops if they differ. The host has seen for a few programs that
// neighbours take the same steps and share boxes; this checks it for all.
TILE_FUNCTION void agree(Ring& ring, Word word) {
  const Word which = ring.messages & 1, parity = ring.messages >> 1 & 1, barrier = ring.message_barrier(which);
  ++ring.messages;
  barrier_expect(barrier, 4);
  send_word(address_in(ring.message_word(which), ring.rank ^ 1), word, address_in(barrier, ring.rank ^ 1));
  barrier_wait(barrier, parity);
  Word theirs = 0;
  TILE_HOPPER(, asm volatile("ld.shared.u32 %0, [%1];" : "=r"(theirs) : "r"(ring.message_word(which)) : "memory"));
  if (theirs != word) stop();
}
#endif

template <class L>
struct Producer : Hollow<Producer<L>> {
  template <class T>
  static Pointer<Producer, T> pointer(const Tensor<T>& tensor) {
    return {tensor.data, {}};
  }

  struct Find {
    const Maps* maps;
    Place3d* found;
    template <class F, class Position>
    TILE_FUNCTION int operator()(const F& fetch, Position position) const {
      if constexpr (is_box<F>()) {
        const TileMap* const map = maps->find(boxed(fetch));
        if (map == nullptr) return stop(), 0;
        found[position] = Place3d(*map);
      }
      return 0;
    }
  };
  // A lane works out where the boxes of a step of its own are, for 32 steps at a time: a step's index arithmetic, one
  // instruction after the other, took as long as its products.
  struct Locate {
    const Place3d* found;
    Box* boxes;
    template <class F, class Position>
    TILE_FUNCTION int operator()(const F& fetch, Position) const {
      if constexpr (is_box<F>()) boxes[Position::value] = box_of(fetch, found[Position::value]);
      return 0;
    }
  };
  struct Load {
    const Place3d* found;
    const Box* boxes;
    int lane;  // whose boxes they are
    const Ring* ring;
    Word* to;
    Word* sum;
    template <class F, class Position>
    TILE_FUNCTION int operator()(const F&, Position) const {
#if defined(__CUDACC__)
      if constexpr (is_box<F>()) {
        const Box& mine = boxes[Position::value];
        const Box at{from_lane(mine.column, lane), from_lane(mine.row, lane), from_lane(mine.depth, lane)};
        *sum = *sum * 65599 + tma_load<F>(at, found[Position::value], *ring, *to);
        *to += (FetchedLayout<F>::kBytes + 1023) / 1024 * 1024;
      }
#endif
      return 0;
    }
  };

  struct Program : Hollow<Producer<L>>::Program {
    const Maps* maps;
    Ring* ring;
    int number;  // of the cluster's programs
    int ids[3], counts[3];
    TILE_FUNCTION int id(int axis) const { return ids[axis]; }
    TILE_FUNCTION int count(int axis) const { return counts[axis]; }

    template <class Context, int Stages, class Stage, class Body>
    TILE_FUNCTION void pipeline(Context&, Constant<Stages>, int steps, Stage& stage, Body&) {
      using Fetched = decltype(stage(0));
      if constexpr (expected_bytes < Fetched >> 0) {
        if (steps <= 0 && ring->blocks == 1) return;
        NoBody nothing;
        Place3d found[fetch_count<Fetched>] = {};
        if (steps > 0) stage(0).each(Find{maps, found}, nothing, 0);
        [[maybe_unused]] Word sum = 0;
        Box boxes[fetch_count<Fetched>] = {};
#if defined(__CUDACC__)
        if (ring->blocks == 2) agree(*ring, static_cast<Word>(number) * 65599 + static_cast<Word>(steps));
#endif
        TILE_NO_UNROLL
        for (int k = 0; k < steps; ++k) {
          if (k % 32 == 0) stage(smaller(k + (thread() & 31), steps - 1)).each(Locate{found, boxes}, nothing, k);
#if defined(__CUDACC__)
          barrier_wait(ring->empty(), ring->parity ^ 1);
          barrier_expect(ring->full(), expected_bytes<Fetched>);
#endif
          Word to = shared_address(arena() + ring->offset());
          stage(0).each(Load{found, boxes, k % 32, ring, &to, &sum}, nothing, k);
          ring->next();
        }
#if defined(__CUDACC__)
        if (ring->blocks == 2) agree(*ring, sum);
#endif
      }
    }
  };
};

// ---- The warps that transpose bytes ----

template <class L>
struct Transposer : Hollow<Transposer<L>> {
  template <class T>
  static Pointer<Transposer, T> pointer(const Tensor<T>& tensor) {
    return {tensor.data, {}};
  }

  struct Program : Hollow<Transposer<L>>::Program {
    Ring* ring;
    int warp;
    int ids[3], counts[3];
    TILE_FUNCTION int id(int axis) const { return ids[axis]; }
    TILE_FUNCTION int count(int axis) const { return counts[axis]; }

    template <class Context, int Stages, class Stage, class Body>
    TILE_FUNCTION void pipeline(Context&, Constant<Stages>, int steps, Stage& stage, Body&) {
      using Fetched = decltype(stage(0));
      if constexpr (expected_bytes < Fetched >> 0) {
        [[maybe_unused]] NoBody nothing;
        TILE_NO_UNROLL
        for (int k = 0; k < steps; ++k) {
#if defined(__CUDACC__)
          if (is_transposed<Fetched>(*ring)) {
            barrier_wait(ring->transposed_empty(), ring->time_parity ^ 1);
            barrier_wait(ring->full(), ring->parity);
            int offset = ring->offset();
            stage(k).each(TransposeFetches<kTransposingWarps>{ring, warp, &offset}, nothing, k);
            stores_to_matrices();
            __syncwarp();
            if ((threadIdx.x & 31) == 0) barrier_arrive(ring->transposed_full());
            ring->next_time();
          }
#endif
          ring->next();
        }
      }
    }
  };
};

// ---- Those who multiply ----

template <class E, class Program>
struct BoxedFetches {
  Program* program;
  const Ring* ring;
  int* offset;
  Step* step;
  template <class F, class Position>
  TILE_FUNCTION auto operator()(const F& fetch, Position) const {
    if constexpr (is_box<F>()) {
      Staged<E, FetchedType<F>, FetchedShape<F>, Position::value> staged{*offset};
      staged.step = step;
      if constexpr (may_be_transposed<F, Position::value>()) {
        if (ring != nullptr) staged.transposed = ring->transposed_at() + ring->transposed[Position::value];
      }
      *offset += (FetchedLayout<F>::kBytes + 1023) / 1024 * 1024;
      return staged;
    } else {
      return program->load(fetch.pointers, fetch.mask, fetch.other, fetch.where);
    }
  }
};

#if !defined(__CUDACC__)
// Emulated, the first thread copies the boxes when their step has come.
struct CopyBoxes {
  const Maps* maps;
  int* offset;
  template <class F, class Position>
  int operator()(const F& fetch, Position) const {
    if constexpr (is_box<F>()) {
      using T = FetchedType<F>;
      using Layout = FetchedLayout<F>;
      const TileMap* const map = maps->find(boxed(fetch));
      if (map == nullptr) stop();
      const Box at = box_of(fetch, Place3d(*map));
      const T* const data = static_cast<const T*>(map->of.data) + map->origin + at.depth * map->step;
      for (int row = 0; row < Layout::kRows; ++row) {
        for (int column = 0; column < FetchedShape<F>::kColumns; ++column) {
          const s64 x = at.column + column, y = at.row + row;
          const bool inside = x >= 0 && x < map->of.columns && y >= 0 && y < map->of.rows;
          const T value = inside ? data[y * map->of.pitch + x] : T{};
          memcpy(static_cast<void*>(arena() + *offset + Layout::at(row, column)), &value, sizeof(T));
        }
      }
      *offset += (Layout::kBytes + 1023) / 1024 * 1024;
    }
    return 0;
  }
};
#endif

// A stage's memory may be filled again.
template <class Fetched>
TILE_FUNCTION void release([[maybe_unused]] const Ring& ring) {
#if defined(__CUDA_ARCH__)
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (ring.blocks == 1) {
    if (lane == 0) barrier_arrive(ring.empty());
  } else if (lane < 2) {  // both blocks fill it
    barrier_arrive_in_cluster(address_in(ring.empty(), lane));
  }
  if (is_transposed<Fetched>(ring) && lane == 0) barrier_arrive(ring.transposed_empty());
#endif
}

// A step's products may still be under way while the next one's are issued, so a stage is released a step later.
template <class L, class E, class Program, class Stage, class Body>
TILE_FUNCTION void consume(Program& program, [[maybe_unused]] const Maps* maps, Ring& ring, int steps, Stage& stage,
                           Body& body) {
  using Fetched = decltype(stage(0));
  constexpr bool kBoxes = expected_bytes < Fetched >> 0;
  [[maybe_unused]] Ring last = ring;  // the stage of the step before
  const int group = warpgroup();
  TILE_NO_UNROLL
  for (int k = 0; k < steps; ++k) {
    int offset = ring.offset();
#if defined(__CUDA_ARCH__)
    if constexpr (kBoxes) barrier_wait(ring.full(), ring.parity);
    if (is_transposed<Fetched>(ring)) barrier_wait(ring.transposed_full(), ring.time_parity);
#elif !defined(__CUDACC__)
    NoBody nothing;
    int copied = offset, read = offset;
    barrier<L>();
    if (thread() == 0) stage(k).each(CopyBoxes{maps, &copied}, nothing, k);
    barrier<L>();
    stage(k).each(TransposeFetches<L::kThreads / 32>{&ring, thread() >> 5, &read}, nothing, k);
    barrier<L>();
#endif
    Step step{.copies = ring.copies(), .group = group};
    stage(k).each(BoxedFetches<E, Program>{&program, &ring, &offset, &step}, body, k);
    if constexpr (kBoxes) {
#if defined(__CUDA_ARCH__)
      wait_for_products(step.products);
      if (k > 0) release<Fetched>(last);
      last = ring;
#endif
      if (is_transposed<Fetched>(ring)) ring.next_time();
      ring.next();
      ring.next_copy();
    }
  }
#if defined(__CUDA_ARCH__)
  if constexpr (kBoxes) {
    wait_for_products<0>();
    if (steps > 0) release<Fetched>(last);
  }
#endif
}

}  // namespace octile::tile::gpu
