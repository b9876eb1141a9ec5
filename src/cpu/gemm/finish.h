// The end of an int8 product: from the sums of a part to its rows of y.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/access.h"
#include "cpu/gemm/gemm_view.h"
#include "cpu/gemm/integer_panels.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"

namespace octile::cpu {

enum class BiasOf : std::uint8_t { none, column, row };

// Rows of y: sums of s32, or totals of groups in Real, which hold right's scales already.
template <class Real, class Sum>
struct FinishRun {
  const Sum* sums;  // (rows, n)
  std::int64_t sums_stride;
  const std::int32_t* correction;  // (n), subtracted from sums of s32
  const Real* left_scale;          // (rows)
  const Real* right_scale;         // (n)
  const Real* bias;                // (n), or (rows)
  std::int64_t rows, n;
  Real* y;
  std::int64_t y_stride;
};

template <BiasOf bias_of>
struct FinishRows {
  template <Isa, class Real, class Sum>
  OCTILE_INLINE static void run(FinishRun<Real, Sum> p) {
    for (std::int64_t i = 0; i < p.rows; ++i) run_row(p, i);
  }

 private:
  template <class Real, class Sum>
  OCTILE_INLINE static void run_row(const FinishRun<Real, Sum>& p, std::int64_t i) {
    const Sum* __restrict sums = p.sums + i * p.sums_stride;
    const std::int32_t* __restrict correction = p.correction;
    const Real* __restrict right_scale = p.right_scale;
    const Real* __restrict bias = p.bias;
    Real* __restrict y = p.y + i * p.y_stride;
    const Real left_scale = p.left_scale[i];
    const Real bias_of_row = bias_of == BiasOf::row ? bias[i] : Real{0};
    for (std::int64_t j = 0; j < p.n; ++j) {
      Real scale = left_scale;
      Real sum;
      if constexpr (std::is_same_v<Sum, std::int32_t>) {
        scale *= right_scale[j];
        const auto exact = static_cast<std::uint32_t>(sums[j]) - static_cast<std::uint32_t>(correction[j]);
        sum = static_cast<Real>(static_cast<std::int32_t>(exact));
      } else {
        sum = sums[j];
      }
      if constexpr (bias_of == BiasOf::none) {
        y[j] = sum * scale;
      } else {
        y[j] = std::fma(sum, scale, bias_of == BiasOf::row ? bias_of_row : bias[j]);
      }
    }
  }
};

// A range of a vector.
template <class Real>
void load_range(const ConstTensor& t, const Range& range, Real* out) {
  if (t.strides[0] == 1) return widen(t.dtype, t.data, range.first, range.count, out);
  for (std::int64_t i = 0; i < range.count; ++i) out[i] = load<Real>(t, range.first + i);
}

// Of a part of at most kRows x kCols.
template <class Real, std::int64_t kRows, std::int64_t kCols>
struct Finish {
  const GemmView& view;
  Range rows, cols;
  BiasOf bias_of = BiasOf::none;
  Real left_scale[kRows];
  Real right_scale[kCols];  // the caller's to fill
  Real bias[std::max(kRows, kCols)];

  Finish(const GemmView& gemm, const Range& part_rows, const Range& part_cols)
      : view(gemm), rows(part_rows), cols(part_cols) {
    load_range(view.left_scale, rows, left_scale);
    if (!view.bias.present()) return;
    bias_of = view.bias_per_row ? BiasOf::row : BiasOf::column;
    const Range range = view.bias_per_row ? rows : cols;
    load_range(view.bias, range, bias);
  }

  // sums (rows, cols), `stride` apart.
  template <class Sum>
  void write(const Sum* sums, std::int64_t stride, const std::int32_t* correction) const {
    write(sums, stride, correction, {0, rows.count}, {0, cols.count});
  }

  // The same for some of the part's rows and columns, counted from its first.
  template <class Sum>
  void write(const Sum* sums, std::int64_t stride, const std::int32_t* correction, const Range& part_rows,
             const Range& part_cols) const {
    const std::int64_t at = (rows.first + part_rows.first) * view.y.strides[0] + cols.first + part_cols.first;
    FinishRun<Real, Sum> run{sums,
                             stride,
                             correction,
                             left_scale + part_rows.first,
                             right_scale + part_cols.first,
                             bias + (bias_of == BiasOf::row ? part_rows.first : part_cols.first),
                             part_rows.count,
                             part_cols.count,
                             nullptr,
                             view.y.strides[0]};
    if (view.y.dtype == DTypeOf<Real>::value && !view.accumulate) {
      run.y = static_cast<Real*>(view.y.data) + at;
      return finish(run);
    }
    Real values[kCols];
    run.y = values;
    run.rows = 1;
    for (std::int64_t i = 0; i < part_rows.count; ++i, run.sums += stride, ++run.left_scale) {
      finish(run);
      if (bias_of == BiasOf::row) ++run.bias;
      if (view.accumulate) {
        add<Real>(view.y.data, at + i * view.y.strides[0], part_cols.count, values);
      } else {
        narrow<Real>(view.y.dtype, view.y.data, at + i * view.y.strides[0], part_cols.count, values);
      }
    }
  }

  // What tiles need to do the same: where Real is float, y is not added to, and there is a bias for each column or
  // none.
  TileFinish of_tiles(const std::int32_t* correction, const Range& part_cols) const {
    TileFinish tile{};
    if constexpr (std::is_same_v<Real, float>) {
      const Tensor& y = view.y;
      const float* column_bias = bias_of == BiasOf::none ? nullptr : bias + part_cols.first;
      const std::int64_t at = rows.first * y.strides[0] + cols.first + part_cols.first;
      tile = {correction,
              left_scale,
              right_scale + part_cols.first,
              column_bias,
              static_cast<std::byte*>(y.data) + at * bits(y.dtype) / 8,
              y.dtype,
              y.strides[0],
              part_cols.count};
    }
    return tile;
  }

 private:
  template <class Sum>
  void finish(const FinishRun<Real, Sum>& run) const {
    if (bias_of == BiasOf::none) {
      multiversion<FinishRows<BiasOf::none>>(run);
    } else if (bias_of == BiasOf::column) {
      multiversion<FinishRows<BiasOf::column>>(run);
    } else {
      multiversion<FinishRows<BiasOf::row>>(run);
    }
  }
};

}  // namespace octile::cpu
