// w4a8_gemm_sm80, on the device: s8 tokens by nibbles as bytes, exact sums of a group.
#pragma once

#include "cuda/device/int4.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80_launch.cuh"

namespace octile::cuda::w4a8_sm80 {

using namespace grouped_weight_sm80;

// Without zero points bytes are 16 q.
template <int kGroup>
struct Bytes : ByteArithmetic<kGroup> {
  static constexpr int kWeightBits = 4;
  using Words = std::uint32_t;
  using typename ByteArithmetic<kGroup>::Slice;
  struct Offset {
    std::uint32_t bytes = 0x08080808u;
    Offset() = default;
    __device__ explicit Offset(unsigned u) : bytes(u * 0x01010101u) {}
  };

  bool zeros;

  __device__ explicit Bytes(bool zeros_) : ByteArithmetic<kGroup>(zeros_ ? 1 : 0x1p-4f), zeros(zeros_) {}

  // Two rows' nibbles: 16 q, or q - z.
  __device__ void convert(Words upper, Words lower, Offset first, Offset second, Slice& to) const {
    if (zeros) {
      to.a[0] = less(upper, first), to.a[1] = less(lower, second);
      to.a[2] = less(upper >> 4, first), to.a[3] = less(lower >> 4, second);
    } else {
      to.a[0] = sixteenfold(upper << 4), to.a[1] = sixteenfold(lower << 4);
      to.a[2] = sixteenfold(upper), to.a[3] = sixteenfold(lower);
    }
  }

 private:
  __device__ static std::uint32_t sixteenfold(std::uint32_t word) { return and_xor(word, 0xf0f0f0f0u, 0x80808080u); }
  // From bytes 128 + u: no borrow crosses a byte.
  __device__ static std::uint32_t less(std::uint32_t word, Offset offset) {
    return (and_xor(word, 0x0f0f0f0fu, 0x80808080u) - offset.bytes) ^ 0x80808080u;
  }
};

struct Format {
  static constexpr GemmFormat kFormat = kW4A8;

  template <class Body>
  static void for_each_tile(const Body& body) {
    body(Candidate<TileShape<64, 8, 256, 6, 4, 1, 4>>{{79e-9, 24e-9}});
    body(Candidate<TileShape<64, 16, 128, 6, 4, 1, 4>>{{89e-9, 13e-9}});
    body(Candidate<TileShape<64, 32, 128, 5, 2, 2, 3>>{{120e-9, 17e-9}});
    body(Candidate<TileShape<64, 64, 128, 5, 2, 2, 3>>{{147e-9, 66e-9}});
    body(Candidate<TileShape<64, 128, 128, 4, 2, 2, 2>>{{203e-9, 95e-9}});
    body(Candidate<StreamShape<1, 1, 8>>{{30e-9, 3e-9, 225e-9}});
    body(Candidate<StreamShape<2, 2, 4>>{{28e-9, 4.5e-9, 200e-9}});
    body(Candidate<StreamShape<8, 1, 4>>{{30e-9, 3e-9, 285e-9}});
  }

  template <class Body>
  static void with_arithmetic(const GemmProblem& p, const Body& body) {
    with_group<Bytes>(p, body);
  }
};

}  // namespace octile::cuda::w4a8_sm80
