// The kernels of the homework, and some that are wrong. Of a wrong kernel, the line to blame is marked. A kernel named
// SomethingBut is the solution but for one mistake: compiled once, it is several wrong kernels.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile::puzzles::homework {

// A NaN or an infinity among the values makes the scale NaN, and NaN as an integer is 0.
TILE_FUNCTION auto scale_of(const auto& most) {
  return where(most < kInfinity, maximum(most / 127.0f, 1e-8f), kInfinity - kInfinity);
}
TILE_FUNCTION auto levels(const auto& values, const auto& scale) {
  return cast<s8, Round::even>(clamp(values / scale, -127.0f, 127.0f));
}

// ---- 13: two launches, since no program may read the maximum before all have added to it ----

struct FindMaximum {
  TILE_KERNEL void operator()(auto& t, auto x, auto, auto, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    t.atomic_max(most, max(abs(t.load(x + i, i < n, 0.0f))));
  }
};

struct QuantizeGlobal {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto s = scale_of(t.load(most + t.arange(c<1>)));
    t.store(q + i, levels(t.load(x + i, i < n, 0.0f), s), i < n);
    t.store(scale + t.arange(c<1>), s, t.arange(c<1>) + t.program_id(0) == 0);
  }
};

struct Nothing {
  TILE_KERNEL void operator()(auto&, auto, auto, auto, auto, int, auto) const {}
};

struct OneLaunch {  // reads the maximum while other programs still add to it
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n, 0.0f);
    t.atomic_max(most, max(abs(v)));  // wrong: OneLaunch
    t.barrier();
    const auto s = scale_of(t.load(most + t.arange(c<1>)));
    t.store(q + i, levels(v, s), i < n);
    t.store(scale + t.arange(c<1>), s, t.arange(c<1>) + t.program_id(0) == 0);
  }
};

struct EveryProgramStoresTheScale {  // the same value, but nobody promises that
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto s = scale_of(t.load(most + t.arange(c<1>)));
    t.store(scale + t.arange(c<1>), s);  // wrong: EveryProgramStoresTheScale
    t.store(q + i, levels(t.load(x + i, i < n, 0.0f), s), i < n);
  }
};

struct RoundsToZero {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto s = scale_of(t.load(most + t.arange(c<1>)));
    t.store(scale + t.arange(c<1>), s, t.arange(c<1>) + t.program_id(0) == 0);
    const auto v = clamp(t.load(x + i, i < n, 0.0f) / s, -127.0f, 127.0f);
    t.store(q + i, cast<s8, Round::zero>(v), i < n);  // wrong: RoundsToZero
  }
};

struct GlobalMistake {
  enum Mistake {
    nan_as_0,
    infinite_scale,
    floor_for_0_alone,
    times_the_reciprocal,
    times_127_first,
    ties_away_from_0
  } mistake;
};

struct FindMaximumBut : GlobalMistake {
  TILE_KERNEL void operator()(auto& t, auto x, auto, auto, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    auto v = abs(cast<f32>(t.load(x + i, i < n, 0.0f)));
    if (mistake == nan_as_0) v = where(v == v, v, 0.0f);
    t.atomic_max(most, max(v));
  }
};

struct QuantizeGlobalBut : GlobalMistake {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto largest = t.load(most + t.arange(c<1>));
    auto s = scale_of(largest);
    if (mistake == infinite_scale) s = maximum(largest / 127.0f, 1e-8f);
    if (mistake == floor_for_0_alone) s = where(largest == 0.0f, 1e-8f, where(s == s, largest / 127.0f, s));
    t.store(scale + t.arange(c<1>), s, t.arange(c<1>) + t.program_id(0) == 0);  // wrong: QuantizeGlobalBut
    const auto v = cast<f32>(t.load(x + i, i < n, 0.0f));
    auto level = v / s;
    if (mistake == times_the_reciprocal) level = v * (1.0f / s);
    if (mistake == times_127_first) level = where(s > 1e-8f, v * 127.0f / largest, level);
    if (mistake == ties_away_from_0) level = level + where(level < 0.0f, -0.5f, 0.5f);
    level = clamp(mistake == ties_away_from_0 ? level : rint(level), -127.0f, 127.0f);
    t.store(q + i, cast<s8, Round::zero>(level), i < n);  // wrong: QuantizeGlobalBut
  }
};

