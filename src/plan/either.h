// Kernels that compute in f32 or in f64, from one template: the launch of their row chooses.
#pragma once

#include "plan/kernel.h"

namespace octile {

constexpr bool in_f64(const QuantizeProblem& p) { return p.x == DType::f64; }
constexpr bool in_f64(const GemmProblem& p) { return p.scale == DType::f64; }

template <auto kFloat, auto kDouble, class Problem, class Operands>
void either(const Problem& p, const Operands& o, const Launch& launch) {
  if constexpr (requires { kFloat(p, o, launch); }) {
    in_f64(p) ? kDouble(p, o, launch) : kFloat(p, o, launch);
  } else {
    in_f64(p) ? kDouble(p, o) : kFloat(p, o);
  }
}

}  // namespace octile
