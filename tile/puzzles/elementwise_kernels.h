// Puzzles 1 to 6: the kernels that solve them, and some that do not. Of a wrong kernel, the line to blame is marked.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile::puzzles::elementwise {

// ---- 1 ----

struct ConstantAdd {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, auto b0) const {
    const auto i = t.arange(b0);
    t.store(z + i, t.load(x + i) + 10.0f);
  }
};

struct OneTooFar {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, auto b0) const {
    const auto i = t.arange(b0);
    const auto v = t.load(x + i + 1);  // wrong: OneTooFar
    t.store(z + i, v + 10.0f);
  }
};

struct AddsToAnInteger {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, auto b0) const {
    const auto i = t.arange(b0);
    const auto v = cast<s32, Round::zero>(t.load(x + i)) + 10;
    t.store(z + i, cast<f32>(v));  // wrong: AddsToAnInteger
  }
};

struct AddsInHalf {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int, auto b0) const {
    const auto i = t.arange(b0);
    t.store(z + i, cast<f16>(t.load(x + i)) + 10.0f);  // wrong: AddsInHalf
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

struct MaskTooWide {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0 + 100);  // wrong: MaskTooWide
    t.store(z + i, v + 10.0f, i < n0);
  }
};

struct StoreWithoutMask {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0, 0.0f);
    t.store(z + i, v + 10.0f);  // wrong: StoreWithoutMask
  }
};

struct NoProgramId {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.arange(b0);
    const auto v = t.load(x + i, i < n0);
    t.store(z + i, v + 10.0f, i < n0);  // wrong: NoProgramId
  }
};

struct ProgramsOfFiveBits {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = (t.program_id(0) & 31) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0);
    t.store(z + i, v + 10.0f, i < n0);  // wrong: ProgramsOfFiveBits
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

struct RowsOfTheWrongLength {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int, int n1, auto b0, auto b1) const {
    const auto i = t.arange(b0);
    const auto j = col(t.arange(b1));
    t.store(z + j * n1 + i, t.load(x + i) + t.load(y + j));  // wrong: RowsOfTheWrongLength
  }
};

struct SwappedVectors {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int, auto b0, auto) const {
    const auto i = t.arange(b0);
    const auto j = col(t.arange(b0));
    t.store(z + j * n0 + i, t.load(x + j) + t.load(y + i));  // wrong: SwappedVectors
  }
};

struct Transposed {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int, int n1, auto b0, auto b1) const {
    const auto i = t.arange(b0);
    const auto j = col(t.arange(b1));
    t.store(z + i * n1 + j, t.load(x + i) + t.load(y + j));  // wrong: Transposed
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

struct RowsOverlap {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = t.load(x + i, i < n0) + t.load(y + j, j < n1);
    t.store(z + j * n1 + i, v, (i < n0) & (j < n1));  // wrong: RowsOverlap
  }
};

struct MasksOneSide {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = t.load(x + i, i < n0, 0.0f) + t.load(y + j, j < n1, 0.0f);
    t.store(z + j * n0 + i, v, j < n1);  // wrong: MasksOneSide
  }
};

struct OneSizeForBoth {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto row = t.load(x + i, i < n0), column = t.load(y + j, j < n0);  // wrong: OneSizeForBoth
    t.store(z + j * n0 + i, row + column, (i < n0) & (j < n1));
  }
};

struct SwappedPrograms {  // leaves out what the shorter side of the grid does not reach
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(1) * b0 + t.arange(b0);
    const auto j = col(t.program_id(0) * b1 + t.arange(b1));
    const auto v = t.load(x + i, i < n0) + t.load(y + j, j < n1);
    t.store(z + j * n0 + i, v, (i < n0) & (j < n1));
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

struct NoRelu {  // right for every x and y in [0, 1)
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = t.load(x + i, i < n0) * t.load(y + j, j < n1);
    t.store(z + j * n0 + i, v, (i < n0) & (j < n1));  // wrong: NoRelu
  }
};

struct ReluOfFactors {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = maximum(t.load(x + i, i < n0), 0.0f) * maximum(t.load(y + j, j < n1), 0.0f);
    t.store(z + j * n0 + i, v, (i < n0) & (j < n1));  // wrong: ReluOfFactors
  }
};

struct ProductInHalf {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto v = cast<f16>(t.load(x + i, i < n0) * t.load(y + j, j < n1));
    t.store(z + j * n0 + i, maximum(cast<f32>(v), 0.0f), (i < n0) & (j < n1));  // wrong: ProductInHalf
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

struct GradientAtZero {  // relu's gradient at 0 is 0
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto in = (i < n0) & (j < n1);
    const auto row = t.load(y + j, j < n1);
    const auto v = where(t.load(x + j * n0 + i, in) * row < 0.0f, 0.0f, row * t.load(dz + j * n0 + i, in));
    t.store(dx + j * n0 + i, v, in);  // wrong: GradientAtZero
  }
};

struct VectorAlongTheRow {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto in = (i < n0) & (j < n1);
    const auto row = t.load(y + i, i < n0);  // wrong: VectorAlongTheRow
    const auto product = t.load(x + j * n0 + i, in) * row;
    t.store(dx + j * n0 + i, where(product > 0.0f, row * t.load(dz + j * n0 + i, in), 0.0f), in);
  }
};

struct SignOfXAlone {
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto dz, auto dx, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto in = (i < n0) & (j < n1);
    const auto v = t.load(y + j, j < n1) * t.load(dz + j * n0 + i, in);
    t.store(dx + j * n0 + i, where(t.load(x + j * n0 + i, in) > 0.0f, v, 0.0f), in);  // wrong: SignOfXAlone
  }
};

}  // namespace octile::tile::puzzles::elementwise
