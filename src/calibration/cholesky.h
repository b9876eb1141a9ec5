// The Cholesky factor for error feedback.
#pragma once

#include <cstdint>
#include <vector>

namespace octile {

// The column at which a matrix is not positive definite; -1: none.
struct BadPivot {
  std::int64_t column = -1;
  double value = 0;
};

// The upper triangle of g (k, k) becomes V, upper triangular, with G = V^T V. The bits are those of the plain loop
//   for c: for b >= c: v[c, b] = (g[c, b] - v[0, c] * v[0, b] - v[1, c] * v[1, b] - ...) / sqrt(the same for g[c, c])
// in f64, for every number of threads. A pivot of at most k * 2^-52 times g[c, c] is rounding error, and bad.
BadPivot factor_cholesky(double* g, std::int64_t k, int threads);

}  // namespace octile
