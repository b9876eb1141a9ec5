// A weight in device memory with a scale for each group of a row's terms. Bytes are row-major; nibbles are row-major as
// in LinearArgs, or packed (docs/reference/packed-weights.md).
#pragma once

#include <cstdint>

#include "plan/kernel.h"
#include "plan/packed_weight.h"

namespace octile::cuda {

// One element per row and group: (j, g) is at j / 16 * panel + j % 16 * row + g * col.
struct GroupPlaces {
  std::int64_t panel = 0;
  std::int64_t row = 0;
  std::int64_t col = 0;

#ifdef __CUDACC__
  __host__ __device__ std::int64_t at(std::int64_t j, std::int64_t g) const {
    return j / 16 * panel + j % 16 * row + g * col;
  }
#endif
};

struct GroupedWeight {
  const std::uint8_t* values = nullptr;
  std::int64_t pitch = 0;        // bytes of a row; packed: of a panel
  const void* scales = nullptr;  // f32 or f64
  const void* zeros = nullptr;   // none; s32, z; packed: u8, 8 + z
  GroupPlaces scale;
  GroupPlaces zero;
  int rows = 0;
  int terms = 0;
  int group = 0;
  int groups = 0;
  bool packed = false;
};

struct NibbleWeight : GroupedWeight {
#ifdef __CUDACC__
  // q + 8 of element (j, c).
  __device__ int nibble(std::int64_t j, int c) const {
    if (!packed) {
      const int byte = __ldcg(values + j * pitch + c / 2);
      return (c % 2 == 0 ? byte & 15 : byte >> 4) ^ 8;
    }
    const int term = c % group;
    const std::int64_t at =
        c / group * (std::int64_t{8} * ((group + 7) / 8 * 8)) + term / 8 * 64 + j % 16 * 4 + term % 4;
    const int byte = __ldcg(values + j / 16 * pitch + at);
    return term % 8 < 4 ? byte & 15 : byte >> 4;
  }

  // 8 + z of group g of row j.
  __device__ int offset(std::int64_t j, int g) const {
    if (zeros == nullptr) return 8;
    const std::int64_t at = zero.at(j, g);
    return packed ? __ldcg(static_cast<const std::uint8_t*>(zeros) + at)
                  : 8 + __ldcg(static_cast<const std::int32_t*>(zeros) + at);
  }
#endif
};

inline GroupPlaces places(const ConstTensor& t) { return {kPanelChannels * t.strides[0], t.strides[0], t.strides[1]}; }

// Of values of either width.
inline GroupedWeight grouped_weight(const GemmProblem& p, const GemmOperands& o) {
  GroupedWeight w;
  w.values = static_cast<const std::uint8_t*>(o.b.data);
  w.rows = static_cast<int>(p.n);
  w.terms = static_cast<int>(p.k);
  w.group = static_cast<int>(p.b.group);
  w.groups = static_cast<int>(p.k / p.b.group);
  w.packed = p.b_packed;
  if (p.b_packed) {
    const PackedLayout at = packed_layout(p);
    w.pitch = at.panel_bytes;
    w.scales = w.values + at.scales_at;
    if (p.b.zero_point) w.zeros = w.values + at.zero_points_at;
    w.scale = w.zero = {w.groups * kPanelChannels, 1, kPanelChannels};
    return w;
  }
  w.pitch = o.b.strides[0] * bits(p.b.type) / 8;
  w.scales = o.b_scale.data;
  w.scale = places(o.b_scale);
  if (p.b.zero_point) {
    w.zeros = o.zero_point.data;
    w.zero = places(o.zero_point);
  }
  return w;
}

inline NibbleWeight nibble_weight(const GemmProblem& p, const GemmOperands& o) { return {grouped_weight(p, o)}; }

}  // namespace octile::cuda
