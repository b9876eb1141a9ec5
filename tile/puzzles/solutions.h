// Which kernels solve which puzzle, for code that runs them on another executor.
#pragma once

#include <tuple>
#include <utility>

#include "puzzles/elementwise.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/linear.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/products.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile::puzzles {

template <class P, class... Kernels>
struct Solution {
  static void run(auto& trial) { P::run(trial, Kernels{}...); }
};

using Solutions = std::tuple<  // by number, from 1
    Solution<ConstantAdd, elementwise::ConstantAdd>, Solution<MaskedAdd, elementwise::MaskedAdd>,
    Solution<OuterAdd, elementwise::OuterAdd>, Solution<BlockedOuterAdd, elementwise::BlockedOuterAdd>,
    Solution<OuterRelu, elementwise::OuterRelu>, Solution<OuterReluBackward, elementwise::OuterReluBackward>,
    Solution<LongSum, rows::LongSum>, Solution<LongSoftmax, rows::LongSoftmax>,
    Solution<ScalarAttention, rows::ScalarAttention>, Solution<Convolution, products::Convolution>,
    Solution<BatchedMatmul, products::BatchedMatmul>, Solution<QuantizedMatmul, products::QuantizedMatmul>,
    Solution<QuantizeGlobal, linear::FindMaximum, linear::QuantizeGlobal>, Solution<QuantizeRows, linear::QuantizeRows>,
    Solution<Forward, linear::Forward>, Solution<BackwardDx, linear::BackwardDx>,
    Solution<BackwardDw, linear::BackwardDw>, Solution<BackwardDb, linear::BackwardDb>>;

// Runs the solution of the puzzle of this number; false: there is none.
template <class AnyTrial>
bool run_solution(int number, AnyTrial& trial) {
  const auto run = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return ((number == static_cast<int>(i) + 1 && (std::tuple_element_t<i, Solutions>::run(trial), true)) || ...);
  };
  return run(std::make_index_sequence<std::tuple_size_v<Solutions>>());
}

}  // namespace octile::tile::puzzles
