// Scales of segments, found by a pass of their own, for quantizers that cannot keep a segment until its scale is known.
#pragma once

#include <cstddef>

#include "cuda/device/elementwise.cuh"
#include "plan/kernel.h"

namespace octile::cuda {

// What the sm80 quantizers say of themselves.
std::string quantizer_sm80_supports(const QuantizeProblem& p);
Cost quantizer_sm80_cost(const QuantizeProblem& p);

// The row of one that needs nothing else.
constexpr QuantizeKernel elementwise_row(std::string_view name, Operation operation,
                                         decltype(QuantizeKernel::launch) launch,
                                         decltype(QuantizeKernel::prepare) prepare) {
  return {.name = name,
          .task = {operation},
          .device = DeviceType::cuda,
          .supports = quantizer_sm80_supports,
          .cost = quantizer_sm80_cost,
          .launch = launch,
          .prepare = prepare};
}

// The scales and zero points that kernels write: to the workspace, if the next kernel needs them, and to the outputs.
template <class Real>
struct ScaleOutputs {
  Real* kept_scale;  // one after another; may be null, then so is kept_zero
  std::int32_t* kept_zero;
  Real* scale;  // may be null
  std::int32_t* zero;
  std::int64_t row_stride, col_stride, zero_row_stride, zero_col_stride;
  std::int64_t per_row;  // segments of a row

  __device__ void put(std::int64_t r, std::int64_t g, const Segment<Real>& segment) const {
    if (kept_scale) {
      kept_scale[r * per_row + g] = segment.s;
      kept_zero[r * per_row + g] = segment.z;
    }
    if (scale) scale[r * row_stride + g * col_stride] = segment.s;
    if (zero) zero[r * zero_row_stride + g * zero_col_stride] = segment.z;
  }
};

template <class Real>
ScaleOutputs<Real> scale_outputs(const QuantizeOperands& o, std::int64_t per_row) {
  return {nullptr,
          nullptr,
          static_cast<Real*>(o.scale.data),
          static_cast<std::int32_t*>(o.zero_point.data),
          o.scale.row_stride,
          o.scale.col_stride,
          o.zero_point.row_stride,
          o.zero_point.col_stride,
          per_row};
}

// Enqueues the pass. The scales are in the workspace, NaN for a bad segment.
template <class T>
SegmentScales<RealOf<T>> measure_segments(const QuantizeProblem& p, const QuantizeOperands& o, const Launch& launch);
std::size_t measure_segments_workspace(const QuantizeProblem& p);
void measure_segments_prepare(const QuantizeProblem& p);

extern template SegmentScales<float> measure_segments<__half>(const QuantizeProblem&, const QuantizeOperands&,
                                                              const Launch&);
extern template SegmentScales<float> measure_segments<__nv_bfloat16>(const QuantizeProblem&, const QuantizeOperands&,
                                                                     const Launch&);
extern template SegmentScales<float> measure_segments<float>(const QuantizeProblem&, const QuantizeOperands&,
                                                             const Launch&);
extern template SegmentScales<double> measure_segments<double>(const QuantizeProblem&, const QuantizeOperands&,
                                                               const Launch&);

}  // namespace octile::cuda
