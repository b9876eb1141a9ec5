#include "puzzles/linear.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

float scale_of(float max_abs) {
  if (!(max_abs < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
  return std::max(max_abs / 127.0f, 1e-8f);
}

Facts QuantizeGlobal::facts() {
  return {
      13,
      "quantize_global",
      "int8 with one scale: s = max(max|x| / 127, 1e-8), q = clamp(rint(x / s), -127, 127)",
      {"rows", "columns"},
      "x f16 [rows, columns], q s8 [rows, columns], scale f32 [1]; a NaN or an infinity in x makes scale NaN and all "
      "of q 0. max_abs f32 [1] is 0 at first, and yours",
      "two launches, each of grid (cdiv(n, b0)), n = rows * columns, b0 = 256",
      "Programs of one launch are in no order, so the maximum has to be complete when the second launch begins. "
      "t.atomic_max(max_abs, v) adds a block's to it.",
      "none: the contract decides every bit",
      "auto& t, auto x, auto q, auto scale, auto max_abs, int n, auto b0",
      Cases({16, 128})
          .with(Values::negative, {{16, 128}})
          .with(Values::large, {{33, 65}})
          .with(Values::tied, {{9, 50}, {10, 120}})
          .with(Values::zero, {{3, 100}})
          .with(Values::tiny, {{3, 100}})
          .with(Values::nan, {{15, 40}, {16, 40}, {17, 40}})
          .with(Values::infinite, {{15, 40}, {16, 40}, {17, 40}})
          .sizes({{1, 1}, {1, 257}, {7, 211}, {17, 1009}, {0, 8}}),
      {"FindMaximum", "MyKernel"}};
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
          "auto& t, auto x, auto q, auto scale, int rows, int columns, auto b0, auto b1",
          Cases({16, 200})
              .with(Values::negative, {{16, 200}})
              .with(Values::large, {{33, 65}})
              .with(Values::apart, {{9, 70}})
              .with(Values::tied, {{8, 120}})
              .with(Values::zero, {{5, 70}})
              .with(Values::tiny, {{5, 70}})
              .with(Values::nan, {{14, 200}})
              .with(Values::infinite, {{14, 200}})
              .sizes({{1, 1}, {7, 128}, {5, 257}, {3, 1031}, {67, 3}, {2, 0}, {0, 9}})};
}

std::vector<Puzzle> linear_quantize_puzzles() {
  namespace l = linear;
  using Global = l::GlobalMistake;
  using Rows = l::QuantizeRowsBut;
  const auto global = mistakes<QuantizeGlobal, l::FindMaximumBut, l::QuantizeGlobalBut>();
  const auto rows = mistakes<QuantizeRows, Rows>();
  return {
      puzzle<QuantizeGlobal>(
          {wrong<QuantizeGlobal>("OneLaunch", Problem::race, "finds the maximum and uses it in one launch",
                                 l::OneLaunch{}, l::Nothing{}),
           global("EveryProgramStoresTheScale", Global::every_program_stores_the_scale, "all programs store the scale",
                  Problem::race),
           global("RoundsToZero", Global::rounds_to_zero, "rounds to zero"),
           global("QuantizeGlobalBut.nan_as_0", Global::nan_as_0, "a NaN counts as 0"),
           global("QuantizeGlobalBut.infinite_scale", Global::infinite_scale, "an infinity makes the scale infinite"),
           global("QuantizeGlobalBut.floor_for_0_alone", Global::floor_for_0_alone,
                  "the minimum scale only where all is 0"),
           global("QuantizeGlobalBut.times_the_reciprocal", Global::times_the_reciprocal,
                  "x * (1 / s) is rounded twice"),
           global("QuantizeGlobalBut.times_127_first", Global::times_127_first, "x * 127 / max rounds other ties"),
           global("QuantizeGlobalBut.ties_away_from_0", Global::ties_away_from_0,
                  "rounds ties away from 0 and not to even")},
          l::FindMaximum{}, l::QuantizeGlobal{}),
      puzzle<QuantizeRows>(
          {rows("MaximumOfUndefined", Rows::maximum_of_undefined, "a masked load without `other`",
                Problem::undefined_value),
           rows("ScaleOfTheLastBlock", Rows::scale_of_the_last_block, "forgets the maximum so far"),
           rows("TiesUp", Rows::ties_up, "rounds ties up and not to even"),
           rows("QuantizeRowsBut.nan_lost", Rows::nan_lost, "a comparison that a NaN never wins"),
           rows("QuantizeRowsBut.nan_kept_from_the_last_block_alone", Rows::nan_kept_from_the_last_block_alone,
                "a comparison that a later block wins over a NaN"),
           rows("QuantizeRowsBut.infinite_scale", Rows::infinite_scale, "an infinity makes the scale infinite"),
           rows("QuantizeRowsBut.floor_for_0_alone", Rows::floor_for_0_alone, "the minimum scale only where all is 0"),
           rows("QuantizeRowsBut.one_maximum_for_all_rows", Rows::one_maximum_for_all_rows,
                "one maximum for the program's rows"),
           rows("QuantizeRowsBut.times_the_reciprocal", Rows::times_the_reciprocal, "x * (1 / s) is rounded twice"),
           rows("QuantizeRowsBut.times_127_first", Rows::times_127_first, "x * 127 / max rounds other ties"),
           rows("QuantizeRowsBut.at_most_256_columns", Rows::at_most_256_columns,
                "looks for the maximum in 256 columns")},
          l::QuantizeRows{}),
  };
}

}  // namespace octile::tile::puzzles
