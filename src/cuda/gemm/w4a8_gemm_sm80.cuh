// w4a8_gemm_sm80, on the device: s8 tokens by nibbles as bytes, exact sums of a group.
#pragma once

#include "cuda/gemm/w4_gemm_sm80.cuh"

namespace octile::cuda::w4a8_sm80 {

using namespace w4_sm80;

// kGroup: slices of a group; 0: a group is a row.
template <int kGroup>
struct Bytes {
  static constexpr int kElement = 1;
  static constexpr bool kSplits = false;
  static constexpr bool kRow = kGroup == 0;
  static constexpr int kChunk = kRow ? 4 : kGroup;
  using Sum = std::int32_t;
  using Total = std::conditional_t<kRow, std::int32_t, float>;
  struct Slice {
    std::uint32_t a[4];
  };
  struct Offset {
    std::uint32_t bytes = 0x08080808u;
    Offset() = default;
    __device__ explicit Offset(unsigned u) : bytes(u * 0x01010101u) {}
  };

  bool zeros;
  float share;  // what counts 1 in a sum
  float base;

  __device__ explicit Bytes(bool zeros_) : zeros(zeros_), share(zeros_ ? 1 : 0x1p-4f), base(-0x1.8p23f * share) {}

  // Two rows' nibbles: 16 q, or q - z.
  __device__ void convert(uint2 words, Offset first, Offset second, Slice& to) const {
    if (zeros) {
      to.a[0] = less(words.x, first), to.a[1] = less(words.y, second);
      to.a[2] = less(words.x >> 4, first), to.a[3] = less(words.y >> 4, second);
    } else {
      to.a[0] = sixteenfold(words.x << 4), to.a[1] = sixteenfold(words.y << 4);
      to.a[2] = sixteenfold(words.x), to.a[3] = sixteenfold(words.y);
    }
  }

  __device__ static uint2 read(std::uint32_t from) { return load_shared_pair(from); }

  __device__ static void multiply(Sum (&sums)[4], const Slice& b, uint2 a, bool first) {
    if (first) {
      multiply_s8(sums, b.a, a.x, a.y, 0x4b400000);
    } else {
      multiply_add_s8(sums, b.a, a.x, a.y);
    }
  }

  __device__ float fold(Sum sum, float scale, float total) const {
    return __fmaf_rn(__fmaf_rn(__int_as_float(sum), share, base), scale, total);
  }
  __device__ float fold_row(Sum sum, float scale) const {
    return __fmaf_rn(__int2float_rn(zeros ? sum : sum / 16), scale, 0);
  }

 private:
  __device__ static std::uint32_t sixteenfold(std::uint32_t word) { return and_xor(word, 0xf0f0f0f0u, 0x80808080u); }
  // From bytes 128 + u: no borrow crosses a byte.
  __device__ static std::uint32_t less(std::uint32_t word, Offset offset) {
    return (and_xor(word, 0x0f0f0f0fu, 0x80808080u) - offset.bytes) ^ 0x80808080u;
  }
};

struct Tiles {
  static constexpr bool kSplits = false;
  template <class Body>
  static void for_each(const Body& body) {
    body(Candidate<TileShape<64, 8, 256, 6, 4, 1, 4>>{{79e-9, 24e-9}});
    body(Candidate<TileShape<64, 16, 128, 6, 4, 1, 4>>{{89e-9, 13e-9}});
    body(Candidate<TileShape<64, 32, 128, 5, 2, 2, 3>>{{120e-9, 17e-9}});
    body(Candidate<TileShape<64, 64, 128, 5, 2, 2, 3>>{{147e-9, 66e-9}});
    body(Candidate<TileShape<64, 128, 128, 4, 2, 2, 2>>{{203e-9, 95e-9}});
  }
};

inline constexpr auto kWithArithmetic = [](const GemmProblem& p, const auto& body) {
  switch (p.b.group) {
    case 32:
      return body.template operator()<Bytes<1>>();
    case 64:
      return body.template operator()<Bytes<2>>();
    case 128:
      return body.template operator()<Bytes<4>>();
    default:
      return body.template operator()<Bytes<0>>();
  }
};

}  // namespace octile::cuda::w4a8_sm80
