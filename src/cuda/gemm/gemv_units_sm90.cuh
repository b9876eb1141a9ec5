// The weight of w4a16_gemv_sm90 and w4a8_gemv_sm90, from global memory straight into registers, as A of mma.m16n8k16 or
// k32: units of 16 rows by 128 columns, of which a lane has eight words, four of each of two rows. Which columns a lane
// has is free, as long as the activations match (first_term).
//
//   packed: lines of 64 bytes, 8 columns of 16 rows; a lane has two rows of every fourth line
//   row-major: with a scale for 128 columns or more, a lane takes 16 adjacent bytes of either row; with small groups,
//   words 16 bytes apart, so that 32 adjacent columns are a block
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/gemm/grouped_weight.h"
#include "cuda/operands.h"

namespace octile::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kUnitTerms = 128;
inline constexpr int kUnitBlocks = 4;  // of 32 columns

// ---- Integers, raw.

// A nibble u = q + 8 becomes (u + kAdded) / kUnit, exactly, by logical operations alone; an odd one of f16, four bits
// higher, becomes 16 times that. In f16 these numbers are subnormal, which mma multiplies like any other.
template <class T>
struct Raw;
template <>
struct Raw<__half> {
  static constexpr float kAdded = 0;
  static constexpr float kUnit = 0x1p24f;
  static constexpr float kOddShare = 0x1p-4f;
  static constexpr std::uint32_t kOnes = 0x00010001u;  // 1 / kUnit in both halves
};
template <>
struct Raw<__nv_bfloat16> {
  static constexpr float kAdded = 16;
  static constexpr float kUnit = 1;
  static constexpr float kOddShare = 1;
  static constexpr std::uint32_t kOnes = 0x3f803f80u;
};

// Pair i gets nibbles i and i + 4. flip: nibbles are q in two's complement, not q + 8.
template <bool flip>
__device__ void raw_integers(__half, std::uint32_t word, std::uint32_t (&pairs)[4]) {
  constexpr std::uint32_t kEven = flip ? 0x00080008u : 0;
  constexpr std::uint32_t kOdd = flip ? 0x00800080u : 0;
  const std::uint32_t above = word >> 8;
  pairs[0] = and_xor(word, 0x000f000fu, kEven);
  pairs[1] = and_xor(word, 0x00f000f0u, kOdd);
  pairs[2] = and_xor(above, 0x000f000fu, kEven);
  pairs[3] = and_xor(above, 0x00f000f0u, kOdd);
}
template <bool flip>
__device__ void raw_integers(__nv_bfloat16, std::uint32_t word, std::uint32_t (&pairs)[4]) {
  constexpr std::uint32_t kMagic = 0x41804180u ^ (flip ? 0x00400040u : 0);  // 16, whose last four bits count 1 and up
  pairs[0] = and_xor(word << 3, 0x00780078u, kMagic);
  pairs[1] = and_xor(word >> 1, 0x00780078u, kMagic);
  pairs[2] = and_xor(word >> 5, 0x00780078u, kMagic);
  pairs[3] = and_xor(word >> 9, 0x00780078u, kMagic);
}

// ---- Addresses.

// Bytes from one tile to the next, from one unit to the adjacent one and to a warp's next, and (small groups) from one
// scale to the next. 32 bits, as for all tiles of a block: 64-bit additions take twice the instructions.
struct UnitSteps {
  int tile = 0;
  int unit = 0;
  int next = 0;
  int part = 0;
};

struct UnitPlaces {
  UnitSteps values, scales, zeros;
  int unit_step = 1;   // from a warp's unit to its next
  int twin_parts = 0;  // small groups: 1 if two blocks share a scale
};

inline UnitPlaces unit_places(const NibbleWeight& w, int unit_step) {
  const std::int64_t per_unit = w.groups == 1 ? 0 : kUnitTerms / w.group;
  const auto steps = [&](std::int64_t tile, std::int64_t unit, std::int64_t part) {
    return UnitSteps{static_cast<int>(tile), static_cast<int>(unit), static_cast<int>(unit * unit_step),
                     static_cast<int>(part)};
  };
  const auto of_groups = [&](const GroupPlaces& at, int bytes) {
    return steps(at.panel * bytes, per_unit * at.col * bytes, at.col * bytes);
  };
  UnitPlaces places;
  places.unit_step = unit_step;
  places.values = w.packed ? steps(w.pitch, kTileRows * kUnitTerms / 2, 0) : steps(16 * w.pitch, kUnitTerms / 2, 0);
  places.scales = of_groups(w.scale, 4);
  places.zeros = of_groups(w.zero, w.packed ? 1 : 4);
  places.twin_parts = w.group == 64;
  return places;
}

