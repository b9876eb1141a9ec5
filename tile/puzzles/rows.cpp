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
          {{1, 1}},
          {{5, 31}, false, Values::mixed, 1},
          {{3, 64}, false, Values::mixed, 1},
          {{7, 997}, false, Values::mixed, 1},
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
          {{1, 1}},
          {{5, 31}, false, Values::mixed, 1},
          {{3, 64}, false, Values::large, 1},
          {{7, 997}, false, Values::large, 1},
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
          {{64, 64}},
          {{1, 1}},
          {{65, 33}},
          {{31, 997}},
          {{100, 50}, false, Values::large},
          {{20, 7}, false, Values::zero},
          {{0, 5}}};
}

std::vector<Puzzle> row_puzzles() {
  namespace r = rows;
  constexpr Problem kOutside = Problem::out_of_bounds;
  return {
      puzzle<LongSum>(
          {wrong<LongSum>("SumOfUndefined", Problem::undefined_value, "a masked load without `other`, summed",
                          r::SumOfUndefined{}),
           wrong<LongSum>("SumOfWholeBlocks", {}, "leaves out what does not fill a block", r::SumOfWholeBlocks{}),
           wrong<LongSum>("SumThroughMemory", Problem::unordered, "reads what it stored, without a barrier",
                          r::SumThroughMemory{})},
          r::LongSum{}),
      puzzle<LongSoftmax>(
          {wrong<LongSoftmax>("SoftmaxWithoutMaximum", {}, "overflows for large values", r::SoftmaxWithoutMaximum{}),
           wrong<LongSoftmax>("SoftmaxOfZeros", {}, "0 for what is masked off, which is not neutral",
                              r::SoftmaxOfZeros{}),
           wrong<LongSoftmax>("RowsWithoutMask", kOutside, "right only with one row a program", r::RowsWithoutMask{})},
          r::LongSoftmax{}),
      puzzle<ScalarAttention>(
          {wrong<ScalarAttention>("KeysOfMinusInfinity", {}, "-infinity in the keys: right for positive queries only",
                                  r::KeysOfMinusInfinity{}),
           wrong<ScalarAttention>("WholeBlocksOfKeys", kOutside, "right where the block divides the length",
                                  r::WholeBlocksOfKeys{})},
          r::ScalarAttention{}),
  };
}

}  // namespace octile::tile::puzzles
