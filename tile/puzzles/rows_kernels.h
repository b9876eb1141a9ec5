// Puzzles 7 to 9: the kernels that solve them, and some that do not. Of a wrong kernel, the line to blame is marked. A
// kernel named SomethingBut is the solution but for one mistake: compiled once, it is several wrong kernels.
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

struct SumBut {
  enum Mistake { in_half, at_most_1024, of_the_next_row } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto row = i + (mistake == of_the_next_row ? 1 : 0);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, mistake == at_most_1024 && length > 1024 ? 1024 : length, b1)) {
      const auto j = t.arange(b1) + k;
      total += sum(t.load(x + row * length + j, (row < n0) & (j < length), 0.0f));
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    t.store(z + i, total, i < n0);  // wrong: SumBut
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

struct SoftmaxBut {
  enum Mistake {
    maximum_from_0,
    masked_lanes_as_0,
    maximum_of_the_first_block,
    maximum_of_the_last_block,
    one_maximum_for_all_rows,
    rescaled_the_other_way,
    exp2_of_the_difference
  } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const float unit = mistake == exp2_of_the_difference ? 1.0f : kLog2E;
    const float other = mistake == masked_lanes_as_0 ? 0.0f : -kInfinity;
    auto most = t.full(b0, c<1>, mistake == maximum_from_0 ? 0.0f : -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = t.load(x + i * length + j, in, -kInfinity);
      auto larger = maximum(most, max(t.load(x + i * length + j, in, other)));
      if (mistake == maximum_of_the_first_block && k > 0) larger = most;
      if (mistake == maximum_of_the_last_block) larger = max(v);
      if (mistake == one_maximum_for_all_rows) larger = maximum(larger, max(larger, kRows));
      const auto change = mistake == rescaled_the_other_way ? larger - most : most - larger;
      total = total * exp2(unit * change) + sum(exp2(unit * (v - larger)));
      most = larger;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = t.load(x + i * length + j, in, -kInfinity);
      t.store(z + i * length + j, exp2(unit * (v - most)) / total, in);  // wrong: SoftmaxBut
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

struct AttentionBut {
  enum Mistake {
    maximum_from_0,
    masked_lanes_as_0,
    maximum_of_the_first_block,
    maximum_of_the_last_block,
    one_maximum_for_all_queries,
    result_not_rescaled
  } mistake;

  TILE_KERNEL void operator()(auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto query = t.load(q + i, i < n0, 0.0f);
    auto most = t.full(b0, c<1>, mistake == maximum_from_0 ? 0.0f : -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    auto result = t.full(b0, c<1>, 0.0f);
    for (int first : range(0, length, b1)) {
      const auto j = t.arange(b1) + first;
      const auto in = j < length;
      const auto product = query * t.load(k + j, in, 0.0f);
      const auto s = where(in, product, -kInfinity);
      auto larger = maximum(most, mistake == masked_lanes_as_0 ? max(product) : max(s));
      if (mistake == maximum_of_the_first_block && first > 0) larger = most;
      if (mistake == maximum_of_the_last_block) larger = max(s);
      if (mistake == one_maximum_for_all_queries) larger = maximum(larger, max(larger, kRows));
      const auto weight = exp2(kLog2E * (s - larger));
      const auto rescale = exp2(kLog2E * (most - larger));
      total = total * rescale + sum(weight);
      if (mistake != result_not_rescaled) result = result * rescale;
      result = result + sum(weight * t.load(v + j, in, 0.0f));
      most = larger;
    }
    t.store(z + i, result / total, i < n0);  // wrong: AttentionBut
  }
};

}  // namespace octile::tile::puzzles::rows
