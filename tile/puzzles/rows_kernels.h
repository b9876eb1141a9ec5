// Puzzles 7 to 9: the kernels that solve them, and some that do not. Of a wrong kernel, the line to blame is marked.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile::puzzles::rows {

// ---- 7 ----

struct LongSum {
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

struct SumOfUndefined {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      total += sum(t.load(x + i * length + j, (i < n0) & (j < length)));
    }
    t.store(z + i, total, i < n0);  // wrong: SumOfUndefined
  }
};

struct SumOfWholeBlocks {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length / b1 * b1, b1)) {
      const auto j = t.arange(b1) + k;
      total += sum(t.load(x + i * length + j, (i < n0) & (j < length), 0.0f));
    }
    t.store(z + i, total, i < n0);  // wrong: SumOfWholeBlocks
  }
};

struct SumThroughMemory {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    t.store(z + i, 0.0f, i < n0);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto part = sum(t.load(x + i * length + j, (i < n0) & (j < length), 0.0f));
      const auto before = t.load(z + i, i < n0);  // wrong: SumThroughMemory
      t.store(z + i, before + part, i < n0);
    }
  }
};

// ---- 8 ----

struct LongSoftmax {  // in two passes: a larger maximum rescales the sum so far
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

struct SoftmaxWithoutMaximum {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      total += sum(exp2(kLog2E * t.load(x + i * length + j, (i < n0) & (j < length), -kInfinity)));
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = exp2(kLog2E * t.load(x + i * length + j, in, 0.0f)) / total;
      t.store(z + i * length + j, v, in);  // wrong: SoftmaxWithoutMaximum
    }
  }
};

struct SoftmaxOfZeros {  // what is masked off counts as exp(0)
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, (i < n0) & (j < length), 0.0f);
      const auto larger = maximum(most, max(v));
      total = total * exp2(kLog2E * (most - larger)) + sum(exp2(kLog2E * (v - larger)));
      most = larger;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = exp2(kLog2E * (t.load(x + i * length + j, in, 0.0f) - most)) / total;
      t.store(z + i * length + j, v, in);  // wrong: SoftmaxOfZeros
    }
  }
};

struct RowsWithoutMask {  // right with one row a program
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto most = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, j < length, -kInfinity);  // wrong: RowsWithoutMask
      const auto larger = maximum(most, max(v));
      total = total * exp2(kLog2E * (most - larger)) + sum(exp2(kLog2E * (v - larger)));
      most = larger;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, j < length, -kInfinity);
      t.store(z + i * length + j, exp2(kLog2E * (v - most)) / total, j < length);
    }
  }
};

// ---- 9 ----

struct ScalarAttention {  // one pass: the sum and the weighted sum are rescaled together
  TILE_KERNEL void operator()(auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto query = t.load(q + i, i < n0, 0.0f);
    auto most = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    auto result = t.full(b0, c<1>, 0.0f);
    for (int first : range(0, length, b1)) {
      const auto j = t.arange(b1) + first;
      const auto in = j < length;
      const auto s = where(in, query * t.load(k + j, in, 0.0f), -kInfinity);
      const auto larger = maximum(most, max(s));
      const auto weight = exp2(kLog2E * (s - larger));
      const auto rescale = exp2(kLog2E * (most - larger));
      total = total * rescale + sum(weight);
      result = result * rescale + sum(weight * t.load(v + j, in, 0.0f));
      most = larger;
    }
    t.store(z + i, result / total, i < n0);
  }
};

struct KeysOfMinusInfinity {  // times a negative query that is +infinity, times 0 it is NaN
  TILE_KERNEL void operator()(auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto query = t.load(q + i, i < n0, 0.0f);
    auto most = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    auto result = t.full(b0, c<1>, 0.0f);
    for (int first : range(0, length, b1)) {
      const auto j = t.arange(b1) + first;
      const auto s = query * t.load(k + j, j < length, -kInfinity);
      const auto larger = maximum(most, max(s));
      const auto weight = exp2(kLog2E * (s - larger));
      const auto rescale = exp2(kLog2E * (most - larger));
      total = total * rescale + sum(weight);
      result = result * rescale + sum(weight * t.load(v + j, j < length, 0.0f));
      most = larger;
    }
    t.store(z + i, result / total, i < n0);  // wrong: KeysOfMinusInfinity
  }
};

struct WholeBlocksOfKeys {  // right where the block divides the length
  TILE_KERNEL void operator()(auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto query = t.load(q + i, i < n0, 0.0f);
    auto most = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    auto result = t.full(b0, c<1>, 0.0f);
    for (int first : range(0, length, b1)) {
      const auto j = t.arange(b1) + first;
      const auto s = query * t.load(k + j);  // wrong: WholeBlocksOfKeys
      const auto larger = maximum(most, max(s));
      const auto weight = exp2(kLog2E * (s - larger));
      const auto rescale = exp2(kLog2E * (most - larger));
      total = total * rescale + sum(weight);
      result = result * rescale + sum(weight * t.load(v + j, j < length, 0.0f));
      most = larger;
    }
    t.store(z + i, result / total, i < n0);
  }
};

}  // namespace octile::tile::puzzles::rows
