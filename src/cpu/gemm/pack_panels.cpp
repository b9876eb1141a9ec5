#include "cpu/gemm/pack_panels.h"

#include <algorithm>
#include <cstring>

#include "cpu/gemm/transpose_lanes.h"
#include "cpu/support/isa.h"
#include "plan/packed_weight.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octile::cpu {

namespace {

constexpr std::int64_t kTerms = 64;       // packed at a time: a line of each channel
constexpr std::int64_t kPackAhead = 256;  // bytes of a channel

// What there is of 16 channels and 64 terms.
struct Block {
  std::int64_t channels, terms;
};

#if defined(__x86_64__)

// 8 x 8 lanes: lane c of row r becomes lane r of row c.
__attribute__((target("avx2"), always_inline)) inline void transpose_eight(__m256i (&row)[8]) {
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
__attribute__((target("avx2"))) void pack_rows_avx2(const std::uint8_t* in, std::int64_t stride, const Panels& out) {
  const __m256i flip = _mm256_set1_epi8(static_cast<char>(out.flip));
  // Unrolled, so that each load has a stride of its own, which the machine learns.
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
    for (int line = 0; line < 2; ++line) {
      __m256i row[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        const std::uint8_t* from = in + (8 * half + r) * stride + 32 * line;
        row[r] = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), flip);
        if (line == 0) __builtin_prefetch(from + kPackAhead, 0, 2);
      }
      transpose_eight(row);
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.data + (8 * line + q) * kPanelLine + 32 * half), row[q]);
      }
    }
  }
}

#define OCTILE_TARGET __attribute__((target("avx512f"), always_inline)) inline
// Lanes 0 and 2 of a and of b, or lanes 1 and 3; masks, since GCC 12 warns of the intrinsics without.
template <int lanes>
OCTILE_TARGET __m512i every_other(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(0xffff, a, b, lanes == 0 ? 0x88 : 0xdd);
}
OCTILE_TARGET __m512i low_lanes(__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi32(0xffff, a, b); }
OCTILE_TARGET __m512i high_lanes(__m512i a, __m512i b) { return _mm512_maskz_unpackhi_epi32(0xffff, a, b); }
OCTILE_TARGET __m512i low_pairs(__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi64(0xff, a, b); }
OCTILE_TARGET __m512i high_pairs(__m512i a, __m512i b) { return _mm512_maskz_unpackhi_epi64(0xff, a, b); }
#undef OCTILE_TARGET

// The same, by 16 x 16 lanes. Channels and terms that are missing are 0, flipped.
template <bool whole>
__attribute__((target("avx512f,avx512bw"))) void pack_rows_avx512(const std::uint8_t* in, std::int64_t stride,
                                                                  const Block& block, const Panels& out) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(out.flip));
  const __mmask64 mask = block.terms >= kTerms ? ~std::uint64_t{0} : (std::uint64_t{1} << block.terms) - 1;
  __m512i fours[16];  // 4 * i + c: in lane l of 128 bits column 4 * l + c of rows 4 * i and on
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const std::uint8_t* from = in + (4 * i + r) * stride;
      const __m512i line =
          whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(4 * i + r < block.channels ? mask : 0, from);
      row[r] = _mm512_xor_si512(line, flip);
      __builtin_prefetch(from + kPackAhead, 0, 2);
    }
    const __m512i low[] = {low_lanes(row[0], row[1]), low_lanes(row[2], row[3])};
    const __m512i high[] = {high_lanes(row[0], row[1]), high_lanes(row[2], row[3])};
    fours[4 * i] = low_pairs(low[0], low[1]);
    fours[4 * i + 1] = high_pairs(low[0], low[1]);
    fours[4 * i + 2] = low_pairs(high[0], high[1]);
    fours[4 * i + 3] = high_pairs(high[0], high[1]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even[] = {every_other<0>(fours[c], fours[4 + c]), every_other<0>(fours[8 + c], fours[12 + c])};
    const __m512i odd[] = {every_other<1>(fours[c], fours[4 + c]), every_other<1>(fours[8 + c], fours[12 + c])};
    std::uint8_t* to = out.data + c * kPanelLine;
    _mm512_storeu_si512(to, every_other<0>(even[0], even[1]));
    _mm512_storeu_si512(to + 4 * kPanelLine, every_other<0>(odd[0], odd[1]));
    _mm512_storeu_si512(to + 8 * kPanelLine, every_other<1>(even[0], even[1]));
    _mm512_storeu_si512(to + 12 * kPanelLine, every_other<1>(odd[0], odd[1]));
  }
}

#endif

// Whole blocks.
void pack_rows(const std::uint8_t* in, std::int64_t stride, const Panels& out) {
#if defined(__x86_64__)
  if (usable(Isa::avx512)) return pack_rows_avx512<true>(in, stride, {kPanelChannels, kTerms}, out);
  if (usable(Isa::avx2)) return pack_rows_avx2(in, stride, out);
#endif
  typedef std::uint32_t Four __attribute__((vector_size(16)));
  for (std::int64_t c = 0; c < kTerms; c += kPanelChannels) {
    for (std::int64_t row = 0; row < kPanelChannels; row += 4) {
      Four lanes[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&lanes[i], in + (row + i) * stride + c, sizeof(Four));
      transpose_lanes(lanes);
      for (int i = 0; i < 4; ++i) {
        const Four flipped = lanes[i] ^ 0x01010101u * out.flip;
        std::memcpy(out.data + (c / kLaneBytes + i) * kPanelLine + row * kLaneBytes, &flipped, sizeof flipped);
      }
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

// One panel of which a few channels or terms may be missing, elsewhere than with AVX-512 through 16 full rows.
void pack_edge(const ConstTensor& b, const Range& channels, const Range& terms, const Panels& out) {
  const auto* data =
      static_cast<const std::uint8_t*>(b.data) + channels.first * b.strides[0] + terms.first * b.strides[1];
  for (std::int64_t done = 0; done < terms.count; done += kTerms) {
    const std::int64_t count = std::min(kTerms, terms.count - done);
    const Panels to = {out.data + done * kPanelChannels, 0, out.flip};
#if defined(__x86_64__)
    if (b.strides[1] == 1 && usable(Isa::avx512)) {
      pack_rows_avx512<false>(data + done, b.strides[0], {channels.count, count}, to);
      continue;
    }
#endif
    std::uint8_t block[kPanelChannels * kTerms] = {};
    for (std::int64_t r = 0; r < channels.count; ++r) {
      const std::uint8_t* from = data + r * b.strides[0] + done * b.strides[1];
      if (b.strides[1] == 1) {
        std::memcpy(block + r * kTerms, from, static_cast<std::size_t>(count));
      } else {
        for (std::int64_t c = 0; c < count; ++c) block[r * kTerms + c] = from[c * b.strides[1]];
      }
    }
    pack_rows(block, kTerms, to);
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
                  {out.data + j * out.stride + c * kPanelChannels, 0, out.flip});
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
              {terms.first + done, terms.count - done},
              {out.data + j * out.stride + done * kPanelChannels, 0, out.flip});
  }
}

}  // namespace octile::cpu
