// The product behind the w4a8 rows of one instruction set each: y[i, j] = fma(t, a_scale[i], bias[j]), where t is the
// fold over the groups g of fma(f32(acc), b_scale[j, g], t) and acc = sum_{c in g} a[i, c] * (b[j, c] - z[j, g]).
//
// b comes in panels of 16 channels, 8 terms to a 32-bit lane, as q + 8 in 0..15: packed once by the caller
// (packed_weight.h), or at the start of each run. What is added to b is taken off again with the group's sum of a:
// acc = sum a * (q + 8) - (8 + z) * sum a.
#pragma once

#include <cstdint>

#include "cpu/gemm/w8a8_panels.h"

namespace octile::cpu {

// For each group of a range, in order: totals[r, c] = fma(f32(acc), scale, totals[r, c]).
struct GroupsRun {
  const std::int8_t* a;  // (rows, groups * depth)
  std::int64_t a_stride;
  const std::int32_t* a_sums;  // (rows, groups)
  std::int64_t a_sums_stride;
  const std::uint8_t* b;  // panels of (groups, depth / 8, 16, 4)
  std::int64_t b_stride;
  const std::uint8_t* scales;       // panels of (groups, 16) f32, at any address
  const std::uint8_t* zero_points;  // panels of (groups, 16) as 8 + z; null: 8
  std::int64_t segments_stride;     // segments from one panel to the next, of both
  std::int64_t groups;
  std::int64_t depth;  // of a group, a multiple of 8
  int rows;            // at most the kernel's
  int panels;          // at most kMostPanels
  float* totals;       // (rows, kTotalsStride)
};

inline constexpr std::int64_t kTotalsStride = 64;

struct GroupKernel {
  int rows;  // of a tile
  void (*tile)(const GroupsRun&);
};

void multiply_groups(const GroupKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch);
std::size_t groups_workspace(const GemmProblem& problem);

}  // namespace octile::cpu
