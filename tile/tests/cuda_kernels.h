// Kernels for tests of the CUDA executor, each covering some of its special cases. Sizes are in
// cuda_cases.h.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile::cuda_cases {

struct AddFrom {  // z[first ..] = x[first ..] + 10: rows may begin anywhere
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int first, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0) + first;
    t.store(z + i, t.load(x + i, i < n0) + 10.0f, i < n0);
  }
};

struct Reduce {  // one tile (p, r, c): its sums, maxima and minima along every axis
  TILE_KERNEL void operator()(auto& t, auto x, auto z, auto p, auto r, auto c0) const {
    const auto plane = col(col(t.arange(p)));
    const auto row = col(t.arange(r));
    const auto column = t.arange(c0);
    const auto v = t.load(x + plane * (r * c0) + row * c0 + column);
    auto to = z + 0;
    t.store(to + plane * r + row, sum(v));
    t.store(to + p * r + plane * r + row, max(v));
    t.store(to + p * r * 2 + plane * r + row, min(v));
    const auto to_rows = z + p * r * 3;
    t.store(to_rows + plane * c0 + column, sum(v, kRows));
    t.store(to_rows + p * c0 + plane * c0 + column, max(v, kRows));
    t.store(to_rows + p * c0 * 2 + plane * c0 + column, min(v, kRows));
    const auto to_planes = z + (p * r + p * c0) * 3;
    t.store(to_planes + row * c0 + column, sum(v, kPlanes));
    t.store(to_planes + r * c0 + row * c0 + column, max(v, kPlanes));
    t.store(to_planes + r * c0 * 2 + row * c0 + column, min(v, kPlanes));
  }
};

struct Rearrange {  // transposed, reshaped, and a row as a column
  TILE_KERNEL void operator()(auto& t, auto x, auto z, auto r, auto c0) const {
    const auto v = t.load(x + col(t.arange(r)) * c0 + t.arange(c0));
    t.store(z + col(t.arange(c0)) * r + t.arange(r), trans(v));
    const auto pairs = reshape(v, r / c<2>, c0 / c<2>, c<4>);
    const auto index = col(col(t.arange(r / c<2>))) * (c0 * 2) + col(t.arange(c0 / c<2>)) * 4 + t.arange(c<4>);
    t.store(z + r * c0 + index, pairs);
    t.store(z + r * c0 * 2 + col(t.arange(c0)), col(t.load(x + t.arange(c0))));
  }
};

struct Integers {  // packs of four 8-bit numbers, with shifts, masks of tiles and gathers
  TILE_KERNEL void operator()(auto& t, auto x, auto bytes, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto in = i < n0;
    const auto word = t.load(x + i / 4, in, 0);
    const auto byte = (word >> (i % 4 * 8)) & 255;
    const auto other = t.load(bytes + byte % n0, in & (byte != 7), 3);
    const auto mixed = where(byte < 100, byte * 5 - other, (byte << 3) ^ other);
    t.store(z + i, mixed / 3 + abs(mixed) % 11, in & !(byte == 9));
  }
};

struct Casts {
  TILE_KERNEL void operator()(auto& t, auto x, auto half, auto brain, auto byte, auto small, auto wide, int n0,
                              auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto in = i < n0;
    const auto v = t.load(x + i, in);
    t.store(half + i, cast<f16>(v), in);
    t.store(brain + i, cast<bf16>(v * 3.0f), in);
    t.store(byte + i, cast<s8, Round::even>(v * 40.0f), in);
    t.store(small + i, cast<u8, Round::down>(sqrt(abs(v)) * 100.0f), in);
    t.store(wide + i, cast<s64>(cast<s32, Round::zero>(v * 1e8f)) * 3, in);
  }
};

struct Atomics {  // count[bin of x] += 1, highest = max x, largest = max as an integer
  TILE_KERNEL void operator()(auto& t, auto x, auto count, auto highest, auto largest, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto in = i < n0;
    const auto v = t.load(x + i, in, 0.0f);
    const auto level = cast<s32, Round::down>(v * 4.0f);
    t.atomic_add(count + (level & 7), where(in, level * 0 + 1, 0), in);
    t.atomic_max(highest, max(where(in, v, -kInfinity)));
    t.atomic_max(largest + (i & 1), level, in);
  }
};

