#include "puzzles/elementwise.h"

#include "puzzles/elementwise_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

namespace {

constexpr const char* kOneRounding = "one rounding: half a unit in the last place of the exact result";
constexpr const char* kVectorToVector = "auto& t, auto x, auto z, int n0, auto b0";
constexpr const char* kVectorsToMatrix = "auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1";
constexpr const char* kBlocks = "grid (cdiv(n0, b0), cdiv(n1, b1)); b0 = b1 = 32";

Cases matrices() {
  return Cases({100, 90})
      .with(Values::negative, {{100, 90}})
      .with(Values::large, {{33, 65}})
      .sizes({{1, 1}, {7, 65}, {64, 32}, {32, 33}, {31, 97}, {200, 3}, {1, 263}, {1031, 2}, {3, 1031}, {0, 5}, {5, 0}});
}

}  // namespace

Facts ConstantAdd::facts() {
  return {1,
          "constant_add",
          "add 10 to a vector as long as the block: z[i] = x[i] + 10",
          {"n0"},
          "x f32 [n0], z f32 [n0]",
          "one program; b0 = n0",
          "t.arange(b0) is 0 .. b0 - 1; x + t.arange(b0) are the places to load from.",
          kOneRounding,
          kVectorToVector,
          Cases({32}).with(Values::negative, {{32}}).sizes({{1}}, 1).sizes({{128}}, 2)};
}

Facts MaskedAdd::facts() {
  return {2,
          "masked_add",
          "add 10 to a vector of any length, a block in each program: z[i] = x[i] + 10",
          {"n0"},
          "x f32 [n0], z f32 [n0]",
          "grid (cdiv(n0, b0)); b0 = 32",
          "t.program_id(0) says which block; the last one may be cut off: i < n0 is a mask.",
          kOneRounding,
          kVectorToVector,
          Cases({200})
              .with(Values::negative, {{200}})
              .with(Values::large, {{200}})
              .sizes({{1}, {31}, {32}, {33}, {1009}, {4099}, {0}})};
}

Facts OuterAdd::facts() {
  return {3,
          "outer_add",
          "add every element of one vector to every element of another: z[j, i] = x[i] + y[j]",
          {"n0", "n1"},
          "x f32 [n0], y f32 [n1], z f32 [n1, n0]",
          "one program; b0 = n0, b1 = n1",
          "col(v) makes a row a column, and a row plus a column is a matrix.",
          kOneRounding,
          kVectorsToMatrix,
          Cases({32, 32}).with(Values::negative, {{32, 32}}).sizes({{16, 64}}, 1).sizes({{8, 1}}, 2)};
}

Facts BlockedOuterAdd::facts() {
  return {4,
          "blocked_outer_add",
          "add every element of one vector to every element of another, of any lengths: z[j, i] = x[i] + y[j]",
          {"n0", "n1"},
          "x f32 [n0], y f32 [n1], z f32 [n1, n0]",
          kBlocks,
          "Two masks, (i < n0) & (j < n1): one is a row, one a column.",
          kOneRounding,
          kVectorsToMatrix,
          matrices()};
}

Facts OuterRelu::facts() {
  return {5,
          "outer_relu",
          "multiply every element of one vector by every one of another, and relu: z[j, i] = max(x[i] * y[j], 0)",
          {"n0", "n1"},
          "x f32 [n0], y f32 [n1], z f32 [n1, n0]",
          kBlocks,
          "maximum(v, 0.0f), or where(v > 0.0f, v, 0.0f).",
          kOneRounding,
          kVectorsToMatrix,
          matrices()};
}

Facts OuterReluBackward::facts() {
  return {6,
          "outer_relu_backward",
          "the gradient of relu(x * y) for x: dx = y * dz where x * y > 0, else 0; y[j] for x[j, :]",
          {"n0", "n1"},
          "x f32 [n1, n0], y f32 [n1], dz f32 [n1, n0], dx f32 [n1, n0]",
          kBlocks,
          "At 0 the gradient is 0; some inputs are 0.",
          kOneRounding,
          "auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0, auto b1",
          matrices().with(Values::zero, {{33, 20}})};
}

std::vector<Puzzle> elementwise_puzzles() {
  namespace e = elementwise;
  constexpr Problem kOutside = Problem::out_of_bounds;
  using Constant = e::ConstantAddBut;
  using Masked = e::MaskedAddBut;
  using Outer = e::OuterAddBut;
  using Blocked = e::BlockedOuterAddBut;
  using Relu = e::OuterReluBut;
  using Backward = e::OuterReluBackwardBut;
  const auto constant = mistakes<ConstantAdd, Constant>();
  const auto masked = mistakes<MaskedAdd, Masked>();
  const auto outer = mistakes<OuterAdd, Outer>();
  const auto blocked = mistakes<BlockedOuterAdd, Blocked>();
  const auto relu = mistakes<OuterRelu, Relu>();
  const auto backward = mistakes<OuterReluBackward, Backward>();
  return {
      puzzle<ConstantAdd>(
          {constant("OneTooFar", Constant::one_too_far, "a block that begins one element too late", kOutside),
           constant("AddsToAnInteger", Constant::to_an_integer, "rounds before it adds"),
           constant("AddsInHalf", Constant::in_half, "rounds to f16 before it adds")},
          e::ConstantAdd{}),
      puzzle<MaskedAdd>(
          {masked("MaskTooWide", Masked::mask_too_wide, "a mask that tests for too large a size", kOutside),
           masked("StoreWithoutMask", Masked::store_without_mask, "the load is masked, the store is not", kOutside),
           masked("NoProgramId", Masked::no_program_id, "all programs write the same block", Problem::race),
           masked("ProgramsOfFiveBits", Masked::programs_of_five_bits, "right for up to 32 programs", Problem::race)},
          e::MaskedAdd{}),
      puzzle<OuterAdd>({outer("RowsOfTheWrongLength", Outer::rows_of_the_wrong_length,
                              "n1 for n0: right as long as both are equal", kOutside),
                        outer("SwappedVectors", Outer::swapped_vectors, "x along the columns"),
                        outer("Transposed", Outer::transposed, "stores the transpose")},
                       e::OuterAdd{}),
      puzzle<BlockedOuterAdd>(
          {blocked("RowsOverlap", Blocked::rows_overlap, "rows shorter than they are: programs overlap", Problem::race),
           blocked("MasksOneSide", Blocked::masks_one_side, "the mask forgets the columns: a row runs into the next",
                   Problem::race),
           blocked("OneSizeForBoth", Blocked::one_size_for_both, "y is masked by the size of x", kOutside),
           leaves_out(blocked("SwappedPrograms", Blocked::swapped_programs, "the axes of the grid are swapped"))},
          e::BlockedOuterAdd{}),
      puzzle<OuterRelu>(
          {relu("NoRelu", Relu::no_relu, "no relu: right for inputs that are not negative"),
           relu("ReluOfFactors", Relu::relu_of_factors, "relu of each factor: wrong where both are negative"),
           relu("ProductInHalf", Relu::product_in_half, "rounds the product to f16")},
          e::OuterRelu{}),
      puzzle<OuterReluBackward>(
          {backward("GradientAtZero", Backward::gradient_at_zero, "lets the gradient through where the product is 0"),
           backward("VectorAlongTheRow", Backward::vector_along_the_row, "y along the rows", kOutside),
           backward("SignOfXAlone", Backward::sign_of_x_alone, "asks for the sign of x and not of the product")},
          e::OuterReluBackward{}),
  };
}

}  // namespace octile::tile::puzzles