// Whether rows can be read 16 bytes at a time, and offsets within a block's tiles, at most 64, fit into 31 bits.
inline bool units_aligned(const GemmProblem& p, const GemmOperands& o) {
  const auto near = [](const ConstTensor& t) {
    return std::min(t.strides[0], t.strides[1]) >= 0 && std::max(t.strides[0], t.strides[1]) <= std::int64_t{1} << 19;
  };
  if (!aligned_rows(o.a.data, o.a.strides[0] * bits(o.a.dtype) / 8, 16)) return false;
  if (o.a.strides[0] > std::int64_t{1} << 30) return false;
  return p.b_packed || (aligned_rows(o.b.data, o.b.strides[0] / 2, 16) && o.b.strides[0] <= std::int64_t{1} << 21 &&
                        near(o.b_scale) && (!p.b.zero_point || near(o.zero_point)));
}

// A predicated load; without a branch, so that loads stay together. A lane's neighbours in memory are read soon after:
// with 16 bytes L2 gets whole lines, words stay in L1, the others are whole lines.
__device__ inline void read_if(bool predicate, uint4& v, const void* from) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "r"(static_cast<int>(predicate)));
}
__device__ inline void read_if(bool predicate, uint2& v, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(from), "r"(static_cast<int>(predicate)));
}
__device__ inline void read_if(bool predicate, std::uint32_t& v, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}"
               : "+r"(v)
               : "l"(from), "r"(static_cast<int>(predicate)));
}
__device__ inline void read_if(bool predicate, std::uint16_t& v, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.L1::no_allocate.b16 %0, [%1];\n}"
               : "+h"(v)
               : "l"(from), "r"(static_cast<int>(predicate)));
}

// ---- Tokens.

// A lane's in a block of eight; beyond the last one, that one.
__device__ inline int token_of_lane(int block, int tokens) {
  return min(block * 8 + static_cast<int>(threadIdx.x) % 32 / 4, tokens - 1);
}

// ---- A lane's part of a unit.

// small_groups: a scale may be for 32 columns; else it is for 128 or more.
template <bool packed_, bool small_groups_, bool zeros_>
struct Unit {
  static constexpr bool kPacked = packed_;
  static constexpr bool kSmallGroups = small_groups_;
  static constexpr bool kZeros = zeros_;
  static constexpr int kParts = small_groups_ ? kUnitBlocks : 1;  // scales of a row

  // As loaded: packed, both rows of a block; else the four blocks of a row.
  std::conditional_t<packed_, uint2, uint4> values[packed_ ? kUnitBlocks : 2] = {};
  uint2 scales[kParts] = {};
  std::conditional_t<packed_, std::uint16_t, uint2> zeros[zeros_ ? kParts : 1] = {};  // packed: two of 8 + z; else of z

  // The first of a lane's eight columns of a block.
  __host__ __device__ static constexpr int first_term(int block, int quarter) {
    return packed_ || small_groups_ ? block * 32 + quarter * 8 : quarter * 32 + block * 8;
  }

  // A lane's rows of the tile.
  __device__ static int2 rows(int lane) {
    const int g = lane / 4;
    return packed_ ? int2{2 * g, 2 * g + 1} : int2{g, g + 8};
  }

  __device__ std::uint32_t word(int block, int h) const {
    if constexpr (packed_) {
      return h == 0 ? values[block].x : values[block].y;
    } else {
      const uint4& row = values[h];
      return block == 0 ? row.x : block == 1 ? row.y : block == 2 ? row.z : row.w;
    }
  }
  __device__ float scale(int part, int h) const { return __uint_as_float(h == 0 ? scales[part].x : scales[part].y); }
  // 8 + z
  __device__ int zero(int part, int h) const {
    if constexpr (!zeros_) {
      return 8;
    } else if constexpr (packed_) {
      return zeros[part] >> 8 * h & 255;
    } else {
      return 8 + static_cast<int>(h == 0 ? zeros[part].x : zeros[part].y);
    }
  }
};

// Loads a warp's units: of tile after tile, then of the next columns. Nothing out of bounds is read: there words keep
// their old values, which times an x of 0 is 0, and scales are 0.
template <class U>
class UnitReader {
 public:
  // first: tile of the block; tile_unit: the first tile and unit to load.
  __device__ UnitReader(const NibbleWeight& w, const UnitPlaces& at, int first, int tiles, int2 tile_unit)
      : tile_(tile_unit.x), tiles_(tiles), unit_(tile_unit.y), rows_(w.rows - first * kTileRows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row_ = U::rows(lane).x;
    const int place = U::kPacked ? lane % 4 * 64 + row_ * 4 : lane % 4 * (U::kSmallGroups ? 4 : 16);
    const auto start = [&](const void* data, const UnitSteps& step, std::int64_t row_bytes) {
      return static_cast<const std::uint8_t*>(data) + row_ * row_bytes +
             static_cast<std::int64_t>(first + tile_) * step.tile + static_cast<std::int64_t>(unit_) * step.unit;
    };
    values_ = start(w.values + place, at.values, U::kPacked ? 0 : w.pitch);
    scales_ = start(w.scales, at.scales, w.scale.row * 4);
    if constexpr (U::kZeros) zeros_ = start(w.zeros, at.zeros, w.zero.row * kZeroBytes);
  }

