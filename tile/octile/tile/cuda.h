// The CUDA executor: a program of the grid is a block of threads with layout L; each thread holds its part of every
// tile. Results match the CPU executors bit for bit, except sums of floats in dot. Compiled by anything but nvcc, it
// emulates the blocks on the CPU, slowly.
#pragma once

#include <stdexcept>
#include <string>

#include "octile/tile/cuda_math.h"
#include "octile/tile/cuda_needs.h"
#include "octile/tile/tensor.h"

namespace octile::tile {

// How exp2 and the division of rows are done. exact: the bits of the CPU executors. fast: with the GPU's exp2 and
// multiplication by the reciprocal, as other GPU compilers do. Then exp2 is within 2^-22 of the result, or 0
// where that is below 2^-126; a quotient of a tile and a column is within 2^-22.9, where the divisor is between 2^-126
// and 2^126 and the quotient is normal. Everything else stays exact.
enum class Math : std::uint8_t { exact, fast };

// L: Threads<rows, columns, vector>, Warps<rows, columns, vector> or Warpgroups<groups>.
template <class L = Threads<4, 32>, Math kMath = Math::exact>
struct Cuda {
  void* stream = nullptr;  // a cudaStream_t
  bool backwards = false;  // emulated: the last thread goes first
  // Of warpgroups: as many blocks as the GPU has SMs, each for several programs, or a block for each program; and how
  // many programs along x run side by side before the next along y.
  bool persistent = true;
  int band = 16;
  // 2: the two blocks of neighbouring programs along x share operands: what both fetch is loaded once.
  int cluster = 1;

  using Layout = L;
  template <class S>
  using Mine = Part<L, S>;

  template <class T, class S>
  struct Storage {
    T values[Mine<S>::kSize];
  };
  template <class I>
  using Index = I;
  using Overflow = NoOverflow;
  struct Memory {};

  // Of a running sum.
  template <class T, class S>
  TILE_FUNCTION static void settle(Tile<Cuda, T, S>& tile) {
    gpu::wait_for_products<0>();
    gpu::pin<Mine<S>::kSize>(tile.values);
  }

  template <class S, class F, class... A>
  TILE_FUNCTION static auto map(F f, const A&... a) {
    const auto values = map_values<S>(f, held<S>(settled(a))...);
    if constexpr (gpu::is_expression<L, S, F, A...>()) {
      using X = gpu::Mapped<F, decltype(gpu::how_of(a))...>;
      using T = typename std::remove_cvref_t<decltype(values)>::Type;
      return Computed<Cuda, T, S, X>(values, X{f, gpu::how_of(a)...}, (gpu::is_changed(a) || ...));
    } else {
      return values;
    }
  }
  template <class T, class S>
  TILE_FUNCTION static void note_change() {}

  template <class S, class F, class... A>
  TILE_FUNCTION static auto map_values(F f, const A&... a) {
    using T = decltype(std::declval<F>()(widen(std::declval<typename A::Type>())...));
    Tile<Cuda, T, S> out;
    if constexpr (std::is_same_v<F, scalar::Exp2> && kMath == Math::fast) {
      gpu::each_place<L, S>(
          [&](const gpu::Place& at, int i) { out.values[i] = gpu::exp2_fast(f32{gpu::value_at<L>(a, at)}...); });
      return out;
    } else if constexpr (std::is_same_v<F, scalar::Exp2>) {
      if (exp2_plainly<S>(out.values, a...)) return out;
    } else if constexpr (std::is_same_v<F, scalar::Divide> && std::is_same_v<T, f32>) {
      if constexpr (divides_rows<S, A...>()) {
        if (divide_plainly<S>(out.values, a...)) return out;
      }
    } else if constexpr (gpu::is_extreme<F> && std::is_same_v<T, f32>) {
      if (never_two_zeros(a...)) {
        gpu::each_place<L, S>([&](const gpu::Place& at, int i) {
          out.values[i] = gpu::extreme(f, static_cast<f32>(gpu::value_at<L>(a, at))...);
        });
        return out;
      }
    } else if constexpr (rounds_to_bytes<F, S, A...>()) {
      f32 four[4];
      gpu::each_place<L, S>([&](const gpu::Place& at, int i) {
        four[i % 4] = static_cast<f32>((gpu::value_at<L>(a, at), ...));
        if (i % 4 == 3) gpu::round_to_bytes(f, out.values + i - 3, four);
      });
      return out;
    } else if constexpr (gpu::is_rounding<F>) {
      gpu::each_place<L, S>(
          [&](const gpu::Place& at, int i) { out.values[i] = round_one(f, gpu::value_at<L>(a, at)...); });
      return out;
    }
    gpu::each_place<L, S>([&](const gpu::Place& at, int i) { out.values[i] = f(gpu::value_at<L>(a, at)...); });
    return out;
  }

