// The fast CPU executor: no checks, vector loops, threads. A kernel gives the same bits here, on the checked executor,
// and with any number of threads.
#pragma once

#include <atomic>

#include "octile/tile/cpu_tile.h"
#include "octile/tile/tensor.h"

namespace octile::tile {

struct FastCpu {
  int threads = 0;  // 0: one per core

  template <class T, class S>
  using Storage = CpuValues<T, S::kSize>;
  template <class I>
  using Index = s64;
  using Overflow = NoOverflow;
  struct Memory {};

  template <class S, class F, class... A>
  static auto map(F f, const A&... a) {
    Tile<FastCpu, cpu::MapType<F, A...>, S> out;
    cpu::map<S>(out.values, f, a...);
    return out;
  }

  template <int Axis, class F, class A>
  static auto reduce(F f, const A& a) {
    using S = typename A::Shape;
    Tile<FastCpu, Common<typename A::Type, typename A::Type>, Reduced<S, Axis>> out;
    cpu::reduce_tile<Axis, S>(f, cpu::stored(a).values, out.values);
    return out;
  }

  template <class S, class A, class Source>
  static auto rearrange(const A& a, Source) {
    Tile<FastCpu, typename A::Type, S> out;
    for (int p = 0; p < S::kPlanes; ++p) {
      for (int r = 0; r < S::kRows; ++r) {
        for (int c = 0; c < S::kColumns; ++c) {
          out.values[SameOrder::of<S>(p, r, c)] = a.values[Source::template of<S>(p, r, c)];
        }
      }
    }
    return out;
  }

  template <class A, class B, class C>
  static C dot(const A& a, const B& b, C sum) {
    cpu::dot(a, b, sum);
    return sum;
  }

  template <class T>
  static Pointer<FastCpu, T> pointer(const Tensor<T>& tensor) {
    return {tensor.data, {}};
  }

  class Program;
};

class FastCpu::Program {
 public:
  Program(const Grid& grid, std::array<int, 3> ids) : ids_{ids[0], ids[1], ids[2]}, counts_{grid.x, grid.y, grid.z} {}

  int id(int axis) const { return ids_[grid_axis(axis)]; }
  int count(int axis) const { return counts_[grid_axis(axis)]; }
  void barrier() {}

  template <class P, class M, class Other>
  auto load(const P& p, const M& mask, Other other, Where) {
    using T = std::remove_const_t<typename P::Element>;
    using S = typename P::Shape;
    Tile<FastCpu, T, S> out;
    T rest{};
    if constexpr (!std::is_same_v<Other, Nothing>) rest = scalar::Cast<T, Round::unstated>{}(other);
    const bool all = holds_everywhere(mask);
    for (int plane = 0; plane < S::kPlanes; ++plane) {
      for (int row = 0; row < S::kRows; ++row) {
        T* to = out.values + (plane * S::kRows + row) * S::kColumns;
        const auto from = source(p, plane, row);
        if (all) {
          if constexpr (contiguous<P>()) {
            copy<S::kColumns>(to, &from(0));
          } else {
            for (int c = 0; c < S::kColumns; ++c) to[c] = from(c);
          }
        } else if constexpr (has_interval<M>()) {
          const Interval part = interval<S>(mask, plane, row);
          for (int c = 0; c < part.low; ++c) to[c] = rest;
          for (int c = part.low; c < part.high; ++c) to[c] = from(c);
          for (int c = part.high; c < S::kColumns; ++c) to[c] = rest;
        } else {
          const auto lane = cpu::row_of(mask, plane, row);
          for (int c = 0; c < S::kColumns; ++c) to[c] = lane(c) ? static_cast<T>(from(c)) : rest;
        }
      }
    }
    return out;
  }

  template <class P, class V, class M>
  void store(const P& p, const V& value, const M& mask, Where) {
    if constexpr (contiguous<P>()) {
      using S = typename P::Shape;
      if (holds_everywhere(mask)) {
        for (int plane = 0; plane < S::kPlanes; ++plane) {
          for (int row = 0; row < S::kRows; ++row) {
            copy<S::kColumns>(&source(p, plane, row)(0), value.values + (plane * S::kRows + row) * S::kColumns);
          }
        }
        return;
      }
    }
    lanes(p, mask, [&](auto& element, int linear) { element = value.values[linear]; });
  }

  template <AtomicOp kOp, class P, class V, class M>
  void atomic(const P& p, const V& value, const M& mask, Where) {
    using T = typename P::Element;
    lanes(p, mask, [&](T& element, int linear) {
      const std::atomic_ref<T> shared(element);
      T old = shared.load();
      const auto next = [&] {
        if constexpr (kOp == AtomicOp::add) return scalar::Add{}(old, value.values[linear]);
        if constexpr (kOp == AtomicOp::max) return scalar::Maximum{}(old, value.values[linear]);
      };
      while (!shared.compare_exchange_weak(old, next())) {
      }
    });
  }

