// w8a8 with vpdpbusd on 32 bytes: half a panel, 8 channels of 4 terms, u8 x s8, so a is kept with 128 added.
#define OCTILE_TILE __attribute__((target("avx2,fma,avxvnni")))
#include "cpu/gemm/tile_avx2.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = kHalves;
  // 6 x 2 vectors of sums leave 4 of 16 registers for operands.
  static constexpr int kSteps[] = {8, 4, 4, 2, 2, 2};
  static constexpr Offset kOffset = Offset::channel_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int rows, int halves>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m256i (&sum)[rows][halves]) {
    for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
      if (rows >= 4 && at.later != 0) _mm_prefetch(at.b + c * kPanelChannels + at.later, _MM_HINT_T1);
      __m256i right[halves];
      const std::int64_t ahead = halves <= kHalves || c < at.near ? kAhead : at.far;
#pragma GCC unroll 8
      for (int j = 0; j < halves; ++j) {
        const std::uint8_t* half = at.b + j / 2 * run.b_stride + c * kPanelChannels + j % 2 * kPanelLine / 2;
        if (j % 2 == 0) _mm_prefetch(half + ahead, _MM_HINT_T0);
        right[j] = load(half);
      }
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) {
        const __m256i left = broadcast(at.a + i * run.a_stride + c);
#pragma GCC unroll 8
        for (int j = 0; j < halves; ++j) sum[i][j] = _mm256_dpbusd_avx_epi32(sum[i][j], left, right[j]);
      }
    }
  }
};

constexpr PanelKernel kKernel = [] {
  PanelKernel kernel = panel_kernel<Tile, Terms>(AForm::offset);
  kernel.stream_rows = 6;
  kernel.finishes = true;
  return kernel;
}();

}  // namespace

extern constinit const GemmKernel w8a8_gemm_avxvnni = {
    .name = "w8a8_gemm_avxvnni",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::avxvnni>,
    .cost = at_rate<350>,
    .workspace = panels_workspace<kKernel>,
    .launch = launch_panels<kKernel>,
};

extern constinit const GemmKernel w8a8_blocked_gemm_avxvnni = {
    .name = "w8a8_blocked_gemm_avxvnni",
    .task = {Operation::blocked_gemm},
    .supports = needs<Isa::avxvnni>,
    .cost = at_rate<320>,
    .workspace = panels_workspace<kKernel>,
    .launch = launch_panels<kKernel>,
};

}  // namespace octile::cpu
