#include "plan/packed_weight.h"

#include <algorithm>
#include <cstring>

#include "base/access.h"
#include "base/message.h"
#include "base/thread_pool.h"

namespace octile {

namespace {

bool is_s4(const GemmProblem& p) { return p.b.type == DType::s4; }

std::int64_t round_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b * b; }

std::int64_t scale_bytes(const GemmProblem& p) { return bits(p.scale) / 8; }

std::int64_t group_of(const GemmProblem& p) { return p.grouped() ? p.b.group : std::max<std::int64_t>(p.k, 1); }

// Of value (j, c): the byte, for s4 the byte that holds its nibble too.
std::int64_t byte_of(const GemmProblem& p, const PackedLayout& at, std::int64_t j, std::int64_t c) {
  const std::int64_t group = group_of(p);
  const std::int64_t terms = is_s4(p) ? kTermsOfS4Lane : kTermsOfS8Lane;
  const std::int64_t term = c % group;
  return j / kPanelChannels * at.panel_bytes + c / group * at.group_bytes + term / terms * kPanelLine +
         j % kPanelChannels * kLaneBytes + term % kLaneBytes;
}

bool in_high_nibble(const GemmProblem& p, std::int64_t c) { return c % p.b.group % kTermsOfS4Lane >= kLaneBytes; }

// Of value (j, c): its scale, sum or zero point.
std::int64_t segment_of(const GemmProblem& p, const PackedLayout& at, std::int64_t j, std::int64_t c) {
  return (j / kPanelChannels * at.groups + c / group_of(p)) * kPanelChannels + j % kPanelChannels;
}

template <class Real>
void put(std::byte* at, std::int64_t i, Real value) {
  std::memcpy(at + i * static_cast<std::int64_t>(sizeof value), &value, sizeof value);
}

// The four low nibbles as the low nibbles of four bytes.
std::uint32_t spread(std::uint32_t nibbles) {
  nibbles = (nibbles | nibbles << 8) & 0x00ff00ff;
  return (nibbles | nibbles << 4) & 0x0f0f0f0f;
}

struct Terms {
  std::int64_t first, count;
};
// The whole lanes among these terms, all of one group, of channel j, whose row is contiguous. Returns their terms.
std::int64_t pack_lanes(const GemmProblem& p, const GemmOperands& o, std::uint8_t* out, std::int64_t j,
                        const Terms& range) {
  const std::int64_t terms = is_s4(p) ? kTermsOfS4Lane : kTermsOfS8Lane;
  const auto* in = static_cast<const std::uint8_t*>(o.b.data) + (j * o.b.strides[0] + range.first) * kLaneBytes / terms;
  const std::int64_t lanes = range.count / terms;
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    std::uint32_t word;
    std::memcpy(&word, in + lane * kLaneBytes, sizeof word);
    if (is_s4(p)) word = (spread(word & 0xffff) | spread(word >> 16) << 4) ^ 0x88888888;
    std::memcpy(out + lane * kPanelLine, &word, sizeof word);
  }
  return lanes * terms;
}

// Value (j, c), into a byte that holds nothing of c yet.
void pack_value(const GemmProblem& p, std::uint8_t& byte, std::int64_t c, std::int32_t q) {
  if (!is_s4(p)) {
    byte = static_cast<std::uint8_t>(q);
  } else if (in_high_nibble(p, c)) {
    byte = static_cast<std::uint8_t>((byte & 15) | (q + 8) << 4);
  } else {
    byte = static_cast<std::uint8_t>((byte & 0xf0) | (q + 8));
  }
}

std::int32_t sum_of(const ConstTensor& b, std::int64_t j, const Terms& range) {
  std::int32_t sum = 0;
  if (range.count == 0) return 0;  // there may be no data
  const auto* values = static_cast<const std::int8_t*>(b.data) + j * b.strides[0] + range.first * b.strides[1];
  for (std::int64_t c = 0; c < range.count; ++c) sum += values[c * b.strides[1]];
  return sum;
}

