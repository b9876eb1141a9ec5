// Tiles that a step of a pipeline computes from what it has fetched, element by element: 16-bit operands of a product
// of warpgroups. Such a tile holds values, as any other, and how they were computed. A product writes it to shared
// memory from the latter, 16 bytes at a time; the values are then unused, and the compiler drops them.
#pragma once

#include "octile/tile/cuda_access.h"
#include "octile/tile/cuda_hopper.h"

namespace octile::tile {

// X: how, as an expression of staged tiles. `changed`: something else was assigned since.
template <class E, class T, class S, class X>
struct Computed : Tile<E, T, S> {
  X how;
  bool changed;

  TILE_FUNCTION Computed(const Tile<E, T, S>& values, const X& x, bool other)
      : Tile<E, T, S>(values), how(x), changed(other) {}
  TILE_FUNCTION Computed& operator=(const Tile<E, T, S>& values) {
    E::template note_change<T, S>();
    Tile<E, T, S>::operator=(values);
    changed = true;
    return *this;
  }
  TILE_FUNCTION Computed& operator=(const Running<E, T, S>& values) { return *this = settled(values); }
  TILE_KEEPS_ITS_TYPE(Computed)
};
template <class E, class T, class S, class X>
inline constexpr bool is_tile<Computed<E, T, S, X>> = true;
template <class E, class T, class S, class X>
struct ValuesOf<Computed<E, T, S, X>> {
  using Type = Tile<E, T, S>;
};
template <class A>
inline constexpr bool is_computed = false;
template <class E, class T, class S, class X>
inline constexpr bool is_computed<Computed<E, T, S, X>> = true;
template <class A>
struct PlainOf {
  using Type = A;
};
template <class E, class T, class S, class X>
struct PlainOf<Computed<E, T, S, X>> : ValuesOf<Computed<E, T, S, X>> {};

namespace gpu {

// ---- Expressions ----

template <class F, class... A>
struct Mapped;
template <class F, class A>
struct Mapped<F, A> {
  F f;
  A a;
};
template <class F, class A, class B>
struct Mapped<F, A, B> {
  F f;
  A a;
  B b;
};
template <class F, class A, class B, class C>
struct Mapped<F, A, B, C> {
  F f;
  A a;
  B b;
  C c;
};
template <class X>
struct MappedTransposed {  // rows as columns
  X x;
};

template <class A>
inline constexpr bool is_number = false;
template <class T>
inline constexpr bool is_number<Scalar<T>> = true;

// What an expression keeps of an operand.
template <class A>
TILE_FUNCTION auto how_of(const A& a) {
  if constexpr (is_computed<A>) {
    return a.how;
  } else {
    return a;
  }
}
template <class A>
TILE_FUNCTION bool is_changed([[maybe_unused]] const A& a) {
  if constexpr (is_computed<A>) return a.changed;
  return false;
}

// Whether F of these operands is an expression: of staged tiles, with indices, masks and numbers beside them. exp2 and
// division have shorter ways for whole tiles.
template <class L, class S, class F, class... A>
TILE_FUNCTION constexpr bool is_expression() {
  constexpr bool kPlain = !std::is_same_v<F, scalar::Exp2> && !std::is_same_v<F, scalar::Divide>;
  constexpr bool kAny = ((is_staged<A> || is_computed<A>) || ...);
  constexpr bool kAll = ((is_staged<A> || is_computed<A> || is_number<A> || AffineTile<A> || LazyMask<A>)&&...);
  if constexpr (!L::kWgmma || S::kPlanes != 1 || !kPlain || !kAny || !kAll || sizeof...(A) > 3) {
    return false;
  } else {
    return !std::is_same_v<decltype(std::declval<F>()(widen(std::declval<typename A::Type>())...)), bool>;
  }
}
template <class A, class Source>
TILE_FUNCTION constexpr bool is_transposed_expression() {
  return is_computed<A> && std::is_same_v<Source, Transposed>;
}

// Tiles of rows and columns that are contiguous along rows, less those that are along columns.
template <class X>
inline constexpr int along_rows = 0;
template <class E, class T, class S, int kPlace>
inline constexpr int along_rows<Staged<E, T, S, kPlace>> = S::kRows > 1 && S::kColumns > 1 ? 1 : 0;
template <class A>
inline constexpr int along_rows<StagedTransposed<A>> = -along_rows<A>;
template <class X>
inline constexpr int along_rows<MappedTransposed<X>> = -along_rows<X>;
template <class F, class... A>
inline constexpr int along_rows<Mapped<F, A...>> = (along_rows<A> + ... + 0);

template <class X>
inline constexpr bool has_bytes = false;
template <class E, class T, class S, int kPlace>
inline constexpr bool has_bytes<Staged<E, T, S, kPlace>> = sizeof(T) == 1 && S::kRows > 1 && S::kColumns > 1;
template <class A>
inline constexpr bool has_bytes<StagedTransposed<A>> = has_bytes<A>;
template <class X>
inline constexpr bool has_bytes<MappedTransposed<X>> = has_bytes<X>;
template <class F, class... A>
inline constexpr bool has_bytes<Mapped<F, A...>> = (has_bytes<A> || ...);

// ---- Runs: neighbours in a row, or, down, in a column ----

template <class T, int n>
struct Run {
  using Type = T;
  T values[n];
};

template <class T>
inline constexpr bool is_byte = std::is_same_v<T, s8> || std::is_same_v<T, u8>;
// n bytes in a word, 128 added to each that has a sign.
template <int n, class T>
TILE_FUNCTION Word raised_bytes(const T* bytes) {
  Word word = 0;
  memcpy(&word, bytes, n);
  return std::is_same_v<T, s8> ? word ^ 0x80808080u : word;
}
// 1024 + u has the bits 0x6400 + u as a 16-bit float.
template <class T, int n>
TILE_FUNCTION Run<f16, n> halves_of_bytes(const Run<T, n>& bytes) {
  constexpr int kTogether = n % 4 == 0 ? 4 : 2;
  constexpr Word kOffset = std::is_same_v<T, s8> ? 0x64806480u : 0x64006400u;
  Run<f16, n> out;
  TILE_UNROLL
  for (int i = 0; i < n; i += kTogether) {
    const Word word = raised_bytes<kTogether>(bytes.values + i);
    TILE_UNROLL
    for (int j = 0; j < kTogether; j += 2) {
      const Word pair = subtract_halves(choose_bytes(word, 0x64646464u, j == 0 ? 0x4140u : 0x4342u), kOffset);
      memcpy(static_cast<void*>(out.values + i + j), &pair, 4);
    }
  }
  return out;
}
template <int n>
TILE_FUNCTION Run<f16, n> halves_of_floats(const Run<f32, n>& floats) {
  Run<f16, n> out;
  TILE_UNROLL
  for (int i = 0; i < n; i += 2) {
    const Word pair = pack_halves(floats.values[i], floats.values[i + 1]);
    memcpy(static_cast<void*>(out.values + i), &pair, 4);
  }
  return out;
}
template <class T, int n>
TILE_FUNCTION Run<f32, n> floats_of_bytes(const Run<T, n>& bytes) {
  constexpr int kTogether = n % 4 == 0 ? 4 : 2;
  Run<f32, n> out;
  TILE_UNROLL
  for (int i = 0; i < n; i += kTogether) {
    Word word = 0;
    memcpy(&word, bytes.values + i, kTogether);
    upper_bytes_to_floats<T>(word << 16, out.values[i], out.values[i + 1]);
    if constexpr (kTogether == 4) upper_bytes_to_floats<T>(word, out.values[i + 2], out.values[i + 3]);
  }
  return out;
}
// What operators do with an integer beside a float.
template <bool kFloat, class T, int n>
TILE_FUNCTION auto as_operand(const Run<T, n>& run) {
  if constexpr (kFloat && is_byte<T> && n % 2 == 0) {
    return floats_of_bytes(run);
  } else {
    return run;
  }
}

template <class F>
inline constexpr bool is_arithmetic = std::is_same_v<F, scalar::Add> || std::is_same_v<F, scalar::Subtract> ||
                                      std::is_same_v<F, scalar::Multiply> || std::is_same_v<F, scalar::Fma>;
template <Round kRound>
inline constexpr bool is_arithmetic<scalar::Cast<f32, kRound>> = true;
template <class F>
inline constexpr bool is_cast_to_half = false;
template <Round kRound>
inline constexpr bool is_cast_to_half<scalar::Cast<f16, kRound>> = true;

template <int n, class F, class... R>
TILE_FUNCTION auto map_runs(F f, const R&... run) {
  using T = decltype(f(widen(run.values[0])...));
  Run<T, n> out;
  TILE_UNROLL
  for (int i = 0; i < n; ++i) out.values[i] = f(widen(run.values[i])...);
  return out;
}
template <int n, class F, class... R>
TILE_FUNCTION auto apply_to_runs(F f, const R&... run) {
  using T = decltype(f(widen(run.values[0])...));
  if constexpr (n % 2 == 0 && is_cast_to_half<F> && (is_byte<typename R::Type> && ...)) {
    return halves_of_bytes(run...);
  } else if constexpr (n % 2 == 0 && is_cast_to_half<F> && (std::is_same_v<typename R::Type, f32> && ...)) {
    return halves_of_floats(run...);
  } else {
    return map_runs<n>(f, as_operand < is_arithmetic<F> && std::is_same_v < T, f32 >> (run)...);
  }
}

// n elements of an expression from (row, column) on. A side of length 1 repeats.
template <int n, bool kDown, class X>
struct RunOf {  // an index, or a mask
  TILE_FUNCTION static auto get(const X& x, int row, int column) {
    using T = std::remove_cvref_t<decltype(x.at(0, 0, 0))>;
    Run<std::conditional_t<LazyMask<X>, bool, typename X::Type>, n> out;
    TILE_UNROLL
    for (int i = 0; i < n; ++i)
      out.values[i] = static_cast<T>(x.at(0, kDown ? row + i : row, kDown ? column : column + i));
    return out;
  }
};
template <int n, bool kDown, class T>
struct RunOf<n, kDown, Scalar<T>> {
  TILE_FUNCTION static auto get(const Scalar<T>& x, int, int) {
    Run<T, n> out;
    TILE_UNROLL
    for (int i = 0; i < n; ++i) out.values[i] = x.value;
    return out;
  }
};
template <int n, bool kDown, class E, class T, class S, int kPlace>
struct RunOf<n, kDown, Staged<E, T, S, kPlace>> {
  TILE_FUNCTION static auto get(const Staged<E, T, S, kPlace>& x, int row, int column) {
    constexpr bool kOneRow = S::kRows == 1, kOneColumn = S::kColumns == 1;
    constexpr int kChunk = smaller(n, 16 / static_cast<int>(sizeof(T)));
    Run<T, n> out;
    if constexpr (!kDown && !kOneColumn && S::kColumns % n == 0) {
      TILE_UNROLL
      for (int i = 0; i < n; i += kChunk) {
        // A row by itself is contiguous.
        load_vector<kChunk>(out.values + i, kOneRow ? &x.at(0, column) + i : &x.at(row, column + i));
      }
    } else if constexpr (kDown ? kOneRow : kOneColumn) {
      const T value = x.at(kOneRow ? 0 : row, kOneColumn ? 0 : column);
      TILE_UNROLL
      for (int i = 0; i < n; ++i) out.values[i] = value;
    } else {
      TILE_UNROLL
      for (int i = 0; i < n; ++i) {
        out.values[i] = x.at(kOneRow ? 0 : kDown ? row + i : row, kOneColumn ? 0 : kDown ? column : column + i);
      }
    }
    return out;
  }
};
template <int n, bool kDown, class A>
struct RunOf<n, kDown, StagedTransposed<A>> {
  TILE_FUNCTION static auto get(const StagedTransposed<A>& x, int row, int column) {
    return RunOf<n, !kDown, A>::get(x.tile, column, row);
  }
};
template <int n, bool kDown, class X>
struct RunOf<n, kDown, MappedTransposed<X>> {
  TILE_FUNCTION static auto get(const MappedTransposed<X>& x, int row, int column) {
    return RunOf<n, !kDown, X>::get(x.x, column, row);
  }
};
template <int n, bool kDown, class F, class A>
struct RunOf<n, kDown, Mapped<F, A>> {
  TILE_FUNCTION static auto get(const Mapped<F, A>& x, int row, int column) {
    return apply_to_runs<n>(x.f, RunOf<n, kDown, A>::get(x.a, row, column));
  }
};
template <int n, bool kDown, class F, class A, class B>
struct RunOf<n, kDown, Mapped<F, A, B>> {
  TILE_FUNCTION static auto get(const Mapped<F, A, B>& x, int row, int column) {
    return apply_to_runs<n>(x.f, RunOf<n, kDown, A>::get(x.a, row, column), RunOf<n, kDown, B>::get(x.b, row, column));
  }
};
template <int n, bool kDown, class F, class A, class B, class C>
struct RunOf<n, kDown, Mapped<F, A, B, C>> {
  TILE_FUNCTION static auto get(const Mapped<F, A, B, C>& x, int row, int column) {
    return apply_to_runs<n>(x.f, RunOf<n, kDown, A>::get(x.a, row, column), RunOf<n, kDown, B>::get(x.b, row, column),
                            RunOf<n, kDown, C>::get(x.c, row, column));
  }
};

// One element.
template <class X>
TILE_FUNCTION auto element_of(const X& x, int row, int column) {
  return RunOf<1, false, X>::get(x, row, column).values[0];
}

// Computed tiles of executors whose tiles are hollow.
template <class E, class L, class S, class F, class... A>
TILE_FUNCTION auto hollow_map(F f, const A&... a) {
  using T = decltype(f(widen(std::declval<typename A::Type>())...));
  if constexpr (is_expression<L, S, F, A...>()) {
    using X = Mapped<F, decltype(how_of(a))...>;
    return Computed<E, T, S, X>({}, X{f, how_of(a)...}, (is_changed(a) || ...));
  } else {
    return Tile<E, T, S>{};
  }
}
template <class E, class S, class A>
TILE_FUNCTION auto hollow_transposed(const A& a) {
  using X = MappedTransposed<decltype(a.how)>;
  return Computed<E, typename A::Type, S, X>({}, X{a.how}, a.changed);
}

// ---- To shared memory ----

// Whether a computed tile is copied with its rows as columns.
template <class A>
inline constexpr bool copies_across = false;
template <class E, class T, class S, class X>
inline constexpr bool copies_across<Computed<E, T, S, X>> = along_rows<X> < 0;

// kRows x kColumns elements of an expression from (row, column) of the copy on, by kWarps warps: a lane takes runs of a
// row, and eight lanes neighbouring rows, which are in different banks. A warp stays in its columns where it can, so
// that what all rows share is read once.
template <int kWarps, int kRows, int kColumns, bool kAcross, class X, class To>
TILE_FUNCTION void write_runs(const X& x, const To& to, int row, int column, int warp) {
  using T = typename To::Type;
  using Layout = typename To::Layout;
  constexpr int n = has_bytes<X> && kColumns % 16 == 0 ? 16 : 8, kRuns = kColumns / n;
  constexpr int kUnits = (kRows + 31) / 32 * kRuns, kTurns = (kUnits + kWarps - 1) / kWarps;
  constexpr int kTogether = smaller(2, kTurns);
  static_assert(power_of_two(kRuns));
  const int lane = thread() & 31;
  TILE_UNROLL
  for (int first = 0; first < kTurns; first += kTogether) {
    Run<T, n> runs[kTogether];
    TILE_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int unit = (first + i) * kWarps + warp, r = (unit >> log2_of(kRuns) << 5) + lane,
                c = (unit & (kRuns - 1)) * n;
      if ((kUnits % kWarps != 0 && unit >= kUnits) || (kRows % 32 != 0 && r >= kRows)) continue;
      if constexpr (kAcross) {
        runs[i] = RunOf<n, true, X>::get(x, column + c, row + r);
      } else {
        runs[i] = RunOf<n, false, X>::get(x, row + r, column + c);
      }
    }
    TILE_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int unit = (first + i) * kWarps + warp, r = (unit >> log2_of(kRuns) << 5) + lane,
                c = (unit & (kRuns - 1)) * n;
      if ((kUnits % kWarps != 0 && unit >= kUnits) || (kRows % 32 != 0 && r >= kRows)) continue;
      TILE_UNROLL
      for (int j = 0; j < n; j += 8) {
        store_vector<8>(reinterpret_cast<T*>(to.base() + Layout::chunk_at(row + r, (column + c + j) >> 3)),
                        runs[i].values + j);
      }
    }
  }
}