  template <class Context, class Stages, class Steps, class Stage, class Body>
  static void pipeline(Context& t, Stages, Steps number, Stage& stage, Body& body) {
    const int steps = static_cast<int>(number);
    for (int k = 0; k < steps; ++k) {
      stage(k).each([&](const auto& fetch, auto) { return t.load_fetch(fetch); }, body, k);
    }
  }

 private:
  template <class P>
  static constexpr bool contiguous() {
    if constexpr (AffineTile<decltype(P::index)>) return decltype(P::index)::kUnit;
    return false;
  }

  // A vector loop. Left alone, the compiler calls memcpy or makes a string instruction, slow to start for a row; and
  // vectors of another width than those of the loops that read the tile next would stall. So it must not see that zero
  // is 0.
  template <int n, class T>
  static void copy(T* to, const std::remove_const_t<T>* from) {
    typedef std::conditional_t<
        sizeof(T) == 1, std::uint8_t,
        std::conditional_t<sizeof(T) == 2, std::uint16_t,
                           std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>> __attribute__((may_alias))
    Word;
    std::uint32_t zero = 0;
    asm("" : "+r"(zero));
    Word* const words = reinterpret_cast<Word*>(to);
    const Word* const source = reinterpret_cast<const Word*>(from);
    for (int i = 0; i < n; ++i) words[i] = static_cast<Word>(source[i] | static_cast<Word>(zero));
  }

  // The elements that a row of pointers points to, as a function of the column.
  template <class P>
  static auto source(const P& p, int plane, int row) {
    using S = typename P::Shape;
    using Index = decltype(p.index);
    auto* data = p.tensor.data;
    if constexpr (AffineTile<Index>) {
      auto* start = data + p.index.row_start(plane, row);
      const s64 step = p.index.column;
      return [=](int c) -> auto& {
        if constexpr (S::kColumns == 1) return *start;
        if constexpr (Index::kUnit) return start[c];
        return start[step * c];
      };
    } else {
      const auto index = cpu::row_of(p.index, plane, row);
      return [=](int c) -> auto& { return data[index(c)]; };
    }
  }

  template <class M>
  static constexpr bool has_interval() {
    if constexpr (LazyMask<M>) return M::kInterval;
    return false;
  }
  template <class S, class M>
  static Interval interval(const M& mask, int plane, int row) {
    if constexpr (std::is_same_v<M, Everything>) {
      return {0, S::kColumns};
    } else {
      const Interval part = mask.interval(plane, row);
      if constexpr (M::Shape::kColumns != S::kColumns) return {0, part.low < part.high ? S::kColumns : 0};
      return part;
    }
  }

  template <class P, class M, class Visit>
  static void lanes(const P& p, const M& mask, Visit visit) {
    using S = typename P::Shape;
    const bool all = holds_everywhere(mask);
    for (int plane = 0; plane < S::kPlanes; ++plane) {
      for (int row = 0; row < S::kRows; ++row) {
        const int first = (plane * S::kRows + row) * S::kColumns;
        const auto to = source(p, plane, row);
        if (all) {
          for (int c = 0; c < S::kColumns; ++c) visit(to(c), first + c);
        } else if constexpr (has_interval<M>()) {
          const Interval part = interval<S>(mask, plane, row);
          for (int c = part.low; c < part.high; ++c) visit(to(c), first + c);
        } else {
          const auto lane = cpu::row_of(mask, plane, row);
          for (int c = 0; c < S::kColumns; ++c) {
            if (lane(c)) visit(to(c), first + c);
          }
        }
      }
    }
  }

  int ids_[3], counts_[3];
};

// Calls body(context, first, last) for parts of 0 .. n - 1 on up to `threads` threads. After an exception of one no
// more parts are begun, and the caller gets it. No template: the threads are compiled once, not for every kernel.
void parallel_ranges(int threads, std::int64_t n, void (*body)(const void*, std::int64_t, std::int64_t),
                     const void* context);

template <class Kernel, class... Args>
void launch(FastCpu executor, Grid grid, const Kernel& kernel, Args&&... args) {
  check_grid(grid);
  const auto run = [&](const auto... a) {
    const auto part = [&](std::int64_t first, std::int64_t last) {
      std::array<int, 3> id = {static_cast<int>(first % grid.x), static_cast<int>(first / grid.x % grid.y),
                               static_cast<int>(first / grid.x / grid.y)};
      for (std::int64_t number = first; number < last; ++number) {
        Context<FastCpu> t{FastCpu::Program(grid, id)};
        kernel(t, a...);
        if (++id[0] == grid.x) {
          id[0] = 0;
          if (++id[1] == grid.y) id[1] = 0, ++id[2];
        }
      }
    };
    const auto call = [](const void* context, std::int64_t first, std::int64_t last) {
      (*static_cast<decltype(&part)>(context))(first, last);
    };
    parallel_ranges(executor.threads, grid.size(), call, &part);
  };
  run(argument(executor, args)...);
  if (grid.size() > 0) (assume_written(args), ...);
}

}  // namespace octile::tile