// ---- 14 ----

struct QuantizeRows {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      most = maximum(most, max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns), 0.0f))));
    }
    const auto s = scale_of(most);
    t.store(scale + i, s, i < rows);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      t.store(q + i * columns + j, levels(t.load(x + i * columns + j, in, 0.0f), s), in);
    }
  }
};

struct MaximumOfUndefined {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      most = maximum(most, max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns)))));
    }
    const auto s = scale_of(most);
    t.store(scale + i, s, i < rows);  // wrong: MaximumOfUndefined
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      t.store(q + i * columns + j, levels(t.load(x + i * columns + j, in, 0.0f), s), in);
    }
  }
};

struct TiesUp {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      most = maximum(most, max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns), 0.0f))));
    }
    const auto s = scale_of(most);
    t.store(scale + i, s, i < rows);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      const auto v = clamp(t.load(x + i * columns + j, in, 0.0f) / s + 0.5f, -127.0f, 127.0f);
      t.store(q + i * columns + j, cast<s8, Round::down>(v), in);  // wrong: TiesUp
    }
  }
};

struct ScaleOfTheLastBlock {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      most = max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns), 0.0f)));
    }
    const auto s = scale_of(most);
    t.store(scale + i, s, i < rows);  // wrong: ScaleOfTheLastBlock
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      t.store(q + i * columns + j, levels(t.load(x + i * columns + j, in, 0.0f), s), in);
    }
  }
};

struct QuantizeRowsBut {
  enum Mistake {
    nan_lost,
    nan_kept_from_the_last_block_alone,
    infinite_scale,
    floor_for_0_alone,
    one_maximum_for_all_rows,
    times_the_reciprocal,
    times_127_first,
    at_most_256_columns
  } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const int end = mistake == at_most_256_columns && columns > 256 ? 256 : columns;
    auto most = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, end, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns), 0.0f)));
      const auto before = most;
      most = maximum(before, v);
      if (mistake == nan_lost) most = where(v > before, v, before);
      if (mistake == nan_kept_from_the_last_block_alone) most = where(before > v, before, v);
    }
    if (mistake == one_maximum_for_all_rows) most = maximum(most, max(most, kRows));
    auto s = scale_of(most);
    if (mistake == infinite_scale) s = maximum(most / 127.0f, 1e-8f);
    if (mistake == floor_for_0_alone) s = where(most == 0.0f, 1e-8f, where(s == s, most / 127.0f, s));
    t.store(scale + i, s, i < rows);  // wrong: QuantizeRowsBut
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      const auto v = cast<f32>(t.load(x + i * columns + j, in, 0.0f));
      auto level = v / s;
      if (mistake == times_the_reciprocal) level = v * (1.0f / s);
      if (mistake == times_127_first) level = where(s > 1e-8f, v * 127.0f / most, level);
      const auto whole = cast<s8, Round::even>(clamp(level, -127.0f, 127.0f));
      t.store(q + i * columns + j, whole, in);  // wrong: QuantizeRowsBut
    }
  }
};

// ---- 15 ----

