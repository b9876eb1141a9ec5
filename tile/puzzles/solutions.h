// Which kernels solve which puzzle, for whoever runs them on another executor.
#pragma once

#include "puzzles/elementwise.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/homework.h"
#include "puzzles/homework_kernels.h"
#include "puzzles/products.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile::puzzles {

// Calls visit(puzzle, kernels...) for the puzzle of this number, a Which<P>; false if there is none.
template <class P>
struct Which {
  using Type = P;
};

template <class Visit>
bool with_solution(int number, Visit visit) {
  switch (number) {
    case 1:
      visit(Which<ConstantAdd>{}, elementwise::ConstantAdd{});
      return true;
    case 2:
      visit(Which<MaskedAdd>{}, elementwise::MaskedAdd{});
      return true;
    case 3:
      visit(Which<OuterAdd>{}, elementwise::OuterAdd{});
      return true;
    case 4:
      visit(Which<BlockedOuterAdd>{}, elementwise::BlockedOuterAdd{});
      return true;
    case 5:
      visit(Which<OuterRelu>{}, elementwise::OuterRelu{});
      return true;
    case 6:
      visit(Which<OuterReluBackward>{}, elementwise::OuterReluBackward{});
      return true;
    case 7:
      visit(Which<LongSum>{}, rows::LongSum{});
      return true;
    case 8:
      visit(Which<LongSoftmax>{}, rows::LongSoftmax{});
      return true;
    case 9:
      visit(Which<ScalarAttention>{}, rows::ScalarAttention{});
      return true;
    case 10:
      visit(Which<Convolution>{}, products::Convolution{});
      return true;
    case 11:
      visit(Which<BatchedMatmul>{}, products::BatchedMatmul{});
      return true;
    case 12:
      visit(Which<QuantizedMatmul>{}, products::QuantizedMatmul{});
      return true;
    case 13:
      visit(Which<QuantizeGlobal>{}, homework::FindMaximum{}, homework::QuantizeGlobal{});
      return true;
    case 14:
      visit(Which<QuantizeRows>{}, homework::QuantizeRows{});
      return true;
    case 15:
      visit(Which<Forward>{}, homework::Forward{});
      return true;
    case 16:
      visit(Which<BackwardDx>{}, homework::BackwardDx{});
      return true;
    case 17:
      visit(Which<BackwardDw>{}, homework::BackwardDw{});
      return true;
    case 18:
      visit(Which<BackwardDb>{}, homework::BackwardDb{});
      return true;
    default:
      return false;
  }
}

}  // namespace octile::tile::puzzles
