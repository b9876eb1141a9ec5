// w8a8 with smmla, the product of (2, 8) by (8, 2): two rows of a by two channels of b, s8 x s8, so a is taken as it
// is. Two lines of a panel, 8 terms, are zipped lane by lane, which makes of each channel its 8 terms in order.
#define OCTILE_TILE __attribute__((target("arch=armv8.2-a+i8mm")))
#include "cpu/gemm/tile_neon.h"

namespace octile::cpu {

namespace {

constexpr int kTerms = 8;

OCTILE_TILE_INLINE int32x4_t load(const std::uint8_t* bytes) { return vreinterpretq_s32_u8(vld1q_u8(bytes)); }

struct Terms {
  static constexpr int kRowStep = 2;
  static constexpr int kColSteps = kQuarters;
  // 4 pairs of rows x 4 vectors of sums, 8 of a; of 3 x 8 gcc spills some.
  static constexpr int kSteps[] = {8, 4, 2, 2};
  static constexpr Offset kOffset = Offset::none;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int pairs, int quarters>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at,
                                          int32x4_t (&sum)[pairs][quarters][2]) {
    const std::uint8_t* b = at.b;
    for (std::int64_t c = 0; c < run.depth; c += kTerms) {
      int8x16_t left[pairs];
#pragma GCC unroll 8
      for (int i = 0; i < pairs; ++i) left[i] = load_pair(at.a + 2 * i * run.a_stride + c, run.a_stride);
#pragma GCC unroll 16
      for (int j = 0; j < quarters; ++j) {
        const std::uint8_t* lines =
            b + j / kQuarters * run.b_stride + c * kPanelChannels + j % kQuarters * kVectorBytes;
        const int32x4_t even = load(lines);
        const int32x4_t odd = load(lines + kPanelLine);
        const int8x16_t lower = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
        const int8x16_t upper = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
#pragma GCC unroll 8
        for (int i = 0; i < pairs; ++i) {
          sum[i][j][0] = vmmlaq_s32(sum[i][j][0], left[i], lower);
          sum[i][j][1] = vmmlaq_s32(sum[i][j][1], left[i], upper);
        }
      }
    }
  }
};

constexpr PanelKernel kKernel = panel_kernel<Tile, Terms>(AForm::plain);

}  // namespace

// Not measured: about 70 % of two dot products a cycle at 3 GHz.
extern constinit const GemmKernel w8a8_gemm_i8mm =
    panels_row<kKernel>("w8a8_gemm_i8mm", {Operation::gemm, kW8A8}, needs<Isa::i8mm>, at_rate<180>);

// Not measured.
extern constinit const GemmKernel w8a8_blocked_gemm_i8mm =
    panels_row<kKernel>("w8a8_blocked_gemm_i8mm", {Operation::blocked_gemm}, needs<Isa::i8mm>, at_rate<160>);

}  // namespace octile::cpu
