// From nibbles and scales in shared memory to the 16-bit fragments of WGMMA. A tile of the weight, 128 x 64, of which a
// warp has 16 rows; rows g and g + 8 of the WGMMA are rows 2g and 2g + 1 of the tile.
//
//   row-major: the even rows, then the odd ones, lines of 32 bytes, swizzled
//   packed: eight panels of eight lines of 64 bytes
//
// A weight becomes (q - z) * s * 2^shift in 16 bits: q - z is exact, s * 2^shift is rounded, and so is their product.
// In f16 each row has its own shift, which makes room for its scales; bf16 has the range of f32. The epilogue undoes
// the shift. A single scale per row is left to the epilogue altogether; then nothing is rounded here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/floats.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/grouped_weight.h"

namespace octile::cuda {

// Whether this thread's elements of a packed weight are the high nibbles of bytes.
template <bool packed>
__device__ bool in_high_nibbles() {
  return packed && threadIdx.x % 4 >= 2;
}

// What turns a pair of biased nibbles into q - z when added. u = 8 + z
template <class T, bool packed>
__device__ std::uint32_t offset_of(unsigned u) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return twice(0xc300u + u);
  if constexpr (!packed) return 0xd400e400u + u * 0x00100001u;
  return in_high_nibbles<packed>() ? twice(0xd400u + 16 * u) : twice(0xe400u + u);
}

// Scales and zero points of a tile's rows, of the groups that begin in a step: one, or two of 32.
struct alignas(128) GroupScales {
  float scale[2][128];
  std::int32_t zero[2][128];  // packed: bytes, four rows in each
};

// Steps from one group to the next, in a tile of `steps` steps.
__device__ inline int steps_of_group(const NibbleWeight& weight, int steps) {
  return weight.groups == 1 ? steps : weight.group == 128 ? 2 : 1;
}

// Copies them in order, two rows per thread.
template <bool packed>
class ScaleFetcher {
 public:
  // pair: which of a tile's 64 pairs of rows.
  __device__ ScaleFetcher(const NibbleWeight& weight, int pair) : w_(weight), pair_(pair) {}

  // Continues with a tile that begins at this row and column.
  __device__ void start_tile(int row, int term) {
    group_ = term / w_.group;
    const auto* const scales = static_cast<const float*>(w_.scales);
    const auto* const zeros = static_cast<const std::uint8_t*>(w_.zeros);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = min(row + 2 * pair_ + h, w_.rows - 1);
      scales_[h] = scales + w_.scale.at(at, group_);
      if (zeros != nullptr) zeros_[h] = zeros + w_.zero.at(packed ? at / 4 * 4 : at, group_) * kZeroBytes;
    }
  }

  // Starts copying the next groups.
  __device__ void fetch(GroupScales& to) {
    fetch_group(to, 0);
    if (w_.group == 32) fetch_group(to, 1);
  }

 private:
  static constexpr int kZeroBytes = packed ? 1 : 4;

  __device__ void fetch_group(GroupScales& to, int i) {
    const bool inside = group_++ < w_.groups;  // out of bounds scales are 0
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ptx::cp_async_4(&to.scale[i][2 * pair_ + h], inside ? scales_[h] : w_.scales, inside);
      scales_[h] += w_.scale.col;
    }
    if (w_.zeros == nullptr) return;
#pragma unroll
    for (int h = 0; h < (packed ? 1 : 2); ++h) {
      if (!packed || pair_ % 2 == 0)
        ptx::cp_async_4(&to.zero[i][packed ? pair_ / 2 : 2 * pair_ + h], inside ? zeros_[h] : w_.zeros, inside);
      zeros_[h] += w_.zero.col * kZeroBytes;
    }
  }

  const NibbleWeight& w_;
  const int pair_;
  int group_;               // the next one
  const float* scales_[2];  // of it
  const std::uint8_t* zeros_[2];
};

// The factors of a thread's two rows.
//
// In f16 scales are relative to a power of two that puts the largest of a row's first step into [2^5, 2^6). Where a
// later one would exceed 2^12, it is put there instead, and the sums so far are scaled down: `rescaled` says so, before
// the previous step has been multiplied.
template <class T, bool packed>
class RowScales {
 public:
  bool rescaled = false;
  float factor[2];  // then: of the two rows' sums