  template <int Axis, class F, class A>
  TILE_FUNCTION static auto reduce(F f, const A& given) {
    const auto& a = settled(given);
    using S = typename A::Shape;
    using T = Common<typename A::Type, typename A::Type>;
    T values[Mine<S>::kSize];
    gpu::each_place<L, S>([&](const gpu::Place& at, int i) { values[i] = static_cast<T>(gpu::value_at<L>(a, at)); });
    gpu::reduce<L, Axis, S>(f, values);
    Tile<Cuda, T, Reduced<S, Axis>> out;
    TILE_UNROLL
    for (int i = 0; i < Mine<Reduced<S, Axis>>::kSize; ++i) out.values[i] = values[i];
    return out;
  }

  // Through shared memory, in row-major order.
  template <class S, class A, class Source>
  TILE_FUNCTION static auto rearrange(const A& given, Source) {
    const auto& a = settled(given);
    using T = typename A::Type;
    using From = typename A::Shape;
    if constexpr (gpu::stays_staged<L, S, A, Source>()) {
      return StagedTransposed<A>{a};
    } else if constexpr (gpu::is_transposed_expression<A, Source>()) {
      using X = gpu::MappedTransposed<decltype(a.how)>;
      Tile<Cuda, T, S> out;
      if (a.changed) {
        out = rearrange<S>(static_cast<const Tile<Cuda, T, From>&>(a), Source{});
      } else {
        gpu::each_place<L, S>(
            [&](const gpu::Place& at, int i) { out.values[i] = gpu::element_of(a.how, at.column, at.row); });
      }
      return Computed<Cuda, T, S, X>(out, X{a.how}, a.changed);
    } else {
      T* const shared = reinterpret_cast<T*>(gpu::arena());
      gpu::barrier<L>();
      if (Mine<From>::owns(gpu::thread())) {
        gpu::each_place<L, From>([&](const gpu::Place& at, int i) {
          const int linear = SameOrder::of<From>(at.plane, at.row, at.column);
          if constexpr (is_staged<A>) {
            shared[linear] = a.at(at.plane * From::kRows + at.row, at.column);
          } else {
            shared[linear] = a.values[i];
          }
        });
      }
      gpu::barrier<L>();
      Tile<Cuda, T, S> out;
      gpu::each_place<L, S>([&](const gpu::Place& at, int i) {
        out.values[i] = shared[Source::template of<S>(at.plane, at.row, at.column)];
      });
      return out;
    }
  }

  // The products of a running sum are waited for where it is read, all others here: a sum that every step reads would
  // be in flight where the loop's branches meet, and the compiler then waits after each instruction.
  template <class A, class B, class Start>
  TILE_FUNCTION static auto dot(const A& a, const B& b, Start&& start) {
    using C = typename PlainOf<std::remove_cvref_t<Start>>::Type;
    using T = typename C::Type;
    using S = typename C::Shape;
    if constexpr (gpu::uses_wgmma<L, typename A::Type, S, A::Shape::kColumns>()) {
      Running<Cuda, T, S> sum(started(start));
      constexpr bool kCarried = std::is_lvalue_reference_v<Start> && !std::is_same_v<C, Tile<Cuda, T, S>>;
      gpu::dot_wgmma<L, kCarried>(settled(a), settled(b), sum.tile);
      if constexpr (std::is_same_v<C, Tile<Cuda, T, S>>) {
        settle(sum.tile);
        return sum.tile;
      } else {
        return sum;
      }
    } else {
      Tile<Cuda, T, S> sum = settled(start);
      gpu::dot<L>(settled(a), settled(b), sum);
      return sum;
    }
  }

  template <class T>
  static Pointer<Cuda, T> pointer(const Tensor<T>& tensor) {
    return {tensor.data, {}};
  }

  class Program;

