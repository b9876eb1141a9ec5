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

// The scales of a warp's 16 rows, group by group, for one tile after the other, on their way through a ring of the
// warp's own in shared memory, many groups ahead. Terms are counted in halves of a step, 32. row_of(i) is the first row
// of the warp in its i-th tile.
//
// In f16 scales are taken relative to a power of two such that the first one of a row is in [2^5, 2^6). Where a later
// one would exceed 2^12, it is the one that is put there, and what has been summed is scaled down: `grown` says so,
// when the 32 terms before have still to be multiplied.
struct ScaleRing {
  static constexpr int kSlots = 16;
  struct Slot {
    float scales[16];
    std::int32_t zeros[16];  // packed: 16 bytes of them
  };
  Slot slots[kSlots];
};

template <class T, bool packed, class RowOf>
class RowScales {
 public:
  bool grown = false;
  float factor[2];  // then, of the two rows' sums

  // Tiles of `halves` halves from `first_half` on.
  __device__ RowScales(const NibbleWeight& weight, ScaleRing& ring, const RowOf& row_of, int2 halves)
      : w_(weight),
        ring_(ptx::shared_address(&ring)),
        row_of_(row_of),
        halves_(weight.groups == 1 ? halves.y : weight.group / 32),
        first_(weight.groups == 1 ? 0 : halves.x / halves_),
        count_(halves.y / halves_) {
    begin_fetching();
#pragma unroll 1
    for (int i = 0; i < ScaleRing::kSlots - 1; ++i) fetch();
  }

  // Before 32 terms are converted.
  __device__ void advance() {
    if (left_ == 0) use();
    --left_;
  }

  __device__ Two<T> scale(int h) const { return as_pair<Two<T>>(scale_[h]); }
  __device__ unsigned offset(int h) const { return offset_[h]; }
  // What y's column of a row is multiplied by: of the tile in use, or, where another has been begun, of the one before.
  __device__ float after(int h, bool before) const { return before ? before_[h] : after_[h]; }

 private:
  static constexpr bool kShifted = std::is_same_v<T, __half>;
  static constexpr int kFirst = 5;          // exponent of a row's first scale
  static constexpr float kLimit = 0x1p12f;  // 15 times less than that is an f16
  static constexpr int kSlotBytes = sizeof(ScaleRing::Slot);

  // A lane's row of the tile whose scales are fetched.
  __device__ void begin_fetching() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = min(row_of_(fetched_tile_++) + lane % 16, w_.rows - 1);
    at_ = w_.scale.at(row, first_);
    zero_at_ = w_.zero.at(packed ? row / 16 * 16 : row, first_);
    to_fetch_ = 0;
  }

  // The next group's, into the slot that was read before the last one.
  __device__ void fetch() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t to = ring_ + static_cast<unsigned>(fill_) * kSlotBytes;
    if (first_ + to_fetch_ >= w_.groups) {  // beyond the terms
      if (lane < 16) ptx::store_word(to + lane * 4, 0);
    } else if (lane < 16) {
      copy_word(to + lane * 4, static_cast<const float*>(w_.scales) + at_);
    } else if (w_.zeros != nullptr && packed) {
      if (lane == 16) copy_sixteen(to + 64, static_cast<const std::uint8_t*>(w_.zeros) + zero_at_);
    } else if (w_.zeros != nullptr) {
      copy_word(to + lane * 4, static_cast<const std::int32_t*>(w_.zeros) + zero_at_);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    at_ += w_.scale.col;
    zero_at_ += w_.zero.col;
    fill_ = fill_ + 1 == ScaleRing::kSlots ? 0 : fill_ + 1;
    if (++to_fetch_ == count_) begin_fetching();
  }

  __device__ static void copy_word(std::uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  }
  __device__ static void copy_sixteen(std::uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }

  __device__ void use() {
    asm volatile("cp.async.wait_group %0;" ::"n"(ScaleRing::kSlots - 2) : "memory");
    __syncwarp();
    const unsigned g = threadIdx.x % 32 / 4;
    const std::uint32_t slot = ring_ + static_cast<unsigned>(slot_) * kSlotBytes;
    float scales[2];
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(scales[0]), "=f"(scales[1]) : "r"(slot + g * 8) : "memory");
    if (w_.zeros != nullptr) read_zeros(slot + 64, g);
