#include "puzzles/rows.h"

#include "puzzles/registry.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile::puzzles {

namespace {

constexpr const char* kRowsToRows =
    "struct MyKernel {\n"
    "  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {";

}  // namespace

Facts LongSum::facts() {
  return {7,
          "long_sum",
          "add up rows of any length, b1 elements at a time: z[i] = sum of x[i, :]",
          {"n0", "length"},
          "x f32 [n0, length], z f32 [n0]",
          "grid (cdiv(n0, b0)); b0 = 1 or 2, b1 = 32",
          "for (int k : range(0, length, b1)); sum(v) gives a column, and so does t.full(b0, c<1>, 0.0f).",
          "a sum of n terms in any order: n u times the sum of their magnitudes, u = 2^-24",
          kRowsToRows,
          "MyKernel{}"};
}
std::vector<Case> LongSum::cases() {
  return {{{4, 200}, true},
          {{4, 200}, false, Values::negative},
          {{5, 100}, false, Values::low, 1},
          {{1, 1}},
          {{5, 31}, false, Values::mixed, 1},
          {{3, 64}, false, Values::mixed, 1},
          {{2, 33}},
          {{7, 997}, false, Values::mixed, 1},
          {{2, 4099}},
          {{67, 3}, false, Values::mixed, 1},
          {{0, 10}},
          {{3, 0}}};
}

Facts LongSoftmax::facts() {
  return {
      8,
      "long_softmax",
      "softmax of rows of any length, b1 elements at a time: z[i, :] = exp(x[i, :]) / sum of exp(x[i, :])",
      {"n0", "length"},
      "x f32 [n0, length], z f32 [n0, length]",
      "grid (cdiv(n0, b0)); b0 = 1 or 2, b1 = 32",
      "exp(x) = exp2(kLog2E * x), and it overflows unless the maximum is subtracted. Three passes do; two can.",
      "a difference, times log2(e), which is rounded too: 3 u (max - min) of its exponential, in the element, in the "
      "sum and in the factors that rescale the sum; the sum and its rescaling: 5 u length; exp2, division: 10 u",
      kRowsToRows,
      "MyKernel{}"};
}
std::vector<Case> LongSoftmax::cases() {
  return {{{4, 200}, true},
          {{4, 200}, false, Values::negative},
          {{4, 200}, false, Values::large},
          {{4, 200}, false, Values::low},
          {{4, 200}, false, Values::rising},
          {{4, 200}, false, Values::falling},
          {{5, 200}, false, Values::low, 1},
          {{5, 100}, false, Values::rising, 1},
          {{5, 100}, false, Values::falling, 1},
          {{5, 100}, false, Values::apart, 1},
          {{1, 1}},
          {{5, 31}, false, Values::mixed, 1},
          {{3, 64}, false, Values::large, 1},
          {{2, 33}},
          {{7, 997}, false, Values::large, 1},
          {{2, 4099}},
          {{67, 3}, false, Values::mixed, 1},
          {{2, 40}, false, Values::zero},
          {{0, 10}},
          {{3, 0}}};
}

Facts ScalarAttention::facts() {
  return {
      9,
      "scalar_attention",
      "attention of scalars: z[i] = sum over j of softmax(q[i] * k)[j] * v[j]",
      {"n0", "length"},
      "q f32 [n0], k f32 [length], v f32 [length], z f32 [n0]; length is at least 1",
      "grid (cdiv(n0, b0)); b0 = 64 queries, b1 = 32 keys at a time: neither has to divide its size",
      "One pass: rescale the sum of the weights and the weighted sum together. Mask what you compute, not the keys: "
      "-infinity times a negative query is +infinity.",
      "as for the softmax, for the sum of the weights and for the weighted sum, with one more rounding of q * k: 2 u "
      "(16 max |q k| + 5 length + 10) times the weighted sum of |v|",
      "struct MyKernel {\n"
      "  TILE_KERNEL void operator()(auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0,\n"
      "                              auto b1) const {",
      "MyKernel{}"};
}
std::vector<Case> ScalarAttention::cases() {
  return {{{200, 200}, true},
          {{200, 200}, false, Values::negative},
          {{70, 200}, false, Values::low},
          {{70, 100}, false, Values::rising},
          {{70, 100}, false, Values::apart},
          {{64, 64}},
          {{1, 1}},
          {{65, 33}},
          {{31, 1031}},
          {{259, 5}},
          {{100, 50}, false, Values::large},
          {{20, 7}, false, Values::zero},
          {{0, 5}}};
}