 private:
  // A staged operand of the whole shape, from shared memory.
  template <class S, class A>
  TILE_FUNCTION static decltype(auto) held(const A& a) {
    if constexpr (is_staged<A>) {
      if constexpr (std::is_same_v<typename A::Shape, S>) {
        Tile<Cuda, typename A::Type, S> read;
        gpu::read_part<L>(read.values, a);
        return read;
      } else {
        return (a);
      }
    } else {
      return (a);
    }
  }

  template <class T, class S>
  TILE_FUNCTION static const Tile<Cuda, T, S>& started(const Tile<Cuda, T, S>& sum) {
    return sum;
  }
  template <class T, class S>
  TILE_FUNCTION static const Tile<Cuda, T, S>& started(const Running<Cuda, T, S>& sum) {
    return sum.tile;
  }

  template <class S, class A>
  TILE_FUNCTION static bool exp2_plainly(f32* out, const A& a) {
    bool plain = true;
    gpu::each_place<L, S>([&](const gpu::Place& at, int) {
      plain = plain & (fabsf(static_cast<f32>(gpu::value_at<L>(a, at))) <= gpu::kExp2Normal);
    });
    if (!plain) return false;
    gpu::each_place<L, S>(
        [&](const gpu::Place& at, int i) { out[i] = gpu::exp2_normal(static_cast<f32>(gpu::value_at<L>(a, at))); });
    return true;
  }

  // gpu::extreme() may get only zeros of different signs wrong; a number beside a tile is seldom zero.
  template <class A, class B>
  TILE_FUNCTION static bool never_two_zeros(const A& a, const B& b) {
    if constexpr (!TileLike<A>) {
      return static_cast<f32>(widen(a.value)) != 0.0f;
    } else if constexpr (!TileLike<B>) {
      return static_cast<f32>(widen(b.value)) != 0.0f;
    } else {
      return false;
    }
  }

  template <class F, class S, class... A>
  TILE_FUNCTION static constexpr bool rounds_to_bytes() {
    return gpu::is_rounding_to_bytes<F> && (is_float_type<typename A::Type> && ...) && Mine<S>::kSize % 4 == 0;
  }
  template <class F, class A>
  TILE_FUNCTION static auto round_one(F f, A a) {
    if constexpr (std::is_same_v<A, f32>) {
      return gpu::round_with(f, a);
    } else {
      return f(a);
    }
  }

  // Each row is divided by one number; with many columns its reciprocal is worth keeping.
  template <class S, class A, class B>
  TILE_FUNCTION static constexpr bool divides_rows() {
    return Mine<S>::kRow >= 4 && B::Shape::kColumns == 1;
  }
  template <class S, class A, class B>
  TILE_FUNCTION static bool divide_plainly(f32* out, const A& a, const B& b) {
    constexpr int kRow = Mine<S>::kRow, kRows = Mine<S>::kSize / kRow;
    constexpr f32 kMin = kMath == Math::fast ? 0x1p-126f : gpu::kPlainLeast;
    constexpr f32 kMax = kMath == Math::fast ? 0x1p126f : gpu::kPlainMost;
    f32 divisor[kRows] = {}, reciprocal[kRows] = {};
    bool plain = true, zeros = false;
    gpu::each_place<L, S>([&](const gpu::Place& at, int i) {
      if (i % kRow == 0) {
        const f32 y = divisor[i / kRow] = static_cast<f32>(gpu::value_at<L>(b, at));
        reciprocal[i / kRow] = gpu::reciprocal(y);
        plain = plain & (y >= kMin) & (y <= kMax);
      }
      if constexpr (kMath == Math::exact) {
        const f32 x = fabsf(static_cast<f32>(gpu::value_at<L>(a, at)));
        plain = plain & (x <= kMax);
        zeros = zeros | !(x >= kMin);
      }
    });
    if (zeros) {
      gpu::each_place<L, S>([&](const gpu::Place& at, int) {
        const f32 x = fabsf(static_cast<f32>(gpu::value_at<L>(a, at)));
        plain = plain & ((x == 0.0f) | (x >= kMin));
      });
    }
    if (!plain) return false;
    gpu::each_place<L, S>([&](const gpu::Place& at, int i) {
      const f32 x = static_cast<f32>(gpu::value_at<L>(a, at));
      if constexpr (kMath == Math::fast) {
        out[i] = x * reciprocal[i / kRow];
      } else {
        out[i] = gpu::divide_plainly(x, divisor[i / kRow], reciprocal[i / kRow]);
      }
    });
    return true;
  }
};

// What may be a sum of WGMMA's.
template <class L, Math kMath, class T, class S>
inline constexpr bool may_run<Cuda<L, kMath>, T, S> = L::kWgmma&& S::kPlanes == 1 &&
                                                      sizeof(T) == 4 && gpu::has_rows_of_wgmma<L, S>();

namespace gpu {

// Which program of the grid a block runs.
template <bool kWgmma>
struct Position {
  TILE_FUNCTION int id(int axis) const { return block_index(axis); }
  TILE_FUNCTION int count(int axis) const { return block_count(axis); }
};
template <>
struct Position<true> {
  int ids[3], counts[3];
  const Maps* maps;
  Ring* ring;
  TILE_FUNCTION int id(int axis) const { return ids[axis]; }
  TILE_FUNCTION int count(int axis) const { return counts[axis]; }
};

}  // namespace gpu

template <class L, Math kMath>
class Cuda<L, kMath>::Program {
 public:
  TILE_FUNCTION explicit Program(int pipeline_memory, const gpu::Position<L::kWgmma>& position = {})
      : position_(position), pipeline_memory_(pipeline_memory) {}

