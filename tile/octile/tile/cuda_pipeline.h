// pipeline() on a GPU: the operands of the next steps are copied into shared memory while one step computes.
#pragma once

#include "octile/tile/cuda_access.h"

namespace octile::tile::gpu {

template <class F>
using FetchedShape = typename decltype(F::pointers)::Shape;
template <class F>
using FetchedType = std::remove_const_t<typename decltype(F::pointers)::Element>;
template <class F>
using FetchedLayout = StagedLayout<FetchedType<F>, FetchedShape<F>>;

template <class Fetches>
inline constexpr int fetched_bytes = 0;
template <class F, class... More>
inline constexpr int fetched_bytes<Fetches<F, More...>> =
    (FetchedLayout<F>::kBytes + 127) / 128 * 128 + fetched_bytes<Fetches<More...>>;

template <int Stages>
TILE_FUNCTION constexpr int stages_of() {
  return Stages < 2 ? 2 : Stages > 4 ? 4 : Stages;
}

template <int Stages, class Stage>
inline constexpr int pipeline_bytes = stages_of<Stages>() * fetched_bytes<decltype(std::declval<Stage&>()(0))>;

template <class T, class Other>
TILE_FUNCTION T rest_of([[maybe_unused]] Other other) {
  if constexpr (std::is_same_v<Other, Nothing>) {
    return T{};
  } else {
    return scalar::Cast<T, Round::unstated>{}(other);
  }
}

// Copies the operand of `fetch` to shared memory: 16 bytes at a time and asynchronously where possible. Threads take
// consecutive chunks, independent of the tile layout.
template <class L, class F>
TILE_FUNCTION void copy_chunks(const F& fetch, int offset) {
  using S = FetchedShape<F>;
  using T = FetchedType<F>;
  using Layout = FetchedLayout<F>;
  constexpr int kInRow = Layout::kRowBytes / 16, kChunks = Layout::kRows * kInRow;
  const auto& index = fetch.pointers.index;
  const T* const data = in_global_memory(fetch.pointers.tensor.data);
  unsigned char* const to = arena() + offset;
  bool aligned = false;
  if constexpr (unit_stride<std::remove_cvref_t<decltype(index)>>()) aligned = rows_aligned<16>(fetch.pointers);
  if (aligned && fetch.mask.all()) {
    // Threads take whole rows at a time where possible, so that each stays in its column.
    constexpr int kRowsAtOnce = L::kThreads / kInRow;  // 0: a row is longer
    if constexpr (S::kPlanes == 1 && kRowsAtOnce > 0 && kRowsAtOnce % 8 == 0 && kChunks % L::kThreads == 0) {
      const int row = thread() / kInRow, chunk = thread() % kInRow;
      const T* from = data + index.at(0, row, chunk * Layout::kChunkElements);
      const s64 step = s64{kRowsAtOnce} * index.row;
      unsigned char* const place = to + Layout::chunk_at(row, chunk);
      TILE_UNROLL
      for (int i = 0; i < kChunks / L::kThreads; ++i) {
        copy_async(place + i * kRowsAtOnce * Layout::kLine, from);
        from += step;
      }
    } else {
      for (int i = thread(); i < kChunks; i += L::kThreads) {
        const int line = i / kInRow, chunk = i % kInRow;
        copy_async(to + Layout::chunk_at(line, chunk),
                   data + index.at(line / S::kRows, line % S::kRows, chunk * Layout::kChunkElements));
      }
    }
    return;
  }
  TILE_NO_UNROLL
  for (int i = thread(); i < kChunks; i += L::kThreads) {
    const int line = i / kInRow, plane = line / S::kRows, row = line % S::kRows;
    const int column = i % kInRow * Layout::kChunkElements;
    unsigned char* const place = to + Layout::chunk_at(line, i % kInRow);
    if (aligned && holds_for(fetch.mask, plane, row, column, Layout::kChunkElements)) {
      copy_async(place, data + index.at(plane, row, column));
    } else {
      T values[Layout::kChunkElements];
      TILE_UNROLL
      for (int v = 0; v < Layout::kChunkElements; ++v) {
        const bool here = fetch.mask.at(plane, row, column + v);
        values[v] = here ? static_cast<T>(data[index.at(plane, row, column + v)]) : rest_of<T>(fetch.other);
      }
      store_vector<Layout::kChunkElements>(reinterpret_cast<T*>(place), values);
    }
  }
}

template <class L, class E, class Program, class F>
TILE_FUNCTION void stage_fetch(Program& program, const F& fetch, int offset) {
  using Index = std::remove_cvref_t<decltype(fetch.pointers.index)>;
  using M = std::remove_cvref_t<decltype(fetch.mask)>;
  if constexpr (AffineTile<Index> && LazyMask<M> && FetchedLayout<F>::kChunks) {
    copy_chunks<L>(fetch, offset);
  } else {
    const auto tile = program.load(fetch.pointers, fetch.mask, fetch.other, fetch.where);
    stage_part<L>(tile.values, Staged<E, FetchedType<F>, FetchedShape<F>>{offset});
  }
}

struct NoBody {
  template <class... A>
  TILE_FUNCTION void operator()(int, const A&...) const {}
};

template <class L, class E, class Program>
struct StageFetches {
  Program* program;
  int* offset;
  template <class F, class Position>
  TILE_FUNCTION int operator()(const F& fetch, Position) const {
    stage_fetch<L, E>(*program, fetch, *offset);
    *offset += (FetchedLayout<F>::kBytes + 127) / 128 * 128;
    return 0;
  }
};
template <class E>
struct StagedFetches {
  int* offset;
  template <class F, class Position>
  TILE_FUNCTION auto operator()(const F&, Position) const {
    const Staged<E, FetchedType<F>, FetchedShape<F>> staged{*offset};
    *offset += (FetchedLayout<F>::kBytes + 127) / 128 * 128;
    return staged;
  }
};

// One barrier per step: after it, all threads see the operands of step k and have finished step k - 1, whose memory the
// copies of step k + kStages - 1 reuse.
template <class L, class E, int Stages, class Program, class Stage, class Body>
TILE_FUNCTION void pipeline(Program& program, int memory, int steps, Stage& stage, Body& body) {
  constexpr int kStages = stages_of<Stages>();
  constexpr int kBytes = fetched_bytes<decltype(stage(0))>;
  NoBody nothing;
  barrier<L>();  // earlier uses of this memory are complete
  TILE_NO_UNROLL
  for (int k = 0; k < kStages - 1; ++k) {
    int offset = memory + k * kBytes;
    if (k < steps) stage(k).each(StageFetches<L, E, Program>{&program, &offset}, nothing, k);
    commit_copies();
  }
  int read = 0, write = kStages - 1;
  for (int k = 0; k < steps; ++k) {
    wait_for_copies<kStages - 2>();
    barrier<L>();
    int offset = memory + write * kBytes;
    if (k + kStages - 1 < steps) {
      stage(k + kStages - 1).each(StageFetches<L, E, Program>{&program, &offset}, nothing, k);
    }
    commit_copies();
    offset = memory + read * kBytes;
    stage(k).each(StagedFetches<E>{&offset}, body, k);
    read = read + 1 == kStages ? 0 : read + 1;
    write = write + 1 == kStages ? 0 : write + 1;
  }
  wait_for_copies<0>();
}

}  // namespace octile::tile::gpu