std::vector<Puzzle> row_puzzles() {
  namespace r = rows;
  constexpr Problem kOutside = Problem::out_of_bounds;
  using Sum = r::SumBut;
  using Softmax = r::SoftmaxBut;
  using Attention = r::AttentionBut;
  const auto sum = [](const char* name, Sum::Mistake mistake, const char* lesson) {
    return wrong<LongSum>(name, {}, lesson, Sum{mistake});
  };
  const auto softmax = [](const char* name, Softmax::Mistake mistake, const char* lesson) {
    return wrong<LongSoftmax>(name, {}, lesson, Softmax{mistake});
  };
  const auto attention = [](const char* name, Attention::Mistake mistake, const char* lesson) {
    return wrong<ScalarAttention>(name, {}, lesson, Attention{mistake});
  };
  return {
      puzzle<LongSum>(
          {wrong<LongSum>("SumOfUndefined", Problem::undefined_value, "a masked load without `other`, summed",
                          r::SumOfUndefined{}),
           wrong<LongSum>("SumOfWholeBlocks", {}, "leaves out what does not fill a block", r::SumOfWholeBlocks{}),
           wrong<LongSum>("SumThroughMemory", Problem::unordered, "reads what it stored, without a barrier",
                          r::SumThroughMemory{}),
           sum("SumBut.in_half", Sum::in_half, "rounds the sum to f16 after each block"),
           sum("SumBut.at_most_1024", Sum::at_most_1024, "right for rows of up to 1024 elements"),
           sum("SumBut.of_the_next_row", Sum::of_the_next_row, "reads the next row")},
          r::LongSum{}),
      puzzle<LongSoftmax>(
          {wrong<LongSoftmax>("SoftmaxWithoutMaximum", {}, "overflows for large values", r::SoftmaxWithoutMaximum{}),
           wrong<LongSoftmax>("SoftmaxOfZeros", {}, "0 for what is masked off, which is not neutral",
                              r::SoftmaxOfZeros{}),
           wrong<LongSoftmax>("RowsWithoutMask", kOutside, "right only with one row a program", r::RowsWithoutMask{}),
           softmax("SoftmaxBut.maximum_from_0", Softmax::maximum_from_0, "the maximum starts at 0"),
           softmax("SoftmaxBut.masked_lanes_as_0", Softmax::masked_lanes_as_0, "the maximum counts masked lanes as 0"),
           softmax("SoftmaxBut.maximum_of_the_first_block", Softmax::maximum_of_the_first_block,
                   "overflows where a later block has much larger elements"),
           softmax("SoftmaxBut.maximum_of_the_last_block", Softmax::maximum_of_the_last_block,
                   "overflows where an earlier block has much larger elements"),
           softmax("SoftmaxBut.one_maximum_for_all_rows", Softmax::one_maximum_for_all_rows,
                   "one maximum for the program: rows far below it add up to 0"),
           softmax("SoftmaxBut.rescaled_the_other_way", Softmax::rescaled_the_other_way,
                   "multiplies the sum so far where it should divide"),
           softmax("SoftmaxBut.exp2_of_the_difference", Softmax::exp2_of_the_difference, "powers of 2 instead of e")},
          r::LongSoftmax{}),
      puzzle<ScalarAttention>(
          {wrong<ScalarAttention>("KeysOfMinusInfinity", {}, "-infinity in the keys: right for positive queries only",
                                  r::KeysOfMinusInfinity{}),
           wrong<ScalarAttention>("WholeBlocksOfKeys", kOutside, "right where the block divides the length",
                                  r::WholeBlocksOfKeys{}),
           attention("AttentionBut.maximum_from_0", Attention::maximum_from_0, "the maximum starts at 0"),
           attention("AttentionBut.masked_lanes_as_0", Attention::masked_lanes_as_0,
                     "the maximum counts masked lanes as 0"),
           attention("AttentionBut.maximum_of_the_first_block", Attention::maximum_of_the_first_block,
                     "overflows where a later block has much larger scores"),
           attention("AttentionBut.maximum_of_the_last_block", Attention::maximum_of_the_last_block,
                     "overflows where an earlier block has much larger scores"),
           attention("AttentionBut.one_maximum_for_all_queries", Attention::one_maximum_for_all_queries,
                     "one maximum for the program: queries far below it add up to 0"),
           attention("AttentionBut.result_not_rescaled", Attention::result_not_rescaled,
                     "rescales the sum of the weights alone")},
          r::ScalarAttention{}),
  };
}

}  // namespace octile::tile::puzzles
