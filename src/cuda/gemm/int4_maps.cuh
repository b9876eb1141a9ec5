// Operands of the GEMMs with 4-bit weights: tensor maps of a and of the weight, and the weight's TMA loads.
#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/device/warp_specialized.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/operands.h"
#include "cuda/tensor_map.h"
#include "plan/kernel.h"

namespace octile::cuda {

constexpr int kPanelRows = static_cast<int>(kPanelChannels);

// Whether TMA can read a, and b where it is not packed.
inline bool int4_mappable(const GemmProblem& problem, const GemmOperands& o) {
  if (!mappable(o.a)) return false;
  const std::int64_t pitch = o.b.strides[0] / 2;
  return problem.b_packed || (pitch > 0 && aligned_rows(o.b.data, pitch, kTmaAlignment));
}

// One thread: a tile of the weight, `bytes` in all, from this column and row on: packed, or the even rows and then the
// odd ones.
template <bool packed>
__device__ void load_int4_tile(std::uint32_t to, int bytes, const GemmMaps& maps, int term, int row,
                               std::uint32_t full) {
  if constexpr (packed) {
    ptx::tma_load(to, maps.b, term * 2, row / kPanelRows, full);
  } else {
    ptx::tma_load(to, maps.b, term / 2, row / 2, full);
    ptx::tma_load(to + bytes / 2, maps.b_odd, term / 2, row / 2, full);
  }
}

// The same for an expert's packed weight.
__device__ inline void load_int4_panels(std::uint32_t to, const GemmMaps& maps, int term, int row, int expert,
                                        std::uint32_t full) {
  ptx::tma_load(to, maps.b, int3{term * 2, row / kPanelRows, expert}, full);
}

// With the scales and zero points of a packed weight: a row per panel, of sixteen values a group. Those of experts are
// stacks.
struct PanelMaps : GemmMaps {
  CUtensorMap scales;
  CUtensorMap zeros;

  __device__ void prefetch_panels(bool zero_points) const {
    ptx::prefetch_tensormap(scales);
    if (zero_points) ptx::prefetch_tensormap(zeros);
  }
};

// One thread: values of sixteen channels a group, of the panels of a tile.
__device__ inline void load_panels(void* to, const CUtensorMap& map, int group, int row, std::uint32_t full) {
  ptx::tma_load(ptx::shared_address(to), map, group * kPanelRows, row / kPanelRows, full);
}
__device__ inline void load_panels(void* to, const CUtensorMap& map, int group, int row, int expert,
                                   std::uint32_t full) {
  ptx::tma_load(ptx::shared_address(to), map, int3{group * kPanelRows, row / kPanelRows, expert}, full);
}

// Tiles of rows of b, and how many groups of them at a time.
inline void set_panel_maps(std::string_view kernel, const GemmProblem& problem, const NibbleWeight& w, int rows_b,
                           int groups, const TmaStack& experts, PanelMaps& maps) {
  const TmaTile tile = {rows_b / kPanelRows, groups * kPanelRows, false};
  const auto panels = [&](const void* values, DType type) {
    const std::int64_t cols = w.groups * kPanelChannels;
    return tensor_map(kernel, matrix(values, type, problem.device, ceil_div(w.rows, kPanelRows), cols, cols), tile,
                      experts);
  };
  maps.scales = panels(w.scales, DType::f32);
  if (w.zeros) maps.zeros = panels(w.zeros, DType::u8);
}

// Experts' packed weights, one after the other.
inline TmaStack stack_of(const GemmProblem& p, const GemmOperands& o) { return {p.experts, o.experts.b_stride}; }

struct Int4Tiles {
  int rows_a, rows_b, terms;
};

// All maps but y's, which is set to a's.
inline GemmMaps int4_maps(std::string_view kernel, const GemmProblem& problem, const ConstTensor& a,
                          const NibbleWeight& w, const Int4Tiles& tile, const TmaStack& experts = {}) {
  GemmMaps maps;
  maps.a = maps.y = tensor_map(kernel, a, {tile.rows_a, tile.terms, true});
  if (w.packed) {  // one row per panel, in words of eight elements of a channel
    const ConstTensor panels =
        matrix(w.values, DType::f32, problem.device, (w.rows + 15) / 16, w.pitch / 4, w.pitch / 4);
    maps.b = maps.b_odd = tensor_map(kernel, panels, {tile.rows_b / kPanelRows, tile.terms * 2, false}, experts);
  } else {
    const ConstTensor bytes = matrix(w.values, DType::u8, problem.device, w.rows, (w.terms + 1) / 2, w.pitch);
    maps.b = tensor_map(kernel, every_second_row(bytes, 0), {tile.rows_b / 2, tile.terms / 2, true});
    maps.b_odd = tensor_map(kernel, every_second_row(bytes, 1), {tile.rows_b / 2, tile.terms / 2, true});
  }
  return maps;
}

}  // namespace octile::cuda