  TILE_FUNCTION int id(int axis) const { return position_.id(axis); }
  TILE_FUNCTION int count(int axis) const { return position_.count(axis); }
  TILE_FUNCTION void barrier() {
    gpu::barrier<L>();
    held_by_several_ = false;
  }

  template <class P, class M, class Other>
  TILE_FUNCTION auto load(const P& p, const M& mask, Other other, Where) {
    using T = std::remove_const_t<typename P::Element>;
    using Part = Mine<typename P::Shape>;
    if constexpr (Part::kHolders > 1) held_by_several_ = true;
    Tile<Cuda, T, typename P::Shape> out;
    const T rest = gpu::rest_of<T>(other);
    TILE_UNROLL
    for (int i = 0; i < Part::kSize; ++i) out.values[i] = rest;
    gpu::access<L>(
        p, mask, [&](const T* from, int i) { gpu::load_vector<Part::kVector>(out.values + i, from); },
        [&](const T* from, int i) { out.values[i] = *from; });
    return out;
  }

  template <class P, class V, class M>
  TILE_FUNCTION void store(const P& p, const V& given, const M& mask, Where where) {
    const auto& value = settled(given);
    using T = typename P::Element;
    using S = typename P::Shape;
    if constexpr (is_staged<V>) {
      Tile<Cuda, T, S> read;
      gpu::read_part<L>(read.values, value);
      store(p, read, mask, where);
    } else {
      wait_for_holders<S>();
      if constexpr (gpu::stores_eights<L, P, M>()) {
        gpu::store_eights<L>(p, mask, value.values);
        return;
      }
      if constexpr (gpu::may_store_columns<L, P, M>()) {
        if (gpu::stores_columns<L>(p, mask)) return gpu::store_columns<L>(p, value.values);
      }
      if (!Mine<S>::owns(gpu::thread())) return;
      gpu::access<L>(
          p, mask, [&](T* to, int i) { gpu::store_vector<Mine<S>::kVector>(to, value.values + i); },
          [&](T* to, int i) { *to = value.values[i]; });
    }
  }

  template <AtomicOp kOp, class P, class V, class M>
  TILE_FUNCTION void atomic(const P& p, const V& given, const M& mask, Where) {
    const auto& value = settled(given);
    wait_for_holders<typename P::Shape>();
    if (!Mine<typename P::Shape>::owns(gpu::thread())) return;
    gpu::each_place<L, typename P::Shape>([&](const gpu::Place& at, int i) {
      if (!gpu::value_at<L>(mask, at)) return;
      gpu::atomic<kOp>(p.tensor.data + gpu::value_at<L>(p.index, at), value.values[i]);
    });
  }

  // A nested pipeline has its own memory, after this one's.
  template <class Context, int Stages, class Stage, class Body>
  TILE_FUNCTION void pipeline(Context&, Constant<Stages>, int steps, Stage& stage, Body& body) {
    if constexpr (L::kWgmma) {
      gpu::consume<L, Cuda>(*this, position_.maps, *position_.ring, steps, stage, body);
      return;
    } else {
      const int memory = pipeline_memory_;
      pipeline_memory_ += gpu::pipeline_bytes<Stages, Stage>;
      gpu::pipeline<L, Cuda, Stages>(*this, memory, steps, stage, body);
      pipeline_memory_ = memory;
    }
  }

