// A first set of kernels in the tile language: puzzles 2, 4, 7, 8 and 11, and two of the homework's. All sizes may be
// ragged. n is a size, b a block size.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile::kernels {

struct MaskedAdd {  // puzzle 2: z = x + 10
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0);
    t.store(z + i, v + 10.0f, i < n0);
  }
};

struct OuterAdd {  // puzzle 4: z[j, i] = x[i] + y[j]
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto sum = t.load(x + i, i < n0) + t.load(y + j, j < n1);
    t.store(z + j * n0 + i, sum, (i < n0) & (j < n1));
  }
};

struct LongSum {  // puzzle 7: z[i] = sum of x[i, :]
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      total += sum(t.load(x + i * length + j, (i < n0) & (j < length), 0.0f));
    }
    t.store(z + i, total, i < n0);
  }
};

struct Softmax {  // puzzle 8, in two passes: the running maximum rescales the running sum
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, (i < n0) & (j < length), -kInfinity);
      const auto larger = maximum(most, max(v));
      total = total * exp2(kLog2E * (most - larger)) + sum(exp2(kLog2E * (v - larger)));
      most = larger;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = t.load(x + i * length + j, in, -kInfinity);
      t.store(z + i * length + j, exp2(kLog2E * (v - most)) / total, in);
    }
  }
};

struct BatchedMatmul {  // puzzle 11: z[b] = x[b] (n0, middle) @ y[b] (middle, n1)
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int n2, int middle, auto b0, auto b1,
                              auto b2, auto b_middle) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto batch = col(col(t.program_id(2) * b2 + t.arange(b2)));
    auto total = t.full(b2, b0, b1, 0.0f);
    t.pipeline(
        c<3>, cdiv(middle, b_middle),
        [&](int step) {
          const auto k = t.arange(b_middle) + step * b_middle;
          const auto in_x = (batch < n2) & (i < n0) & (k < middle);
          const auto in_y = (batch < n2) & (col(k) < middle) & (j < n1);
          return fetches(t.fetch(x + batch * n0 * middle + i * middle + k, in_x, 0.0f),
                         t.fetch(y + batch * middle * n1 + col(k) * n1 + j, in_y, 0.0f));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    t.store(z + batch * n0 * n1 + i * n1 + j, total, (batch < n2) & (i < n0) & (j < n1));
  }
};

struct QuantizeRows {  // homework 2: s = max(max|x[r, :]| / 127, 1e-8), q = clamp(rint(x / s), -127, 127)
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      most = maximum(most, max(abs(t.load(x + i * columns + j, (i < rows) & (j < columns), 0.0f))));
    }
    const auto s = maximum(most / 127.0f, 1e-8f);
    t.store(scale + i, s, i < rows);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < columns);
      const auto v = t.load(x + i * columns + j, in, 0.0f);
      t.store(q + i * columns + j, cast<s8, Round::even>(clamp(v / s, -127.0f, 127.0f)), in);
    }
  }
};

struct Forward {      // homework 3: y = f16(fma(f32(x_q @ w_q), s_x * s_w, bias)), w_q (in, out)
  template <class T>  // nvcc 13.0 takes up to nine parameters that are auto
  TILE_KERNEL void operator()(T& t, auto x, auto x_scale, auto w, auto w_scale, auto bias, auto y, int batch, int in,
                              int out, auto bm, auto bn, auto bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    t.pipeline(
        c<3>, cdiv(in, bk),
        [&](int step) {
          const auto k = t.arange(bk) + step * bk;
          return fetches(t.fetch(x + i * in + k, (i < batch) & (k < in), 0),
                         t.fetch(w + col(k) * out + j, (col(k) < in) & (j < out), 0));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    const auto scale = t.load(x_scale) * t.load(w_scale + j, j < out, 0.0f);
    const auto result = fma(cast<f32>(total), scale, t.load(bias + j, j < out, 0.0f));
    t.store(y + i * out + j, cast<f16>(result), (i < batch) & (j < out));
  }
};

}  // namespace octile::tile::kernels
