// Puzzles 7 to 9: the kernels that solve them, and wrong ones. A kernel named SomethingBut is the solution with one
// mistake: compiled once, it is several wrong kernels. A comment on the line to blame names them.
#pragma once

#include "puzzles/mistake.h"

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
  enum Mistake { undefined, whole_blocks, in_half, at_most_1024, of_the_next_row } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto row = i + (mistake == of_the_next_row ? 1 : 0);
    const int end = mistake == whole_blocks ? length / b1 * b1 : length;
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, mistake == at_most_1024 && end > 1024 ? 1024 : end, b1)) {
      const auto j = t.arange(b1) + k;
      const auto p = x + row * length + j;
      const auto in = (row < n0) & (j < length);
      total += sum(mistake == undefined ? t.load(p, in) : t.load(p, in, 0.0f));
      if (mistake == in_half) total = cast<f32>(cast<f16>(total));
    }
    t.store(z + i, total, i < n0);  // wrong: SumOfUndefined, SumOfWholeBlocks, SumBut
  }
};

// ---- 8 ----

struct LongSoftmax {  // in two passes: a larger maximum rescales the sum so far
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto running_max = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, (i < n0) & (j < length), -kInfinity);
      const auto new_max = maximum(running_max, max(v));
      total = total * exp2(kLog2E * (running_max - new_max)) + sum(exp2(kLog2E * (v - new_max)));
      running_max = new_max;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = t.load(x + i * length + j, in, -kInfinity);
      t.store(z + i * length + j, exp2(kLog2E * (v - running_max)) / total, in);
    }
  }
};

struct SoftmaxBut {
  enum Mistake {
    without_maximum,
    of_zeros,
    rows_without_mask,
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
    const bool from_0 = mistake == maximum_from_0 || mistake == without_maximum;
    const float unit = mistake == exp2_of_the_difference ? 1.0f : kLog2E;
    const float other = mistake == of_zeros ? 0.0f : -kInfinity;
    const int rows = mistake == rows_without_mask ? kNoEnd : n0;
    auto running_max = t.full(b0, c<1>, from_0 ? 0.0f : -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, (i < rows) & (j < length), other);  // wrong: RowsWithoutMask
      auto new_max = maximum(running_max, max(v));
      if (mistake == without_maximum || (mistake == maximum_of_the_first_block && k > 0)) new_max = running_max;
      if (mistake == maximum_of_the_last_block) new_max = max(v);
      if (mistake == masked_lanes_as_0) new_max = maximum(running_max, max(where(j < length, v, 0.0f)));
      if (mistake == one_maximum_for_all_rows) new_max = maximum(new_max, max(new_max, kRows));
      const auto change = mistake == rescaled_the_other_way ? new_max - running_max : running_max - new_max;
      total = total * exp2(unit * change) + sum(exp2(unit * (v - new_max)));
      running_max = new_max;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < rows) & (j < length);
      const auto v = t.load(x + i * length + j, in, -kInfinity);
      const auto result = exp2(unit * (v - running_max)) / total;
      t.store(z + i * length + j, result, in);  // wrong: SoftmaxWithoutMaximum, SoftmaxOfZeros, SoftmaxBut
    }
  }
};

// ---- 9 ----

struct ScalarAttention {  // one pass: the sum and the weighted sum are rescaled together
  TILE_KERNEL void operator()(auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto query = t.load(q + i, i < n0, 0.0f);
    auto running_max = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    auto result = t.full(b0, c<1>, 0.0f);
    for (int first : range(0, length, b1)) {
      const auto j = t.arange(b1) + first;
      const auto in = j < length;
      const auto s = where(in, query * t.load(k + j, in, 0.0f), -kInfinity);
      const auto new_max = maximum(running_max, max(s));
      const auto weight = exp2(kLog2E * (s - new_max));
      const auto rescale = exp2(kLog2E * (running_max - new_max));
      total = total * rescale + sum(weight);
      result = result * rescale + sum(weight * t.load(v + j, in, 0.0f));
      running_max = new_max;
    }
    t.store(z + i, result / total, i < n0);
  }
};

struct AttentionBut {
  enum Mistake {
    keys_of_minus_infinity,
    whole_blocks_of_keys,
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
    const float other = mistake == keys_of_minus_infinity ? -kInfinity : 0.0f;
    const int end = mistake == whole_blocks_of_keys ? kNoEnd : length;
    auto running_max = t.full(b0, c<1>, mistake == maximum_from_0 ? 0.0f : -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    auto result = t.full(b0, c<1>, 0.0f);
    for (int first : range(0, length, b1)) {
      const auto j = t.arange(b1) + first;
      const auto in = j < length;
      const auto product = query * t.load(k + j, j < end, other);  // wrong: WholeBlocksOfKeys
      const auto s = mistake == keys_of_minus_infinity ? product : where(in, product, -kInfinity);
      auto new_max = maximum(running_max, mistake == masked_lanes_as_0 ? max(product) : max(s));
      if (mistake == maximum_of_the_first_block && first > 0) new_max = running_max;
      if (mistake == maximum_of_the_last_block) new_max = max(s);
      if (mistake == one_maximum_for_all_queries) new_max = maximum(new_max, max(new_max, kRows));
      const auto weight = exp2(kLog2E * (s - new_max));
      const auto rescale = exp2(kLog2E * (running_max - new_max));
      total = total * rescale + sum(weight);
      if (mistake != result_not_rescaled) result = result * rescale;
      result = result + sum(weight * t.load(v + j, in, 0.0f));
      running_max = new_max;
    }
    t.store(z + i, result / total, i < n0);  // wrong: KeysOfMinusInfinity, AttentionBut
  }
};

}  // namespace octile::tile::puzzles::rows