 private:
  // All holders of an element load it before its owner stores it. (Ordering between lanes is up to the kernel.)
  template <class S>
  TILE_FUNCTION void wait_for_holders() {
    if constexpr (Mine<S>::kHolders > 1) {
      if (held_by_several_) barrier();
    }
  }

  gpu::Position<L::kWgmma> position_;
  int pipeline_memory_;
  bool held_by_several_ = false;  // something loaded since the last barrier
};

namespace gpu {

template <class A>
inline constexpr bool in_host_memory = false;
template <class T>
inline constexpr bool in_host_memory<Array<T>> = true;

template <class L, class Kernel, class... Args>
struct Launch {};  // a name for Needs

// Never called; compiling it records the kernel's needs.
template <class N, class Kernel, class... A>
void note_needs(const Kernel& kernel, const A&... a) {
  Context<N> t{};
  kernel(t, a...);
}

// The GPU gets a plain address: Pointer's empty member would make it two words.
template <class A>
auto sent(A a) {
  return a;
}
template <class E, class T>
T* sent(Pointer<E, T> p) {
  return p.data;
}
template <class E, class A>
TILE_FUNCTION A received(A a) {
  return a;
}
template <class E, class T>
TILE_FUNCTION Pointer<E, T> received(T* p) {
  return {p, {}};
}

#if defined(__CUDACC__)
template <class E, class Kernel, class... A>
__global__ void __launch_bounds__(E::Layout::kThreads, E::Layout::kBlocks)
    run(Kernel kernel, int pipeline_memory, A... a) {
  Context<E> t{typename E::Program(pipeline_memory)};
  kernel(t, received<E>(a)...);
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("octile: ") + what + ": " + cudaGetErrorString(error));
}
#endif

// No template, as all that need not be one: it is compiled once, not for every kernel.
inline void check_launch(const Grid& grid, int shared) {
  check_grid(grid);
  constexpr int kMaxShared = 227 * 1024;
  if (grid.y > 65535 || grid.z > 65535) throw std::invalid_argument("octile: a GPU's grid has up to 65535 y and z.");
  if (grid.size() == 0 || shared <= kMaxShared) return;
  throw std::invalid_argument("octile: the tiles of this kernel take " + std::to_string(shared) +
                              " bytes of shared memory, and a block has 232448: smaller tiles or fewer stages.");
}

template <class E, class Kernel, class... A>
void launch_blocks(const E& executor, Grid grid, int scratch, int shared, const Kernel& kernel, const A&... a) {
  constexpr int kThreads = E::Layout::kThreads;
#if defined(__CUDACC__)
  void (*const function)(Kernel, int, A...) = run<E, Kernel, A...>;
  if (shared > 48 * 1024) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");
  }
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  run<E><<<blocks, kThreads, static_cast<std::size_t>(shared), static_cast<cudaStream_t>(executor.stream)>>>(
      kernel, scratch, a...);
  check(cudaGetLastError(), "launch");
#else
  const auto thread = [&] {
    Context<E> t{typename E::Program(scratch)};
    kernel(t, received<E>(a)...);
  };
  emulation::run_grid(kThreads, static_cast<std::size_t>(shared), executor.backwards, {grid.x, grid.y, grid.z}, thread);
#endif
}

}  // namespace gpu

// Asynchronous, in the executor's stream. Tensors are in device memory.
template <class L, Math kMath, class Kernel, class... Args>
requires(!L::kWgmma) void launch(Cuda<L, kMath> executor, Grid grid, const Kernel& kernel, Args&&... args) {
#if defined(__CUDACC__)
  static_assert(
      (!gpu::in_host_memory<std::remove_cvref_t<Args>> && ...),
      "octile: a GPU kernel takes device memory, as Tensor<T>{name, pointer, shape}; an Array is on the host.");
#endif
  using Key = gpu::Launch<L, Kernel, std::remove_cvref_t<Args>...>;
  if (false) {  // instantiated to note what the kernel needs; never runs
    using N = gpu::Needs<L, Key>;
    N none;
    gpu::note_needs<N>(kernel, argument(none, args)...);
  }
  using Noted = gpu::Noted<Key>;
  gpu::check_launch(grid, Noted::scratch + Noted::pipeline);
  if (grid.size() == 0) return;
  gpu::launch_blocks(executor, grid, Noted::scratch, Noted::scratch + Noted::pipeline, kernel,
                     gpu::sent(argument(executor, args))...);
  (assume_written(args), ...);
}

