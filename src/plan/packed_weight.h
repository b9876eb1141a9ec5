// The packed form of a linear layer's weight: docs/reference/packed-weights.md. One form for all CPUs, which depends on
// the weight's format and sizes alone.
//
// Channels go in panels of 16, one per 32-bit lane. A lane holds 4 terms of an s8 weight or 8 of an s4 one, so that 64
// bytes are 16 channels of as many terms, in order of terms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "plan/kernel.h"

namespace octile {

// Whether weights of this type can be packed.
constexpr bool has_packed_form(DType type) { return type == DType::s8 || type == DType::s4; }

inline constexpr std::int64_t kPanelChannels = 16;
inline constexpr std::int64_t kLaneBytes = 4;
inline constexpr std::int64_t kPanelLine = kPanelChannels * kLaneBytes;
inline constexpr std::int64_t kTermsOfS8Lane = 4;
inline constexpr std::int64_t kTermsOfS4Lane = 8;
inline constexpr std::int64_t kS8Depth = 64;  // the terms of a channel or group of an s8 panel are padded to a multiple
inline constexpr std::int64_t kS4Depth = 8;   // of it, but for groups of 32; those of a group of an s4 panel

// Offsets. Sections begin at multiples of 64 bytes; padding is 0 (s4: the nibble of 0). Per channel and per tensor
// there is one group, the whole row. Without terms there are no groups, and nothing is packed.
//   s8  values [panel][group][depth / 4][16][4] s8
//       sums [panel][group][16] s32, of the group's values       scales [panel][group][16] f32 or f64
//   s4  values [panel][group][depth / 8][16][4] u8: byte b has term b in its low nibble, term 4 + b in its high one,
//       each as q + 8
//       scales [panel][group][16]                zero_points [panel][group][16] u8, as 8 + z, if there are any
struct PackedLayout {
  std::int64_t panels = 0;
  std::int64_t groups = 1;       // of a channel
  std::int64_t group_depth = 0;  // terms of a group, padded
  std::int64_t group_bytes = 0;  // of one panel
  std::int64_t panel_bytes = 0;  // of all groups
  std::int64_t sums_at = 0;      // s8
  std::int64_t scales_at = 0;
  std::int64_t zero_points_at = 0;  // s4
  std::int64_t size = 0;
};

// Of problem.n channels of problem.k terms.
PackedLayout packed_layout(const GemmProblem& problem);

// A packed weight must not make every vector of it cross a cache line.
void check_alignment(std::string_view function, std::string_view name, const void* data);

// What is packed: b (n, k) s8 or s4, whichever stride is 1; b_scale; zero_point. All of it has been checked.
void pack_weight(const GemmProblem& problem, const GemmOperands& operands, std::byte* packed);

// Reads a packed weight value by value, for the reference. Inline: most of the time of a check goes into it.
class PackedWeight {
 public:
  PackedWeight(const GemmProblem& problem, const void* packed)
      : at_(packed_layout(problem)),
        packed_(static_cast<const std::byte*>(packed)),
        s4_(problem.b.type == DType::s4),
        zero_point_(problem.b.zero_point),
        f64_(problem.scale == DType::f64) {}

  // Term t of group g of channel j: s8, or s4 with its zero point subtracted.
  std::int32_t value(std::int64_t j, std::int64_t g, std::int64_t t) const {
    const std::byte* const group = packed_ + j / kPanelChannels * at_.panel_bytes + g * at_.group_bytes;
    const std::int64_t lane = s4_ ? t / kTermsOfS4Lane : t / kTermsOfS8Lane;
    const auto byte =
        static_cast<std::uint8_t>(group[lane * kPanelLine + j % kPanelChannels * kLaneBytes + t % kLaneBytes]);
    if (!s4_) return static_cast<std::int8_t>(byte);
    const int nibble = t % kTermsOfS4Lane >= kLaneBytes ? byte >> 4 : byte & 15;
    return nibble - (zero_point_ ? static_cast<std::uint8_t>(packed_[at_.zero_points_at + segment(j, g)]) : 8);
  }
  // The scale of group g of channel j, in f64.
  double scale(std::int64_t j, std::int64_t g) const {
    return f64_ ? get<double>(segment(j, g)) : static_cast<double>(get<float>(segment(j, g)));
  }

 private:
  std::int64_t segment(std::int64_t j, std::int64_t g) const {
    return (j / kPanelChannels * at_.groups + g) * kPanelChannels + j % kPanelChannels;
  }
  template <class T>
  T get(std::int64_t i) const {
    T value;
    std::memcpy(&value, packed_ + at_.scales_at + i * static_cast<std::int64_t>(sizeof value), sizeof value);
    return value;
  }

  PackedLayout at_;
  const std::byte* packed_;
  bool s4_;
  bool zero_point_;
  bool f64_;
};

}  // namespace octile