// per_channel: c<1> for a scale for each column of w, c<0> for one in all. biased: c<1> if there is a bias.
// Twelve parameters of type auto are more than the front end of nvcc 13.0 survives, so the types have names.
struct Forward {
  template <class T, class Xq, class Xs, class Wq, class Ws, class Bias, class Y, class C, class B, class M, class N,
            class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Wq w_q, Ws w_scale, Bias bias, Y y, int batch, int in, int out,
                              C per_channel, B biased, M bm, N bn, K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    t.pipeline(
        c<3>, cdiv(in, bk),
        [&](int step) {
          const auto k = t.arange(bk) + step * bk;
          const auto x = t.fetch(x_q + i * in + k, (i < batch) & (k < in), 0);
          return fetches(x, t.fetch(w_q + col(k) * out + j, (col(k) < in) & (j < out), 0));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    const auto scale = t.load(x_scale) * t.load(w_scale + j * per_channel, j < out, 0.0f);
    const auto inside = (i < batch) & (j < out);
    if constexpr (decltype(biased)::value != 0) {
      const auto b = t.load(bias + j, j < out, 0.0f);
      t.store(y + i * out + j, cast<f16>(fma(cast<f32>(total), scale, b)), inside);
    } else {
      t.store(y + i * out + j, cast<f16>(cast<f32>(total) * scale), inside);
    }
  }
};

struct InnerWithoutMask {  // what is masked in w is multiplied by 0, but x is read beyond its end
  template <class T, class Xq, class Xs, class Wq, class Ws, class Bias, class Y, class C, class B, class M, class N,
            class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Wq w_q, Ws w_scale, Bias bias, Y y, int batch, int in, int out,
                              C per_channel, B biased, M bm, N bn, K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    t.pipeline(
        c<3>, cdiv(in, bk),
        [&](int step) {
          const auto k = t.arange(bk) + step * bk;
          const auto x = t.fetch(x_q + i * in + k, i < batch, 0);  // wrong: InnerWithoutMask
          return fetches(x, t.fetch(w_q + col(k) * out + j, (col(k) < in) & (j < out), 0));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    const auto scale = t.load(x_scale) * t.load(w_scale + j * per_channel, j < out, 0.0f);
    const auto inside = (i < batch) & (j < out);
    if constexpr (decltype(biased)::value != 0) {
      const auto b = t.load(bias + j, j < out, 0.0f);
      t.store(y + i * out + j, cast<f16>(fma(cast<f32>(total), scale, b)), inside);
    } else {
      t.store(y + i * out + j, cast<f16>(cast<f32>(total) * scale), inside);
    }
  }
};

struct BiasOfTheRow {
  template <class T, class Xq, class Xs, class Wq, class Ws, class Bias, class Y, class C, class B, class M, class N,
            class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Wq w_q, Ws w_scale, Bias bias, Y y, int batch, int in, int out,
                              C per_channel, B biased, M bm, N bn, K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    t.pipeline(
        c<3>, cdiv(in, bk),
        [&](int step) {
          const auto k = t.arange(bk) + step * bk;
          const auto x = t.fetch(x_q + i * in + k, (i < batch) & (k < in), 0);
          return fetches(x, t.fetch(w_q + col(k) * out + j, (col(k) < in) & (j < out), 0));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    const auto scale = t.load(x_scale) * t.load(w_scale + j * per_channel, j < out, 0.0f);
    const auto inside = (i < batch) & (j < out);
    if constexpr (decltype(biased)::value != 0) {
      const auto b = t.load(bias + i, i < batch, 0.0f);
      t.store(y + i * out + j, cast<f16>(fma(cast<f32>(total), scale, b)), inside);  // wrong: BiasOfTheRow
    } else {
      t.store(y + i * out + j, cast<f16>(cast<f32>(total) * scale), inside);
    }
  }
};

struct OneScaleForAll {
  template <class T, class Xq, class Xs, class Wq, class Ws, class Bias, class Y, class C, class B, class M, class N,
            class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Wq w_q, Ws w_scale, Bias bias, Y y, int batch, int in, int out,
                              C, B biased, M bm, N bn, K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    t.pipeline(
        c<3>, cdiv(in, bk),
        [&](int step) {
          const auto k = t.arange(bk) + step * bk;
          const auto x = t.fetch(x_q + i * in + k, (i < batch) & (k < in), 0);
          return fetches(x, t.fetch(w_q + col(k) * out + j, (col(k) < in) & (j < out), 0));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    const auto scale = t.load(x_scale) * t.load(w_scale);
    const auto inside = (i < batch) & (j < out);
    if constexpr (decltype(biased)::value != 0) {
      const auto b = t.load(bias + j, j < out, 0.0f);
      t.store(y + i * out + j, cast<f16>(fma(cast<f32>(total), scale, b)), inside);  // wrong: OneScaleForAll
    } else {
      t.store(y + i * out + j, cast<f16>(cast<f32>(total) * scale), inside);
    }
  }
};

struct ForwardBut {
  enum Mistake {
    at_most_256_terms,
    sum_in_half,
    scale_in_half,
    bias_of_the_first_tile,
    no_bias_in_the_last_tile
  } mistake;

