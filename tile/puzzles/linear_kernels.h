// Puzzles 13 to 18, a linear layer of int8 operands: the kernels that solve them, and wrong ones. A kernel named
// SomethingBut is the solution with one mistake: compiled once, it is several wrong kernels. A comment on the line to
// blame names them.
#pragma once

#include "puzzles/mistake.h"

namespace octile::tile::puzzles::linear {

// A NaN or an infinity among the values makes the scale NaN, and NaN as an integer is 0.
TILE_FUNCTION auto scale_of(const auto& max_abs) {
  return where(max_abs < kInfinity, maximum(max_abs / 127.0f, 1e-8f), kInfinity - kInfinity);
}
TILE_FUNCTION auto levels(const auto& values, const auto& scale) {
  return cast<s8, Round::even>(clamp(values / scale, -127.0f, 127.0f));
}

// ---- 13: two launches, since no program may read the maximum before all have added to it ----

struct FindMaximum {
  TILE_KERNEL void operator()(auto& t, auto x, auto, auto, auto max_abs, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    t.atomic_max(max_abs, max(abs(t.load(x + i, i < n, 0.0f))));
  }
};

struct QuantizeGlobal {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto max_abs, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto s = scale_of(t.load(max_abs + t.arange(c<1>)));
    t.store(q + i, levels(t.load(x + i, i < n, 0.0f), s), i < n);
    t.store(scale + t.arange(c<1>), s, t.arange(c<1>) + t.program_id(0) == 0);
  }
};

struct Nothing {
  TILE_KERNEL void operator()(auto&, auto, auto, auto, auto, int, auto) const {}
};

struct OneLaunch {  // reads the maximum while other programs still add to it
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto max_abs, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n, 0.0f);
    t.atomic_max(max_abs, max(abs(v)));  // wrong: OneLaunch
    t.barrier();
    const auto s = scale_of(t.load(max_abs + t.arange(c<1>)));
    t.store(q + i, levels(v, s), i < n);
    t.store(scale + t.arange(c<1>), s, t.arange(c<1>) + t.program_id(0) == 0);
  }
};

enum class GlobalMistake {
  every_program_stores_the_scale,
  rounds_to_zero,
  nan_as_0,
  infinite_scale,
  floor_for_0_alone,
  times_the_reciprocal,
  times_127_first,
  ties_away_from_0
};

struct FindMaximumBut {
  using Mistake = GlobalMistake;
  Mistake mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto, auto, auto max_abs, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    auto v = abs(cast<f32>(t.load(x + i, i < n, 0.0f)));
    if (mistake == Mistake::nan_as_0) v = where(v == v, v, 0.0f);
    t.atomic_max(max_abs, max(v));
  }
};

struct QuantizeGlobalBut {
  using Mistake = GlobalMistake;
  Mistake mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto max_abs, int n, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto largest = t.load(max_abs + t.arange(c<1>));
    auto s = scale_of(largest);
    if (mistake == Mistake::infinite_scale) s = maximum(largest / 127.0f, 1e-8f);
    if (mistake == Mistake::floor_for_0_alone) s = where(largest == 0.0f, 1e-8f, where(s == s, largest / 127.0f, s));
    const auto first =
        (t.arange(c<1>) + t.program_id(0)) * (mistake == Mistake::every_program_stores_the_scale ? 0 : 1);
    t.store(scale + t.arange(c<1>), s, first == 0);  // wrong: EveryProgramStoresTheScale, QuantizeGlobalBut
    const auto v = cast<f32>(t.load(x + i, i < n, 0.0f));
    auto level = v / s;
    if (mistake == Mistake::times_the_reciprocal) level = v * (1.0f / s);
    if (mistake == Mistake::times_127_first) level = where(s > 1e-8f, v * 127.0f / largest, level);
    if (mistake == Mistake::ties_away_from_0) level = level + where(level < 0.0f, -0.5f, 0.5f);
    if (mistake != Mistake::ties_away_from_0 && mistake != Mistake::rounds_to_zero) level = rint(level);
    level = clamp(level, -127.0f, 127.0f);
    t.store(q + i, cast<s8, Round::zero>(level), i < n);  // wrong: RoundsToZero, QuantizeGlobalBut
  }
};

// ---- 14 ----

struct QuantizeRows {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto max_abs = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      max_abs = maximum(max_abs, max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns), 0.0f))));
    }
    const auto s = scale_of(max_abs);
    t.store(scale + i, s, i < rows);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      t.store(q + i * columns + j, levels(t.load(x + i * columns + j, in, 0.0f), s), in);
    }
  }
};

struct QuantizeRowsBut {
  enum Mistake {
    maximum_of_undefined,
    scale_of_the_last_block,
    ties_up,
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
    auto max_abs = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, end, b1)) {
      const auto j = t.arange(b1) + k;
      const auto p = x + i * columns + j;
      const auto in = (i < rows) & (j < columns);
      const auto v = max(abs(mistake == maximum_of_undefined ? t.load(p, in) : t.load(p, in, 0.0f)));
      const auto before = max_abs;
      max_abs = mistake == scale_of_the_last_block ? v : maximum(before, v);
      if (mistake == nan_lost) max_abs = where(v > before, v, before);
      if (mistake == nan_kept_from_the_last_block_alone) max_abs = where(before > v, before, v);
    }
    if (mistake == one_maximum_for_all_rows) max_abs = maximum(max_abs, max(max_abs, kRows));
    auto s = scale_of(max_abs);
    if (mistake == infinite_scale) s = maximum(max_abs / 127.0f, 1e-8f);
    if (mistake == floor_for_0_alone) s = where(max_abs == 0.0f, 1e-8f, where(s == s, max_abs / 127.0f, s));
    t.store(scale + i, s, i < rows);  // wrong: MaximumOfUndefined, ScaleOfTheLastBlock, QuantizeRowsBut
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      const auto v = cast<f32>(t.load(x + i * columns + j, in, 0.0f));
      auto level = v / s;
      if (mistake == times_the_reciprocal) level = v * (1.0f / s);
      if (mistake == times_127_first) level = where(s > 1e-8f, v * 127.0f / max_abs, level);
      auto whole = cast<s8, Round::even>(clamp(level, -127.0f, 127.0f));
      if (mistake == ties_up) whole = cast<s8, Round::down>(clamp(level + 0.5f, -127.0f, 127.0f));
      t.store(q + i * columns + j, whole, in);  // wrong: TiesUp, QuantizeRowsBut
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

