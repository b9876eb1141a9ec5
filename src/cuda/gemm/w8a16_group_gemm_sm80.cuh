// w8a16_group_gemm_sm80, on the device: 16-bit tokens by s8 as floats of their type, which hold it exactly.
#pragma once

#include "cuda/device/bytes.cuh"
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
  static constexpr Bound kBound = Bound::sum;
  static constexpr bool kSplits = true;

  template <class Body>
  static void for_each_tile(const Body& body) {
    body(Candidate<TileShape<64, 8, 128, 5, 4, 1, 4>>{{91e-9, 25e-9}});
    body(Candidate<TileShape<64, 16, 128, 4, 4, 1, 4>>{{105e-9, 25e-9}});
    body(Candidate<TileShape<64, 32, 64, 6, 2, 2, 3>>{{140e-9, 42e-9}});
    body(Candidate<TileShape<64, 64, 64, 5, 2, 2, 3>>{{213e-9, 85e-9}});
    body(Candidate<TileShape<64, 128, 64, 4, 2, 2, 2>>{{323e-9, 118e-9}});
  }

  template <class Body>
  static void with_arithmetic(const GemmProblem& p, const Body& body) {
    with_chunk_and_type<Halves>(p, body);
  }

  static std::string reason_against(const GemmProblem& p) { return reason_against_float_tokens(p); }
};

}  // namespace octile::cuda::w8a16_sm80
