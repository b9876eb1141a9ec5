// w4a8 with sdot on 16 bytes: a quarter of a panel, 4 channels of 4 terms, twice a line. b lies in 0..15, and so is s8.
#define OCTILE_TILE __attribute__((target("arch=armv8.2-a+dotprod")))
#include "cpu/gemm/tile_neon.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kQuarters;
  // 4 x 4 vectors of sums; 6 would leave no registers for 6 of a beside the nibbles.
  static constexpr int kSteps[] = {16, 8, 4, 4};
  static constexpr Offset kOffset = Offset::row_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels / 2;

  template <int rows, int quarters>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at,
                                          int32x4_t (&sum)[rows][quarters]) {
    const std::uint8_t* b = at.b;
    const uint8x16_t low = vdupq_n_u8(15);
    for (std::int64_t c = 0; c < run.depth; c += kS4Depth) {
      int8x8_t left[rows];
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) left[i] = vreinterpret_s8_u8(vld1_u8(at.a + i * run.a_stride + c));
#pragma GCC unroll 16
      for (int j = 0; j < quarters; ++j) {
        const uint8x16_t line = vld1q_u8(b + j / kQuarters * run.b_stride + j % kQuarters * kVectorBytes);
        const int8x16_t lower = vreinterpretq_s8_u8(vandq_u8(line, low));
        const int8x16_t upper = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
          sum[i][j] = vdotq_lane_s32(sum[i][j], lower, left[i], 0);
          sum[i][j] = vdotq_lane_s32(sum[i][j], upper, left[i], 1);
        }
      }
      b += kPanelLine;
    }
  }
};

constexpr PanelKernel kKernel = panel_kernel<Tile, Terms>(AForm::plain);

}  // namespace

// Not measured: about 70 % of two dot products a cycle at 3 GHz.
extern constinit const GemmKernel w4a8_gemm_neon =
    panels_row<kKernel>("w4a8_gemm_neon", {Operation::gemm, kW4A8}, needs<Isa::neon>, at_rate<110>);

}  // namespace octile::cpu
