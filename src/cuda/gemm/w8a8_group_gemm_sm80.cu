// w8a8_group_gemm_sm80, w8a8 with a scale per group of the weight, on every GPU from Ampere on: y (m, n), over the
// groups g of k in order,
//
//   t = fma(f32(sum_c a[i, c] * q[j, c]), s[j, g], t), then y[i, j] = fma(t, a_scale[i], bias[j])
//
// The sums of a group are exact in s32, so the bits are those of every other backend: grouped_weight_gemm_sm80.cuh.
#include "cuda/gemm/grouped_weight_gemm_sm80_launch.cuh"

namespace octile::cuda {

namespace {

using namespace grouped_weight_sm80;

constexpr std::string_view kName = "w8a8_group_gemm_sm80";

template <int kGroup>
struct Bytes : ByteArithmetic<kGroup> {
  static constexpr int kWeightBits = 8;
  using Words = uint2;
  using Offset = NoOffset;
  using typename ByteArithmetic<kGroup>::Slice;

  __device__ explicit Bytes(bool) : ByteArithmetic<kGroup>(1) {}

  __device__ static void convert(Words upper, Words lower, Offset, Offset, Slice& to) {
    to.a[0] = upper.x, to.a[1] = lower.x;
    to.a[2] = upper.y, to.a[3] = lower.y;
  }
};

struct Format {
  static constexpr GemmFormat kFormat = kW8A8;

  template <class Body>
  static void for_each_tile(const Body& body) {
    body(Candidate<TileShape<64, 8, 128, 6, 4, 1, 4>>{{79e-9, 24e-9}});
    body(Candidate<TileShape<64, 32, 128, 4, 4, 1, 3>>{{120e-9, 17e-9}});
    body(Candidate<TileShape<64, 64, 128, 4, 4, 2, 2>>{{147e-9, 66e-9}});
    body(Candidate<TileShape<64, 128, 128, 3, 2, 4, 2>>{{203e-9, 95e-9}});
  }

  template <class Body>
  static void with_arithmetic(const GemmProblem& p, const Body& body) {
    with_group<Bytes>(p, body);
  }
};

}  // namespace

extern constinit const GemmKernel w8a8_group_gemm_sm80 = row<Format, kName>();

}  // namespace octile::cuda
