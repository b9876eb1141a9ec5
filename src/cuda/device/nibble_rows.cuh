// A tile of a 4-bit weight in shared memory, 128 rows by 64 terms, on its way to the matrix unit as its first operand:
// what of it a warp makes fragments of (register_products.cuh), 16 rows, of which a thread has rows 2g and 2g + 1 as
// rows g and g + 8 of the product, with their scales.
//
//   as LinearArgs has it: the even rows, then the odd ones, lines of 32 bytes, swizzled
//   packed: eight panels of eight lines of 64 bytes
//
// A weight becomes (q - z) * s * 2^shift in 16 bits: q - z is exact, s * 2^shift is rounded, and so is their product.
// In f16 the shift is a row's own, such that there is room for its scales; bf16 has the range of f32. y gets the shift
// back, and one scale for a whole row altogether, and then nothing is rounded here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/nibbles.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/register_products.cuh"
#include "cuda/device/transposed_boxes.cuh"
#include "cuda/nibble_weight.h"

namespace octile::cuda {

// Whether this thread's terms of a packed weight lie in the high nibbles of bytes.
template <bool packed>
__device__ bool in_high_nibbles() {
  return packed && threadIdx.x % 4 >= 2;
}

// What is added to a raised nibble u, both of a pair, such that q - z remains. u = 8 + z
template <class T, bool packed>
__device__ std::uint32_t offset_of(unsigned u) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return twice(0xc300u + u);
  if constexpr (!packed) return 0xd400e400u + u * 0x00100001u;
  return in_high_nibbles<packed>() ? twice(0xd400u + 16 * u) : twice(0xe400u + u);
}

// The scales of a thread's two rows, group by group, for one tile after the other. Terms are counted in halves of a
// step,
// 32. The four threads that have the same rows prepare one group of four each, hand them round, and read the next four
// meanwhile: four groups are two steps, or more. row_of(i) is the first of the thread's rows in its i-th tile, or
// negative if there is none.
//
// In f16 scales are taken relative to a power of two such that the largest of a row's first four is in [2^5, 2^6).
// Where a later one would exceed 2^12, the largest of its four is the one that is put there, and what has been summed
// is scaled down: `grown` says so, when the 32 terms before have still to be multiplied.
template <class T, bool packed, class RowOf>
class RowScales {
 public:
  bool grown = false;
  float factor[2];  // then, of the two rows' sums

  // Tiles of `halves` halves from `first_half` on.
  __device__ RowScales(const NibbleWeight& weight, const RowOf& row_of, int2 halves)
      : w_(weight),
        row_of_(row_of),
        halves_(weight.groups == 1 ? halves.y : weight.group / 32),
        first_(weight.groups == 1 ? 0 : halves.x / halves_),
        count_(halves.y / halves_) {
    begin_reading();
    read();
  }

  // Before the first 32 terms of a step are converted, and before the others.
  __device__ void advance_step() {
    if (left_ == 0) {
      if (used_ % 4 == 0) take_four();
      use();
    }
    --left_;
  }
  __device__ void advance() {
    if (left_ == 0) use();
    --left_;
  }

  __device__ Two<T> scale(int h) const { return as_pair<Two<T>>(scale_[h]); }
  __device__ std::uint32_t offset(int h) const { return offset_[h]; }
  // What y's column of a row is multiplied by: of the tile in use, or, where another has been begun, of the one before.
  __device__ float after(int h, bool before) const { return before ? before_[h] : after_[h]; }

 private:
  static constexpr bool kShifted = std::is_same_v<T, __half>;
  static constexpr int kFirst = 5;          // exponent of a row's first scale
  static constexpr float kLimit = 0x1p12f;  // 15 times less than that is an f16

  __device__ void begin_reading() {
    row_ = row_of_(tile_++);
    to_read_ = 0;
  }