  // row: the first of the thread's rows in a tile.
  __device__ RowScales(const NibbleWeight& weight, int row)
      : row_(row),
        mask_(weight.groups == 1 ? ~0 : weight.group == 128),
        twice_(weight.group == 32 && weight.groups > 1),
        whole_(weight.groups == 1),
        zeros_(weight.zeros != nullptr) {
    offset_[0] = offset_[1] = offset_of<T, packed>(8);
    asm volatile("" : "+r"(mask_), "+r"(twice_), "+r"(whole_), "+r"(zeros_));  // kept in registers, not recomputed
  }

  // The next step is a tile's first.
  __device__ void begin_tile() { step_ = 0; }

  // Whether groups begin in the next step. known: the step is the first (0) or the second (1) half of 128 columns, or
  // that is unknown (-1).
  template <int known>
  __device__ bool begins() const {
    if constexpr (known == 0) return mask_ >= 0 || step_ == 0;
    if constexpr (known == 1) return mask_ == 0;
    return (step_ & mask_) == 0;
  }
  __device__ void fetch(const GroupScales& from) {
    fetch_group(from, 0);
    if (twice_) fetch_group(from, 1);
  }

  // Before the first 32 columns of a step are converted, and before the others.
  template <int known>
  __device__ void begin_step() {
    if (begins<known>()) {
      if (known != 1 && step_ == 0) before_[0] = power_[0], before_[1] = power_[1];
      if (whole_) {
        power_[0] = next_[0].x, power_[1] = next_[0].y;  // in the epilogue
        scale_[0] = scale_[1] = as_bits(Two<T>(narrow<T>(1.0f), narrow<T>(1.0f)));
        use_zeros(0);
      } else {
        if constexpr (std::is_same_v<T, __half>) choose_powers<known>();
        use(0);
      }
    }
    ++step_;
  }
  __device__ void begin_half() {
    if (twice_) use(1);
  }

  __device__ Two<T> scale(int h) const { return as_pair<Two<T>>(scale_[h]); }
  __device__ std::uint32_t offset(int h) const { return offset_[h]; }
  // The epilogue's factor of a row, for the tile before the one that has begun.
  __device__ float after(int h) const {
    return whole_ ? before_[h] : __int_as_float((254 << 23) - __float_as_int(before_[h]));
  }

 private:
  static constexpr unsigned kFirst = 5;     // exponent of a row's first scale
  static constexpr float kLimit = 0x1p12f;  // 15 times anything smaller is an f16

  __device__ void fetch_group(const GroupScales& from, int i) {
    next_[i] = *reinterpret_cast<const float2*>(&from.scale[i][row_]);
    if (!zeros_) return;
    if constexpr (packed) {
      next_zero_[i].x = from.zero[i][row_ / 4];
    } else {
      next_zero_[i] = *reinterpret_cast<const int2*>(&from.zero[i][row_]);
    }
  }

  __device__ void use(int i) {
    const float scale[2] = {next_[i].x * power_[0], next_[i].y * power_[1]};
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_[h] = as_bits(Two<T>(narrow<T>(scale[h]), narrow<T>(scale[h])));
    use_zeros(i);
  }

  __device__ void use_zeros(int i) {
    if (!zeros_) return;
    if constexpr (packed) {
      const unsigned word = static_cast<unsigned>(next_zero_[i].x) >> row_ % 4 * 8;
      offset_[0] = offset_of<T, packed>(word & 0xff), offset_[1] = offset_of<T, packed>(word >> 8 & 0xff);
    } else {
      offset_[0] = offset_of<T, packed>(8 + next_zero_[i].x), offset_[1] = offset_of<T, packed>(8 + next_zero_[i].y);
    }
  }