// How a launch of warpgroups ran.
struct LaunchReport {
  std::string fallback;  // why it is one of the layout's Fallback; empty if it is not
  int stages = 0, stage_bytes = 0, blocks = 0, cluster = 1;

  bool by_wgmma() const { return fallback.empty(); }
  std::string text() const {
    if (!by_wgmma()) return "mma.sync: " + fallback;
    return "WGMMA: " + std::to_string(stages) + " stages of " + std::to_string(stage_bytes) + " bytes, " +
           std::to_string(blocks) + " blocks" + (cluster == 2 ? ", two of which share operands" : "");
  }
};

namespace gpu {

template <class L, class Key>
struct WarpgroupsPlan : Plan {
  Ring ring{};
  int shared = 0;

  template <class Kernel, class... Args>
  WarpgroupsPlan(const Grid& grid, const Kernel& kernel, Args&... args) {
    using Noted = gpu::Noted<Key>;
    constexpr int kMaxShared = 227 * 1024, kBarriers = 16 * (kMaxSlots + 2) + kMessageBytes;
    ring.copies_at = (Noted::scratch + 1023) / 1024 * 1024;
    ring.copies_bytes = Noted::copies;
    ring.memory = ring.copies_at + gpu::kCopies * ring.copies_bytes;
    ring.slot_bytes = Noted::slot;
    for (int i = 0; i < kMaxTransposed; ++i) {
      ring.transposed[i] = Noted::transposed[i] > 0 ? ring.transposed_bytes : -1;
      ring.transposed_bytes += Noted::transposed[i];
    }
    const int rest = ring.memory + 2 * ring.transposed_bytes + kBarriers;
    if (Noted::slot > 0) ring.slots = smaller(kMaxSlots, (kMaxShared - rest) / Noted::slot);
    shared = rest + ring.slots * ring.slot_bytes;
    if (grid.size() >= 1 << 30) problem = "the grid has 2^30 programs or more";
    if (shared > kMaxShared || (Noted::slot > 0 && ring.slots < 2)) {
      problem = "two stages of " + std::to_string(Noted::slot) + " bytes and " + std::to_string(ring.memory) +
                " bytes for operands are more shared memory than a block has";
    }
    Probe probe;
    const auto look = [&](int x, int y, int z) {
      seen.clear();
      if (!problem.empty() || x >= grid.x || y >= grid.y || z >= grid.z) return;
      typename Probe::Program program;
      program.plan = this;
      const int at[] = {x, y, z}, counts[] = {grid.x, grid.y, grid.z};
      for (int i = 0; i < 3; ++i) program.ids[i] = at[i], program.counts[i] = counts[i];
      Context<Probe> t{program};
      kernel(t, argument(probe, args)...);
    };
    const auto look_at_two = [&](int x, int y, int z) {  // neighbours along x, where there are any
      look(x, y, z);
      const std::vector<Seen> first = seen;
      look(x + 1, y, z);
      if (pairs && problem.empty()) compare(first, seen);
    };
    if (Noted::slot > 0) {
      pairs = grid.x % 2 == 0;
      look_at_two(0, 0, 0);
      look(2, 0, 0);
      look(0, 1, 0);
      look(0, 0, 1);
      look_at_two(larger(0, grid.x - 2), grid.y - 1, grid.z - 1);
    }
    finish();
  }