struct StoreThenLoad {  // a program reads what its other threads have stored
  TILE_KERNEL void operator()(auto& t, auto x, auto z, auto w, auto b0) const {
    const auto i = t.arange(b0);
    const auto first = t.program_id(0) * b0;
    t.store(z + first + i, t.load(x + first + i) * 2.0f);
    t.barrier();
    t.store(w + first + i, t.load(z + first + (b0 - 1 - i)));
  }
};

// A tile held by several threads, stored or counted up where it was loaded, by one of them. Its old value goes to
// every row of z, where each holder stores its own. The same for the scalar s.
struct InPlace {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, auto s, auto highest, auto b0, auto b1) const {
    const auto j = t.arange(b1);
    const auto rows = z + col(t.arange(b0)) * b1 + j;
    const auto v = t.load(x + j);
    t.store(x + j, v * 2.0f);
    t.store(rows, v);
    const auto level = t.load(highest + j);
    t.atomic_max(highest + j, level + 5);
    t.store(rows + b0 * b1, cast<f32>(level));
    const auto one = t.load(s);
    t.store(s, one + 1.0f);
    t.store(rows + b0 * b1 * 2, one + v);
  }
};

struct Matmul {  // z = x (n0, middle) @ y (middle, n1), operands loaded ahead
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int middle, auto b0, auto b1,
                              auto b2) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    auto total = t.full(b0, b1, 0.0f);
    t.pipeline(
        c<4>, cdiv(middle, b2),
        [&](int step) {
          const auto k = t.arange(b2) + step * b2;
          return fetches(t.fetch(x + i * middle + k, (i < n0) & (k < middle), 0.0f),
                         t.fetch(y + col(k) * n1 + j, (col(k) < middle) & (j < n1), 0.0f));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    t.store(z + i * n1 + j, total, (i < n0) & (j < n1));
  }
};

struct MatmulTransposed {  // z = x^T @ y from registers; x (middle, n0). Doubles y first.
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int middle, auto b0, auto b1,
                              auto b2) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    auto total = t.full(b0, b1, 0.0f);
    for (int step : range(0, middle, b2)) {
      const auto k = col(t.arange(b2) + step);
      const auto a = t.load(x + k * n0 + i, (i < n0) & (k < middle), 0.0f);
      const auto b = t.load(y + k * n1 + j, (k < middle) & (j < n1), 0.0f);
      total = dot(trans(a), cast<f16>(b * 2.0f), total);
    }
    t.store(z + col(i) * n1 + j, total, (col(i) < n0) & (j < n1));
  }
};

// z = x (n0, middle) @ y (middle, n1), of integers or floats. Across: x is stored as (middle, n0). Along: y as (n1,
// middle).
template <class Sum, bool kAcross, bool kAlong>
struct Product {
  template <class T, class X, class Y, class Z, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, X x, Y y, Z z, int n0, int n1, int middle, M b0, N b1, K b2) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    auto total = t.full(b0, b1, Sum{0});
    t.pipeline(
        c<3>, cdiv(middle, b2),
        [&](int step) {
          const auto k = t.arange(b2) + step * b2;
          const auto left = [&] {
            if constexpr (kAcross) return t.fetch(x + col(k) * n0 + i, (col(k) < middle) & (i < n0), Sum{0});
            if constexpr (!kAcross) return t.fetch(x + col(i) * middle + k, (col(i) < n0) & (k < middle), Sum{0});
          };
          const auto right = [&] {
            if constexpr (kAlong) return t.fetch(y + col(j) * middle + k, (col(j) < n1) & (k < middle), Sum{0});
            if constexpr (!kAlong) return t.fetch(y + col(k) * n1 + j, (col(k) < middle) & (j < n1), Sum{0});
          };
          return fetches(left(), right());
        },
        [&](int, const auto& a, const auto& b) {
          if constexpr (kAcross && kAlong) total = dot(trans(a), trans(b), total);
          if constexpr (kAcross && !kAlong) total = dot(trans(a), b, total);
          if constexpr (!kAcross && kAlong) total = dot(a, trans(b), total);
          if constexpr (!kAcross && !kAlong) total = dot(a, b, total);
        });
    t.store(z + col(i) * n1 + j, total, (col(i) < n0) & (j < n1));
  }
};

