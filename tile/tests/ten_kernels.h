// Ten kernels of the kind that people write first. What `int` is, is the caller's.
#pragma once

namespace octile::tile::ten {

struct StridedAdd {  // z[i] = x[i * x_step] + y[i * y_step]
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n, int x_step, int y_step, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    t.store(z + i, t.load(x + i * x_step, i < n) + t.load(y + i * y_step, i < n), i < n);
  }
};

struct Copy2d {  // of a matrix whose rows begin x_pitch elements apart
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int rows, int columns, int x_pitch, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto in = (i < rows) & (j < columns);
    t.store(z + i * columns + j, t.load(x + i * x_pitch + j, in), in);
  }
};

struct LayerNorm {  // a row a program; keeps what the backward needs
  TILE_KERNEL void operator()(auto& t, auto x, auto gamma, auto beta, auto z, auto mean, auto rstd, int columns,
                              auto b) const {
    const auto row = t.program_id(0);
    const auto p = x + row * columns;
    auto total = t.full(c<1>, 0.0f), squares = t.full(c<1>, 0.0f);
    for (int k : range(0, columns, b)) {
      const auto j = t.arange(b) + k;
      total += sum(t.load(p + j, j < columns, 0.0f));
    }
    const auto m = total / columns;
    for (int k : range(0, columns, b)) {
      const auto j = t.arange(b) + k;
      const auto d = where(j < columns, t.load(p + j, j < columns, 0.0f) - m, 0.0f);
      squares += sum(d * d);
    }
    const auto r = 1.0f / sqrt(squares / columns + 1e-5f);
    t.store(mean + row, m);
    t.store(rstd + row, r);
    for (int k : range(0, columns, b)) {
      const auto j = t.arange(b) + k;
      const auto v = (t.load(p + j, j < columns) - m) * r;
      t.store(z + row * columns + j, v * t.load(gamma + j, j < columns) + t.load(beta + j, j < columns), j < columns);
    }
  }
};

struct LayerNormBackward {  // dx = rstd * (g - mean(g) - v * mean(g * v)), g = dz * gamma, v = (x - mean) * rstd
  TILE_KERNEL void operator()(auto& t, auto x, auto gamma, auto mean, auto rstd, auto dz, auto dx, int columns,
                              auto b) const {
    const auto row = t.program_id(0);
    const auto m = t.load(mean + row), r = t.load(rstd + row);
    auto of_g = t.full(c<1>, 0.0f), of_gv = t.full(c<1>, 0.0f);
    for (int k : range(0, columns, b)) {
      const auto j = t.arange(b) + k;
      const auto g = t.load(dz + row * columns + j, j < columns, 0.0f) * t.load(gamma + j, j < columns, 0.0f);
      of_g += sum(g);
      of_gv += sum(g * ((t.load(x + row * columns + j, j < columns, 0.0f) - m) * r));
    }
    for (int k : range(0, columns, b)) {
      const auto j = t.arange(b) + k;
      const auto g = t.load(dz + row * columns + j, j < columns) * t.load(gamma + j, j < columns);
      const auto v = (t.load(x + row * columns + j, j < columns) - m) * r;
      t.store(dx + row * columns + j, r * (g - of_g / columns - v * (of_gv / columns)), j < columns);
    }
  }
};

struct Rope {  // turns the pairs (i, i + half) of each head of each token
  TILE_KERNEL void operator()(auto& t, auto x, auto cosine, auto sine, auto z, int heads, auto half) const {
    const auto i = t.arange(half);
    const auto head = t.program_id(0) * (heads * (half * c<2>)) + t.program_id(1) * (half * c<2>);
    const auto c0 = t.load(cosine + t.program_id(0) * half + i), s0 = t.load(sine + t.program_id(0) * half + i);
    const auto a = t.load(x + head + i), b = t.load(x + head + i + half);
    t.store(z + head + i, a * c0 - b * s0);
    t.store(z + head + i + half, b * c0 + a * s0);
  }
};

struct TopKMask {  // all but the k largest of a row of at most b elements become -infinity; of equal ones the first
                   // counts
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n, int k, auto b) const {
    const auto p = x + t.program_id(0) * n;
    const auto j = t.arange(b);
    const auto i = col(t.arange(b));
    const auto others = t.load(p + j, j < n, -kInfinity);
    const auto own = t.load(p + i, i < n, -kInfinity);
    const auto before = (others > own) | ((others == own) & (j < i));
    const auto rank = sum(cast<s32>(before & (j < n)));
    t.store(z + t.program_id(0) * n + i, where(rank < k, own, -kInfinity), i < n);
  }
};

struct Histogram {  // of integers from 0 to below the number of bins
  TILE_KERNEL void operator()(auto& t, auto x, auto bins, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    t.atomic_add(bins + t.load(x + i, i < n, 0), 1, i < n);
  }
};

struct BatchedTranspose {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int rows, int columns, auto b0, auto b1) const {
    const auto batch = t.program_id(2) * (rows * columns);
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    const auto v = t.load(x + batch + (col(i) * columns + j), (col(i) < rows) & (j < columns));
    t.store(z + batch + (col(j) * rows + i), trans(v), (col(j) < columns) & (i < rows));
  }
};

struct SegmentedSum {  // segment s is x[offsets[s]] to before x[offsets[s + 1]], and none is longer than `longest`
  TILE_KERNEL void operator()(auto& t, auto x, auto offsets, auto z, int segments, int longest, auto b0,
                              auto b1) const {
    const auto s = col(t.program_id(0) * b0 + t.arange(b0));
    const auto first = t.load(offsets + s, s < segments, 0), last = t.load(offsets + s + 1, s < segments, 0);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, longest, b1)) {
      const auto at = first + (t.arange(b1) + k);
      total += sum(t.load(x + at, at < last, 0.0f));
    }
    t.store(z + s, total, s < segments);
  }
};

struct Int4Unpack {  // two to a byte, the lower four bits first, 8 more than they are
  TILE_KERNEL void operator()(auto& t, auto packed, auto z, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    const auto byte = cast<s32>(t.load(packed + (i >> 1), i < n, 0));
    t.store(z + i, cast<s8>(((byte >> ((i & 1) * 4)) & 15) - 8), i < n);
  }
};

struct SoftmaxWithLengths {  // of the first lengths[i] elements of row i; the rest becomes 0
  TILE_KERNEL void operator()(auto& t, auto x, auto lengths, auto z, int rows, int columns, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto length = t.load(lengths + i, i < rows, 0);
    auto largest = t.full(b0, c<1>, -3.0e38f), total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * columns + j, (i < rows) & (j < length), -kInfinity);
      const auto next = maximum(largest, max(v));
      total = total * exp2(kLog2E * (largest - next)) + sum(exp2(kLog2E * (v - next)));
      largest = next;
    }
    for (int k : range(0, columns, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * columns + j, (i < rows) & (j < length), -kInfinity);
      const auto result = where(j < length, exp2(kLog2E * (v - largest)) / total, 0.0f);
      t.store(z + i * columns + j, result, (i < rows) & (j < columns));
    }
  }
};

}  // namespace octile::tile::ten