#pragma unroll
    for (int h = 0; h < 2; ++h) take(h, scales[h]);
    grown = kShifted && used_ > 0 && __any_sync(~0u, factor[0] != 1 || factor[1] != 1);
    used_ = used_ + 1 == count_ ? 0 : used_ + 1;
    slot_ = slot_ + 1 == ScaleRing::kSlots ? 0 : slot_ + 1;
    left_ = halves_;
    fetch();
  }

  __device__ void read_zeros(std::uint32_t at, unsigned g) {
    if constexpr (packed) {
      std::uint16_t two;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(at + g * 2) : "memory");
      offset_[0] = two & 255;
      offset_[1] = two >> 8;
    } else {
      int two[2];
      asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(two[0]), "=r"(two[1]) : "r"(at + g * 8) : "memory");
      offset_[0] = 8 + two[0];
      offset_[1] = 8 + two[1];
    }
  }

  __device__ void take(int h, float scale) {
    factor[h] = 1;
    if (used_ == 0) {
      before_[h] = after_[h];
      after_[h] = 1;
    }
    if (w_.groups == 1) {
      after_[h] = scale;
      scale = 1;
    } else if constexpr (kShifted) {
      const float magnitude = fabsf(scale);
      if (used_ == 0) shift_[h] = 0x1p126f;  // whatever comes first is larger
      if ((used_ == 0 || magnitude * shift_[h] >= kLimit) && magnitude < __int_as_float(0x7f800000)) {
        const int exponent = max(static_cast<int>(__float_as_uint(magnitude) >> 23) - 127, -100);
        const float shift = ldexpf(1.0f, kFirst - exponent);
        factor[h] = used_ == 0 ? 1 : shift / shift_[h];
        shift_[h] = shift;
        after_[h] = ldexpf(1.0f, exponent - kFirst);
      } else if (used_ == 0) {
        shift_[h] = 1;  // no number at all
      }
      scale *= shift_[h];
    }
    const T narrowed = narrow<T>(scale);
    scale_[h] = as_bits(Two<T>(narrowed, narrowed));
  }

  const NibbleWeight& w_;
  const std::uint32_t ring_;
  const RowOf& row_of_;
  const int halves_;  // of a group
  const int first_;   // group of a tile
  const int count_;   // of its groups
  std::int64_t at_;   // what is fetched next
  std::int64_t zero_at_;
  int to_fetch_;
  int fetched_tile_ = 0;
  int fill_ = 0;
  int slot_ = 0;
  int left_ = 0;  // halves of the group in use
  int used_ = 0;  // groups of the tile
  float shift_[2];
  float after_[2] = {1, 1};
  float before_[2];
  std::uint32_t scale_[2];
  unsigned offset_[2] = {8, 8};
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
      high_ = c / 2;
      bytes_ = (c % 2 * 2) | 4u << 4 | (c % 2 * 2 + 1) << 8 | 4u << 12;
    } else {
      const unsigned line = sixteen * 8 + g;
      place_ = line * 32 + (line / 4 % 2) * 16;
      bytes_ = c | 4u << 4 | c << 8 | 4u << 12;
      high_ = 0;
    }
  }

  // Brings slice `slice` of sixteen terms.
  template <int slice>
  __device__ void fetch(const std::uint8_t* tile) {
    if constexpr (packed) {
      const uint2 first = *reinterpret_cast<const uint2*>(tile + place_ + slice * 128);
      const uint2 second = *reinterpret_cast<const uint2*>(tile + place_ + slice * 128 + 64);
      words_[0] = first.x, words_[1] = first.y, words_[2] = second.x, words_[3] = second.y;
    } else {
      const unsigned at = (place_ ^ slice / 2 * 16) + slice % 2 * 8;
      const uint2 even = *reinterpret_cast<const uint2*>(tile + at);
      const uint2 odd = *reinterpret_cast<const uint2*>(tile + at + kTileBytes / 2);
      words_[0] = even.x, words_[1] = odd.x, words_[2] = even.y, words_[3] = odd.y;
    }
  }

  // The slice fetched last.
  template <class Scales>
  __device__ void convert(Fragment& to, const Scales& scales) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two<T> product = __hmul2(integers(words_[i], scales.offset(i % 2)), scales.scale(i % 2));
      to[i] = as_bits(product);
    }
  }

 private:
  __device__ Two<T> integers(std::uint32_t word, unsigned u) const {
    const std::uint32_t two = __byte_perm(word, 0, bytes_);
    if constexpr (std::is_same_v<T, __half>) {
      if constexpr (packed) {
        const std::uint32_t raised = raise(two, high_ ? 0x00f000f0u : 0x000f000fu, 0x64006400u);
        const std::uint32_t offset = high_ ? twice(0xd400u + 16 * u) : twice(0xe400u + u);
        return __hfma2(as_pair<__half2>(raised), as_pair<__half2>(high_ ? 0x2c002c00u : 0x3c003c00u),
                       as_pair<__half2>(offset));
      } else {
        const std::uint32_t raised = raise(two, 0x00f0000fu, 0x64806408u);
        return __hfma2(as_pair<__half2>(raised), as_pair<__half2>(0x2c003c00u),
                       as_pair<__half2>(0xd400e400u + u * 0x00100001u));
      }
    } else {
      const std::uint32_t low = packed ? two >> 4 * high_ : (two & 0xffffu) * 0x1001u;
      const std::uint32_t raised = raise(low, 0x000f000fu, packed ? 0x43004300u : 0x43084308u);
      return __hadd2(as_pair<__nv_bfloat162>(raised), as_pair<__nv_bfloat162>(twice(0xc300u + u)));
    }
  }

  unsigned place_;  // of this thread's bytes
  unsigned bytes_;  // of a word, as __byte_perm is told
  unsigned high_;   // packed: in the high nibbles
  std::uint32_t words_[4];
};

}  // namespace octile::cuda