struct ScaledProduct {  // z[n] = (2 x[n]) @ (y[n] s) of each batch n, in f16: operands from registers, two sums of
                        // products
  template <class T, class X, class Y, class S, class Z, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, X x, Y y, S scale, Z z, int n0, int n1, int middle, M b0, N b1, K b2) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const int batch = t.program_id(2);
    auto total = t.full(b0, b1, 0.0f);
    t.pipeline(
        c<3>, cdiv(middle, b2),
        [&](int step) {
          const auto k = t.arange(b2) + step * b2;
          return fetches(t.fetch(x + batch * (n0 * middle) + i * middle + k, (i < n0) & (k < middle), 0.0f),
                         t.fetch(y + batch * (n1 * middle) + col(k) * n1 + j, (col(k) < middle) & (j < n1), 0.0f),
                         t.fetch(scale + k, k < middle, 0.0f));
        },
        [&](int, const auto& a, const auto& b, const auto& s) {
          total = dot(cast<f16>(a * 2.0f), b, total);
          total = dot(a, cast<f16>(b * col(s)), total);
        });
    const auto inside = (i < n0) & (j < n1);
    t.store(z + batch * (n0 * n1) + i * n1 + j, cast<f16>(total * 0.125f), inside);
  }
};

// z^T of sums z that are read and copied while products are added to them: the sum of all steps, halved after the
// second, less the one before the last step. The bytes on the left are read from shared memory across.
struct RunningSums {
  template <class T, class X, class Y, class Z, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, X x, Y y, Z z, int n0, int n1, int middle, M b0, N b1, K b2) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    auto total = t.full(b0, b1, 0.0f), before = t.full(b0, b1, 0.0f);
    t.pipeline(
        c<3>, cdiv(middle, b2),
        [&](int step) {
          const auto k = col(t.arange(b2) + step * b2);
          return fetches(t.fetch(x + k * n0 + i, (k < middle) & (i < n0), 0),
                         t.fetch(y + k * n1 + j, (k < middle) & (j < n1), 0.0f));
        },
        [&](int step, const auto& a, const auto& b) {
          before = total;
          const auto left = cast<f16>(trans(a));
          const auto other = dot(left, b, total);
          total = dot(left, b, total);
          if (step == 1) total = (total + other) * 0.25f;
        });
    t.store(z + j * n0 + col(i), cast<f16>(total - before), (col(i) < n0) & (j < n1));
  }
};