  template <class T, class Xq, class Xs, class Wq, class Ws, class Bias, class Y, class C, class B, class M, class N,
            class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Wq w_q, Ws w_scale, Bias bias, Y y, int batch, int in, int out,
                              C per_channel, B biased, M bm, N bn, K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    for (int first : range(0, mistake == at_most_256_terms && in > 256 ? 256 : in, bk)) {
      const auto k = t.arange(bk) + first;
      const auto x = t.load(x_q + i * in + k, (i < batch) & (k < in), 0);
      total = dot(x, t.load(w_q + col(k) * out + j, (col(k) < in) & (j < out), 0), total);
    }
    auto scale = t.load(x_scale) * t.load(w_scale + j * per_channel, j < out, 0.0f);
    if (mistake == scale_in_half) scale = cast<f32>(cast<f16>(scale));
    auto product = cast<f32>(total);
    if (mistake == sum_in_half) product = cast<f32>(cast<f16>(product));
    const auto from = mistake == bias_of_the_first_tile ? t.arange(bn) + 0 : j;
    const int end = mistake == no_bias_in_the_last_tile ? (out - 1) / bn * bn : out;
    auto result = product * scale;
    if constexpr (decltype(biased)::value != 0) {
      result = fma(product, scale, cast<f32>(t.load(bias + from, (from < end) & (from < out), 0.0f)));
    }
    t.store(y + i * out + j, cast<f16>(result), (i < batch) & (j < out));  // wrong: ForwardBut
  }
};

// ---- 16: dX = dY @ (w_q * w_scale)^T ----

struct BackwardDx {
  TILE_KERNEL void operator()(auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out,
                              auto per_channel, auto bm, auto bn, auto bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    t.pipeline(
        c<3>, cdiv(out, bk),
        [&](int step) {
          const auto n = t.arange(bk) + step * bk;
          return fetches(t.fetch(dy + i * out + n, (i < batch) & (n < out), 0.0f),
                         t.fetch(w_q + col(j) * out + n, (col(j) < in) & (n < out), 0),
                         t.fetch(w_scale + n * per_channel, n < out, 0.0f));
        },
        [&](int, const auto& a, const auto& w, const auto& s) { total = dot(cast<f32>(a), trans(w * s), total); });
    t.store(dx + i * in + j, cast<f16>(total), (i < batch) & (j < in));
  }
};

struct ScaleOfTheInput {  // a scale belongs to a column of w, which is summed over here
  TILE_KERNEL void operator()(auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out,
                              auto per_channel, auto bm, auto bn, auto bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, out, bk)) {
      const auto n = t.arange(bk) + k;
      const auto a = t.load(dy + i * out + n, (i < batch) & (n < out), 0.0f);
      const auto w = t.load(w_q + col(j) * out + n, (col(j) < in) & (n < out), 0);
      total = dot(cast<f32>(a), trans(cast<f32>(w)), total);
    }
    const auto s = t.load(w_scale + j * per_channel, j < in, 0.0f);
    t.store(dx + i * in + j, cast<f16>(total * s), (i < batch) & (j < in));  // wrong: ScaleOfTheInput
  }
};

struct WithoutTransposing {  // reads w as if it were (out, in)
  TILE_KERNEL void operator()(auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out,
                              auto per_channel, auto bm, auto bn, auto bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, out, bk)) {
      const auto n = t.arange(bk) + k;
      const auto a = t.load(dy + i * out + n, (i < batch) & (n < out), 0.0f);
      const auto w = t.load(w_q + col(n) * in + j, (col(n) < out) & (j < in), 0);
      const auto s = t.load(w_scale + n * per_channel, n < out, 0.0f);
      total = dot(a * s, cast<f32>(w), total);
    }
    t.store(dx + i * in + j, cast<f16>(total), (i < batch) & (j < in));  // wrong: WithoutTransposing
  }
};