  template <int known>
  __device__ void choose_powers() {
    const float peak[2] = {largest(next_[0].x, next_[1].x), largest(next_[0].y, next_[1].y)};
    const bool exceeds[2] = {peak[0] * power_[0] >= kLimit, peak[1] * power_[1] >= kLimit};
    if (known != 1 && step_ == 0) {
      power_[0] = power_for(peak[0]), power_[1] = power_for(peak[1]);
    } else if (__any_sync(~0u, exceeds[0] || exceeds[1])) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float power = exceeds[h] ? power_for(peak[h]) : power_[h];
        factor[h] = __int_as_float(max(__float_as_int(power) - __float_as_int(power_[h]) + (127 << 23), 0));
        power_[h] = power;
      }
      rescaled = true;
    }
  }
  __device__ float largest(float a, float b) const { return twice_ ? fmaxf(fabsf(a), fabsf(b)) : fabsf(a); }
  // 2^(kFirst - exponent), clamped so that it has a reciprocal.
  __device__ static float power_for(float scale) {
    const unsigned exponent = __float_as_uint(scale) & 0xffu << 23;
    return __uint_as_float(((254 + kFirst) << 23) - min(max(exponent, 27u << 23), 254u << 23));
  }

  const int row_;
  int mask_;   // bits of the step that are 0 where a group begins
  int twice_;  // groups of 32
  int whole_;  // groups of a row
  int zeros_;  // there are zero points
  int step_ = 0;
  float2 next_[2] = {};
  int2 next_zero_[2];
  float power_[2] = {1, 1};  // whole: the scales
  float before_[2];
  std::uint32_t scale_[2];  // of the group in use
  std::uint32_t offset_[2];
};

// From a word of eight nibbles the pair that this thread has as an operand of WGMMA, as the integers q - z. Packed:
// columns 2c and 2c + 1 are the low nibbles of bytes 2c and 2c + 1; from c = 2 on the high ones of 2c - 4 and 2c - 3.
template <class T, bool packed>
class PairOfWord {
 public:
  __device__ PairOfWord() {
    const unsigned c = threadIdx.x % 4;
    if constexpr (packed) {
      mask_ = in_high_nibbles<packed>() ? 0x00f000f0u : 0x000f000fu;
      factor_ = in_high_nibbles<packed>() ? 0x2c002c00u : 0x3c003c00u;
      shift_ = in_high_nibbles<packed>() ? 4 : 0;
      bytes_ = (c % 2 * 2) | 4u << 4 | (c % 2 * 2 + 1) << 8 | 4u << 12;
      asm volatile("" : "+r"(mask_), "+r"(factor_), "+r"(shift_),
                        "+r"(bytes_));  // kept in registers, not recomputed
    } else {
      bytes_ = std::is_same_v<T, __half> ? c | 4u << 4 | c << 8 | 4u << 12 : c | 0x4440u;
    }
  }

  // offset: offset_of(8 + z)
  __device__ Two<T> integers(std::uint32_t word, std::uint32_t offset) const {
    const std::uint32_t two = __byte_perm(word, 0, bytes_);
    if constexpr (std::is_same_v<T, __half>) {
      const std::uint32_t biased = packed ? and_xor(two, mask_, 0x64006400u) : and_xor(two, 0x00f0000fu, 0x64806408u);
      const std::uint32_t factor = packed ? factor_ : 0x2c003c00u;
      return __hfma2(as_pair<__half2>(biased), as_pair<__half2>(factor), as_pair<__half2>(offset));
    } else {
      const std::uint32_t low = packed ? two >> shift_ : two * 0x1001u;
      const std::uint32_t biased = and_xor(low, 0x000f000fu, packed ? 0x43004300u : 0x43084308u);
      return __hadd2(as_pair<__nv_bfloat162>(biased), as_pair<__nv_bfloat162>(offset));
    }
  }

 private:
  unsigned bytes_;        // selector of __byte_perm
  std::uint32_t mask_;    // f16, packed: where in a byte
  std::uint32_t factor_;  // f16, packed: 1/16 for the high nibbles
  unsigned shift_;        // bf16, packed
};

template <class T, bool packed>
class NibbleReader {
 public:
  static constexpr int kTileBytes = 128 * 32;

  // sixteen: which 16 of the tile's 128 rows.
  __device__ explicit NibbleReader(unsigned sixteen) {
    const unsigned g = threadIdx.x % 32 / 4;
    if constexpr (packed) {
      place_ = sixteen * 512 + g * 8;
    } else {
      const unsigned line = sixteen * 8 + g;
      place_ = line * 32 + (line / 4 % 2) * 16;
    }
  }

  // Loads half of a tile's columns.
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

  // 16 columns of the half loaded last.
  template <class Scales>
  __device__ void convert(Fragment& to, const Scales& scales, int sixteen) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two<T> exact = pair_.integers(words_[4 * sixteen + i], scales.offset(i % 2));
      to[i] = as_bits(__hmul2(exact, scales.scale(i % 2)));
    }
  }

 private:
  PairOfWord<T, packed> pair_;
  unsigned place_;  // of this thread's bytes
  std::uint32_t words_[8];
};

}  // namespace octile::cuda