// z = x @ y in f32, with operands that a step computes: x is bytes (n0, middle) or (middle, n0), y 16-bit floats
// (middle, n1) or (n1, middle).
enum class Factor {
  scaled_rows,      // x s on the left
  columns,          // x^T on the left, after the cast
  columns_before,   // x^T on the left, before it
  right_rows,       // x s on the right
  right_columns,    // (x s)^T on the right
  masked,           // x where the term is below 40
  sum_with_row,     // x^T + s
  assigned,         // a tile that is assigned to, in some steps
  assigned_columns  // the same, transposed
};
template <Factor kFactor>
struct ComputedFactor {
  template <class T, class X, class Y, class S, class Z, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, X x, Y y, S scale, Z z, int n0, int n1, int middle, M b0, N b1, K b2) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    constexpr bool kColumns = kFactor == Factor::columns || kFactor == Factor::columns_before ||
                              kFactor == Factor::right_rows || kFactor == Factor::sum_with_row ||
                              kFactor == Factor::assigned_columns;
    constexpr bool kRight = kFactor == Factor::right_rows || kFactor == Factor::right_columns;
    auto total = t.full(b0, b1, 0.0f);
    t.pipeline(
        c<3>, cdiv(middle, b2),
        [&](int step) {
          const auto k = t.arange(b2) + step * b2;
          const auto bytes_of = [&](const auto& of, int n) {
            if constexpr (kColumns) return t.fetch(x + col(k) * n + of, (col(k) < middle) & (of < n), 0);
            if constexpr (!kColumns) return t.fetch(x + col(of) * middle + k, (col(of) < n) & (k < middle), 0);
          };
          const auto bytes = [&] {
            if constexpr (kRight) return bytes_of(j, n1);
            if constexpr (!kRight) return bytes_of(i, n0);
          };
          const auto halves = [&] {
            if constexpr (kRight) return t.fetch(y + col(i) * middle + k, (col(i) < n0) & (k < middle), 0.0f);
            if constexpr (!kRight) return t.fetch(y + col(k) * n1 + j, (col(k) < middle) & (j < n1), 0.0f);
          };
          return fetches(bytes(), halves(), t.fetch(scale + k, k < middle, 0.0f));
        },
        [&](int step, const auto& a, const auto& b, const auto& s) {
          if constexpr (kFactor == Factor::scaled_rows) total = dot(cast<f16>(a * s), b, total);
          if constexpr (kFactor == Factor::columns) total = dot(trans(cast<f16>(a)), b, total);
          if constexpr (kFactor == Factor::columns_before) total = dot(cast<f16>(trans(a) - 1), b, total);
          if constexpr (kFactor == Factor::right_rows) total = dot(b, cast<f16>(a * col(s)), total);
          if constexpr (kFactor == Factor::right_columns)
            total = dot(b, trans(cast<f16>(fma(cast<f32>(a), s, s))), total);
          if constexpr (kFactor == Factor::masked) {
            total = dot(cast<f16>(where(t.arange(b2) + step * b2 < 40, a, 0)), b, total);
          }
          if constexpr (kFactor == Factor::sum_with_row) total = dot(cast<f16>(trans(a) + s), b, total);
          if constexpr (kFactor == Factor::assigned) {
            auto factor = cast<f16>(a * s);
            if (step == 1) factor = cast<f16>(a * 2);
            total = dot(factor, b, total);
          }
          if constexpr (kFactor == Factor::assigned_columns) {
            auto sum = a + 1;
            sum = sum + a;
            total = dot(trans(cast<f16>(sum)), b, total);
          }
        });
    t.store(z + col(i) * n1 + j, total, (col(i) < n0) & (j < n1));
  }
};

struct Nested {  // z[r] = sum over i of x[r, i] times the sum over j of y[i, j]: a pipeline for each step of another
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int steps, int length, auto b0, auto b1) const {
    const auto i = col(t.arange(b0));
    const auto j = t.arange(b1);
    auto total = t.full(b0, c<1>, 0.0f);
    t.pipeline(
        c<3>, steps, [&](int k) { return fetches(t.fetch(x + i * (b1 * steps) + k * b1 + j)); },
        [&](int k, const auto& a) {
          auto inner = t.full(c<1>, b1, 0.0f);
          t.pipeline(
              c<2>, cdiv(length, b1),
              [&](int step) {
                const auto column = step * b1 + j;
                return fetches(t.fetch(y + k * length + column, column < length, 0.0f));
              },
              [&](int, const auto& b) { inner += b; });
          total += sum(a) * sum(inner);
        });
    t.store(z + i, total);
  }
};

struct ColumnSums {  // z[j] = sum over k of x[k, j]: a mask that is one comparison
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int n1, auto b0) const {
    const auto j = t.program_id(0) * b0 + t.arange(b0);
    auto total = t.full(b0, 0.0f);
    t.pipeline(
        c<3>, n0, [&](int k) { return fetches(t.fetch(x + k * n1 + j, j < n1, 0.0f)); },
        [&](int, const auto& v) { total += v; });
    t.store(z + j, total, j < n1);
  }
};

struct PipelinedRows {  // z[r] = sum over steps of the elementwise work on staged operands, one of them gathered
  TILE_KERNEL void operator()(auto& t, auto x, auto index, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto total = t.full(b0, c<1>, 0.0f);
    t.pipeline(
        c<2>, cdiv(length, b1),
        [&](int step) {
          const auto j = t.arange(b1) + step * b1;
          const auto in = (i < n0) & (j < length);
          const auto from = t.load(index + j, j < length, 0);
          return fetches(t.fetch(x + i * length + j, in, 2.5f), t.fetch(x + i * length + from, in, -1.0f), t.fetch(x));
        },
        [&](int step, const auto& a, const auto& b, const auto& first) {
          total += sum(a * b + trans(trans(a)) * first) + sum(max(b, kRows)) * cast<f32>(t.full(c<1>, step));
        });
    t.store(z + i, total, i < n0);
  }
};

}  // namespace octile::tile::cuda_cases
