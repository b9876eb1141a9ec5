// Shared by the stages of quantize_weight: the checked problem and its outputs.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "calibration/weight_scales.h"
#include "octile/weight_quantizer.h"

namespace octile {

struct WeightProblem {
  std::string_view function;
  WeightQuantizerDescription description;
  std::int64_t segment = 0;   // columns that share a scale; k where a row does
  std::int64_t segments = 0;  // in a row
  ConstTensor weight, second_moments, importance;
  Tensor q, scale, zero_point;
};

// Segment i of a row of scales.
inline void write_scale(const WeightProblem& p, std::int64_t row, std::int64_t i, SegmentScale scale) {
  const std::int64_t at = p.scale.rank == 2 ? row * p.scale.strides[0] + i : row * p.scale.strides[0];
  static_cast<float*>(p.scale.data)[at] = scale.s;
  if (p.zero_point.present()) {
    static_cast<std::int32_t*>(p.zero_point.data)[row * p.zero_point.strides[0] + i] = scale.z;
  }
}

// A row of integers, s8 or packed.
void write_levels(const WeightProblem& p, std::int64_t row, const std::int8_t* levels);

// Couplings between the columns of a layer's input, from its second moments: H + damping = U D U^T.
struct FeedbackFactor {
  std::vector<std::int64_t> order;  // the column that is rounded i-th
  std::vector<float> weights;       // (padded k): D over the largest of it, by column; 0 beyond
  // Columns first..last - 1 in the order of rounding: U[i, j] at couplings[at + i * (last - first) + j - first] for
  // i < last, 0 for i >= j.
  struct Panel {
    std::int64_t first, last;
    std::int64_t at;
  };
  std::vector<Panel> panels;
  std::vector<float> couplings;
};

// Throws where H, checked already, is not positive definite after damping.
FeedbackFactor factor_moments(const WeightProblem& p);

// Columns of a panel, unless it is a group; rows of the weight that are rounded together.
constexpr std::int64_t kPanelColumns = 128;
constexpr std::int64_t kStripRows = 64;

// Rounds rows first..first + count - 1, count <= kStripRows. tensor_scale: the tensor's, if it has one scale.
void round_with_feedback(const WeightProblem& p, const FeedbackFactor& factor, SegmentScale tensor_scale,
                         std::int64_t first, std::int64_t count);

}  // namespace octile
