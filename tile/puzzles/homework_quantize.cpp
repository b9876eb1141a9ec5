#include "puzzles/homework.h"
#include "puzzles/homework_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

float scale_of(float most) {
  if (!(most < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
  return std::max(most / 127.0f, 1e-8f);
}

Facts QuantizeGlobal::facts() {
  return {13,
          "quantize_global",
          "int8 with one scale: s = max(max|x| / 127, 1e-8), q = clamp(rint(x / s), -127, 127)",
          {"rows", "columns"},
          "x f16 [rows, columns], q s8 [rows, columns], scale f32 [1]; most f32 [1] is 0 at first, and yours",
          "two launches, each of grid (cdiv(n, b0)), n = rows * columns, b0 = 256",
          "Programs of one launch are in no order, so the maximum has to be complete when the second launch begins. "
          "t.atomic_max(most, v) adds a block's to it.",
          "none: the contract decides every bit",
          "struct FindMaximum {\n"
          "  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {\n"
          "    // The first launch.\n"
          "  }\n"
          "};\n\n"
          "struct MyKernel {\n"
          "  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, auto most, int n, auto b0) const {",
          "FindMaximum{}, MyKernel{}"};
}
std::vector<Case> QuantizeGlobal::cases() {
  return {{{16, 128}, true}, {{16, 128}, false, Values::negative}, {{33, 65}, false, Values::large}, {{1, 1}},
          {{7, 211}},        {{9, 50}, false, Values::tied},       {{3, 100}, false, Values::zero},  {{0, 8}}};
}

Facts QuantizeRows::facts() {
  return {14,
          "quantize_rowwise",
          "int8 with a scale for each row: s = max(max|x| / 127, 1e-8) of the row, q = clamp(rint(x / s), -127, 127)",
          {"rows", "columns"},
          "x f16 [rows, columns], q s8 [rows, columns], scale f32 [rows]",
          "grid (cdiv(rows, b0)); b0 = 4, b1 = 64 columns at a time",
          "Two passes over the row; abs(), maximum(), clamp(), cast<s8, Round::even>(v).",
          "none: the contract decides every bit",
          "struct MyKernel {\n"
          "  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0,\n"
          "                              auto b1) const {",
          "MyKernel{}"};
}
std::vector<Case> QuantizeRows::cases() {
  return {{{16, 200}, true}, {{16, 200}, false, Values::negative}, {{33, 65}, false, Values::large}, {{1, 1}},
          {{7, 128}},        {{6, 90}, false, Values::tied},       {{5, 70}, false, Values::zero},   {{2, 0}},
          {{0, 9}}};
}

std::vector<Puzzle> homework_quantize_puzzles() {
  namespace h = homework;
  return {
      puzzle<QuantizeGlobal>(
          {wrong<QuantizeGlobal>("OneLaunch", Problem::race, "finds the maximum and uses it in one launch",
                                 h::OneLaunch{}, h::Nothing{}),
           wrong<QuantizeGlobal>("EveryProgramStoresTheScale", Problem::race, "all programs store the scale",
                                 h::FindMaximum{}, h::EveryProgramStoresTheScale{}),
           wrong<QuantizeGlobal>("RoundsToZero", {}, "rounds to zero", h::FindMaximum{}, h::RoundsToZero{})},
          h::FindMaximum{}, h::QuantizeGlobal{}),
      puzzle<QuantizeRows>(
          {wrong<QuantizeRows>("MaximumOfUndefined", Problem::undefined_value, "a masked load without `other`",
                               h::MaximumOfUndefined{}),
           wrong<QuantizeRows>("ScaleOfTheLastBlock", {}, "forgets the maximum so far", h::ScaleOfTheLastBlock{}),
           wrong<QuantizeRows>("TiesUp", {}, "rounds ties up and not to even", h::TiesUp{})},
          h::QuantizeRows{}),
  };
}

}  // namespace octile::tile::puzzles
