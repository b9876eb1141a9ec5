// Weights as w4a16 and w8a16 take them: panels of 16 channels, a channel per 32-bit lane of 8 nibbles q + 8 or of 4
// bytes, this many terms to a 64-byte line. That is the packed form (packed_weight.h); a weight as the caller has it is
// gathered into lines, a block at a time, where the nibbles of a lane lie in the order of their terms.
#pragma once

#include <bit>
#include <cstring>

#include "cpu/gemm/float_panels.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

// Which nibble of a lane holds which term.
enum class NibbleOrder : std::uint8_t { packed, row };

// The lowest bit of term t.
constexpr int nibble_bit(NibbleOrder order, int t) {
  if (order == NibbleOrder::row) return 4 * t;
  return t < 4 ? 8 * t : 8 * (t - 4) + 4;
}

// A nibble that lies in the mantissa of 2^(23 - bit) adds itself to it, so a mask, an exponent and one exact
// subtraction make it a float, and the zero point is subtracted at no cost. Two places, bit 0 and bit 8, take three
// shifts for eight terms; with five places there would be one, at the price of more constants: on AVX2 a tenth faster
// at M = 1, on AVX-512 slower.
inline constexpr int kNibblePlaces = 2;
constexpr int place_of(int bit) { return bit / 8 % kNibblePlaces; }
constexpr float place_value(int place) { return static_cast<float>(1 << (23 - 8 * place)); }

// Of a vector of channels.
template <Isa isa>
struct NibbleVectors {
  static constexpr int kLineTerms = 8;
  static constexpr std::int64_t kLanes = vector_bytes(isa) / 4;
  using Element = float;
  typedef float Elements __attribute__((vector_size(vector_bytes(isa))));
  using Sums = Elements;
  typedef std::uint32_t Words __attribute__((vector_size(vector_bytes(isa))));

  Elements offset[kNibblePlaces];  // what is subtracted at each place: its value + 8 + z
  Elements table;                  // -8 .. 7, for kLookUp

  // zero_points: 8 + z, null for 8.
  OCTILE_INLINE void set(const std::uint8_t* zero_points) {
    alignas(64) float z[kLanes];
    alignas(64) float ramp[kLanes];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      z[lane] = zero_points ? zero_points[lane] : 8.0f;
      ramp[lane] = static_cast<float>(lane - 8);
    }
    table = *reinterpret_cast<const Elements*>(ramp);
    for (int place = 0; place < kNibblePlaces; ++place) {
      offset[place] = *reinterpret_cast<const Elements*>(z) + place_value(place);
    }
  }

  // Term t of each lane, less 8 and its zero point. Not returned, since a function of the baseline must not return a
  // wide vector. kLookUp: there are no zero points, and a permutation may take the float out of a register that holds
  // them all. It does so for half of the terms, which spreads the work best over Zen 5's units (1.3x for one row).
  template <NibbleOrder kOrder, bool kLookUp>
  OCTILE_INLINE void element(const Words& lanes, int t, Elements& value) const {
    const int bit = nibble_bit(kOrder, t);
    const int place = place_of(bit);
    const Words shifted = lanes >> (bit - 8 * place);
    if constexpr (kLookUp && kLanes == 16) {
      if (place == 0 && look_up(reinterpret_cast<const Floats16&>(table), reinterpret_cast<const Words16&>(shifted),
                                reinterpret_cast<Floats16&>(value))) {
        return;
      }
    }
    const Words nibble = shifted & (15u << 8 * place);
    value = reinterpret_cast<Elements>(nibble | std::bit_cast<std::uint32_t>(place_value(place))) - offset[place];
  }

 private:
  typedef float Floats16 __attribute__((vector_size(64)));
  typedef std::uint32_t Words16 __attribute__((vector_size(64)));

  // value = table[index % 16], if the compiler can say so.
  static OCTILE_INLINE bool look_up(const Floats16& table, const Words16& index, Floats16& value) {
#if defined(__clang__)
    return static_cast<void>(table), static_cast<void>(index), static_cast<void>(value), false;
#else
    typedef std::int32_t Indices16 __attribute__((vector_size(64)));
    value = __builtin_shuffle(table, reinterpret_cast<const Indices16&>(index));
    return true;
#endif
  }
};

// The same for bytes, the same way: GCC 12 has no __builtin_convertvector of vectors whose size is a template's.
template <Isa isa>
struct ByteVectors {
  static constexpr int kLineTerms = 4;
  static constexpr std::int64_t kLanes = vector_bytes(isa) / 4;
  using Element = float;
  typedef float Elements __attribute__((vector_size(vector_bytes(isa))));
  using Sums = Elements;
  typedef std::uint32_t Words __attribute__((vector_size(vector_bytes(isa))));

  OCTILE_INLINE void set(const std::uint8_t*) {}

  template <NibbleOrder, bool>
  OCTILE_INLINE void element(const Words& lanes, int t, Elements& value) const {
    const Words mantissa = (lanes >> (8 * t) & 255u) ^ std::bit_cast<std::uint32_t>(0x1p23f + 128);  // q + 128
    value = reinterpret_cast<Elements>(mantissa) - (0x1p23f + 128);
  }
};

// 16 channels' worth of a few lines, and what belongs to them.
struct WeightBlock {
  const std::uint8_t* lines;
  const void* scales;               // (groups, 16) f32 or f64
  const std::uint8_t* zero_points;  // (groups, 16) 8 + z, or null
};

// Of a block of kDepth terms that is put together here; f32 scales are packed 16 groups at a time.
inline constexpr std::int64_t kMaxBlockGroups = 16;
static_assert(kMaxBlockGroups >= kDepth / 32);

// b of the product, packed or not.
class WeightPanels {
 public:
  WeightPanels(const GemmProblem& p, const GemmOperands& o);

  std::int64_t depth() const { return layout_.groups * layout_.group_depth; }
  std::int64_t segment() const { return std::min(kDepth, layout_.group_depth); }
  NibbleOrder order() const { return packed_ ? NibbleOrder::packed : NibbleOrder::row; }
  bool packed() const { return packed_ != nullptr; }
  const PackedLayout& layout() const { return layout_; }

  // Where a block that is not packed is put together; its lines follow it in a Storage.
  struct alignas(64) Buffer {
    double scales[kMaxBlockGroups * kPanelChannels];
    std::uint8_t zero_points[kMaxBlockGroups * kPanelChannels];

    std::uint8_t* lines() { return reinterpret_cast<std::uint8_t*>(this + 1); }
  };

  // No larger than the codec needs: nibbles in buffers for bytes are 15 % slower (W4A16, M = 1, one thread, Zen 5).
  template <template <Isa> class Codec>
  struct Storage {
    Buffer buffer;
    alignas(64) std::uint8_t lines[kDepth * kPanelLine / Codec<Isa::baseline>::kLineTerms];
  };

  // Terms term .. term + terms - 1 of a panel: a part of a group, or, with scales in f32, some whole groups.
  WeightBlock block(std::int64_t panel, std::int64_t term, std::int64_t terms, Buffer& buffer) const;

 private:
  const GemmProblem& p_;
  const GemmOperands& o_;
  PackedLayout layout_;
  const std::uint8_t* packed_ = nullptr;
};

}  // namespace octile::cpu
