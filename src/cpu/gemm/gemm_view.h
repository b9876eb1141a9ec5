// What the int8 products of this folder have in common.
#pragma once

#include <utility>

#include "plan/kernel.h"

namespace octile::cpu {

struct Range {
  std::int64_t first, count;
};

// A product seen so that y is written along its contiguous dimension: where that is i, a and b exchange their parts.
struct GemmView {
  ConstTensor left, right;  // (rows, k), (cols, k); a packed right is bytes
  ConstTensor left_scale, right_scale;
  ConstTensor bias;
  Tensor y;  // (rows, cols), contiguous along a row
  bool bias_per_row = false;
  bool accumulate;
  std::int64_t rows, cols, k;
  std::int64_t block;             // of a, in terms; 0: none
  ConstTensor block_scale;        // (rows, blocks), or of right (cols, blocks); the other scales are 1 then
  bool right_has_blocks = false;  // else left, if there are any

  // By the problem, as the workspace is: the strides of a single column would do either way.
  GemmView(const GemmProblem& problem, const GemmOperands& o)
      : left(o.a),
        right(o.b),
        left_scale(o.a_scale),
        right_scale(o.b_scale),
        bias(o.bias),
        y(o.y),
        accumulate(problem.accumulate),
        rows(o.y.rows()),
        cols(o.y.cols()),
        k(o.a.cols()),
        block(problem.a_block) {
    if (block > 0) {
      static constexpr float kOne = 1;
      block_scale = o.a_scale;
      left_scale = right_scale = vector(&kOne, 1, 0);
    }
    if (problem.y_major == Major::contraction) return;
    right_has_blocks = block > 0;
    std::swap(left, right);
    std::swap(left_scale, right_scale);
    std::swap(rows, cols);
    std::swap(y.shape[0], y.shape[1]);
    std::swap(y.strides[0], y.strides[1]);
    bias_per_row = true;
  }
};

// The sizes that a plan may be asked for: the workspace is laid out before there are operands.
struct GemmExtent {
  std::int64_t rows, cols;

  explicit GemmExtent(const GemmProblem& p)
      : rows(p.y_major == Major::outer ? p.n : p.m), cols(p.y_major == Major::outer ? p.m : p.n) {}
};

inline const std::uint8_t* bytes(const ConstTensor& t) { return static_cast<const std::uint8_t*>(t.data); }

// Elements from one copied row to the next. An odd number of cache lines: rows a power of two apart share their places
// in the L1 cache.
constexpr std::int64_t row_stride(std::int64_t k) { return ((k + 63) / 64 | 1) * 64; }

}  // namespace octile::cpu