  // Loads nothing unless `predicate`.
  __device__ void read(const NibbleWeight& w, const UnitPlaces& at, bool predicate, U& to) {
    const int blocks = predicate ? (w.terms - unit_ * kUnitTerms) / 32 : 0;
    const int row = tile_ * kTileRows + row_;
    if constexpr (U::kPacked) {
#pragma unroll
      for (int i = 0; i < kUnitBlocks; ++i) read_if(i < blocks, to.values[i], values_ + i * 256);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint8_t* const from = values_ + 8 * h * w.pitch;
        const bool inside = row + 8 * h < rows_;
        if constexpr (U::kSmallGroups) {
          read_if(inside && 0 < blocks, to.values[h].x, from);
          read_if(inside && 1 < blocks, to.values[h].y, from + 16);
          read_if(inside && 2 < blocks, to.values[h].z, from + 32);
          read_if(inside && 3 < blocks, to.values[h].w, from + 48);
        } else {
          read_if(inside && static_cast<int>(threadIdx.x) % 4 < blocks, to.values[h], from);
        }
      }
    }
#pragma unroll
    for (int part = 0; part < U::kParts; ++part) {
      const std::int64_t number = U::kSmallGroups ? part >> at.twin_parts : 0;
      const std::uint8_t* const scale = scales_ + number * at.scales.part;
      const std::uint8_t* const zero = zeros_ + number * at.zeros.part;
      const bool inside = part < blocks;
      if (U::kSmallGroups && !inside) to.scales[part] = uint2{};
      if constexpr (U::kPacked) {
        read_if(inside, to.scales[part], scale);
        if constexpr (U::kZeros) read_if(inside, to.zeros[part], zero);
      } else {
        const bool upper = inside && row < rows_;
        const bool lower = inside && row + 8 < rows_;
        read_if(upper, to.scales[part].x, scale);
        read_if(lower, to.scales[part].y, scale + 8 * w.scale.row * 4);
        if constexpr (U::kZeros) {
          read_if(upper, to.zeros[part].x, zero);
          read_if(lower, to.zeros[part].y, zero + 8 * w.zero.row * 4);
        }
      }
    }
    advance(at);
  }

 private:
  static constexpr int kZeroBytes = U::kPacked ? 1 : 4;

  __device__ void advance(const UnitPlaces& at) {
    const bool last = ++tile_ == tiles_;
    values_ += last ? at.values.next - (tiles_ - 1) * at.values.tile : at.values.tile;
    scales_ += last ? at.scales.next - (tiles_ - 1) * at.scales.tile : at.scales.tile;
    if constexpr (U::kZeros) zeros_ += last ? at.zeros.next - (tiles_ - 1) * at.zeros.tile : at.zeros.tile;
    tile_ = last ? 0 : tile_;
    unit_ += last ? at.unit_step : 0;
  }

  const std::uint8_t* values_;
  const std::uint8_t* scales_;
  const std::uint8_t* zeros_ = nullptr;
  int row_;
  int tile_;
  int tiles_;
  int unit_;
  int rows_;
};

// ---- Results.

// y (tokens, rows).
struct TokenRows {
  void* y = nullptr;
  std::int64_t pitch = 0;
  DType type = DType::f32;
  int rows = 0;
  int tokens = 0;

  // A lane's sums as mma leaves them: rows.x and rows.y of two tokens.
  __device__ void store(int token, int2 at, float4 sums) const {
    if (type == DType::f16) {
      store_as<__half>(token, at, sums);
    } else if (type == DType::bf16) {
      store_as<__nv_bfloat16>(token, at, sums);
    } else {
      store_as<float>(token, at, sums);
    }
  }

 private:
  template <class T>
  __device__ void store_as(int token, int2 at, float4 sums) const {
    T* const to = static_cast<T*>(y) + token * pitch;
    const bool second = token + 1 < tokens;
    if (at.x < rows) {
      to[at.x] = narrow<T>(sums.x);
      if (second) to[pitch + at.x] = narrow<T>(sums.y);
    }
    if (at.y < rows) {
      to[at.y] = narrow<T>(sums.z);
      if (second) to[pitch + at.y] = narrow<T>(sums.w);
    }
  }
};

}  // namespace octile::cuda
