// Operands in forms that kernels take by value.
#pragma once

#include <cstdint>

#include "plan/kernel.h"

namespace octile::cuda {

// Rows of a and of b, and the contraction: those that a plan is selected for, or those of a run.
struct GemmSize {
  std::int64_t m, n, k;
};
inline GemmSize size_of(const GemmProblem& p) { return {p.m, p.n, p.k}; }
inline GemmSize size_of(const GemmOperands& o) { return {o.a.rows(), o.b.rows(), o.a.cols()}; }

// A vector of scales in device memory, or one value for all: a plan's own scale is in host memory, and is passed with
// the launch.
template <class Real>
struct RowScale {
  const Real* data = nullptr;
  std::int64_t stride = 0;
  Real value = 1;

#ifdef __CUDACC__
  // Past the L1: a grid that starts early must not meet lines from before the kernel that it waits for.
  __device__ Real operator[](std::int64_t i) const { return data ? __ldcg(data + i * stride) : value; }
#endif
};

// Whether an address, and every row `pitch` bytes apart from it, is a multiple of `bytes`.
inline bool aligned_rows(const void* data, std::int64_t pitch, std::int64_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(pitch)) %
             static_cast<std::uintptr_t>(bytes) ==
         0;
}

template <class Real>
RowScale<Real> row_scale(const ConstTensor& t) {
  const Real* const data = static_cast<const Real*>(t.data);
  if (t.device.type == DeviceType::cpu) return {nullptr, 0, *data};
  return {data, t.strides[0], 1};
}

}  // namespace octile::cuda
