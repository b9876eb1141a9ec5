// Bytes transposed in registers, 16 x 16 of them at a time.
#include <cstring>
#include <utility>

#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octile::cpu {

namespace {

template <int width>
struct VectorOf {
  typedef std::uint8_t type __attribute__((vector_size(width)));
};
template <int width>
using Vector = typename VectorOf<width>::type;

// In every 16 bytes, the first or second halves of a and b interleaved.
template <int half, int width>
OCTILE_INLINE void interleave(const Vector<width>& a, const Vector<width>& b, Vector<width>& out) {
  constexpr auto pick = [](int i) { return i / 16 * 16 + half * 8 + i % 16 / 2 + i % 2 * width; };
  [&]<int... i>(std::integer_sequence<int, i...>) {
#if defined(__clang__)
    out = __builtin_shufflevector(a, b, pick(i)...);
#else
    out = __builtin_shuffle(a, b, Vector<width>{static_cast<std::uint8_t>(pick(i))...});
#endif
  }
  (std::make_integer_sequence<int, width>{});
}

// Four rounds of interleaving row i with row i + 8 transpose 16 x 16 bytes: each round moves one bit of the row number
// to the column number. Wider vectors hold several such squares side by side: column c is byte c / 16 * 16 of a[c %
// 16].
template <int width>
OCTILE_INLINE void transpose_squares(ConstBytes from, Vector<width> (&a)[16]) {
  Vector<width> b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], from.data + i * from.stride, width);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      interleave<0, width>(a[i], a[i + 8], b[2 * i]);
      interleave<1, width>(a[i], a[i + 8], b[2 * i + 1]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
}

OCTILE_INLINE void transpose_16x16(ConstBytes from, Bytes to) {
  Vector<16> a[16];
  transpose_squares<16>(from, a);
  for (int i = 0; i < 16; ++i) std::memcpy(to.data + i * to.stride, &a[i], 16);
}

OCTILE_INLINE void transpose_block(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols) {
  if (rows >= 16 && cols >= 16) return transpose_16x16(from, to);
  for (std::int64_t c = 0; c < std::min<std::int64_t>(16, cols); ++c) {
    for (std::int64_t r = 0; r < std::min<std::int64_t>(16, rows); ++r) {
      to.data[c * to.stride + r] = from.data[r * from.stride + c];
    }
  }
}

constexpr std::int64_t kLine = 64;  // bytes of a cache line

// 64 lines x 64 bytes through a buffer, so that lines are written whole, and neighbours one after the other.
template <int width, int lines>
OCTILE_INLINE void transpose_lines(ConstBytes from, Bytes to, bool around_caches) {
  constexpr std::int64_t kRow = lines * kLine;
  alignas(64) std::uint8_t transposed[kLine * kRow];
  for (std::int64_t r = 0; r < kRow; r += 16) {
    for (std::int64_t c = 0; c < kLine; c += width) {
      Vector<width> a[16];
      transpose_squares<width>({from.data + r * from.stride + c, from.stride}, a);
      for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < width; j += 16) {
          std::memcpy(transposed + (c + i + j) * kRow + r, reinterpret_cast<const std::uint8_t*>(&a[i]) + j, 16);
        }
      }
    }
  }
  for (std::int64_t c = 0; c < kLine && !around_caches; ++c) {
    std::memcpy(to.data + c * to.stride, transposed + c * kRow, static_cast<std::size_t>(kRow));
  }
  if (around_caches) copy_rows_around_caches({transposed, kRow}, to, kLine, lines);
}

#if defined(__x86_64__)

// The same without a buffer: the four squares of a vector lie below each other, so that it becomes a whole line.
__attribute__((target("avx512f,avx512bw"))) inline void transpose_lines_512(ConstBytes from, Bytes to, int lines,
                                                                            bool around_caches) {
  for (int c = 0; c < kLine; c += 16) {
    for (int line = 0; line < lines; ++line) {
      const auto row = [&](std::int64_t r) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.data + (line * kLine + r) * from.stride + c));
      };
      __m512i a[16], b[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const __m512i upper = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(i + 16), 1);
        a[i] = _mm512_inserti32x4(_mm512_inserti32x4(upper, row(i + 32), 2), row(i + 48), 3);
      }
#pragma GCC unroll 4
      for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          b[2 * i] = _mm512_unpacklo_epi8(a[i], a[i + 8]);
          b[2 * i + 1] = _mm512_unpackhi_epi8(a[i], a[i + 8]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) a[i] = b[i];
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        auto* out = reinterpret_cast<__m512i*>(to.data + (c + i) * to.stride + line * kLine);
        around_caches ? _mm512_stream_si512(out, a[i]) : _mm512_storeu_si512(out, a[i]);
      }
    }
  }
}

#endif

// The side whose rows lie further apart is gone through a whole line at a time: its lines may all fall into the same
// few places of the L1 cache, and would not stay there for a second visit.
struct Transpose {
  template <Isa isa>
  OCTILE_INLINE static void run(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols, bool around_caches) {
    // Lines that do not begin at one are not written whole.
    around_caches = around_caches && reinterpret_cast<std::uintptr_t>(to.data) % kLine == 0 && to.stride % kLine == 0;
    const bool along_rows = from.stride > to.stride;
    const int lines = around_caches && rows >= 2 * kLine ? 2 : 1;
    const std::int64_t height = lines * kLine;
    const std::int64_t down = ceil_div(rows, height);
    const std::int64_t across = ceil_div(cols, kLine);
    for (std::int64_t i = 0; i < down * across; ++i) {
      const std::int64_t r = (along_rows ? i / across : i % down) * height;
      const std::int64_t c = (along_rows ? i % across : i / down) * kLine;
      const ConstBytes source = {from.data + r * from.stride + c, from.stride};
      const Bytes target = {to.data + c * to.stride + r, to.stride};
      if (rows - r < height || cols - c < kLine) {
        transpose_edge(source, target, std::min(height, rows - r), std::min(kLine, cols - c));
        continue;
      }
#if defined(__x86_64__)
      if constexpr (isa >= Isa::avx512) {
        transpose_lines_512(source, target, lines, around_caches);
        continue;
      }
#endif
      constexpr int kWidth = isa >= Isa::avx2 ? 32 : 16;
      if (lines == 2) {
        transpose_lines<kWidth, 2>(source, target, around_caches);
      } else {
        transpose_lines<kWidth, 1>(source, target, around_caches);
      }
    }
  }

  OCTILE_INLINE static void transpose_edge(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols) {
    for (std::int64_t r = 0; r < rows; r += 16) {
      for (std::int64_t c = 0; c < cols; c += 16) {
        transpose_block({from.data + r * from.stride + c, from.stride}, {to.data + c * to.stride + r, to.stride},
                        rows - r, cols - c);
      }
    }
  }
};

}  // namespace

void transpose(ConstBytes from, Bytes to, std::int64_t rows, std::int64_t cols, bool around_caches) {
  multiversion<Transpose>(from, to, rows, cols, around_caches);
}

}  // namespace octile::cpu
