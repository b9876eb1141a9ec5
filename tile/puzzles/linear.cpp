#include "puzzles/linear.h"

#include "puzzles/linear_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

Facts Forward::facts() {
  return {
      15,
      "forward",
      "int8 product, scaled, with a bias: y = (x_q @ w_q) * (x_scale * w_scale) + bias",
      {"batch", "in", "out"},
      "x_q s8 [batch, in], x_scale f32 [1], w_q s8 [in, out], w_scale f32 [out] or [1], bias f16 [out] or none, y f16 "
      "[batch, out]",
      "grid (cdiv(batch, bm), cdiv(out, bn)); bm = bn = 16, bk = 32; per_channel and biased are c<0> or c<1>",
      "Sum in s32, apply the scales once, fma(cast<f32>(total), scale, b) adds the bias. if constexpr (biased != 0).",
      "the sum is exact; four roundings of the product in f32, and two to f16, since the product may be rounded before "
      "the bias is added",
      "auto& t, auto x_q, auto x_scale, auto w_q, auto w_scale, auto bias, auto y, int batch, int in, int out, auto "
      "per_channel, auto biased, auto bm, auto bn, auto bk",
      Cases({32, 64, 48})
          .with(Values::negative, {{33, 100, 47}}, 1)
          .sizes({{33, 100, 47}, {3, 1031, 5}, {2, 5, 131}, {1, 1, 1}, {5, 0, 9}, {0, 16, 16}})
          .sizes({{131, 3, 2}}, 1)
          .sizes({{17, 257, 20}}, 2)};
}

Facts BackwardDx::facts() {
  return {
      16,
      "backward_dx",
      "the gradient of the input: dx = dy @ transpose(w_q * w_scale)",
      {"batch", "in", "out"},
      "dy f16 [batch, out], w_q s8 [in, out], w_scale f32 [out] or [1], dx f16 [batch, in]",
      "grid (cdiv(batch, bm), cdiv(in, bn)); bm = bn = 16, bk = 32; per_channel is c<0> or c<1>",
      "Load w with its rows along the rows, which are contiguous, and trans() the tile.",
      "a sum of `out` products of a rounded factor: (out + 2) u times the sum of their magnitudes, and a rounding to "
      "f16",
      "auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out, auto per_channel, auto bm, auto "
      "bn, auto bk",
      Cases({32, 48, 64})
          .with(Values::negative, {{17, 65, 31}}, 1)
          .sizes({{33, 47, 100}, {3, 5, 257}, {2, 3, 1031}, {131, 2, 5}, {1, 1, 1}, {9, 5, 0}, {0, 16, 16}})
          .sizes({{2, 131, 3}}, 1)};
}

Facts BackwardDw::facts() {
  return {
      17,
      "backward_dw",
      "the gradient of the weight: dw = transpose(x_q * x_scale) @ dy",
      {"batch", "in", "out"},
      "x_q s8 [batch, in], x_scale f32 [1], dy f16 [batch, out], dw f16 [in, out]",
      "grid (cdiv(in, bm), cdiv(out, bn)); bm = bn = 16, bk = 32 rows of the batch at a time",
      "The sum runs over the batch: both operands are loaded with it along their rows.",
      "a sum of `batch` products of a rounded factor: (batch + 2) u times the sum of their magnitudes, and a rounding "
      "to f16",
      "auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out, auto bm, auto bn, auto bk",
      Cases({64, 32, 48})
          .with(Values::negative, {{31, 17, 65}})
          .sizes(
              {{100, 33, 47}, {257, 3, 5}, {1031, 2, 3}, {3, 131, 2}, {5, 2, 131}, {1, 1, 1}, {0, 5, 9}, {16, 0, 16}})};
}

