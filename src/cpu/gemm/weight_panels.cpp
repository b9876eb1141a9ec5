#include "cpu/gemm/weight_panels.h"

#include "cpu/gemm/pack_panels.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kLineTerms = 8;
constexpr std::int64_t kGatheredTerms = 32;  // 16 bytes of a row
constexpr int kTwoZeroNibbles = 0x88;

struct GatherRun {
  const std::uint8_t* rows[kPanelChannels];
  std::int64_t terms;  // a multiple of kGatheredTerms
  std::uint8_t* lines;
};

// A lane is 4 bytes of a row: 4 x 4 lanes are transposed at a time, and two's complement becomes q + 8.
struct GatherLines {
  template <Isa>
  OCTILE_INLINE static void run(GatherRun p) {
    typedef std::uint32_t Four __attribute__((vector_size(16)));
    constexpr std::uint32_t kSigns = 0x88888888;
    for (std::int64_t term = 0; term < p.terms; term += kGatheredTerms) {
      for (std::int64_t row = 0; row < kPanelChannels; row += 4) {
        Four in[4];
        for (int i = 0; i < 4; ++i) std::memcpy(&in[i], p.rows[row + i] + term / 2, sizeof(Four));
        transpose_lanes(in);
        for (int i = 0; i < 4; ++i) {
          const Four lanes = in[i] ^ kSigns;
          std::memcpy(p.lines + (term / kLineTerms + i) * kPanelLine + row * kLaneBytes, &lanes, sizeof lanes);
        }
      }
    }
  }
};

}  // namespace

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
  if (p_.b.type == DType::s4) {
    gather_nibbles(panel, term, terms, buffer.lines());
  } else {
    const std::int64_t first = panel * kPanelChannels;
    pack_panels(o_.b, {first, std::min(kPanelChannels, p_.n - first)}, {term, std::min(terms, p_.k - term)},
                {buffer.lines(), 0});
  }
  for (std::int64_t i = 0; i < kPanelChannels; ++i) {
    const std::int64_t row = panel * kPanelChannels + i;
    const bool real = row < p_.n;
    if (scale_bytes == 8) {
      buffer.scales[i] = real ? load<double>(o_.b_scale, row, group) : 0;
    } else {
      reinterpret_cast<float*>(buffer.scales)[i] = real ? load<float>(o_.b_scale, row, group) : 0;
    }
    if (p_.b.zero_point) {
      buffer.zero_points[i] = static_cast<std::uint8_t>(8 + (real ? load_integer(o_.zero_point, row, group) : 0));
    }
  }
  return {buffer.lines(), buffer.scales, p_.b.zero_point ? buffer.zero_points : nullptr};
}

void WeightPanels::gather_nibbles(std::int64_t panel, std::int64_t term, std::int64_t terms,
                                  std::uint8_t* lines) const {
  const std::int64_t first = panel * kPanelChannels;
  const std::int64_t real = std::min(terms, p_.k - term);
  const std::int64_t whole = real / kGatheredTerms * kGatheredTerms;
  const auto row = [&](std::int64_t i) {
    const std::int64_t j = std::min(first + i, p_.n - 1);  // beyond the last channel anything will do
    return static_cast<const std::uint8_t*>(o_.b.data) + j * o_.b.strides[0] / 2;
  };
  GatherRun run{{}, whole, lines};
  for (std::int64_t i = 0; i < kPanelChannels; ++i) run.rows[i] = row(i) + term / 2;
  multiversion<GatherLines>(run);
  if (whole == terms) return;
  std::uint8_t* const rest = lines + whole / kLineTerms * kPanelLine;
  std::memset(rest, kTwoZeroNibbles, static_cast<std::size_t>((terms - whole) / kLineTerms * kPanelLine));
  for (std::int64_t i = 0; i < kPanelChannels; ++i) {
    for (std::int64_t c = whole; c < real; ++c) {
      const int byte = row(i)[(term + c) / 2];
      const int nibble = (c % 2 ? byte >> 4 : byte) & 15;
      std::uint8_t& out = rest[(c - whole) / kLineTerms * kPanelLine + i * kLaneBytes + c % kLineTerms / 2];
      out = static_cast<std::uint8_t>(out ^ nibble << (c % 2 * 4));  // 8 ^ q is q + 8
    }
  }
}

}  // namespace octile::cpu
