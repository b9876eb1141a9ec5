#include "puzzles/rows.h"

#include "puzzles/registry.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile::puzzles {

namespace {

constexpr const char* kRowsToRows = "auto& t, auto x, auto z, int n0, int length, auto b0, auto b1";

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
          Cases({4, 200})
              .with(Values::negative, {{4, 200}})
              .with(Values::low, {{5, 100}}, 1)
              .sizes({{1, 1}, {2, 33}, {2, 4099}, {0, 10}, {3, 0}})
              .sizes({{5, 31}, {3, 64}, {7, 997}, {67, 3}}, 1)};
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
      Cases({4, 200})
          .with(Values::negative, {{4, 200}})
          .with(Values::large, {{4, 200}})
          .with(Values::low, {{4, 200}})
          .with(Values::rising, {{4, 200}})
          .with(Values::falling, {{4, 200}})
          .with(Values::low, {{5, 200}}, 1)
          .with(Values::rising, {{5, 100}}, 1)
          .with(Values::falling, {{5, 100}}, 1)
          .with(Values::apart, {{5, 100}}, 1)
          .with(Values::large, {{3, 64}, {7, 997}}, 1)
          .with(Values::zero, {{2, 40}})
          .sizes({{1, 1}, {2, 33}, {2, 4099}, {0, 10}, {3, 0}})
          .sizes({{5, 31}, {67, 3}}, 1)};
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
      "auto& t, auto q, auto k, auto v, auto z, int n0, int length, auto b0, auto b1",
      Cases({200, 200})
          .with(Values::negative, {{200, 200}})
          .with(Values::low, {{70, 200}})
          .with(Values::rising, {{70, 100}})
          .with(Values::apart, {{70, 100}})
          .with(Values::large, {{100, 50}})
          .with(Values::zero, {{20, 7}})
          .sizes({{64, 64}, {1, 1}, {65, 33}, {31, 1031}, {259, 5}, {0, 5}})};
}

std::vector<Puzzle> row_puzzles() {
  namespace r = rows;
  constexpr Problem kOutside = Problem::out_of_bounds;
  using Sum = r::SumBut;
  using Softmax = r::SoftmaxBut;
  using Attention = r::AttentionBut;
  const auto sum = mistakes<LongSum, Sum>();
  const auto softmax = mistakes<LongSoftmax, Softmax>();
  const auto attention = mistakes<ScalarAttention, Attention>();
  return {
      puzzle<LongSum>(
          {sum("SumOfUndefined", Sum::undefined, "a masked load without `other`, summed", Problem::undefined_value),
           sum("SumOfWholeBlocks", Sum::whole_blocks, "leaves out what does not fill a block"),
           wrong<LongSum>("SumThroughMemory", Problem::unordered, "reads what it stored, without a barrier",
                          r::SumThroughMemory{}),
           sum("SumBut.in_half", Sum::in_half, "rounds the sum to f16 after each block"),
           sum("SumBut.at_most_1024", Sum::at_most_1024, "right for rows of up to 1024 elements"),
           sum("SumBut.of_the_next_row", Sum::of_the_next_row, "reads the next row")},
          r::LongSum{}),
      puzzle<LongSoftmax>(
          {softmax("SoftmaxWithoutMaximum", Softmax::without_maximum, "overflows for large values"),
           softmax("SoftmaxOfZeros", Softmax::of_zeros, "0 for what is masked off, which is not neutral"),
           softmax("RowsWithoutMask", Softmax::rows_without_mask, "right only with one row a program", kOutside),
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
          {attention("KeysOfMinusInfinity", Attention::keys_of_minus_infinity,
                     "-infinity in the keys: right for positive queries only"),
           attention("WholeBlocksOfKeys", Attention::whole_blocks_of_keys, "right where the block divides the length",
                     kOutside),
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
