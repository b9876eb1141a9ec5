// A chunk of a 4-bit weight, 16 rows by 128 or 256 terms, on its way from memory into a warp's registers as the first
// operand of mma.m16n8k16. Of a block of 32 terms a lane has a word of each of two rows, eight terms; which terms they
// are is free, since those of the other operand are chosen alike (first_term).
//
//   as LinearArgs has it: rows of 64 or 128 bytes, their sixteens exchanged. Where a scale is for 128 terms or more, a
//   lane takes 16 bytes side by side for four blocks at once; where for fewer (fine), a block is 32 terms side by side.
//   packed: lines of 64 bytes, 8 terms of 16 channels; a lane has two channels of every fourth line
#pragma once

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/nibble_weight.h"

namespace octile::cuda {

inline constexpr int kTileRows = 16;

__device__ inline void copy_4(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// blocks: of 32 terms. fine: a scale may be for 32 terms; else it is for 128 or more.
template <int blocks_, bool packed_, bool fine_>
struct Chunk {
  static constexpr int kBlocks = blocks_;
  static constexpr bool kPacked = packed_;
  static constexpr int kTerms = 32 * kBlocks;
  static constexpr int kParts = fine_ ? kBlocks : kBlocks / 4;  // scales of a row
  static constexpr int kPartTerms = kTerms / kParts;
  static constexpr int kValueBytes = kTileRows * kTerms / 2;
  static constexpr int kScaleBytes = kParts * kTileRows * 4;
  static constexpr int kZeroBytes = packed_ ? kParts * kTileRows : kScaleBytes;
  static constexpr int kUnits = kBlocks;  // of 16 bytes, of a row
  static constexpr int kRowBytes = kUnits * 16;

  // ---- Where a lane's part lies.

  // Of a block: the first of a lane's eight terms.
  __device__ static int first_term(int block, int quarter) {
    if (packed_ || fine_) return block * 32 + quarter * 8;
    return block / 4 * 128 + quarter * 32 + block % 4 * 8;
  }

  // A lane's rows of the tile.
  __device__ static int2 rows(int lane) {
    const int g = lane / 4;
    return packed_ ? int2{2 * g, 2 * g + 1} : int2{g, g + 8};
  }

  // Where a row's unit is put, so that neither kind of load meets a bank twice: other rows than its neighbour's, and
  // all of eight rows.
  __device__ static int place_of(int row, int unit) {
    if (kUnits == 4) return row * kRowBytes + (unit ^ row / 2 % 4) * 16;
    return row * kRowBytes + (unit ^ (row % 2 * 4 + row / 2 % 2 * 2 + row / 4 % 2)) * 16;
  }

  // Words of `count` blocks from `first` on, of a lane's two rows.
  template <int count>
  __device__ static void load(std::uint32_t stage, int first, int lane, std::uint32_t (&words)[2][count]) {
    const int g = lane / 4;
    const int c = lane % 4;
    if constexpr (packed_) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const uint2 two = load_shared_pair(stage + ((first + i) * 4 + c) * 64 + g * 8);
        words[0][i] = two.x;
        words[1][i] = two.y;
      }
    } else if constexpr (fine_) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        words[0][i] = load_shared_word(stage + place_of(g, first + i) + c * 4);
        words[1][i] = load_shared_word(stage + place_of(g + 8, first + i) + c * 4);
      }
    } else {
      static_assert(count == 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 four = load_shared(stage + place_of(g + 8 * h, first + c));
        words[h][0] = four.x, words[h][1] = four.y, words[h][2] = four.z, words[h][3] = four.w;
      }
    }
  }

  __device__ static uint2 scales(std::uint32_t stage, int part, int lane) {
    const std::uint32_t at = stage + kValueBytes + part * kTileRows * 4 + lane / 4 * (packed_ ? 8 : 4);
    if constexpr (packed_) return load_shared_pair(at);
    return {load_shared_word(at), load_shared_word(at + 32)};
  }

  // 8 + z
  __device__ static uint2 zeros(std::uint32_t stage, int part, int lane) {
    const std::uint32_t at = stage + kValueBytes + kScaleBytes;
    if constexpr (packed_) {
      const std::uint32_t word = load_shared_word(at + part * kTileRows + lane / 8 * 4) >> lane / 4 % 2 * 16;
      return {word & 255, word >> 8 & 255};
    }
    const std::uint32_t first = at + part * kTileRows * 4 + lane / 4 * 4;
    return {8 + load_shared_word(first), 8 + load_shared_word(first + 32)};
  }

  // ---- From memory.

  // A warp's: places advance from tile to tile. What is not whole is looked at unit by unit, and beyond the weight
  // there are zeros.
  class Fetcher {
   public:
    __device__ Fetcher(const NibbleWeight& w, int chunk, int tile, int by_tiles) {
      by_values_ = packed_ ? by_tiles * w.pitch : std::int64_t{kTileRows} * by_tiles * w.pitch;
      by_scales_ = by_tiles * w.scale.panel;
      by_zeros_ = by_tiles * w.zero.panel;
      begin(w, chunk, tile);
    }

    // From this chunk of this tile on.
    __device__ void begin(const NibbleWeight& w, int chunk, int tile) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      if constexpr (packed_) {
        values_ = w.values + tile * w.pitch + std::int64_t{chunk} * kValueBytes + lane * 16;
      } else {
        values_ = w.values + (tile * kTileRows + lane / kUnits) * w.pitch + std::int64_t{chunk} * kRowBytes +
                  lane % kUnits * 16;
      }
#pragma unroll
      for (int i = 0; i < kScaleCopies; ++i) {
        const int part = (i * 32 + lane) / kScaleLanes;
        const int group = group_of(w, min(chunk * kTerms + part * kPartTerms, w.terms - 1));
        const int row = lane % kScaleLanes * (packed_ ? 4 : 1);
        scales_[i] = tile * w.scale.panel + row * w.scale.row + group * w.scale.col;
        zeros_[i] = tile * w.zero.panel + (packed_ ? 0 : row * w.zero.row) + group * w.zero.col;
      }
    }

    __device__ void fetch(const NibbleWeight& w, std::uint32_t to, int chunk, int tile) {
      const bool whole = (chunk + 1) * kTerms <= w.terms && (packed_ || (tile + 1) * kTileRows <= w.rows);
      if (whole) {
        fetch_values(w, to);
        fetch_scales(w, to + kValueBytes);
      } else {
        fetch_edge(w, to, {chunk * kTerms, tile * kTileRows}, values_);
        fetch_edge_scales(w, to + kValueBytes, chunk, tile);
      }
      values_ += by_values_;
#pragma unroll
      for (int i = 0; i < kScaleCopies; ++i) {
        scales_[i] += by_scales_;
        zeros_[i] += by_zeros_;
      }
    }

   private:
    static constexpr int kCopies = kValueBytes / 16 / 32;  // of a lane
    static constexpr int kRowsAtOnce = 32 / kUnits;
    static constexpr int kScaleLanes = packed_ ? 4 : 16;  // of a part
    static constexpr int kScaleCopies = (kParts * kScaleLanes + 31) / 32;

    __device__ void fetch_values(const NibbleWeight& w, std::uint32_t to) const {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const std::uint8_t* from = values_;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if constexpr (packed_) {
          copy_async(to + (i * 32 + lane) * 16, from + i * 512);
        } else {
          copy_async(to + place_of(i * kRowsAtOnce + lane / kUnits, lane % kUnits), from);
          from += kRowsAtOnce * w.pitch;
        }
      }
    }

    __device__ void fetch_scales(const NibbleWeight& w, std::uint32_t to) const {
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int i = 0; i < kScaleCopies; ++i) {
        const int number = i * 32 + lane;
        if (kParts * kScaleLanes % 32 != 0 && number >= kParts * kScaleLanes) continue;
        const float* const from = static_cast<const float*>(w.scales) + scales_[i];
        if constexpr (packed_) {
          copy_async(to + number * 16, from);
          if (w.zeros == nullptr || number % kScaleLanes != 0) continue;
          copy_async(to + kScaleBytes + number * 4, static_cast<const std::uint8_t*>(w.zeros) + zeros_[i]);
        } else {
          copy_4(to + number * 4, from);
          if (w.zeros == nullptr) continue;
          copy_4(to + kScaleBytes + number * 4, static_cast<const std::int32_t*>(w.zeros) + zeros_[i]);
        }
      }
    }

    // first: the chunk's first term, and the tile's first row.
    __device__ __noinline__ static void fetch_edge(const NibbleWeight& w, std::uint32_t to, int2 first,
                                                   const std::uint8_t* from) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const int row = i * kRowsAtOnce + lane / kUnits;
        const int term = first.x + (packed_ ? (i * 32 + lane) / 4 * 8 : lane % kUnits * 32);
        const bool inside = term < w.terms && (packed_ || first.y + row < w.rows);
        const std::uint32_t at = to + (packed_ ? (i * 32 + lane) * 16 : place_of(row, lane % kUnits));
        if (inside) {
          copy_async(at, from);
        } else {
          store_shared(at, uint4{});
        }
        from += packed_ ? 512 : kRowsAtOnce * w.pitch;
      }
    }

    __device__ __noinline__ static void fetch_edge_scales(const NibbleWeight& w, std::uint32_t to, int chunk,
                                                          int tile) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
      for (int i = lane; i < kParts * kTileRows; i += 32) {
        const int term = chunk * kTerms + i / kTileRows * kPartTerms;
        const int row = tile * kTileRows + i % kTileRows;
        const bool inside = term < w.terms && (packed_ || row < w.rows);
        const int group = inside ? group_of(w, term) : 0;
        if (inside) {
          copy_4(to + i * 4, static_cast<const float*>(w.scales) + w.scale.at(row, group));
        } else {
          store_shared(to + i * 4, 0u);
        }
        if (w.zeros == nullptr || (packed_ && i % kTileRows != 0)) continue;
        const std::uint32_t at = to + kScaleBytes + i * (packed_ ? 1 : 4);
        if (!inside) {  // times 0, but what lay there before could make a NaN of it
          packed_ ? store_shared(at, uint4{}) : store_shared(at, 0u);
        } else if (packed_) {
          copy_async(at, static_cast<const std::uint8_t*>(w.zeros) + w.zero.at(row, group));
        } else {
          copy_4(at, static_cast<const std::int32_t*>(w.zeros) + w.zero.at(row, group));
        }
      }
    }

    __device__ static int group_of(const NibbleWeight& w, int term) {
      if (w.groups == 1) return 0;
      return w.group == 128 ? term / 128 : w.group == 64 ? term / 64 : term / 32;
    }

    const std::uint8_t* values_;
    std::int64_t scales_[kScaleCopies];
    std::int64_t zeros_[kScaleCopies];
    std::int64_t by_values_;
    std::int64_t by_scales_;
    std::int64_t by_zeros_;
  };
};

}  // namespace octile::cuda
