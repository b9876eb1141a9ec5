// Puzzles 1 to 6: the kernels that solve them, and wrong ones. A kernel named SomethingBut is the solution with one
// mistake: compiled once, it is several wrong kernels. A comment on the line to blame names them.
#pragma once

#include "puzzles/mistake.h"

namespace octile::tile::puzzles::elementwise {

// ---- 1 ----

struct ConstantAdd {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, auto b0) const {
    const auto i = t.arange(b0);
    t.store(z + i, t.load(x + i) + 10.0f);
  }
};

struct ConstantAddBut {
  enum Mistake { one_too_far, to_an_integer, in_half } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, auto b0) const {
    const auto i = t.arange(b0);
    auto v = t.load(x + i + (mistake == one_too_far ? 1 : 0));  // wrong: OneTooFar
    if (mistake == to_an_integer) v = cast<f32>(cast<s32, Round::zero>(v));
    if (mistake == in_half) v = cast<f32>(cast<f16>(v));
    t.store(z + i, v + 10.0f);  // wrong: AddsToAnInteger, AddsInHalf
  }
};

// ---- 2 ----

struct MaskedAdd {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0);
    t.store(z + i, v + 10.0f, i < n0);
  }
};

struct MaskedAddBut {
  enum Mistake { mask_too_wide, store_without_mask, no_program_id, programs_of_five_bits } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const int bits = mistake == no_program_id ? 0 : mistake == programs_of_five_bits ? 31 : kNoEnd;
    const auto i = (t.program_id(0) & bits) * b0 + t.arange(b0);
    const int wide = mistake == mask_too_wide ? 1 : 0, end = mistake == store_without_mask ? kNoEnd : n0;
    const auto v = t.load(x + i, i < n0 + 100 * wide, 0.0f);  // wrong: MaskTooWide
    t.store(z + i, v + 10.0f, i < end);  // wrong: StoreWithoutMask, NoProgramId, ProgramsOfFiveBits
  }
};

// ---- 3 ----

struct OuterAdd {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int, auto b0, auto b1) const {
    const auto i = t.arange(b0);
    const auto j = col(t.arange(b1));
    t.store(z + j * n0 + i, t.load(x + i) + t.load(y + j));
  }
};

struct OuterAddBut {
  enum Mistake { rows_of_the_wrong_length, swapped_vectors, transposed } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.arange(b0);
    const auto j = col(t.arange(b1));
    const bool swapped = mistake == swapped_vectors;
    const auto v = t.load((swapped ? y : x) + i) + t.load((swapped ? x : y) + j);
    const int step = mistake == rows_of_the_wrong_length ? n1 : n0;
    const auto place = mistake == transposed ? i * n1 + j : i * 1 + j * step;
    t.store(z + place, v);  // wrong: RowsOfTheWrongLength, SwappedVectors, Transposed
  }
};

// ---- 4 ----

struct BlockedOuterAdd {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = t.load(x + i, i < n0) + t.load(y + j, j < n1);
    t.store(z + j * n0 + i, v, (i < n0) & (j < n1));
  }
};

struct BlockedOuterAddBut {
  enum Mistake { rows_overlap, masks_one_side, one_size_for_both, swapped_programs } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const int axis = mistake == swapped_programs ? 1 : 0;
    const auto i = t.program_id(axis) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1 - axis) * b1 + t.arange(b1));
    const int end = mistake == one_size_for_both ? n0 : n1;
    const auto row = t.load(x + i, i < n0, 0.0f);
    const auto column = t.load(y + j, j < end, 0.0f);  // wrong: OneSizeForBoth
    const int step = mistake == rows_overlap ? n1 : n0, width = mistake == masks_one_side ? kNoEnd : n0;
    t.store(z + j * step + i, row + column, (i < width) & (j < n1));  // wrong: RowsOverlap, MasksOneSide
  }
};

// ---- 5 ----

struct OuterRelu {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = t.load(x + i, i < n0) * t.load(y + j, j < n1);
    t.store(z + j * n0 + i, maximum(v, 0.0f), (i < n0) & (j < n1));
  }
};

struct OuterReluBut {
  enum Mistake { no_relu, relu_of_factors, product_in_half } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const float low = mistake == relu_of_factors ? 0.0f : -kInfinity;
    auto v = maximum(t.load(x + i, i < n0), low) * maximum(t.load(y + j, j < n1), low);
    if (mistake == product_in_half) v = cast<f32>(cast<f16>(v));
    if (mistake != no_relu) v = maximum(v, 0.0f);
    t.store(z + j * n0 + i, v, (i < n0) & (j < n1));  // wrong: NoRelu, ReluOfFactors, ProductInHalf
  }
};

// ---- 6 ----

struct OuterReluBackward {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto in = (i < n0) & (j < n1);
    const auto row = t.load(y + j, j < n1);
    const auto product = t.load(x + j * n0 + i, in) * row;
    t.store(dx + j * n0 + i, where(product > 0.0f, row * t.load(dz + j * n0 + i, in), 0.0f), in);
  }
};

struct OuterReluBackwardBut {
  enum Mistake { gradient_at_zero, vector_along_the_row, sign_of_x_alone } mistake;

  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto in = (i < n0) & (j < n1);
    const auto at = mistake == vector_along_the_row ? i * 1 + j * 0 : i * 0 + j;
    const auto row = t.load(y + at, in);  // wrong: VectorAlongTheRow
    const auto value = t.load(x + j * n0 + i, in), v = row * t.load(dz + j * n0 + i, in);
    const auto sign = mistake == sign_of_x_alone ? value : value * row;
    const auto through = mistake == gradient_at_zero ? sign >= 0.0f : sign > 0.0f;
    t.store(dx + j * n0 + i, where(through, v, 0.0f), in);  // wrong: GradientAtZero, SignOfXAlone
  }
};

}  // namespace octile::tile::puzzles::elementwise
