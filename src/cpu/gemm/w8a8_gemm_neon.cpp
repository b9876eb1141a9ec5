// w8a8 with sdot on 16 bytes: a quarter of a panel, 4 channels of 4 terms, s8 x s8, so a is taken as it is. One vector
// of a holds 16 terms of a row, which the instruction takes lane by lane.
#define OCTILE_TILE __attribute__((target("arch=armv8.2-a+dotprod")))
#include "cpu/gemm/tile_neon.h"

namespace octile::cpu {

namespace {

// sums += 4 terms of b times lane `lane` of a.
template <int lane, int rows, int quarters>
OCTILE_TILE_INLINE void add_lane(int32x4_t (&sum)[rows][quarters], const int8x16_t (&left)[rows], const std::uint8_t* b,
                                 std::int64_t b_stride) {
#pragma GCC unroll 16
  for (int j = 0; j < quarters; ++j) {
    const std::uint8_t* quarter = b + j / kQuarters * b_stride + lane * kPanelLine + j % kQuarters * kVectorBytes;
    const int8x16_t right = vreinterpretq_s8_u8(vld1q_u8(quarter));
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) sum[i][j] = vdotq_laneq_s32(sum[i][j], right, left[i], lane);
  }
}

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kQuarters;
  // 8 x 2 vectors of sums, 8 of a and one of b; gcc spills sums of 6 x 4.
  static constexpr int kSteps[] = {16, 8, 8, 4, 4, 2, 2, 2};
  static constexpr Offset kOffset = Offset::none;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int rows, int quarters>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at,
                                          int32x4_t (&sum)[rows][quarters]) {
    const std::uint8_t* b = at.b;
    for (std::int64_t c = 0; c < run.depth; c += kVectorBytes) {
      int8x16_t left[rows];
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) left[i] = vreinterpretq_s8_u8(vld1q_u8(at.a + i * run.a_stride + c));
      const std::uint8_t* lines = b + c * kPanelChannels;
      add_lane<0>(sum, left, lines, run.b_stride);
      add_lane<1>(sum, left, lines, run.b_stride);
      add_lane<2>(sum, left, lines, run.b_stride);
      add_lane<3>(sum, left, lines, run.b_stride);
    }
  }
};

constexpr PanelKernel kKernel = panel_kernel<Tile, Terms>(AForm::plain);

}  // namespace

// Not measured: about 70 % of two dot products a cycle at 3 GHz.
extern constinit const GemmKernel w8a8_gemm_neon =
    panels_row<kKernel>("w8a8_gemm_neon", {Operation::gemm, kW8A8}, needs<Isa::neon>, at_rate<130>);

// Not measured.
extern constinit const GemmKernel w8a8_blocked_gemm_neon =
    panels_row<kKernel>("w8a8_blocked_gemm_neon", {Operation::blocked_gemm}, needs<Isa::neon>, at_rate<115>);

}  // namespace octile::cpu
