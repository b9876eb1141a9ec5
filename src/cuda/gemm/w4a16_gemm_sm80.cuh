// w4a16_gemm_sm80, on the device: 16-bit tokens by nibbles as floats of their type.
#pragma once

#include "cuda/device/int4.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80_launch.cuh"

namespace octile::cuda::w4a16_sm80 {

using namespace grouped_weight_sm80;

template <class T, int kChunk>
struct Halves : FloatArithmetic<T, kChunk> {
  static constexpr int kWeightBits = 4;
  using Offset = cuda::Offset<T>;
  using Words = std::uint32_t;
  using typename FloatArithmetic<T, kChunk>::Slice;

  __device__ explicit Halves(bool) {}

  // Two rows' nibbles.
  __device__ static void convert(Words upper, Words lower, const Offset& first, const Offset& second, Slice& to) {
    integers_of(__byte_perm(upper, 0, 0x4140), first, to.a[0][0], to.a[1][0]);
    integers_of(__byte_perm(lower, 0, 0x4140), second, to.a[0][1], to.a[1][1]);
    integers_of(__byte_perm(upper, 0, 0x4342), first, to.a[0][2], to.a[1][2]);
    integers_of(__byte_perm(lower, 0, 0x4342), second, to.a[0][3], to.a[1][3]);
  }

 private:
  // Of two bytes, 16 bits apart: the pair of low nibbles, and that of high ones.
  __device__ static void integers_of(std::uint32_t two, const Offset& offset, std::uint32_t& low, std::uint32_t& high) {
    using Pair = Two<T>;
    if constexpr (std::is_same_v<T, __half>) {
      const Pair sixteenth = as_pair<Pair>(0x2c002c00u);
      low = as_bits(__hadd2(as_pair<Pair>(and_xor(two, 0x000f000fu, 0x64006400u)), as_pair<Pair>(offset.low)));
      high = as_bits(
          __hfma2(as_pair<Pair>(and_xor(two, 0x00f000f0u, 0x64006400u)), sixteenth, as_pair<Pair>(offset.high)));
    } else {
      low = as_bits(__hadd2(as_pair<Pair>(and_xor(two, 0x000f000fu, 0x43004300u)), as_pair<Pair>(offset.low)));
      high = as_bits(__hadd2(as_pair<Pair>(and_xor(two >> 4, 0x000f000fu, 0x43004300u)), as_pair<Pair>(offset.low)));
    }
  }
};

struct Format {
  static constexpr GemmFormat kFormat = kW4A16;

  template <class Body>
  static void for_each_tile(const Body& body) {
    body(Candidate<TileShape<64, 8, 128, 8, 4, 1, 4>>{{96e-9, 24e-9}});
    body(Candidate<TileShape<64, 16, 128, 6, 4, 1, 4>>{{104e-9, 32e-9}});
    body(Candidate<TileShape<128, 32, 128, 4, 4, 1, 3>>{{224e-9, 68e-9}});
    body(Candidate<TileShape<128, 64, 64, 4, 4, 1, 2>>{{284e-9, 124e-9}});
    body(Candidate<StreamShape<1, 1, 8>>{{24e-9, 10e-9, 230e-9}});
    body(Candidate<StreamShape<2, 2, 4>>{{16.5e-9, 17e-9, 200e-9}});
    body(Candidate<StreamShape<4, 1, 4>>{{24e-9, 10e-9, 290e-9}});
  }

  template <class Body>
  static void with_arithmetic(const GemmProblem& p, const Body& body) {
    with_chunk_and_type<Halves>(p, body);
  }
};

}  // namespace octile::cuda::w4a16_sm80
