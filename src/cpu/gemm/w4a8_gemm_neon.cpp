// w4a8 with sdot on 16 bytes: a quarter of a panel, 4 channels of 4 terms, twice a line. b lies in 0..15, and so is s8.
#include "cpu/gemm/tile_neon.h"

#define OCTILE_NEON __attribute__((target("arch=armv8.2-a+dotprod")))

namespace octile::cpu {

namespace {

struct Tile {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kQuarters;
  // 4 x 4 vectors of sums; 6 would leave no registers for 6 of a beside the nibbles.
  static constexpr int kSteps[] = {16, 8, 4, 4};

  // (rows, quarters) vectors of sums in registers, from quarter `first` on.
  template <int rows, int quarters>
  OCTILE_NEON static void run(const TileRun& run, int first) {
    const uint8x16_t low = vdupq_n_u8(15);
    const std::uint8_t* b = quarter_of(run, first);
    int32x4_t sum[rows][quarters];
    load_sums(run, first, sum);
    for (std::int64_t c = 0; c < run.depth; c += kS4Depth) {
      int8x8_t left[rows];
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) left[i] = vreinterpret_s8_u8(vld1_u8(run.a + i * run.a_stride + c));
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
    store_sums(run, first, sum);
  }
};

constexpr PanelKernel kKernel = panel_kernel<Tile>(AForm::plain);

}  // namespace

void w4a8_gemm_neon(const GemmProblem& problem, const GemmOperands& operands, const Launch& launch) {
  multiply_panels(kKernel, problem, operands, launch);
}

}  // namespace octile::cpu
