#include "cpu/gemm/pack_panels.h"

#include <algorithm>
#include <cstring>

#include "cpu/support/isa.h"
#include "plan/packed_weight.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octile::cpu {

namespace {

constexpr std::int64_t kTerms = 64;       // packed at a time: a line of each channel
constexpr std::int64_t kPackAhead = 512;  // bytes of a channel

#if defined(__x86_64__)

// 8 x 8 lanes: lane c of row r becomes lane r of row c.
__attribute__((target("avx2"), always_inline)) inline void transpose_lanes(__m256i (&row)[8]) {
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
        const std::uint8_t* from = in + (8 * half + r) * stride + 32 * line;
        row[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        if (line == 0) __builtin_prefetch(from + kPackAhead, 0, 2);
      }
      transpose_lanes(row);
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

// Four rows of 16 channels that lie side by side, `stride` bytes apart.
void pack_line(const std::uint8_t* in, std::int64_t stride, std::uint8_t* out) {
#if defined(__SSE2__)
  __m128i row[4];
  for (int i = 0; i < 4; ++i) row[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * stride));
  const __m128i pairs[4] = {_mm_unpacklo_epi8(row[0], row[1]), _mm_unpackhi_epi8(row[0], row[1]),
                            _mm_unpacklo_epi8(row[2], row[3]), _mm_unpackhi_epi8(row[2], row[3])};
  auto* line = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(line, _mm_unpacklo_epi16(pairs[0], pairs[2]));
  _mm_storeu_si128(line + 1, _mm_unpackhi_epi16(pairs[0], pairs[2]));
  _mm_storeu_si128(line + 2, _mm_unpacklo_epi16(pairs[1], pairs[3]));
  _mm_storeu_si128(line + 3, _mm_unpackhi_epi16(pairs[1], pairs[3]));
#else
  for (std::int64_t r = 0; r < kPanelChannels; ++r) {
    for (std::int64_t i = 0; i < kLaneBytes; ++i) out[r * kLaneBytes + i] = in[i * stride + r];
  }
#endif
}

// One panel of which a few channels or terms may be missing, by way of 16 full rows.
void pack_edge(const ConstTensor& b, const Range& channels, const Range& terms, std::uint8_t* out) {
  const auto* data =
      static_cast<const std::uint8_t*>(b.data) + channels.first * b.strides[0] + terms.first * b.strides[1];
  for (std::int64_t done = 0; done < terms.count; done += kTerms) {
    std::uint8_t block[kPanelChannels * kTerms] = {};
    const std::int64_t count = std::min(kTerms, terms.count - done);
    for (std::int64_t r = 0; r < channels.count; ++r) {
      const std::uint8_t* from = data + r * b.strides[0] + done * b.strides[1];
      for (std::int64_t c = 0; c < count; ++c) block[r * kTerms + c] = from[c * b.strides[1]];
    }
    pack_rows(block, kTerms, out + done * kPanelChannels);
  }
}

}  // namespace

void pack_panels(const ConstTensor& b, const Range& channels, const Range& terms, const Panels& out) {
  const auto* data =
      static_cast<const std::uint8_t*>(b.data) + channels.first * b.strides[0] + terms.first * b.strides[1];
  const std::int64_t panels = channels.count / kPanelChannels;  // full ones
  const std::int64_t whole = terms.count / kTerms * kTerms;
  if (b.strides[1] == 1) {
    for (std::int64_t j = 0; j < panels; ++j) {
      for (std::int64_t c = 0; c < whole; c += kTerms) {
        pack_rows(data + j * kPanelChannels * b.strides[0] + c, b.strides[0],
                  out.data + j * out.stride + c * kPanelChannels);
      }
    }
  } else {
    // All panels at once, so that a line is read once: rows a power of two apart drive each other out of the cache.
    for (std::int64_t c = 0; c < whole; c += kLaneBytes) {
      for (std::int64_t j = 0; j < panels; ++j) {
        pack_line(data + c * b.strides[1] + j * kPanelChannels, b.strides[1],
                  out.data + j * out.stride + c * kPanelChannels);
      }
    }
  }
  for (std::int64_t j = 0; j * kPanelChannels < channels.count; ++j) {
    const std::int64_t done = j < panels ? whole : 0;
    if (done == terms.count) continue;
    const std::int64_t first = j * kPanelChannels;
    pack_edge(b, {channels.first + first, std::min(kPanelChannels, channels.count - first)},
              {terms.first + done, terms.count - done}, out.data + j * out.stride + done * kPanelChannels);
  }
}

}  // namespace octile::cpu