struct ForwardBut {
  enum Mistake {
    inner_without_mask,
    bias_of_the_row,
    one_scale_for_all,
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
    const int inner = mistake == inner_without_mask ? kNoEnd : in;
    auto total = t.full(bm, bn, 0);
    for (int first : range(0, mistake == at_most_256_terms && in > 256 ? 256 : in, bk)) {
      const auto k = t.arange(bk) + first;
      const auto x = t.load(x_q + i * in + k, (i < batch) & (k < inner), 0);  // wrong: InnerWithoutMask
      total = dot(x, t.load(w_q + col(k) * out + j, (col(k) < in) & (j < out), 0), total);
    }
    const int channel = mistake == one_scale_for_all ? 0 : per_channel;
    auto scale = t.load(x_scale) * t.load(w_scale + j * channel, j < out, 0.0f);
    if (mistake == scale_in_half) scale = cast<f32>(cast<f16>(scale));
    auto product = cast<f32>(total);
    if (mistake == sum_in_half) product = cast<f32>(cast<f16>(product));
    const auto column = mistake == bias_of_the_first_tile ? t.arange(bn) + 0 : j;
    const auto from = mistake == bias_of_the_row ? i + column * 0 : i * 0 + column * 1;
    const int whole = mistake == no_bias_in_the_last_tile ? (out - 1) / bn * bn : out;
    const int end = mistake == bias_of_the_row ? batch : whole;
    auto result = product * scale;
    if constexpr (decltype(biased)::value != 0) {
      result = fma(product, scale, cast<f32>(t.load(bias + from, from < end, 0.0f)));
    }
    const auto inside = (i < batch) & (j < out);
    t.store(y + i * out + j, cast<f16>(result), inside);  // wrong: BiasOfTheRow, OneScaleForAll, ForwardBut
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

struct BackwardDxBut {
  enum Mistake {
    scale_of_the_input,  // a scale belongs to a column of w, which is summed over here
    without_transposing,
    at_most_128_terms,
    in_half,
    scales_of_the_first_block
  } mistake;

  TILE_KERNEL void operator()(auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out,
                              auto per_channel, auto bm, auto bn, auto bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, mistake == at_most_128_terms && out > 128 ? 128 : out, bk)) {
      const auto n = t.arange(bk) + k;
      const auto first = t.arange(bk) + (mistake == scales_of_the_first_block ? 0 : k);
      const auto channel = mistake == scale_of_the_input ? col(j) + first * 0 : col(j) * 0 + first * 1;
      const auto a = t.load(dy + i * out + n, (i < batch) & (n < out), 0.0f);
      const auto place = mistake == without_transposing ? col(j) + n * in : col(j) * out + n * 1;
      const auto w = t.load(w_q + place, (col(j) < in) & (n < out), 0);
      const auto s = t.load(w_scale + channel * per_channel, channel < out, 0.0f);
      total = dot(cast<f32>(a), trans(w * s), total);
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    const auto inside = (i < batch) & (j < in);
    t.store(dx + i * in + j, cast<f16>(total), inside);  // wrong: ScaleOfTheInput, WithoutTransposing, BackwardDxBut
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

struct SumsTilesThroughMemory {  // adds to dW for each block of the batch; without a barrier it may read an old sum
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
  enum Mistake { batch_without_mask, at_most_128_rows, in_half, scaled_in_half } mistake;

  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out, auto bm,
                              auto bn, auto bk) const {
    const auto i = t.program_id(0) * bm + t.arange(bm);
    const auto j = t.program_id(1) * bn + t.arange(bn);
    const int rows = mistake == batch_without_mask ? kNoEnd : batch;
    auto total = t.full(bm, bn, 0.0f);
    for (int k : range(0, mistake == at_most_128_rows && batch > 128 ? 128 : batch, bk)) {
      const auto m = col(t.arange(bk) + k);
      const auto q = t.load(x_q + m * in + i, (m < rows) & (i < in), 0);  // wrong: BatchWithoutMask
      auto x = q * t.load(x_scale);
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

struct BackwardDbBut {
  enum Mistake { in_half, columns_without_mask, at_most_1024_rows, of_the_next_column } mistake;

  TILE_KERNEL void operator()(auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm) const {
    const auto j = t.program_id(0) * bn + t.arange(bn);
    const auto from = j + (mistake == of_the_next_column ? 1 : 0);
    const int end = mistake == columns_without_mask ? kNoEnd : out;
    auto total = t.full(bn, 0.0f);
    for (int k : range(0, mistake == at_most_1024_rows && batch > 1024 ? 1024 : batch, bm)) {
      const auto m = col(t.arange(bm) + k);
      total += sum(t.load(dy + m * out + from, (m < batch) & (from < end), 0.0f), kRows);  // wrong: ColumnsWithoutMask
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    t.store(db + j, cast<f16>(total), j < out);  // wrong: SumsInHalf, BackwardDbBut
  }
};

}  // namespace octile::tile::puzzles::linear
