// Proofs: the puzzles' solutions are proved, wrong kernels are refuted by a counterexample that the checked
// executor confirms, and what the prover cannot follow stays undecided.
#include <gtest/gtest.h>

#include "puzzles/elementwise.h"
#include "puzzles/linear.h"
#include "puzzles/mistake.h"
#include "puzzles/prove_trial.h"
#include "puzzles/rows.h"

#define int octile::tile::SymbolicInt
#define bool octile::tile::SymbolicBool
#include "prove_kernels.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows_kernels.h"
#undef int
#undef bool

#include "puzzles/solutions.h"

namespace octile::tile {
namespace {

using namespace puzzles;

// ---- The puzzles ----

template <class P, class... Kernels>
void expect_proved(Solution<P, Kernels...>) {
  for (const Proof& proof : proofs<P>(Kernels{}...)) {
    EXPECT_TRUE(proof.proved()) << P::facts().name << "\n" << text(proof);
    EXPECT_LT(proof.seconds, 10);
  }
}

TEST(Prove, SolutionsOfThePuzzles) {
  std::apply([](auto... solutions) { (expect_proved(solutions), ...); }, Solutions{});
}

void expect_refuted(const Proof& proof, Property property, const char* kernel) {
  EXPECT_EQ(proof.answer(property), Answer::refuted) << kernel << "\n" << text(proof);
  EXPECT_LT(proof.seconds, 11) << kernel;  // a limit of 10, and the query in progress
  for (const Claim& claim : proof.claims) {
    if (claim.answer != Answer::refuted) continue;
    EXPECT_TRUE(claim.confirmed && claim.report) << kernel << "\n" << text(proof);
  }
}

template <class P, class... Kernels>
void refuted(Property property, const char* name, const Kernels&... kernels) {
  Proof last;
  for (const int blocks : blocks_of(P::facts())) {
    last = proof<P>(blocks, kernels...);
    if (last.answer(property) == Answer::refuted) break;
  }
  expect_refuted(last, property, name);
}
#define REFUTED(P, property, ...) refuted<P>(Property::property, #__VA_ARGS__, __VA_ARGS__)

TEST(Prove, WrongElementwiseKernels) {
  namespace e = elementwise;
  REFUTED(ConstantAdd, bounds, e::ConstantAddBut{e::ConstantAddBut::one_too_far});
  REFUTED(MaskedAdd, bounds, e::MaskedAddBut{e::MaskedAddBut::mask_too_wide});
  REFUTED(MaskedAdd, bounds, e::MaskedAddBut{e::MaskedAddBut::store_without_mask});
  REFUTED(MaskedAdd, race, e::MaskedAddBut{e::MaskedAddBut::no_program_id});
  REFUTED(MaskedAdd, race, e::MaskedAddBut{e::MaskedAddBut::programs_of_five_bits});
  REFUTED(OuterAdd, bounds, e::OuterAddBut{e::OuterAddBut::rows_of_the_wrong_length});
  REFUTED(BlockedOuterAdd, race, e::BlockedOuterAddBut{e::BlockedOuterAddBut::rows_overlap});
  REFUTED(BlockedOuterAdd, race, e::BlockedOuterAddBut{e::BlockedOuterAddBut::masks_one_side});
  REFUTED(BlockedOuterAdd, bounds, e::BlockedOuterAddBut{e::BlockedOuterAddBut::one_size_for_both});
  REFUTED(BlockedOuterAdd, written, e::BlockedOuterAddBut{e::BlockedOuterAddBut::swapped_programs});
  REFUTED(OuterReluBackward, bounds, e::OuterReluBackwardBut{e::OuterReluBackwardBut::vector_along_the_row});
}

TEST(Prove, WrongRowKernels) {
  namespace r = rows;
  REFUTED(LongSum, defined, r::SumBut{r::SumBut::undefined});
  REFUTED(LongSum, order, r::SumThroughMemory{});
  REFUTED(LongSoftmax, bounds, r::SoftmaxBut{r::SoftmaxBut::rows_without_mask});
  REFUTED(ScalarAttention, bounds, r::AttentionBut{r::AttentionBut::whole_blocks_of_keys});
}

TEST(Prove, WrongProducts) {
  namespace p = products;
  REFUTED(Convolution, bounds, p::ConvolutionByPixel{p::ConvolutionByPixel::images_without_mask});
  REFUTED(Convolution, written, p::ConvolutionBut{p::ConvolutionBut::at_most_24_columns});
  REFUTED(BatchedMatmul, bounds, p::SquareOnly{});
  REFUTED(BatchedMatmul, defined, p::MatmulBut{p::MatmulBut::tail_times_zero});
  REFUTED(QuantizedMatmul, bounds, p::QuantizedBut{p::QuantizedBut::scales_without_mask});
}

TEST(Prove, WrongLayers) {
  namespace l = linear;
  using Mistake = l::GlobalMistake;
  REFUTED(QuantizeGlobal, race, l::OneLaunch{}, l::Nothing{});
  REFUTED(QuantizeGlobal, race, l::FindMaximumBut{Mistake::every_program_stores_the_scale},
          l::QuantizeGlobalBut{Mistake::every_program_stores_the_scale});
  REFUTED(QuantizeRows, defined, l::QuantizeRowsBut{l::QuantizeRowsBut::maximum_of_undefined});
  REFUTED(Forward, bounds, l::ForwardBut{l::ForwardBut::inner_without_mask});
  REFUTED(BackwardDw, bounds, l::BackwardDwBut{l::BackwardDwBut::batch_without_mask});
  REFUTED(BackwardDw, order, l::SumsTilesThroughMemory{});
  REFUTED(BackwardDb, bounds, l::BackwardDbBut{l::BackwardDbBut::columns_without_mask});
}

// ---- docs/reference/proofs.md ----

TEST(Prove, TextOfAProof) {
  const auto setup = [](auto kernel) {
    return [=](Prover& p) {
      const auto n0 = p.size("n0");
      const auto x = p.input<float>("x", {n0}), z = p.output<float>("z", {n0});
      p.launch({cdiv(n0, 32)}, kernel, x, z, n0, c<32>);
    };
  };
  const Proof right = prove(setup(elementwise::MaskedAdd{}));
  EXPECT_EQ(text(right).find("  proved: every access is in bounds\n  proved: no two programs meet"), 0u) << text(right);
  const Proof wrong = prove(setup(elementwise::MaskedAddBut{elementwise::MaskedAddBut::mask_too_wide}));
  EXPECT_EQ(text(wrong).find("  refuted: every access is in bounds; at n0 = 1: elementwise_kernels.h:"), 0u)
      << text(wrong);
  EXPECT_NE(text(wrong).find("out of bounds, 31 lanes; first: program (0,0,0), lane [0,0,1], x[1] of 1\n"),
            std::string::npos);
}

// A kernel whose sizes are `auto`.
struct Copy {
  void operator()(auto& t, auto x, auto z, auto n, auto step) const {
    auto p = x + t.arange(c<32>);
    for (auto k : range(0, n, c<32>)) {
      const auto i = t.arange(c<32>) + k;
      t.store(z + i, t.load(p, i < n), i < n);
      p += step;
    }
  }
};

struct LeavesAnOffset {  // for the next iteration, under a condition
  void operator()(auto& t, auto z, auto n) const {
    SymbolicInt offset = 0;
    for (auto k : range(n)) {
      if (k > 3) {
        offset = 1;
      } else {
        t.store(z + k + offset, 1.0f);
      }
    }
  }
};

TEST(Prove, WhatIsNotDecided) {
  const Proof left = prove([](Prover& p) {
    const auto n = p.size("n");
    p.launch({1}, LeavesAnOffset{}, p.input<f32>("z", {n}), n);
  });
  EXPECT_NE(text(left).find("a loop carries an index"), std::string::npos) << text(left);
  const auto carried = [](Prover& p) {
    const auto n = p.size("n");
    p.launch({1}, Copy{}, p.input<f32>("x", {n}), p.output<f32>("z", {n}), n, c<32>);
  };
  const Proof proof = prove(carried);
  EXPECT_FALSE(proof.proved() || proof.refuted()) << text(proof);
  EXPECT_NE(text(proof).find("a loop carries an index from one iteration to the next"), std::string::npos)
      << text(proof);
  const Proof late = prove(carried, {.seconds = 0});
  EXPECT_FALSE(late.proved() || late.refuted()) << text(late);
}

template <class Kernel>
void carries(const Kernel& kernel, const char* name) {
  const Proof proof = prove([&](Prover& p) {
    const auto n = p.size("n", 1);
    p.launch({1}, kernel, p.input<f32>("x", {32}), p.output<f32>("z", {1}), n);
  });
  EXPECT_FALSE(proof.proved()) << name << "\n" << text(proof);
}
#define CARRIES(Kernel) carries(wrong::Kernel{}, #Kernel)

TEST(Prove, WhatALoopCarriesOnIsNotProved) {
  CARRIES(LateIndex);
  CARRIES(LatePointers);
  CARRIES(LateMask);
  CARRIES(LateIndices);
  CARRIES(LateNumber);
  CARRIES(LateStep);
  CARRIES(NoIteration);
  CARRIES(LateFlag);
  CARRIES(EarlyEnd);
  const auto values = [](Prover& p) {
    const auto n = p.size("n", 1);
    p.assume(n <= 32);
    p.launch({1}, wrong::LateValues{}, p.input<f32>("x", {n + 31}), p.output<f32>("z", {1}), n);
  };
  EXPECT_FALSE(prove(values).proved());
  const Proof number = prove([](Prover& p) {
    const auto n = p.size("n", 1);
    p.launch({1}, wrong::LateNumber{}, p.input<f32>("x", {32}), p.output<f32>("z", {1}), n);
  });
  EXPECT_NE(text(number).find("a variable that a loop changes is not the same after each of its iterations"),
            std::string::npos)
      << text(number);
}

TEST(Prove, WhatALoopLeavesAlikeIsProved) {
  const Proof proof = prove([](Prover& p) {
    const auto n = p.size("n", 1);
    p.launch({1}, right::CarriesOn{}, p.input<f32>("x", {n, 32}), p.output<f32>("z", {33}), n);
  });
  EXPECT_TRUE(proof.proved()) << text(proof);
}

// ---- Other wrong kernels ----

// A vector, or several, of n elements.
template <class T = f32, class... More>
void vectors(Property property, const char* name, const auto& kernel, int block, const char* outputs, More... more) {
  const Proof proof = prove([&](Prover& p) {
    const auto n = p.size("n", 1);
    std::vector<SymbolicTensor<f32>> tensors;
    for (const char* each = outputs; *each != 0; ++each) {
      const std::string tensor(1, *each);
      tensors.push_back(*each == 'z' ? p.output<f32>(tensor, {n}) : p.input<f32>(tensor, {n}));
    }
    const SymbolicGrid grid{block == 0 ? SymbolicInt(1) : cdiv(n, SymbolicInt(block))};
    if constexpr (requires(Context<Symbolic> & t, Pointer<Symbolic, f32> x) {
                    kernel(t, x, SymbolicInt(1), more...);
                  }) {
      p.launch(grid, kernel, tensors[0], n, more...);
    } else {
      p.launch(grid, kernel, tensors[0], tensors[1], n, more...);
    }
  });
  expect_refuted(proof, property, name);
}
#define VECTORS(property, Kernel, block, tensors) vectors(Property::property, #Kernel, wrong::Kernel{}, block, tensors)

TEST(Prove, WrongVectors) {
  VECTORS(bounds, StartsTooEarly, 32, "z");
  VECTORS(order, RowsOverlapInAStore, 0, "z");
  VECTORS(race, OneMoreThanABlock, 8, "z");
  VECTORS(race, ReadsItsNeighbour, 1, "yz");
  VECTORS(order, ReadsWhatItStored, 16, "z");
  VECTORS(order, ReversesInPlace, 0, "x");
  VECTORS(order, RowsOverlapInALoop, 0, "z");
  VECTORS(order, OtherShape, 0, "z");
  VECTORS(defined, AddsToWhatNobodyWrote, 32, "xz");
  VECTORS(overflow, OffsetsPast32Bits, 1, "z");
  VECTORS(bounds, RotatesByOne, 32, "xz");
  VECTORS(written, EvenElementsOnly, 32, "xz");
  VECTORS(written, LastBlockOfTheLoopMissing, 0, "xz");
  VECTORS(bounds, StencilWithoutItsBorder, 32, "xz");
  VECTORS(race, GridStrideWithoutTheStride, 32, "xz");
  VECTORS(bounds, DownsampledRowsOfTheInput, 32, "xz");
  VECTORS(race, OneProgramTooMany, 32, "xz");
}

void refuted(Property property, const char* name, const std::function<void(Prover&)>& setup) {
  expect_refuted(prove(setup), property, name);
}

TEST(Prove, WrongOthers) {
  refuted(Property::order, "LoadsAheadOfItsStores", [](Prover& p) {
    const auto n = p.size("n", 1);
    p.launch({1}, wrong::LoadsAheadOfItsStores{}, p.input<f32>("x", {n, 16}), p.input<f32>("z", {n, 16}), n);
  });
  refuted(Property::defined, "IndexFromAMaskedLoad", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({cdiv(n, 32)}, wrong::IndexFromAMaskedLoad{}, p.input<s32>("index", {n}, 0, n), p.input<f32>("z", {n}), n);
  });
  refuted(Property::defined, "MaskFromAMaskedLoad", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({cdiv(n, 32)}, wrong::MaskFromAMaskedLoad{}, p.input<s32>("flags", {n}), p.input<f32>("z", {n}), n);
  });
  refuted(Property::bounds, "HistogramWithoutALimit", [](Prover& p) {
    const auto n = p.size("n"), bins = p.size("bins", 1);
    p.launch({cdiv(n, 32)}, wrong::HistogramWithoutALimit{}, p.input<s32>("x", {n}), p.input<s32>("bins", {bins}), n);
  });
  refuted(Property::race, "StoresBesideAtomics",
          [](Prover& p) { p.launch({p.size("programs")}, wrong::StoresBesideAtomics{}, p.input<s32>("total", {1})); });
  refuted(Property::bounds, "TransposesWithTheWrongStride", [](Prover& p) {
    const auto rows = p.size("rows"), columns = p.size("columns");
    p.launch({cdiv(rows, 16), cdiv(columns, 16)}, wrong::TransposesWithTheWrongStride{},
             p.input<f32>("x", {rows, columns}), p.output<f32>("z", {columns, rows}), rows, columns);
  });
  refuted(Property::written, "UpperTriangleOnly", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({cdiv(n, 8), cdiv(n, 8)}, wrong::UpperTriangleOnly{}, p.output<f32>("z", {n, n}), n);
  });
  refuted(Property::race, "SharedScratch", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({cdiv(n, 32)}, wrong::SharedScratch{}, p.input<f32>("x", {n}), p.output<f32>("scratch", {32}),
             p.output<f32>("z", {n}), n);
  });
  refuted(Property::order, "BarrierInOneBranch", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({n}, wrong::BarrierInOneBranch{}, p.output<f32>("scratch", {n, 32}), p.output<f32>("z", {n, 32}), n);
  });
  refuted(Property::order, "BarrierBeforeTheLoopAlone", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({1}, wrong::BarrierBeforeTheLoopAlone{}, p.output<f32>("scratch", {32}), p.output<f32>("z", {n, 32}), n);
  });
  refuted(Property::bounds, "GathersUnchecked", [](Prover& p) {
    const auto n = p.size("n"), m = p.size("m");
    p.launch({cdiv(n, 32)}, wrong::GathersUnchecked{}, p.input<s32>("index", {n}, 0, n), p.input<f32>("x", {m}),
             p.output<f32>("z", {n}), n);
  });
  refuted(Property::race, "ScattersWithTwins", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({cdiv(n, 32)}, wrong::ScattersWithTwins{}, p.input<s32>("index", {n}, 0, n), p.input<f32>("x", {n}),
             p.input<f32>("z", {n}), n);
  });
  refuted(Property::defined, "DividesByWhatMayBeZero", [](Prover& p) {
    const auto n = p.size("n");
    p.launch({cdiv(n, 32)}, wrong::DividesByWhatMayBeZero{}, p.input<s32>("x", {n}), p.output<s32>("z", {n}), n);
  });
}

}  // namespace
}  // namespace octile::tile
