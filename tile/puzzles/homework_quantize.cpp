#include "puzzles/homework.h"
#include "puzzles/homework_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

float scale_of(float most) {
  if (!(most < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
  return std::max(most / 127.0f, 1e-8f);
}

Facts QuantizeGlobal::facts() {
  return {
      13,
      "quantize_global",
      "int8 with one scale: s = max(max|x| / 127, 1e-8), q = clamp(rint(x / s), -127, 127)",
      {"rows", "columns"},
      "x f16 [rows, columns], q s8 [rows, columns], scale f32 [1]; a NaN or an infinity in x makes scale NaN and all "
      "of q 0. most f32 [1] is 0 at first, and yours",
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
  return {{{16, 128}, true},
          {{16, 128}, false, Values::negative},
          {{33, 65}, false, Values::large},
          {{1, 1}},
          {{1, 257}},
          {{7, 211}},
          {{17, 1009}},
          {{9, 50}, false, Values::tied},
          {{10, 120}, false, Values::tied},
          {{3, 100}, false, Values::zero},
          {{3, 100}, false, Values::tiny},
          {{15, 40}, false, Values::nan},
          {{16, 40}, false, Values::nan},
          {{17, 40}, false, Values::nan},
          {{15, 40}, false, Values::infinite},
          {{16, 40}, false, Values::infinite},
          {{17, 40}, false, Values::infinite},
          {{0, 8}}};
}

Facts QuantizeRows::facts() {
  return {14,
          "quantize_rowwise",
          "int8 with a scale for each row: s = max(max|x| / 127, 1e-8) of the row, q = clamp(rint(x / s), -127, 127)",
          {"rows", "columns"},
          "x f16 [rows, columns], q s8 [rows, columns], scale f32 [rows]; a NaN or an infinity in a row of x makes its "
          "scale NaN and its q 0",
          "grid (cdiv(rows, b0)); b0 = 4, b1 = 64 columns at a time",
          "Two passes over the row; abs(), maximum(), clamp(), cast<s8, Round::even>(v).",
          "none: the contract decides every bit",
          "struct MyKernel {\n"
          "  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0,\n"
          "                              auto b1) const {",
          "MyKernel{}"};
}
std::vector<Case> QuantizeRows::cases() {
  return {{{16, 200}, true},
          {{16, 200}, false, Values::negative},
          {{33, 65}, false, Values::large},
          {{9, 70}, false, Values::apart},
          {{1, 1}},
          {{7, 128}},
          {{5, 257}},
          {{3, 1031}},
          {{67, 3}},
          {{8, 120}, false, Values::tied},
          {{5, 70}, false, Values::zero},
          {{5, 70}, false, Values::tiny},
          {{14, 200}, false, Values::nan},
          {{14, 200}, false, Values::infinite},
          {{2, 0}},
          {{0, 9}}};
}

std::vector<Puzzle> homework_quantize_puzzles() {
  namespace h = homework;
  using Global = h::GlobalMistake;
  using Rows = h::QuantizeRowsBut;
  const auto global = [](const char* name, Global::Mistake mistake, const char* lesson) {
    return wrong<QuantizeGlobal>(name, {}, lesson, h::FindMaximumBut{{mistake}}, h::QuantizeGlobalBut{{mistake}});
  };
  const auto rows = [](const char* name, Rows::Mistake mistake, const char* lesson) {
    return wrong<QuantizeRows>(name, {}, lesson, Rows{mistake});
  };
  return {
      puzzle<QuantizeGlobal>(
          {wrong<QuantizeGlobal>("OneLaunch", Problem::race, "finds the maximum and uses it in one launch",
                                 h::OneLaunch{}, h::Nothing{}),
           wrong<QuantizeGlobal>("EveryProgramStoresTheScale", Problem::race, "all programs store the scale",
                                 h::FindMaximum{}, h::EveryProgramStoresTheScale{}),
           wrong<QuantizeGlobal>("RoundsToZero", {}, "rounds to zero", h::FindMaximum{}, h::RoundsToZero{}),
           global("QuantizeGlobalBut.nan_as_0", Global::nan_as_0, "a NaN counts as 0"),
           global("QuantizeGlobalBut.infinite_scale", Global::infinite_scale, "an infinity makes the scale infinite"),
           global("QuantizeGlobalBut.floor_for_0_alone", Global::floor_for_0_alone,
                  "the least scale only where all is 0"),
           global("QuantizeGlobalBut.times_the_reciprocal", Global::times_the_reciprocal,
                  "x * (1 / s) is rounded twice"),
           global("QuantizeGlobalBut.times_127_first", Global::times_127_first, "x * 127 / max rounds other ties"),
           global("QuantizeGlobalBut.ties_away_from_0", Global::ties_away_from_0,
                  "rounds ties away from 0 and not to even")},
          h::FindMaximum{}, h::QuantizeGlobal{}),
      puzzle<QuantizeRows>(
          {wrong<QuantizeRows>("MaximumOfUndefined", Problem::undefined_value, "a masked load without `other`",
                               h::MaximumOfUndefined{}),
           wrong<QuantizeRows>("ScaleOfTheLastBlock", {}, "forgets the maximum so far", h::ScaleOfTheLastBlock{}),
           wrong<QuantizeRows>("TiesUp", {}, "rounds ties up and not to even", h::TiesUp{}),
           rows("QuantizeRowsBut.nan_lost", Rows::nan_lost, "a comparison that a NaN never wins"),
           rows("QuantizeRowsBut.nan_kept_from_the_last_block_alone", Rows::nan_kept_from_the_last_block_alone,
                "a comparison that a later block wins over a NaN"),
           rows("QuantizeRowsBut.infinite_scale", Rows::infinite_scale, "an infinity makes the scale infinite"),
           rows("QuantizeRowsBut.floor_for_0_alone", Rows::floor_for_0_alone, "the least scale only where all is 0"),
           rows("QuantizeRowsBut.one_maximum_for_all_rows", Rows::one_maximum_for_all_rows,
                "one maximum for the program's rows"),
           rows("QuantizeRowsBut.times_the_reciprocal", Rows::times_the_reciprocal, "x * (1 / s) is rounded twice"),
           rows("QuantizeRowsBut.times_127_first", Rows::times_127_first, "x * 127 / max rounds other ties"),
           rows("QuantizeRowsBut.at_most_256_columns", Rows::at_most_256_columns,
                "looks for the maximum in 256 columns")},
          h::QuantizeRows{}),
  };
}

}  // namespace octile::tile::puzzles
