// The error of a layer's output from its input's second moments: e^T H e.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/validate.h"
#include "octile/tensor.h"

namespace octile {

// H (k, k), f32 or f64: finite, not negative on its diagonal, symmetric to 1e-3 * sqrt(H_ii * H_jj). Throws.
ConstTensor check_moments(TensorChecks& checks, const ConstTensor& h, std::int64_t k);

double moment_at(const ConstTensor& h, std::int64_t i, std::int64_t j);  // of the upper triangle

// The sum over `rows` rows e that `fill` writes (k values) of e^T H e: H * e in f32, summed in the order of the
// columns, the product with e in f64. With an importance h in place of H: sum_j h_j e_j^2 in f64.
class MomentForm {
 public:
  // Copies what it needs. An absent H: `importance` (k), f32; both absent: 1.
  MomentForm(const ConstTensor& h, const ConstTensor& importance, std::int64_t k, int threads);

  double sum_of_rows(std::int64_t rows, const std::function<void(std::int64_t, float*)>& fill) const;

 private:
  std::int64_t k_;
  int threads_;
  double unit_ = 1;             // of moments_
  std::vector<float> moments_;  // (k, k), or empty
  std::vector<float> importance_;
};

}  // namespace octile
