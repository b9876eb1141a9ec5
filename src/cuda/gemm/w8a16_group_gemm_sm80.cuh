// w8a16_group_gemm_sm80, on the device: 16-bit tokens by s8 as floats of their type, which hold it exactly.
#pragma once

#include "cuda/device/bytes.cuh"
#include "cuda/device/int4.cuh"
#include "cuda/gemm/grouped_weight_gemm_sm80_launch.cuh"

namespace octile::cuda::w8a16_sm80 {

using namespace grouped_weight_sm80;

template <class T, int kChunk>
struct Halves : FloatArithmetic<T, kChunk> {
  static constexpr int kWeightBits = 8;
  using Words = uint2;
  using Offset = NoOffset;
  using typename FloatArithmetic<T, kChunk>::Slice;

  __device__ explicit Halves(bool) {}

  __device__ static void convert(Words upper, Words lower, Offset, Offset, Slice& to) {
    convert_row(upper, to, 0);
    convert_row(lower, to, 1);
  }

 private:
  __device__ static void convert_row(Words words, Slice& to, int row) {
    const FromBytes<T> first(words.x), second(words.y);
    to.a[0][row] = as_bits(first.template pair<0, 1>());
    to.a[0][row + 2] = as_bits(first.template pair<2, 3>());
    to.a[1][row] = as_bits(second.template pair<0, 1>());
    to.a[1][row + 2] = as_bits(second.template pair<2, 3>());
  }
};

struct Format {
  static constexpr GemmFormat kFormat = kW8A16;

  template <class Body>
  static void for_each_tile(const Body& body) {
    body(Candidate<TileShape<64, 8, 128, 6, 4, 1, 3>>{{64e-9, 27e-9}});
    body(Candidate<TileShape<64, 16, 128, 6, 4, 1, 3>>{{72e-9, 32e-9}});
    body(Candidate<TileShape<64, 32, 128, 4, 4, 1, 3>>{{116e-9, 48e-9}});
    body(Candidate<TileShape<128, 64, 64, 4, 4, 1, 2>>{{244e-9, 84e-9}});
  }

  template <class Body>
  static void with_arithmetic(const GemmProblem& p, const Body& body) {
    with_chunk_and_type<Halves>(p, body);
  }
};

}  // namespace octile::cuda::w8a16_sm80