// The copy of an operand of a product.
template <class A>
using CopyShape =
    std::conditional_t<copies_across<A>, Shape<1, A::Shape::kColumns, A::Shape::kRows>, typename A::Shape>;
template <class A>
TILE_FUNCTION auto copy_of(int offset) {
  using Copy = Staged<typename A::Executor, typename A::Type, CopyShape<A>>;
  const Copy copy{offset};
  if constexpr (copies_across<A>) {
    return StagedTransposed<Copy>{copy};
  } else {
    return copy;
  }
}

// By the warps that multiply: of a left operand, each warpgroup writes its own rows, 64 at a time in turn.
template <class L, bool kLeft, class A>
TILE_FUNCTION void write_computed(const A& a, int offset, [[maybe_unused]] int group) {
  using S = typename A::Shape;
  using To = CopyShape<A>;
  constexpr bool kAcross = copies_across<A>;
  const Staged<typename A::Executor, typename A::Type, To> to{offset};
  if (a.changed) {
    if constexpr (!kAcross) {
      stage_part<L>(a.values, to);
    } else if (Part<L, S>::owns(thread())) {
      each_place<L, S>([&](const Place& at, int i) { to.at(at.column, at.row) = a.values[i]; });
    }
  } else if constexpr (!kLeft) {
    write_runs<L::kThreads / 32, To::kRows, To::kColumns, kAcross>(a.how, to, 0, 0, thread() >> 5);
  } else {
    const int warp = thread() >> 5 & 3;
    TILE_UNROLL
    for (int block = 0; block < S::kRows; block += L::kGroups * 64) {
      const int first = block + group * 64;
      if constexpr (kAcross) {
        write_runs<4, To::kRows, 64, true>(a.how, to, 0, first, warp);
      } else {
        write_runs<4, 64, To::kColumns, false>(a.how, to, first, 0, warp);
      }
    }
  }
}

}  // namespace gpu
}  // namespace octile::tile
