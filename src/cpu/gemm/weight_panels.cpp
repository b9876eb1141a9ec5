#include "cpu/gemm/weight_panels.h"

#include "cpu/gemm/pack_panels.h"

namespace octile::cpu {

WeightPanels::WeightPanels(const GemmProblem& p, const GemmOperands& o)
    : p_(p),
      o_(o),
      layout_(packed_layout(p)),
      packed_(p.b_packed ? static_cast<const std::uint8_t*>(o.b.data) : nullptr) {}

WeightBlock WeightPanels::block(std::int64_t panel, std::int64_t term, std::int64_t terms, Buffer& buffer) const {
  const std::int64_t group = term / layout_.group_depth;
  const std::int64_t scale_bytes = bits(p_.scale) / 8;
  if (packed_) {
    const std::int64_t segment = (panel * layout_.groups + group) * kPanelChannels;
    return {packed_ + panel * layout_.panel_bytes + term * kPanelChannels * (p_.b.type == DType::s4 ? 4 : 8) / 8,
            packed_ + layout_.scales_at + segment * scale_bytes,
            p_.b.zero_point ? packed_ + layout_.zero_points_at + segment : nullptr};
  }
  const bool s4 = p_.b.type == DType::s4;
  ConstTensor rows = o_.b;
  if (s4) rows.strides = {o_.b.strides[0] / 2, 1};
  const Range channels{panel * kPanelChannels, std::min(kPanelChannels, p_.n - panel * kPanelChannels)};
  const std::int64_t real = std::min(terms, p_.k - term);
  s4 ? pack_panels(rows, channels, {term / 2, ceil_div(real, 2)}, {buffer.lines(), 0, kFlipNibbles})
     : pack_panels(rows, channels, {term, real}, {buffer.lines(), 0});
  const std::int64_t groups = std::max<std::int64_t>(terms / layout_.group_depth, 1);
  if (p_.scale == DType::f32 && o_.b_scale.strides[1] == 1) {
    ConstTensor lanes = o_.b_scale;  // f32, as four terms each
    lanes.strides = {lanes.strides[0] * scale_bytes, 1};
    pack_panels(lanes, channels, {group * scale_bytes, groups * scale_bytes},
                {reinterpret_cast<std::uint8_t*>(buffer.scales), 0});
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t i = 0; i < kPanelChannels; ++i) {
      const std::int64_t row = channels.first + i;
      const bool is_real = i < channels.count;
      const std::int64_t at = g * kPanelChannels + i;
      if (scale_bytes == 8) {
        buffer.scales[at] = is_real ? load<double>(o_.b_scale, row, group + g) : 0;
      } else if (o_.b_scale.strides[1] != 1) {
        reinterpret_cast<float*>(buffer.scales)[at] = is_real ? load<float>(o_.b_scale, row, group + g) : 0;
      } else if (!p_.b.zero_point) {
        break;
      }
      if (p_.b.zero_point) {
        const std::int64_t z = is_real ? load_integer(o_.zero_point, row, group + g) : 0;
        buffer.zero_points[at] = static_cast<std::uint8_t>(8 + z);
      }
    }
  }
  return {buffer.lines(), buffer.scales, p_.b.zero_point ? buffer.zero_points : nullptr};
}

}  // namespace octile::cpu
