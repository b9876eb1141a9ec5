// Expected times from rates: what the rows of the reference and of the CPU have in common.
#pragma once

#include "plan/kernel.h"

namespace octile {

// Bytes of one matrix element read and written, roughly the float in and the integer out.
inline Cost quantize_cost(const QuantizeProblem& p, double bytes_per_second) {
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.cols);
  const double bytes = elements * (bits(p.x) + bits(p.q) * (p.orientation == Orientation::both ? 2 : 1)) / 8;
  return {2 * elements, bytes, bytes / bytes_per_second};
}

// Operations and bytes of a product, without a time.
inline Cost gemm_work(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  const double n = static_cast<double>(p.n);
  const double k = static_cast<double>(p.k);
  const int b_bits = p.operation == Operation::column_sum ? 0 : bits(p.b.type);
  return {2 * m * n * k, (m * k * bits(p.a) + n * k * b_bits + m * n * bits(p.y)) / 8};
}

inline Cost gemm_cost(const GemmProblem& p, double operations_per_second, double bytes_per_second) {
  Cost cost = gemm_work(p);
  // Added, although they overlap: of kernels that only wait for memory, the one with less to compute is faster.
  cost.seconds = cost.operations / operations_per_second + cost.bytes / bytes_per_second;
  return cost;
}

}  // namespace octile