Facts BackwardDb::facts() {
  return {18,
          "backward_db",
          "the gradient of the bias: db[j] = sum of dy[:, j]",
          {"batch", "out"},
          "dy f16 [batch, out], db f16 [out]",
          "grid (cdiv(out, bn)); bn = 64, bm = 16 rows at a time",
          "sum(v, kRows) adds up the rows of a tile. Keep the sum in f32 to the end.",
          "a sum of `batch` terms: (batch + 1) u times the sum of their magnitudes, and a rounding to f16",
          "auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm",
          Cases({64, 128})
              .with(Values::negative, {{1001, 65}})
              .sizes({{1001, 65}, {4099, 3}, {3, 1031}, {1, 1}, {17, 31}, {0, 5}, {5, 0}})};
}

std::vector<Puzzle> linear_puzzles() {
  namespace l = linear;
  constexpr Problem kOutside = Problem::out_of_bounds;
  using ForwardBut = l::ForwardBut;
  using DxBut = l::BackwardDxBut;
  using DwBut = l::BackwardDwBut;
  using DbBut = l::BackwardDbBut;
  const auto forward = mistakes<Forward, ForwardBut>();
  const auto dx = mistakes<BackwardDx, DxBut>();
  const auto dw = mistakes<BackwardDw, DwBut>();
  const auto db = mistakes<BackwardDb, DbBut>();
  return {
      puzzle<Forward>(
          {forward("InnerWithoutMask", ForwardBut::inner_without_mask, "x is not masked along the sum", kOutside),
           forward("BiasOfTheRow", ForwardBut::bias_of_the_row, "the bias along the batch"),
           forward("OneScaleForAll", ForwardBut::one_scale_for_all, "the first scale for all columns"),
           forward("ForwardBut.at_most_256_terms", ForwardBut::at_most_256_terms, "right for sums of up to 256 terms"),
           forward("ForwardBut.sum_in_half", ForwardBut::sum_in_half, "rounds the sum to f16 before it is scaled"),
           forward("ForwardBut.scale_in_half", ForwardBut::scale_in_half, "rounds the product of the scales to f16"),
           forward("ForwardBut.bias_of_the_first_tile", ForwardBut::bias_of_the_first_tile,
                   "the bias of the first columns for all"),
           forward("ForwardBut.no_bias_in_the_last_tile", ForwardBut::no_bias_in_the_last_tile,
                   "the last columns get no bias")},
          l::Forward{}),
      puzzle<BackwardDx>(
          {dx("ScaleOfTheInput", DxBut::scale_of_the_input, "a scale along the wrong side of w"),
           dx("WithoutTransposing", DxBut::without_transposing, "reads w as if it were (out, in)"),
           dx("BackwardDxBut.at_most_128_terms", DxBut::at_most_128_terms, "right for sums of up to 128 terms"),
           dx("BackwardDxBut.in_half", DxBut::in_half, "rounds the sum to f16 after each block"),
           dx("BackwardDxBut.scales_of_the_first_block", DxBut::scales_of_the_first_block,
              "the scales of the first 32 columns for all")},
          l::BackwardDx{}),
      puzzle<BackwardDw>(
          {dw("BatchWithoutMask", DwBut::batch_without_mask, "the batch is not masked", kOutside),
           wrong<BackwardDw>("SumsTilesThroughMemory", Problem::unordered, "reads what it stored, without a barrier",
                             l::SumsTilesThroughMemory{}),
           dw("BackwardDwBut.at_most_128_rows", DwBut::at_most_128_rows, "right for batches of up to 128 rows"),
           dw("BackwardDwBut.in_half", DwBut::in_half, "rounds the sum to f16 after each block"),
           dw("BackwardDwBut.scaled_in_half", DwBut::scaled_in_half, "rounds the scaled operand to f16")},
          l::BackwardDw{}),
      puzzle<BackwardDb>(
          {db("SumsInHalf", DbBut::in_half, "rounds the sum to f16 after each block"),
           db("ColumnsWithoutMask", DbBut::columns_without_mask, "the columns are not masked", kOutside),
           db("BackwardDbBut.at_most_1024_rows", DbBut::at_most_1024_rows, "right for batches of up to 1024 rows"),
           db("BackwardDbBut.of_the_next_column", DbBut::of_the_next_column, "adds up the next column")},
          l::BackwardDb{}),
  };
}

}  // namespace octile::tile::puzzles
