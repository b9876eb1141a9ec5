// w8a8 with vpdpbusd on 64 bytes: 16 channels of 4 terms, u8 x s8, so a is kept with 128 added.
#include "cpu/gemm/tile_avx512vnni.h"

namespace octile::cpu {

namespace {

struct Terms {
  static constexpr int kRowStep = 1;
  static constexpr int kColSteps = 1;
  // 12 x 2 vectors of sums leave 8 of 32 registers for operands.
  static constexpr int kSteps[] = {4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2};
  static constexpr Offset kOffset = Offset::channel_sums;
  static constexpr std::int64_t kDepthBytes = kPanelChannels;

  template <int rows, int panels>
  OCTILE_TILE_INLINE static void multiply(const TileRun& run, const TileOperands& at, __m512i (&sum)[rows][panels]) {
    for (std::int64_t c = 0; c < run.depth; c += kLaneBytes) {
      if (rows >= 4 && panels == kMaxPanels && at.later != 0) {
        _mm_prefetch(at.b + c * kPanelChannels + at.later, _MM_HINT_T1);
      }
      __m512i right[panels];
#pragma GCC unroll 4
      for (int j = 0; j < panels; ++j) {
        const std::uint8_t* line = at.b + j * run.b_stride + c * kPanelChannels;
        _mm_prefetch(line + kAhead, _MM_HINT_T0);
        right[j] = _mm512_loadu_si512(line);
      }
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        const __m512i left = broadcast(at.a + i * run.a_stride + c);
#pragma GCC unroll 4
        for (int j = 0; j < panels; ++j) sum[i][j] = _mm512_dpbusd_epi32(sum[i][j], left, right[j]);
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

extern constinit const GemmKernel w8a8_gemm_avx512vnni = {
    .name = "w8a8_gemm_avx512vnni",
    .task = {Operation::gemm, kW8A8},
    .supports = needs<Isa::avx512vnni>,
    .cost = at_rate<700>,
    .workspace = panels_workspace<kKernel>,
    .launch = launch_panels<kKernel>,
};

extern constinit const GemmKernel w8a8_blocked_gemm_avx512vnni = {
    .name = "w8a8_blocked_gemm_avx512vnni",
    .task = {Operation::blocked_gemm},
    .supports = needs<Isa::avx512vnni>,
    .cost = at_rate<600>,
    .workspace = panels_workspace<kKernel>,
    .launch = launch_panels<kKernel>,
};

}  // namespace octile::cpu