  // This thread's one of the next four groups.
  __device__ void read() {
    if (row_ < 0) return;
    const int group = first_ + to_read_ + static_cast<int>(threadIdx.x) % 4;
    const bool inside = group < w_.groups;
    const int g = inside ? group : 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(row_ + h, w_.rows - 1);
      const float scale = __ldcg(static_cast<const float*>(w_.scales) + w_.scale.at(row, g));
      next_[h] = inside ? scale : 0;  // beyond the terms
      if (w_.zeros == nullptr) continue;
      const std::int64_t at = w_.zero.at(row, g);
      next_zero_[h] = packed ? __ldcg(static_cast<const std::uint8_t*>(w_.zeros) + at)
                             : 8 + __ldcg(static_cast<const std::int32_t*>(w_.zeros) + at);
    }
    to_read_ += 4;
    if (to_read_ >= count_) begin_reading();
  }

  __device__ void take_four() {
    bool grown_here = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (used_ == 0) {
        before_[h] = after_[h];
        after_[h] = 1;
      }
      float scale = next_[h];
      if (w_.groups == 1) {
        after_[h] = __shfl_sync(~0u, scale, 0, 4);
        scale = 1;
      } else if constexpr (kShifted) {
        unsigned magnitude = __float_as_uint(scale) & 0x7fffffffu;
        magnitude = magnitude < 0x7f800000u ? magnitude : 0;
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 1));
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, 2));
        const bool grows = used_ > 0 && __uint_as_float(magnitude) * power_of_two(shift_[h]) >= kLimit;
        const int shift = used_ == 0 || grows ? kFirst - max(static_cast<int>(magnitude >> 23) - 127, -100) : shift_[h];
        factor[h] = grows ? power_of_two(max(shift - shift_[h], -127)) : 1;
        grown_here |= grows;
        shift_[h] = shift;
        after_[h] = power_of_two(-shift);
        scale *= power_of_two(shift);
      }
      const T narrowed = narrow<T>(scale);
      four_[h] = as_bits(Two<T>(narrowed, narrowed));
      four_offsets_[h] = next_zero_[h];
    }
    if constexpr (kShifted) grown = __any_sync(~0u, grown_here);
    read();
  }

  __device__ void use() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale_[h] = __shfl_sync(~0u, four_[h], used_, 4);
      offset_[h] = offset_of<T, packed>(__shfl_sync(~0u, four_offsets_[h], used_, 4));
    }
    used_ = used_ + 1 == count_ ? 0 : used_ + 1;
    left_ = halves_;
  }

  // From -127 on, which is 0.
  __device__ static float power_of_two(int exponent) {
    return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
  }

  const NibbleWeight& w_;
  const RowOf& row_of_;
  const int halves_;  // of a group
  const int first_;   // group of a tile
  const int count_;   // of its groups
  int tile_ = 0;
  int row_;  // of what is read next
  int to_read_;
  int left_ = 0;  // halves of the group in use
  int used_ = 0;  // groups of the tile
  float next_[2] = {};
  unsigned next_zero_[2] = {8, 8};  // 8 + z
  std::uint32_t four_[2];           // this thread's one of four
  unsigned four_offsets_[2];
  int shift_[2] = {};
  float after_[2] = {1, 1};
  float before_[2];
  std::uint32_t scale_[2];  // of the group in use
  std::uint32_t offset_[2];
};

template <class T, bool packed>
class NibbleReader {
 public:
  static constexpr int kTileBytes = 128 * 32;

  // sixteen: which of the tile's eight sixteens of rows.
  __device__ explicit NibbleReader(unsigned sixteen) {
    const unsigned g = threadIdx.x % 32 / 4;
    const unsigned c = threadIdx.x % 4;
    if constexpr (packed) {
      place_ = sixteen * 512 + g * 8;
      // Terms 2c and 2c + 1 are the low nibbles of bytes 2c and 2c + 1, and from c = 2 on the high ones of 2c - 4, ..
      mask_ = in_high_nibbles<packed>() ? 0x00f000f0u : 0x000f000fu;
      factor_ = in_high_nibbles<packed>() ? 0x2c002c00u : 0x3c003c00u;
      shift_ = in_high_nibbles<packed>() ? 4 : 0;
      bytes_ = (c % 2 * 2) | 4u << 4 | (c % 2 * 2 + 1) << 8 | 4u << 12;
    } else {
      const unsigned line = sixteen * 8 + g;
      place_ = line * 32 + (line / 4 % 2) * 16;
      bytes_ = std::is_same_v<T, __half> ? c | 4u << 4 | c << 8 | 4u << 12 : c | 0x4440u;
    }
  }

  // Brings 32 terms of a tile of 64: the first half, or the second.
  template <int half>
  __device__ void fetch(const std::uint8_t* tile) {
    if constexpr (packed) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 two = *reinterpret_cast<const uint2*>(tile + place_ + half * 256 + i * 64);
        words_[2 * i] = two.x, words_[2 * i + 1] = two.y;
      }
    } else {
      const unsigned at = place_ ^ half * 16;
      const uint4 even = *reinterpret_cast<const uint4*>(tile + at);
      const uint4 odd = *reinterpret_cast<const uint4*>(tile + at + kTileBytes / 2);
      words_[0] = even.x, words_[2] = even.y, words_[4] = even.z, words_[6] = even.w;
      words_[1] = odd.x, words_[3] = odd.y, words_[5] = odd.z, words_[7] = odd.w;
    }
  }

  // The half fetched last, or its second sixteen terms.
  template <class Scales>
  __device__ void convert(Fragment& to, const Scales& scales, int sixteen) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two<T> exact = integers(words_[4 * sixteen + i], scales.offset(i % 2));
      to[i] = as_bits(__hmul2(exact, scales.scale(i % 2)));
    }
  }

 private:
  __device__ Two<T> integers(std::uint32_t word, std::uint32_t offset) const {
    const std::uint32_t two = __byte_perm(word, 0, bytes_);
    if constexpr (std::is_same_v<T, __half>) {
      const std::uint32_t raised = packed ? raise(two, mask_, 0x64006400u) : raise(two, 0x00f0000fu, 0x64806408u);
      const std::uint32_t factor = packed ? factor_ : 0x2c003c00u;
      return __hfma2(as_pair<__half2>(raised), as_pair<__half2>(factor), as_pair<__half2>(offset));
    } else {
      const std::uint32_t low = packed ? two >> shift_ : two * 0x1001u;
      const std::uint32_t raised = raise(low, 0x000f000fu, packed ? 0x43004300u : 0x43084308u);
      return __hadd2(as_pair<__nv_bfloat162>(raised), as_pair<__nv_bfloat162>(offset));
    }
  }

  unsigned place_;        // of this thread's bytes
  unsigned bytes_;        // of a word, as __byte_perm is told
  std::uint32_t mask_;    // f16, packed: where in a byte
  std::uint32_t factor_;  // f16, packed: of what counts 16
  unsigned shift_;        // bf16, packed
  std::uint32_t words_[8];
};

}  // namespace octile::cuda