  // Before the maps are made.
  void share(int cluster) {
    bool any = false;
    for (int i = 0; i < maps.count; ++i) {
      maps.maps[i].shared = maps.maps[i].shared && pairs && cluster == 2;
      any = any || maps.maps[i].shared;
    }
    ring.blocks = any ? 2 : 1;
  }
};

#if defined(__CUDACC__)
// The first warp of the last warpgroup asks for boxes, and the warps beside it transpose bytes; the others multiply.
template <class E, class Kernel, class... A>
__global__ void __launch_bounds__(E::Layout::kThreads + 128, 1)
    run_warpgroups(Kernel kernel, const __grid_constant__ Maps maps, Ring ring, dim3 programs, int band, A... a) {
  using L = typename E::Layout;
  const int counts[3] = {static_cast<int>(programs.x), static_cast<int>(programs.y), static_cast<int>(programs.z)};
  const int number = static_cast<int>(programs.x * programs.y * programs.z);
  ring.barriers = shared_address(arena() + ring.memory + ring.slots * ring.slot_bytes + 2 * ring.transposed_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring.slots + 2; ++i) {
      barrier_init(ring.barriers + Word(16 * i), i < ring.slots ? 1 : kTransposingWarps);
      barrier_init(ring.barriers + Word(16 * i + 8), L::kThreads / 32 * (i < ring.slots ? ring.blocks : 1));
    }
    for (Word i = 0; i < 2; ++i) barrier_init(ring.message_barrier(i), 1);
    barriers_are_made();
  }
  __syncthreads();
  if (ring.blocks == 2) {
    ring.rank = cluster_rank();
    cluster_barrier();
  }
  const int first = static_cast<int>(blockIdx.x) / ring.blocks, step = static_cast<int>(gridDim.x) / ring.blocks;
  const int clusters = number / ring.blocks;
  if (threadIdx.x >= L::kThreads) {
    if constexpr (L::kGroups == 2) fewer_registers<56>();
    const int warp = __shfl_sync(0xffffffffu, (static_cast<int>(threadIdx.x) - L::kThreads) / 32, 0);
    if (warp == 0) {
      for (int i = first; i < clusters; i += step) {
        typename Producer<L>::Program program{{}, &maps, &ring, i, {}, {counts[0], counts[1], counts[2]}};
        place_program(i, counts, band, ring.blocks, ring.rank, program.ids);
        Context<Producer<L>> t{program};
        kernel(t, received<Producer<L>>(a)...);
      }
      if (ring.blocks == 2) agree(ring, ~Word{0});  // no one waits for boxes that never arrive
    } else if (ring.transposed_bytes > 0 && warp <= kTransposingWarps) {
      for (int i = first; i < clusters; i += step) {
        typename Transposer<L>::Program program{{}, &ring, warp - 1, {}, {counts[0], counts[1], counts[2]}};
        place_program(i, counts, band, ring.blocks, ring.rank, program.ids);
        Context<Transposer<L>> t{program};
        kernel(t, received<Transposer<L>>(a)...);
      }
    }
  } else {
    if constexpr (L::kGroups == 2) more_registers<224>();
    for (int i = first; i < clusters; i += step) {
      Position<true> position{{}, {counts[0], counts[1], counts[2]}, &maps, &ring};
      place_program(i, counts, band, ring.blocks, ring.rank, position.ids);
      Context<E> t{typename E::Program(0, position)};
      kernel(t, received<E>(a)...);
    }
  }
  if (ring.blocks == 2) {  // no block leaves while the other may write to its memory
    __syncwarp();
    cluster_barrier();
  }
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&value, attribute, device), "device");
  return value;
}

// The driver's function is looked up, so that a program needs no libcuda to start.
inline CUresult encode(TileMap& map) {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "tensor maps");
    if (result != cudaDriverEntryPointSuccess) throw std::runtime_error("octile: the driver has no tensor maps");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  const auto bytes = static_cast<cuuint64_t>(map.of.element);
  const auto type = map.of.element == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : map.of.element == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                          : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const int line = map.of.box_columns * map.of.element;
  // Of what two blocks share, each loads half.
  const auto rows = static_cast<cuuint32_t>(map.shared ? map.of.box_rows / 2 : map.of.box_rows);
  const auto swizzle = map.of.box_rows == 1 ? CU_TENSOR_MAP_SWIZZLE_NONE
                       : line == 128        ? CU_TENSOR_MAP_SWIZZLE_128B
                       : line == 64         ? CU_TENSOR_MAP_SWIZZLE_64B
                                            : CU_TENSOR_MAP_SWIZZLE_32B;
  const auto pitch = static_cast<cuuint64_t>(map.of.pitch) * bytes;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(map.of.columns), static_cast<cuuint64_t>(map.of.rows),
                              static_cast<cuuint64_t>(map.depth)};
  const cuuint64_t pitches[] = {pitch, map.depth > 1 ? static_cast<cuuint64_t>(map.step) * bytes : pitch};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(map.of.box_columns), rows, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  void* const start = const_cast<char*>(static_cast<const char*>(map.of.data)) + map.origin * map.of.element;
  return function(&map.map, type, 3, start, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

inline void encode_maps(Plan& plan) {
  if (!plan.problem.empty()) return;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
    plan.problem = "this GPU has no WGMMA; it is of another generation";
    return;
  }
  for (int i = 0; i < plan.maps.count; ++i) {
    const CUresult result = encode(plan.maps.maps[i]);
    if (result == CUDA_SUCCESS) continue;
    plan.refuse({"", plan.maps.maps[i].line, 0},
                "the driver makes no tensor map of it, error " + std::to_string(result));
  }
}
#endif

