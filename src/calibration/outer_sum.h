// C += A^T * B, the one product of calibration: second moments, Cholesky factors, error feedback, output errors.
#pragma once

#include <cstdint>

namespace octile {

template <class Real>
struct OuterSum {
  const Real* a;  // (depth, rows)
  std::int64_t a_stride;
  const Real* b;  // (depth, cols)
  std::int64_t b_stride;
  Real* c;  // (rows, cols)
  std::int64_t c_stride;
  std::int64_t depth, rows, cols;
};

// c[r, j] += a[d, r] * b[d, j] for d = 0, 1, ..., product and sum rounded one after the other: the bits of that plain
// loop on every machine. On the calling thread.
void add_outer(const OuterSum<float>& p);
void add_outer(const OuterSum<double>& p);

}  // namespace octile