struct BackwardDxBut {
  enum Mistake { at_most_128_terms, in_half, scales_of_the_first_block } mistake;

  TILE_KERNEL void operator()(auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out,
                              auto per_channel, auto bm, auto bn, auto bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, mistake == at_most_128_terms && out > 128 ? 128 : out, bk)) {
      const auto n = t.arange(bk) + k;
      const auto channel = t.arange(bk) + (mistake == scales_of_the_first_block ? 0 : k);
      const auto a = t.load(dy + i * out + n, (i < batch) & (n < out), 0.0f);
      const auto w = t.load(w_q + col(j) * out + n, (col(j) < in) & (n < out), 0);
      const auto s = t.load(w_scale + channel * per_channel, channel < out, 0.0f);
      total = dot(cast<f32>(a), trans(w * s), total);
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    t.store(dx + i * in + j, cast<f16>(total), (i < batch) & (j < in));  // wrong: BackwardDxBut
  }
};

// ---- 17: dW = (x_q * x_scale)^T @ dY ----

struct BackwardDw {
  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out, auto bm,
                              auto bn, auto bk) const {
    const auto i = t.program_id(0) * bm + t.arange(bm);
    const auto j = t.program_id(1) * bn + t.arange(bn);
    const auto scale = t.load(x_scale);
    auto total = t.full(bm, bn, 0.0f);
    t.pipeline(
        c<3>, cdiv(batch, bk),
        [&](int step) {
          const auto m = col(t.arange(bk) + step * bk);
          return fetches(t.fetch(x_q + m * in + i, (m < batch) & (i < in), 0),
                         t.fetch(dy + m * out + j, (m < batch) & (j < out), 0.0f));
        },
        [&](int, const auto& x, const auto& d) { total = dot(trans(x * scale), cast<f32>(d), total); });
    t.store(dw + col(i) * out + j, cast<f16>(total), (col(i) < in) & (j < out));
  }
};

struct BatchWithoutMask {
  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out, auto bm,
                              auto bn, auto bk) const {
    const auto i = t.program_id(0) * bm + t.arange(bm);
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, batch, bk)) {
      const auto m = col(t.arange(bk) + k);
      const auto x = t.load(x_q + m * in + i, i < in, 0);  // wrong: BatchWithoutMask
      const auto d = t.load(dy + m * out + j, (m < batch) & (j < out), 0.0f);
      total = dot(trans(x * t.load(x_scale)), cast<f32>(d), total);
    }
    t.store(dw + col(i) * out + j, cast<f16>(total), (col(i) < in) & (j < out));
  }
};

