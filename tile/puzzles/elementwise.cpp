#include "puzzles/elementwise.h"

#include "puzzles/elementwise_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

namespace {

constexpr const char* kOneRounding = "one rounding: half a unit in the last place of the exact result";
constexpr const char* kVectorToVector =
    "struct MyKernel {\n"
    "  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {";
constexpr const char* kVectorsToMatrix =
    "struct MyKernel {\n"
    "  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {";
constexpr const char* kBlocks = "grid (cdiv(n0, b0), cdiv(n1, b1)); b0 = b1 = 32";

std::vector<Case> matrices() {
  return {{{100, 90}, true},
          {{100, 90}, false, Values::negative},
          {{33, 65}, false, Values::large},
          {{1, 1}},
          {{7, 65}},
          {{64, 32}},
          {{32, 33}},
          {{31, 97}},
          {{200, 3}},
          {{1, 263}},
          {{1031, 2}},
          {{3, 1031}},
          {{0, 5}},
          {{5, 0}}};
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
          "MyKernel{}"};
}
std::vector<Case> ConstantAdd::cases() {
  return {
      {{32}, true}, {{32}, false, Values::negative}, {{1}, false, Values::mixed, 1}, {{128}, false, Values::mixed, 2}};
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
          "MyKernel{}"};
}
std::vector<Case> MaskedAdd::cases() {
  return {{{200}, true},
          {{200}, false, Values::negative},
          {{200}, false, Values::large},
          {{1}},
          {{31}},
          {{32}},
          {{33}},
          {{1009}},
          {{4099}},
          {{0}}};
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
          "MyKernel{}"};
}
std::vector<Case> OuterAdd::cases() {
  return {{{32, 32}, true},
          {{32, 32}, false, Values::negative},
          {{16, 64}, false, Values::mixed, 1},
          {{8, 1}, false, Values::mixed, 2}};
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
          "MyKernel{}"};
}
std::vector<Case> BlockedOuterAdd::cases() { return matrices(); }

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
          "MyKernel{}"};
}
std::vector<Case> OuterRelu::cases() { return matrices(); }

Facts OuterReluBackward::facts() {
  return {6,
          "outer_relu_backward",
          "the gradient of relu(x * y) for x: dx = y * dz where x * y > 0, else 0; y[j] for x[j, :]",
          {"n0", "n1"},
          "x f32 [n1, n0], y f32 [n1], dz f32 [n1, n0], dx f32 [n1, n0]",
          kBlocks,
          "At 0 the gradient is 0; some inputs are 0.",
          kOneRounding,
          "struct MyKernel {\n"
          "  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0,\n"
          "                              auto b1) const {",
          "MyKernel{}"};
}
std::vector<Case> OuterReluBackward::cases() {
  std::vector<Case> result = matrices();
  result.push_back({{33, 20}, false, Values::zero});
  return result;
}

std::vector<Puzzle> elementwise_puzzles() {
  namespace e = elementwise;
  constexpr Problem kOutside = Problem::out_of_bounds;
  return {
      puzzle<ConstantAdd>(
          {wrong<ConstantAdd>("OneTooFar", kOutside, "a block that begins one element too late", e::OneTooFar{}),
           wrong<ConstantAdd>("AddsToAnInteger", {}, "rounds before it adds", e::AddsToAnInteger{}),
           wrong<ConstantAdd>("AddsInHalf", {}, "rounds to f16 before it adds", e::AddsInHalf{})},
          e::ConstantAdd{}),
      puzzle<MaskedAdd>(
          {wrong<MaskedAdd>("MaskTooWide", kOutside, "a mask that tests for too large a size", e::MaskTooWide{}),
           wrong<MaskedAdd>("StoreWithoutMask", kOutside, "the load is masked, the store is not",
                            e::StoreWithoutMask{}),
           wrong<MaskedAdd>("NoProgramId", Problem::race, "all programs write the same block", e::NoProgramId{}),
           wrong<MaskedAdd>("ProgramsOfFiveBits", Problem::race, "right for up to 32 programs",
                            e::ProgramsOfFiveBits{})},
          e::MaskedAdd{}),
      puzzle<OuterAdd>({wrong<OuterAdd>("RowsOfTheWrongLength", kOutside, "n1 for n0: right as long as both are equal",
                                        e::RowsOfTheWrongLength{}),
                        wrong<OuterAdd>("SwappedVectors", {}, "x along the columns", e::SwappedVectors{}),
                        wrong<OuterAdd>("Transposed", {}, "stores the transpose", e::Transposed{})},
                       e::OuterAdd{}),
      puzzle<BlockedOuterAdd>(
          {wrong<BlockedOuterAdd>("RowsOverlap", Problem::race, "rows shorter than they are: programs overlap",
                                  e::RowsOverlap{}),
           wrong<BlockedOuterAdd>("MasksOneSide", Problem::race,
                                  "the mask forgets the columns: a row runs into the next", e::MasksOneSide{}),
           wrong<BlockedOuterAdd>("OneSizeForBoth", kOutside, "y is masked by the size of x", e::OneSizeForBoth{}),
           leaves_out<BlockedOuterAdd>("SwappedPrograms", "the axes of the grid are swapped", e::SwappedPrograms{})},
          e::BlockedOuterAdd{}),
      puzzle<OuterRelu>({wrong<OuterRelu>("NoRelu", {}, "no relu: right for inputs that are not negative", e::NoRelu{}),
                         wrong<OuterRelu>("ReluOfFactors", {}, "relu of each factor: wrong where both are negative",
                                          e::ReluOfFactors{}),
                         wrong<OuterRelu>("ProductInHalf", {}, "rounds the product to f16", e::ProductInHalf{})},
                        e::OuterRelu{}),
      puzzle<OuterReluBackward>(
          {wrong<OuterReluBackward>("GradientAtZero", {}, "lets the gradient through where the product is 0",
                                    e::GradientAtZero{}),
           wrong<OuterReluBackward>("VectorAlongTheRow", kOutside, "y along the rows", e::VectorAlongTheRow{}),
           wrong<OuterReluBackward>("SignOfXAlone", {}, "asks for the sign of x and not of the product",
                                    e::SignOfXAlone{})},
          e::OuterReluBackward{}),
  };
}

}  // namespace octile::tile::puzzles
