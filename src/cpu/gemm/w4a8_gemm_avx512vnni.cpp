// w4a8 with vpdpbusd on 64 bytes: 16 channels of 4 terms, twice a line, b as the u8 operand and a as the s8 one.
#define OCTILE_TILE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#include "cpu/gemm/tile_avx512vnni.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = 1;
  // 8 x 2 vectors of sums, and the low and high nibbles of two panels; a comes from memory.
  static constexpr int kSteps[] = {4, 4, 4, 4, 2, 2, 2, 2};
  static constexpr Offset kOffset = Offset::row_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels / 2;

  template <int rows, int panels>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m512i (&sum)[rows][panels]) {
    const __m512i low = _mm512_set1_epi8(15);
    const std::uint8_t* right[panels];
#pragma GCC unroll 8
    for (int j = 0; j < panels; ++j) right[j] = at.b + j * run.b_stride;
    const std::uint8_t* left_at = at.a;
    const std::int64_t bytes = run.depth * kDepthBytes;
    const std::int64_t ahead = rows > 4 || at.near > 0 ? kAhead : at.far;
    for (std::int64_t line_at = 0; line_at < bytes; line_at += kPanelLine, left_at += kS4Depth) {
      __m512i lower[panels];
      __m512i upper[panels];
#pragma GCC unroll 8
      for (int j = 0; j < panels; ++j) {
        _mm_prefetch(right[j] + line_at + ahead, _MM_HINT_T0);
        const __m512i line = _mm512_loadu_si512(right[j] + line_at);
        lower[j] = _mm512_and_si512(line, low);
        upper[j] = _mm512_and_si512(line >> 4, low);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m512i left = broadcast(left_at + i * run.a_stride);
        const __m512i left_upper = broadcast(left_at + i * run.a_stride + kLaneBytes);
#pragma GCC unroll 8
        for (int j = 0; j < panels; ++j) {
          sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], lower[j], left);
          sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], upper[j], left_upper);
        }
      }
    }
  }
};

constexpr PanelKernel kKernel = panel_kernel<Tile, Terms>(AForm::plain);

}  // namespace

extern constinit const GemmKernel w4a8_gemm_avx512vnni =
    panels_row<kKernel>("w4a8_gemm_avx512vnni", {Operation::gemm, kW4A8}, needs<Isa::avx512vnni>, at_rate<600>);

}  // namespace octile::cpu