void pack_channel(const GemmProblem& p, const GemmOperands& o, const PackedLayout& at, std::int64_t j,
                  std::byte* packed) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(packed);
  const std::int64_t group = group_of(p);
  for (std::int64_t g = 0; g < at.groups; ++g) {
    const std::int64_t first = g * group;
    const std::int64_t end = std::min(p.k, first + group);
    std::int64_t c = first;
    if (o.b.strides[1] == 1) c += pack_lanes(p, o, bytes + byte_of(p, at, j, first), j, {first, end - first});
    for (; c < end; ++c) pack_value(p, bytes[byte_of(p, at, j, c)], c, load_integer(o.b, j, c));

    const std::int64_t segment = segment_of(p, at, j, first);
    const std::int64_t col = o.b_scale.rank == 2 ? g : 0;
    if (p.scale == DType::f64) {
      put(packed + at.scales_at, segment, load<double>(o.b_scale, j, col));
    } else {
      put(packed + at.scales_at, segment, load<float>(o.b_scale, j, col));
    }
    if (!is_s4(p)) put(packed + at.sums_at, segment, sum_of(o.b, j, {first, end - first}));
    if (p.b.zero_point) {
      bytes[at.zero_points_at + segment] = static_cast<std::uint8_t>(8 + load_integer(o.zero_point, j, g));
    }
  }
}

}  // namespace

PackedLayout packed_layout(const GemmProblem& p) {
  const bool s4 = is_s4(p);
  PackedLayout at;
  at.panels = (p.n + kPanelChannels - 1) / kPanelChannels;
  const std::int64_t group = p.grouped() ? p.b.group : p.k;
  at.groups = p.grouped() ? p.k / p.b.group : std::min<std::int64_t>(p.k, 1);
  at.group_depth = s4                                       ? round_up(group, kS4Depth)
                   : group == kS8Depth / 2 && at.groups > 1 ? group
                                                            : round_up(group, kS8Depth);
  at.group_bytes = at.group_depth / (s4 ? kTermsOfS4Lane : kTermsOfS8Lane) * kPanelLine;
  at.panel_bytes = at.groups * at.group_bytes;
  const std::int64_t segments = at.panels * at.groups * kPanelChannels;
  at.sums_at = at.panels * at.panel_bytes;
  at.scales_at = at.sums_at + (s4 ? 0 : segments * static_cast<std::int64_t>(sizeof(std::int32_t)));
  at.zero_points_at = at.scales_at + segments * scale_bytes(p);
  at.size = at.zero_points_at + (p.b.zero_point ? round_up(segments, kPanelLine) : 0);
  return at;
}

void check_alignment(std::string_view function, std::string_view name, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % kPanelLine != 0) {
    fail(Status::misaligned, function, ": ", name, " lies at ", data, ", expected a multiple of ", kPanelLine,
         "; see docs/how-to/errors.md#alignment");
  }
}

void pack_weight(const GemmProblem& p, const GemmOperands& o, std::byte* packed) {
  const PackedLayout at = packed_layout(p);
  constexpr int kTwoZeroNibbles = 0x88;
  if (p.b.zero_point) {
    const std::int64_t end = at.zero_points_at + at.panels * at.groups * kPanelChannels;
    std::memset(packed + end, 0, static_cast<std::size_t>(at.size - end));
  }
  cpu::parallel_for(p.threads, at.panels, [&](std::int64_t panel) {
    std::memset(packed + panel * at.panel_bytes, is_s4(p) ? kTwoZeroNibbles : 0,
                static_cast<std::size_t>(at.panel_bytes));
    const auto fill = [&](std::int64_t begin, std::int64_t bytes_each, int value) {
      const std::int64_t bytes = at.groups * kPanelChannels * bytes_each;
      std::memset(packed + begin + panel * bytes, value, static_cast<std::size_t>(bytes));
    };
    if (!is_s4(p)) fill(at.sums_at, static_cast<std::int64_t>(sizeof(std::int32_t)), 0);
    fill(at.scales_at, scale_bytes(p), 0);
    if (p.b.zero_point) fill(at.zero_points_at, 1, 8);
    const std::int64_t first = panel * kPanelChannels;
    for (std::int64_t j = first; j < std::min(p.n, first + kPanelChannels); ++j) pack_channel(p, o, at, j, packed);
  });
}

}  // namespace octile