struct SumsTilesThroughMemory {  // adds to dW for each piece of the batch; without a barrier the sum is an old one
  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out, auto bm,
                              auto bn, auto bk) const {
    const auto i = t.program_id(0) * bm + t.arange(bm);
    const auto j = t.program_id(1) * bn + t.arange(bn);
    const auto p = dw + col(i) * out + j;
    const auto inside = (col(i) < in) & (j < out);
    t.store(p, cast<f16>(t.full(bm, bn, 0.0f)), inside);
    for (int k : range(0, batch, bk)) {
      const auto m = col(t.arange(bk) + k);
      const auto x = t.load(x_q + m * in + i, (m < batch) & (i < in), 0);
      const auto d = t.load(dy + m * out + j, (m < batch) & (j < out), 0.0f);
      const auto before = cast<f32>(t.load(p, inside));  // wrong: SumsTilesThroughMemory
      t.store(p, cast<f16>(dot(trans(x * t.load(x_scale)), cast<f32>(d), before)), inside);
    }
  }
};

struct BackwardDwBut {
  enum Mistake { at_most_128_rows, in_half, scaled_in_half } mistake;

  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out, auto bm,
                              auto bn, auto bk) const {
    const auto i = t.program_id(0) * bm + t.arange(bm);
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, mistake == at_most_128_rows && batch > 128 ? 128 : batch, bk)) {
      const auto m = col(t.arange(bk) + k);
      auto x = t.load(x_q + m * in + i, (m < batch) & (i < in), 0) * t.load(x_scale);
      if (mistake == scaled_in_half) x = cast<f32>(cast<f16>(x));
      total = dot(trans(x), cast<f32>(t.load(dy + m * out + j, (m < batch) & (j < out), 0.0f)), total);
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    t.store(dw + col(i) * out + j, cast<f16>(total), (col(i) < in) & (j < out));  // wrong: BackwardDwBut
  }
};

// ---- 18: dB = sum of dY over the batch ----

struct BackwardDb {
  TILE_KERNEL void operator()(auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm) const {
    const auto j = t.program_id(0) * bn + t.arange(bn);
    auto total = t.full(bn, 0.0f);
    for (int k : range(0, batch, bm)) {
      const auto m = col(t.arange(bm) + k);
      total += sum(t.load(dy + m * out + j, (m < batch) & (j < out), 0.0f), kRows);
    }
    t.store(db + j, cast<f16>(total), j < out);
  }
};

struct SumsInHalf {
  TILE_KERNEL void operator()(auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm) const {
    const auto j = t.program_id(0) * bn + t.arange(bn);
    auto total = cast<f16>(t.full(bn, 0.0f));
    for (int k : range(0, batch, bm)) {
      const auto m = col(t.arange(bm) + k);
      total = cast<f16>(total + sum(t.load(dy + m * out + j, (m < batch) & (j < out), 0.0f), kRows));
    }
    t.store(db + j, total, j < out);  // wrong: SumsInHalf
  }
};

struct ColumnsWithoutMask {
  TILE_KERNEL void operator()(auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm) const {
    const auto j = t.program_id(0) * bn + t.arange(bn);
    auto total = t.full(bn, 0.0f);
    for (int k : range(0, batch, bm)) {
      const auto m = col(t.arange(bm) + k);
      total += sum(t.load(dy + m * out + j, m < batch, 0.0f), kRows);  // wrong: ColumnsWithoutMask
    }
    t.store(db + j, cast<f16>(total), j < out);
  }
};

struct BackwardDbBut {
  enum Mistake { at_most_1024_rows, of_the_next_column } mistake;

  TILE_KERNEL void operator()(auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm) const {
    const auto j = t.program_id(0) * bn + t.arange(bn);
    const auto from = j + (mistake == of_the_next_column ? 1 : 0);
    auto total = t.full(bn, 0.0f);
    for (int k : range(0, mistake == at_most_1024_rows && batch > 1024 ? 1024 : batch, bm)) {
      const auto m = col(t.arange(bm) + k);
      total += sum(t.load(dy + m * out + from, (m < batch) & (from < out), 0.0f), kRows);
    }
    t.store(db + j, cast<f16>(total), j < out);  // wrong: BackwardDbBut
  }
};

}  // namespace octile::tile::puzzles::homework
