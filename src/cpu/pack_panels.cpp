#include "cpu/pack_panels.h"

#include <algorithm>
#include <cstring>

#include "cpu/multiversion.h"
#include "packed_weight.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octile::cpu {

namespace {

constexpr std::int64_t kTerms = 64;  // packed at a time: a line of each channel

#if defined(__x86_64__)

// 8 x 8 lanes: lane c of row r becomes lane r of row c.
__attribute__((target("avx2"), always_inline)) inline void turn_lanes(__m256i (&row)[8]) {
  __m256i pairs[8];
  __m256i fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    fours[4 * i] = _mm256_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
    fours[4 * i + 1] = _mm256_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
    fours[4 * i + 2] = _mm256_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    fours[4 * i + 3] = _mm256_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    row[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x20);
    row[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x31);
  }
}

// 64 terms of 16 channels, each `stride` bytes after the one before.
__attribute__((target("avx2"))) void pack_rows_avx2(const std::uint8_t* in, std::int64_t stride, std::uint8_t* out) {
  for (int half = 0; half < 2; ++half) {
    for (int line = 0; line < 2; ++line) {
      __m256i row[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        row[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + (8 * half + r) * stride + 32 * line));
      }
      turn_lanes(row);
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (8 * line + q) * kPanelLine + 32 * half), row[q]);
      }
    }
  }
}

#endif

void pack_rows(const std::uint8_t* in, std::int64_t stride, std::uint8_t* out) {
#if defined(__x86_64__)
  if (usable(Isa::avx2)) return pack_rows_avx2(in, stride, out);
#endif
  for (std::int64_t r = 0; r < kPanelChannels; ++r) {
    for (std::int64_t c = 0; c < kTerms; c += kLaneBytes) {
      std::memcpy(out + c * kPanelChannels + r * kLaneBytes, in + r * stride + c, kLaneBytes);
    }
  }
}

// Four terms of 16 channels that lie side by side.
struct PackColumns {
  template <Isa>
  OCTILE_INLINE static void run(const std::uint8_t* __restrict in, std::int64_t stride, std::int64_t lanes,
                                std::uint8_t* __restrict out) {
    for (std::int64_t q = 0; q < lanes; ++q) {
      const std::uint8_t* __restrict from = in + q * kLaneBytes * stride;
      std::uint8_t* __restrict to = out + q * kPanelLine;
      for (int r = 0; r < 16; ++r) {
        to[4 * r] = from[r];
        to[4 * r + 1] = from[stride + r];
        to[4 * r + 2] = from[2 * stride + r];
        to[4 * r + 3] = from[3 * stride + r];
      }
    }
  }
};

}  // namespace

void pack_panel(const ConstTensor& b, const ChannelRange& channels, const TermRange& terms, std::uint8_t* out) {
  const auto* data =
      static_cast<const std::uint8_t*>(b.data) + channels.first * b.strides[0] + terms.first * b.strides[1];
  const std::int64_t rows = std::min(kPanelChannels, channels.end - channels.first);
  std::int64_t done = 0;
  if (rows == kPanelChannels) {
    if (b.strides[1] == 1) {
      for (; done + kTerms <= terms.count; done += kTerms)
        pack_rows(data + done, b.strides[0], out + done * kPanelChannels);
    } else {
      done = terms.count / kTerms * kTerms;
      multiversion<PackColumns>(data, b.strides[1], done / kLaneBytes, out);
    }
  }
  // What is left, a few terms or a panel that is not full, by way of 16 full rows.
  for (; done < terms.count; done += kTerms) {
    std::uint8_t block[kPanelChannels * kTerms] = {};
    const std::int64_t count = std::min(kTerms, terms.count - done);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::uint8_t* from = data + r * b.strides[0] + done * b.strides[1];
      for (std::int64_t c = 0; c < count; ++c) block[r * kTerms + c] = from[c * b.strides[1]];
    }
    pack_rows(block, kTerms, out + done * kPanelChannels);
  }
}

}  // namespace octile::cpu
