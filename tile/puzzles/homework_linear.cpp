#include "puzzles/homework.h"
#include "puzzles/homework_kernels.h"
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
      "struct MyKernel {\n"
      "  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto w_q, auto w_scale, auto bias, auto y,\n"
      "                              int batch, int in, int out, auto per_channel, auto biased, auto bm, auto bn,\n"
      "                              auto bk) const {",
      "MyKernel{}"};
}
std::vector<Case> Forward::cases() {
  return {{{32, 64, 48}, true},
          {{33, 100, 47}},
          {{33, 100, 47}, false, Values::negative, 1},
          {{17, 257, 20}, false, Values::mixed, 2},
          {{3, 1031, 5}},
          {{131, 3, 2}, false, Values::mixed, 1},
          {{2, 5, 131}},
          {{1, 1, 1}},
          {{5, 0, 9}},
          {{0, 16, 16}}};
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
      "struct MyKernel {\n"
      "  TILE_KERNEL void operator()(auto& t, auto dy, auto w_q, auto w_scale, auto dx, int batch, int in, int out,\n"
      "                              auto per_channel, auto bm, auto bn, auto bk) const {",
      "MyKernel{}"};
}
std::vector<Case> BackwardDx::cases() {
  return {{{32, 48, 64}, true}, {{33, 47, 100}}, {{17, 65, 31}, false, Values::negative, 1}, {{3, 5, 257}},
          {{2, 3, 1031}},       {{131, 2, 5}},   {{2, 131, 3}, false, Values::mixed, 1},     {{1, 1, 1}},
          {{9, 5, 0}},          {{0, 16, 16}}};
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
      "struct MyKernel {\n"
      "  TILE_KERNEL void operator()(auto& t, auto x_q, auto x_scale, auto dy, auto dw, int batch, int in, int out,\n"
      "                              auto bm, auto bn, auto bk) const {",
      "MyKernel{}"};
}
std::vector<Case> BackwardDw::cases() {
  return {{{64, 32, 48}, true}, {{100, 33, 47}}, {{31, 17, 65}, false, Values::negative},
          {{257, 3, 5}},        {{1031, 2, 3}},  {{3, 131, 2}},
          {{5, 2, 131}},        {{1, 1, 1}},     {{0, 5, 9}},
          {{16, 0, 16}}};
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
          "struct MyKernel {\n"
          "  TILE_KERNEL void operator()(auto& t, auto dy, auto db, int batch, int out, auto bn, auto bm) const {",
          "MyKernel{}"};
}
std::vector<Case> BackwardDb::cases() {
  return {{{64, 128}, true}, {{1001, 65}}, {{1001, 65}, false, Values::negative},
          {{4099, 3}},       {{3, 1031}},  {{1, 1}},
          {{17, 31}},        {{0, 5}},     {{5, 0}}};
}

std::vector<Puzzle> homework_linear_puzzles() {
  namespace h = homework;
  constexpr Problem kOutside = Problem::out_of_bounds;
  using ForwardBut = h::ForwardBut;
  using DxBut = h::BackwardDxBut;
  using DwBut = h::BackwardDwBut;
  using DbBut = h::BackwardDbBut;
  const auto forward = [](const char* name, ForwardBut::Mistake mistake, const char* lesson) {
    return wrong<Forward>(name, {}, lesson, ForwardBut{mistake});
  };
  const auto dx = [](const char* name, DxBut::Mistake mistake, const char* lesson) {
    return wrong<BackwardDx>(name, {}, lesson, DxBut{mistake});
  };
  const auto dw = [](const char* name, DwBut::Mistake mistake, const char* lesson) {
    return wrong<BackwardDw>(name, {}, lesson, DwBut{mistake});
  };
  const auto db = [](const char* name, DbBut::Mistake mistake, const char* lesson) {
    return wrong<BackwardDb>(name, {}, lesson, DbBut{mistake});
  };
  return {
      puzzle<Forward>(
          {wrong<Forward>("InnerWithoutMask", kOutside, "x is not masked along the sum", h::InnerWithoutMask{}),
           wrong<Forward>("BiasOfTheRow", {}, "the bias along the batch", h::BiasOfTheRow{}),
           wrong<Forward>("OneScaleForAll", {}, "the first scale for all columns", h::OneScaleForAll{}),
           forward("ForwardBut.at_most_256_terms", ForwardBut::at_most_256_terms, "right for sums of up to 256 terms"),
           forward("ForwardBut.sum_in_half", ForwardBut::sum_in_half, "rounds the sum to f16 before it is scaled"),
           forward("ForwardBut.scale_in_half", ForwardBut::scale_in_half, "rounds the product of the scales to f16"),
           forward("ForwardBut.bias_of_the_first_tile", ForwardBut::bias_of_the_first_tile,
                   "the bias of the first columns for all"),
           forward("ForwardBut.no_bias_in_the_last_tile", ForwardBut::no_bias_in_the_last_tile,
                   "the last columns get no bias")},
          h::Forward{}),
      puzzle<BackwardDx>(
          {wrong<BackwardDx>("ScaleOfTheInput", {}, "a scale along the wrong side of w", h::ScaleOfTheInput{}),
           wrong<BackwardDx>("WithoutTransposing", {}, "reads w as if it were (out, in)", h::WithoutTransposing{}),
           dx("BackwardDxBut.at_most_128_terms", DxBut::at_most_128_terms, "right for sums of up to 128 terms"),
           dx("BackwardDxBut.in_half", DxBut::in_half, "rounds the sum to f16 after each block"),
           dx("BackwardDxBut.scales_of_the_first_block", DxBut::scales_of_the_first_block,
              "the scales of the first 32 columns for all")},
          h::BackwardDx{}),
      puzzle<BackwardDw>(
          {wrong<BackwardDw>("BatchWithoutMask", kOutside, "the batch is not masked", h::BatchWithoutMask{}),
           wrong<BackwardDw>("SumsTilesThroughMemory", Problem::unordered, "reads what it stored, without a barrier",
                             h::SumsTilesThroughMemory{}),
           dw("BackwardDwBut.at_most_128_rows", DwBut::at_most_128_rows, "right for batches of up to 128 rows"),
           dw("BackwardDwBut.in_half", DwBut::in_half, "rounds the sum to f16 after each block"),
           dw("BackwardDwBut.scaled_in_half", DwBut::scaled_in_half, "rounds the scaled operand to f16")},
          h::BackwardDw{}),
      puzzle<BackwardDb>(
          {wrong<BackwardDb>("SumsInHalf", {}, "rounds the sum to f16 after each block", h::SumsInHalf{}),
           wrong<BackwardDb>("ColumnsWithoutMask", kOutside, "the columns are not masked", h::ColumnsWithoutMask{}),
           db("BackwardDbBut.at_most_1024_rows", DbBut::at_most_1024_rows, "right for batches of up to 1024 rows"),
           db("BackwardDbBut.of_the_next_column", DbBut::of_the_next_column, "adds up the next column")},
          h::BackwardDb{}),
  };
}

}  // namespace octile::tile::puzzles