template <class E, class Kernel, class... A>
int launch_warpgroups(const E& executor, const Grid& grid, const Plan& plan, const Ring& ring, int shared,
                      const Kernel& kernel, const A&... a) {
  constexpr int kThreads = E::Layout::kThreads;
#if defined(__CUDACC__)
  void (*const function)(Kernel, Maps, Ring, dim3, int, A...) = run_warpgroups<E, Kernel, A...>;
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");
  int blocks = static_cast<int>(grid.size());
  if (executor.persistent) {
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    blocks = smaller(blocks, processors - processors % ring.blocks);
  }
  const dim3 programs(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(ring.blocks), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kThreads + 128);
  launch.dynamicSmemBytes = static_cast<std::size_t>(shared);
  launch.stream = static_cast<cudaStream_t>(executor.stream);
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  check(cudaLaunchKernelEx(&launch, function, kernel, plan.maps, ring, programs, executor.band, a...), "launch");
  return blocks;
#else
  const auto thread = [&] {
    Ring mine = ring;
    Position<true> position{{}, {grid.x, grid.y, grid.z}, &plan.maps, &mine};
    const int number = block_index(0) + grid.x * (block_index(1) + grid.y * block_index(2));
    place_program(number, position.counts, executor.band, 1, 0, position.ids);
    Context<E> t{typename E::Program(0, position)};
    kernel(t, received<E>(a)...);
  };
  emulation::run_grid(kThreads, static_cast<std::size_t>(shared), executor.backwards, {grid.x, grid.y, grid.z}, thread);
  return static_cast<int>(grid.size());
#endif
}

}  // namespace gpu

// The same for warpgroups. Where they cannot run the kernel, its layout's Fallback does, and the report says why.
template <class L, Math kMath, class Kernel, class... Args>
requires(L::kWgmma) LaunchReport launch(Cuda<L, kMath> executor, Grid grid, const Kernel& kernel, Args&&... args) {
#if defined(__CUDACC__)
  static_assert(
      (!gpu::in_host_memory<std::remove_cvref_t<Args>> && ...),
      "octile: a GPU kernel takes device memory, as Tensor<T>{name, pointer, shape}; an Array is on the host.");
#endif
  using Key = gpu::Launch<L, Kernel, std::remove_cvref_t<Args>...>;
  if (false) {  // instantiated to note what the kernel needs; never runs
    using N = gpu::Needs<L, Key>;
    N none;
    gpu::note_needs<N>(kernel, argument(none, args)...);
  }
  LaunchReport report;
  check_grid(grid);
  if (grid.size() == 0) return report;
  if (executor.cluster != 1 && executor.cluster != 2) {
    throw std::invalid_argument("octile: a cluster has 1 or 2 blocks, not " + std::to_string(executor.cluster) + ".");
  }
  gpu::WarpgroupsPlan<L, Key> plan(grid, kernel, args...);
  plan.share(executor.cluster);
#if defined(__CUDACC__)
  gpu::encode_maps(plan);
#endif
  if (!plan.problem.empty()) {
    if constexpr (std::is_same_v<typename L::Fallback, NoFallback>) {
      throw std::invalid_argument(
          "octile: WGMMA cannot run this kernel, and its layout has no fallback: " + plan.problem + ".");
    } else {
      report.fallback = plan.problem;
      launch(Cuda<typename L::Fallback, kMath>{executor.stream, executor.backwards}, grid, kernel, args...);
      return report;
    }
  }
  report.stages = plan.ring.slots;
  report.stage_bytes = plan.ring.slot_bytes;
  report.cluster = plan.ring.blocks;
  report.blocks = gpu::launch_warpgroups(executor, grid, plan, plan.ring, plan.shared, kernel,
                                         gpu::sent(argument(executor, args))...);
  (assume_written(args), ...);
  return report;
}

}  // namespace octile::tile
